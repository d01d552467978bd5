"""The faults aimed at loans are worth what they find: bugs of control planes that loan are planted, each is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kits.simulation.moving import Moving
from springtide.control import controller as controller_module
from springtide.control import pools, reconcile, runs
from springtide.core import actions, events
from springtide.core.resources import Node
from springtide_studies.fault_seeds import executor as executor_module
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.seeds import run_seed

MAX_SEEDS = 100
BASE_SEED = 2_000_000

pytestmark = pytest.mark.slow

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, tuple[Plant, str]] = {}


def plant(found_by: str) -> Callable[[Plant], Plant]:
    """Name the invariants of which one has to find it."""

    def enter(function: Plant) -> Plant:
        PLANTS[function.__name__] = (function, found_by)
        return function

    return enter


def owned(node: Node) -> bool:
    return node.owner != "shared"


@plant("label-admits")
def label_before_the_workers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_inadmissible", lambda state, node, wish: set())


@plant("one-label,label-admits")
def forget_the_labels_on_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that a crash cut off is not made so by the next control plane."""
    monkeypatch.setattr(controller_module.Controller, "_labels", lambda self: {})


@plant("one-label,label-admits")
def believe_a_node_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines forget a label when its node goes down."""
    original = Machine.add_node
    first: dict[str, Node] = {}

    def add_node(self: Any, node: Node) -> None:
        first.setdefault(f"{id(self)}/{node.node_id}", node)
        self.known_nodes.pop(node.node_id, None)
        original(self, first[f"{id(self)}/{node.node_id}"])

    monkeypatch.setattr(Machine, "add_node", add_node)


@plant("replay-equals,one-label,JournalError")
def keep_drains_in_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    original = controller_module.Controller.restore

    def restore(self: Any, step: Any) -> None:
        original(self, replace(step, actions=tuple(a for a in step.actions if type(a) is not actions.DrainNode)))

    monkeypatch.setattr(controller_module.Controller, "restore", restore)


@plant("drain-ends,minimum-kept")
def never_take_anything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reclaim waits for ever for jobs that go on."""
    monkeypatch.setattr(reconcile, "_preempt", lambda *given: [])


@plant("one-label,label-admits")
def label_nodes_only_in_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    original = executor_module.SimExecutor.start

    def start(self: Any, action: Any) -> None:
        if not isinstance(action, actions.LabelNode):
            original(self, action)

    monkeypatch.setattr(executor_module.SimExecutor, "start", start)


@plant("minimum-kept,all-end,label-admits,drain-closes")
def forget_to_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records never learn of a label."""
    original = runs.apply_action

    def apply(action: Any, state: Any, now_s: float) -> None:
        if isinstance(action, actions.LabelNode) and state.nodes.get(action.node_id) is not None:
            state.drains = {n: drain for n, drain in state.drains.items() if n != action.node_id}
        else:
            original(action, state, now_s)

    monkeypatch.setattr(runs, "apply_action", apply)


@plant("one-label,label-admits")
def a_rejoined_node_goes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records take a node that joins again for one that was never loaned."""
    original = runs.apply_event

    def apply(event: Any, state: Any, now_s: float) -> None:
        original(event, state, now_s)
        if isinstance(event, events.NodeJoined):
            node = state.nodes[event.node.node_id]
            state.nodes[node.node_id] = replace(node, pool=node.owner)

    monkeypatch.setattr(runs, "apply_event", apply)


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, found_by = PLANTS[name]
    function(monkeypatch)
    for index in range(MAX_SEEDS):
        # Without faults what is late is late at once.
        num_faults = None if index % 2 else 0.0
        result = run_seed(BASE_SEED + index, Moving, num_faults=num_faults, has_pools=True, reaches=owned)
        if result.violation:
            assert result.violation in (*found_by.split(","), "AssertionError"), result.detail[-2000:]
            return
    pytest.fail(f"{name} was not found within {MAX_SEEDS} seeds")


def test_nothing_is_found_where_nothing_is_planted() -> None:
    for index in range(5):
        result = run_seed(BASE_SEED + index, Moving, has_pools=True, reaches=owned)
        assert not result.violation, result.detail
