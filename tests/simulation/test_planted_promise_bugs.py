"""Tight deadlines and reclaims among moves: bugs of capacities, promises and reclaims are planted, each is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kits.simulation.moving import Moving
from kits.simulation.sweeps import begin_in_ci, only_in_full
from springtide.control import controller as controller_module
from springtide.control import incremental, pools, reconcile, runs
from springtide.core import actions, events
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.workload import JobState
from springtide.scheduling.policies.springtide import decision, memory
from springtide.solvers.reservations import profile, reservation_table
from springtide_studies.fault_seeds.seeds import SeedOutcome, run_seed

MAX_SEEDS = 300
BASE_SEED = 3_000_000
# The search of what takes many seeds begins here in CI.
RARE = {"reckon_steps_of_a_checkpoint_from_the_last_report": 135, "leave_the_last_device_unpromised": 47}

# A reclaim that comes just while a job moves is rare even here.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# How often every job of a restless policy moves.
MOVES_EVERY_S, RESTLESS_FOR_S = 2.5, 150.0

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, tuple[Plant, str]] = {}


def plant(worlds: str) -> Callable[[Plant], Plant]:
    """Enter a bug with the worlds in which it is looked for: tight deadlines, or jobs that move during reclaims."""

    def enter(function: Plant) -> Plant:
        PLANTS[function.__name__] = (function, worlds)
        return function

    return enter


# --- capacity --------------------------------------------------------------------------------------------------------


@plant("promises")
def find_room_for_one_device_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    original = profile.FreeProfile.earliest

    def earliest(self: Any, num_devices: int, *given: float) -> float | None:
        return original(self, num_devices - 1, *given)

    monkeypatch.setattr(profile.FreeProfile, "earliest", earliest)


@plant("promises")
def promise_one_device_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    original = decision.promisable_capacity
    monkeypatch.setattr(
        decision, "promisable_capacity", lambda *given: profile.mapped(original(*given), lambda count: count + 1)
    )


@plant("promises")
def leave_the_last_device_unpromised(monkeypatch: pytest.MonkeyPatch) -> None:
    original = decision.promisable_capacity
    monkeypatch.setattr(
        decision,
        "promisable_capacity",
        lambda *given: profile.mapped(original(*given), lambda count: max(0, count - 1)),
    )


@plant("promises")
def take_devices_until_the_next_breakpoint_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of what is taken is off by one entry of the profile."""
    original = profile.FreeProfile.take

    def take(self: Any, start_s: float, end_s: float, num_devices: int) -> None:
        inside = [moment_s for moment_s in self.times if start_s < moment_s < end_s]
        original(self, start_s, inside[-1] if inside and num_devices > 0 else end_s, num_devices)

    monkeypatch.setattr(profile.FreeProfile, "take", take)


# --- promises --------------------------------------------------------------------------------------------------------


@plant("promises")
def never_release_the_devices_of_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation_table.ReservationTable, "drop", lambda self, key: self.entries.pop(key))


@plant("promises")
def never_forget_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has ended keeps its place in the table."""
    monkeypatch.setattr(decision, "_has_hard_deadline", lambda row: True)


@plant("promises")
def give_a_promise_up_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is planned anew is planned as if nothing had been promised."""
    original = decision.entry_of

    def entry_of(*given: Any, **named: Any) -> Any:
        entry = original(*given, **named)
        if named.get("held"):
            entry.deadline_s *= 2.0
        return entry

    monkeypatch.setattr(decision, "entry_of", entry_of)


@plant("promises")
def forget_promises_in_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was promised is not in what the policy remembers."""
    original = memory.State.encode

    def encode(self: Any, index_of: Any) -> Any:
        known = original(self, index_of)
        return {**known, "jobs": dict(list(known["jobs"].items())[:-1])}

    monkeypatch.setattr(memory.State, "encode", encode)


@plant("promises")
def reckon_steps_of_a_checkpoint_from_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a checkpoint counts as reached when steps were last reported."""
    original = runs.apply_event

    def apply(event: Any, state: Any, now_s: float) -> None:
        original(event, state, now_s)
        record = state.jobs.get(event.job_id) if isinstance(event, events.CheckpointCommitted) else None
        if record is not None and record.state is JobState.RUNNING:
            step = max(record.progress.step, event.step)
            state.jobs[event.job_id] = replace(record, progress=replace(record.progress, step=step))

    monkeypatch.setattr(runs, "apply_event", apply)


