"""Faults during loans: while a node drains, while it is labelled and right after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from springtide.core.actions import Action, DrainNode, LabelNode, PreemptJob
from springtide_studies.fault_seeds.faults import CRASH_POINTS, FaultPlan, FaultScript

# A node changes pools within seconds: faults aimed at it come within these.
_PASSAGE_S = 4.0
# How often the control plane passes a crash point between a drain and the first serving replica, about.
_PASSES = 9


def _kind(rng: np.random.Generator) -> type[Action]:
    return DrainNode if rng.random() < 0.5 else LabelNode


def _delay_s(rng: np.random.Generator) -> float:
    """At once, within the same turn or within the passage of a node."""
    return 0.0 if rng.random() < 0.3 else float(np.exp(rng.uniform(np.log(0.001), np.log(_PASSAGE_S))))


def _at_node(
    faults: FaultScript, kind: type[Action], delay_s: float, then: Callable[[DrainNode | LabelNode], None]
) -> None:
    """Call back with the next node that an action of this kind names, if it is up and connected then."""

    def act(action: DrainNode | LabelNode) -> None:
        machine = faults.machine
        if action.node_id in machine.nodes and action.node_id not in machine.partitioned:
            then(action)

    def on_action(action: Action) -> None:
        assert isinstance(action, DrainNode | LabelNode)
        if delay_s:
            faults.machine.agenda.after(delay_s, lambda: act(action))
        else:
            act(action)

    faults.watch(kind, on_action)


def _crash_at_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The control plane dies right before or after it marks or labels a node."""
    point = f"{_kind(rng).__name__}.{'before' if rng.random() < 0.5 else 'after'}"
    faults.arm(point, int(rng.integers(0, 3)), float(rng.uniform(0.1, 6.0)))


def _crash_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The control plane dies somewhere between a drain, the preemption, the label and the first serving replica."""
    kind = (DrainNode, PreemptJob, LabelNode)[int(rng.integers(3))]
    point = str(rng.choice(CRASH_POINTS[:-2]))
    skip, down_s = int(rng.integers(0, _PASSES)), float(rng.uniform(0.1, 8.0))
    faults.watch(kind, lambda action: faults.arm(point, skip, down_s))


def _crash_twice_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The control plane dies in a passage, and its successor in its recovery."""
    kind, point = _kind(rng), str(rng.choice(CRASH_POINTS[1:-2]))
    skip, down_s = int(rng.integers(0, 3)), float(rng.uniform(0.1, 2.0))
    again = str(rng.choice(CRASH_POINTS[-2:]))

    def on_action(action: Action) -> None:
        faults.arm(point, skip, down_s)
        faults.arm(again, 0, down_s)

    faults.watch(kind, on_action)


def _lose_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The node goes down while it drains, while it is labelled or just after."""
    is_noticed = rng.random() < 0.6
    down_s = float(rng.uniform(5.0, 30.0) if is_noticed else rng.uniform(0.5, 3.5))
    _at_node(
        faults,
        _kind(rng),
        _delay_s(rng),
        lambda action: faults.lose_node(action.node_id, down_s, is_noticed=is_noticed),
    )


def _lose_both(faults: FaultScript, rng: np.random.Generator) -> None:
    """The node and the control plane go down together, between two effects of one turn."""
    kind, down_s = _kind(rng), float(rng.uniform(5.0, 30.0))
    point = str(rng.choice(["start.before", "start.after", "wait.after", "append.before"]))
    away_s = float(rng.uniform(0.1, 20.0))

    def lose(action: DrainNode | LabelNode) -> None:
        faults.lose_node(action.node_id, down_s, is_noticed=True)
        faults.arm(point, 0, away_s)

    _at_node(faults, kind, 0.0, lose)


def _cut_off_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The node is cut off from the control plane while it drains or right after it is labelled."""
    duration_s = float(rng.uniform(0.2, 12.0))
    _at_node(faults, _kind(rng), _delay_s(rng), lambda action: faults.partition_node(action.node_id, duration_s))


def _hang_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """A worker on the node does not receive the drain, and may not react to signals."""
    duration_s, is_unkillable = float(rng.uniform(0.5, 20.0)), rng.random() < 0.5

    def hang(action: DrainNode | LabelNode) -> None:
        for process in faults.machine.on_node(action.node_id)[:1]:
            faults.last(faults.now_s() + duration_s)
            faults.machine.stall(process, duration_s, is_unkillable=is_unkillable)

    _at_node(faults, DrainNode, _delay_s(rng), hang)


def _crash_workers_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """Every process on the node dies in the middle of leaving it, or of starting on it."""

    def kill(action: DrainNode | LabelNode) -> None:
        for process in faults.machine.on_node(action.node_id):
            faults.machine.die(process, "killed by a fault")

    _at_node(faults, _kind(rng), _delay_s(rng), kill)


def _fail_journal_in_passage(faults: FaultScript, rng: np.random.Generator) -> None:
    """The journal's disk refuses writes while a node changes pools; nodes may come and go meanwhile."""
    duration_s, loses = float(rng.uniform(0.5, 12.0)), rng.random() < 0.5
    down_s = float(rng.uniform(0.5, 8.0))

    def fail(action: DrainNode | LabelNode) -> None:
        faults.fail_journal(duration_s)
        if loses:
            is_noticed = down_s > faults.machine.delays.node_lost_after_s
            faults.lose_node(action.node_id, down_s, is_noticed=is_noticed)

    _at_node(faults, DrainNode, _delay_s(rng), fail)


LOAN_FAULT_KINDS: Mapping[str, FaultPlan] = MappingProxyType(
    {
        "crash at a drain or a label": _crash_at_passage,
        "crash between drain and service": _crash_in_passage,
        "crash in a passage and in recovery": _crash_twice_in_passage,
        "node lost in passage": _lose_in_passage,
        "node and control plane lost in passage": _lose_both,
        "node cut off in passage": _cut_off_in_passage,
        "worker hangs in passage": _hang_in_passage,
        "workers die in passage": _crash_workers_in_passage,
        "journal error in passage": _fail_journal_in_passage,
    }
)