# --- reclaims --------------------------------------------------------------------------------------------------------


@plant("restless")
def lose_a_reclaim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reclaim is marked as a drain: the jobs there may stay."""
    original = pools.pool_actions

    def pool_actions(state: Any, plan: Any) -> Any:
        return [
            replace(action, is_reclaim=False) if isinstance(action, actions.DrainNode) else action
            for action in original(state, plan)
        ]

    monkeypatch.setattr(reconcile, "pool_actions", pool_actions)


@plant("restless")
def lose_a_reclaim_on_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was a reclaim is a drain to the next control plane."""
    original = controller_module.Controller.restore

    def restore(self: Any, step: Any) -> None:
        drains = [
            replace(action, is_reclaim=False) if isinstance(action, actions.DrainNode) else action
            for action in step.actions
        ]
        original(self, replace(step, actions=tuple(drains)))

    monkeypatch.setattr(controller_module.Controller, "restore", restore)


@plant("restless")
def settle_without_the_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that moves is not looked at again when the node that it leaves is reclaimed."""
    original = incremental.Worklist.pending

    def pending(self: Any, plan: Any, drains: Any) -> Any:
        self._drains = drains
        return original(self, plan, drains)

    monkeypatch.setattr(incremental.Worklist, "pending", pending)


def owned(node: Any) -> bool:
    return node.owner != "shared"


class Restless(Moving):
    """Moves every elastic job to other devices again and again, so that reclaims come while jobs move."""

    def decide(self, snapshot: Snapshot) -> Plan:
        plan = super().decide(snapshot)
        number = int(snapshot.now_s / MOVES_EVERY_S)
        elastic = {view.job.job_id for view in snapshot.jobs if view.job.elastic}
        moving = {who: given.num_devices for who, given in plan.allocations.items() if who in elastic}
        kept = {device for who, given in plan.allocations.items() if who not in moving for device in given.device_ids}
        labels = {node.node_id: node.pool for node in snapshot.cluster.nodes}
        labels.update({node_id: wish.pool for node_id, wish in plan.pools.items()})
        open_ = [
            device
            for device in snapshot.cluster.device_ids()
            if device not in kept and labels[snapshot.cluster.node_of[device]] != "inference"
        ]
        if sum(moving.values()) > len(open_) or snapshot.now_s > RESTLESS_FOR_S:
            return plan
        if number % 2:
            open_.reverse()
        allocations = dict(plan.allocations)
        for job_id, count in moving.items():
            allocations[job_id] = PoolAllocation(device_ids=tuple(open_[:count]))
            open_ = open_[count:]
        return replace(plan, allocations=allocations, revisit_at_s=(number + 1) * MOVES_EVERY_S)


def play(worlds: str, index: int) -> SeedOutcome:
    seed, num_faults = BASE_SEED + index, None if index % 2 else 0.0
    if worlds == "promises":
        return run_seed(seed, "springtide", num_faults=num_faults, has_promises=True)
    return run_seed(seed, Restless, num_faults=num_faults, has_pools=True, reaches=owned)


# A hundred seeds and more.
DEAR = {"settle_without_the_drains"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=only_in_full if name in DEAR else ()) for name in PLANTS])
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, worlds = PLANTS[name]
    function(monkeypatch)
    for index in range(begin_in_ci(RARE.get(name, 0)), MAX_SEEDS):
        result = play(worlds, index)
        if result.violation:
            print(f"{name}: found by {result.violation} after {index + 1} seeds")
            return
    pytest.fail(f"{name} was not found within {MAX_SEEDS} seeds")


def test_nothing_is_found_where_nothing_is_planted() -> None:
    for worlds in ("promises", "restless"):
        for index in range(6):
            assert not play(worlds, index).violation
