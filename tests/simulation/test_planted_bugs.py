"""The fault seeds are worth what they find: classic bugs of control planes are planted, and each must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kits.cheap_policies import cheap_names
from kits.simulation.sweeps import begin_in_ci
from springtide.control import controller as controller_module
from springtide.control import loop, losses, reconcile, runs, transitions
from springtide.control.edits import find, put, without_replica
from springtide.core import actions, events
from springtide.core.errors import JournalError
from springtide.core.workload import JobState
from springtide_studies.fault_seeds import executor as executor_module
from springtide_studies.fault_seeds import training
from springtide_studies.fault_seeds.seeds import run_seed
from springtide_studies.fault_seeds.store import JobStore

MAX_SEEDS = 1000
BASE_SEED = 1_000_000
POLICIES = sorted(cheap_names(round_s=2.0))
# The search of what takes more than a hundred seeds begins here in CI.
RARE = {"form_of_workers_without_state": 150}

pytestmark = pytest.mark.slow

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of like events are applied one by one, so that the bug is in the way of each."""
    for name in ("_apply_ready", "_apply_stopped", "_apply_starts", "_apply_stops"):
        monkeypatch.setattr(runs, name, lambda *_: False)


def on_event(monkeypatch: pytest.MonkeyPatch, kind: type, handle: Callable[..., None]) -> None:
    original = runs.apply_event

    def apply(event: Any, state: Any, now_s: float) -> None:
        if isinstance(event, kind):
            handle(original, event, state, now_s)
        else:
            original(event, state, now_s)

    monkeypatch.setattr(runs, "apply_event", apply)
    one_by_one(monkeypatch)


def on_action(monkeypatch: pytest.MonkeyPatch, kind: type, handle: Callable[..., None]) -> None:
    original = runs.apply_action

    def apply(action: Any, state: Any, now_s: float) -> None:
        if isinstance(action, kind):
            handle(original, action, state, now_s)
        else:
            original(action, state, now_s)

    monkeypatch.setattr(runs, "apply_action", apply)
    one_by_one(monkeypatch)


def wrong_loop(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """The loop with its three effects in another order: a(cknowledge), j(ournal), s(tart)."""

    def run(controller: Any, executor: Any, clock: Any, journal: Any, *, until: Any, **_: Any) -> None:
        while not until():
            found = executor.wait(controller.wakeup_at_s)
            step = controller.step(clock.now_s(), found)
            for letter in order:
                if letter == "a":
                    executor.acknowledge(found)
                elif letter == "s":
                    for action in step.actions:
                        executor.start(action)
                else:
                    while step.events or step.actions or step.reasons:
                        try:
                            journal.append(step)
                            break
                        except JournalError:
                            executor.wait(clock.now_s() + 1.0)

    monkeypatch.setattr(loop, "run", run)


@plant
def acknowledge_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_loop(monkeypatch, "ajs")


@plant
def start_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_loop(monkeypatch, "sja")


@plant
def forget_the_fence_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "admit", lambda self, generation: None)


@plant
def accept_stale_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "_current", lambda state, job_id, generation: state.jobs.get(job_id))


@plant
def free_a_device_when_its_replica_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, action: Any, state: Any, now_s: float) -> None:
        record, replica = find(state, action.workload_id, action.replica_id)
        if record is not None and replica is not None:
            put(state, without_replica(record, replica, now_s))

    on_action(monkeypatch, actions.StopReplica, handle)


@plant
def lose_the_checkpoint_on_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    original = controller_module.Controller.restore

    def restore(self: Any, step: Any) -> None:
        original(self, replace(step, events=tuple(e for e in step.events if type(e) is not events.CheckpointCommitted)))

    monkeypatch.setattr(controller_module.Controller, "restore", restore)


@plant
def forget_that_a_submit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, event: Any, state: Any, now_s: float) -> None:
        state.jobs.pop(event.job.job_id, None)
        original(event, state, now_s)

    on_event(monkeypatch, events.JobSubmitted, handle)


@plant
def end_a_job_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = controller_module.Controller.step

    def step(self: Any, now_s: float, found: Any) -> Any:
        done = original(self, now_s, found)
        ends = tuple(action for action in done.actions if isinstance(action, actions.EndJob))
        return replace(done, actions=(*done.actions, *ends[:1]))

    monkeypatch.setattr(controller_module.Controller, "step", step)


@plant
def form_of_workers_without_state(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reconcile._recover

    def recover(record: Any) -> Any:
        newest = [r.replica_id for r in record.replicas if r.state == "READY"][-1:]
        return [
            replace(action, replica_ids=tuple(newest)) if isinstance(action, actions.ResizeJob) and newest else action
            for action in original(record)
        ]

    monkeypatch.setattr(reconcile, "_recover", recover)


@plant
def write_the_manifest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    original = training.write_order
    monkeypatch.setattr(training, "write_order", lambda *given: tuple(reversed(original(*given))))


@plant
def skip_a_batch_after_a_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(training.ModelledGroup):
        def __init__(self, generation: int, members: Any, step: int) -> None:
            super().__init__(generation, members, step + (generation > 1))

    monkeypatch.setattr(training, "ModelledGroup", Group)


@plant
def do_not_force_the_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reconcile._recover

    def recover(record: Any) -> Any:
        return [replace(a, forced=False) if isinstance(a, actions.ResizeJob) else a for a in original(record)]

    monkeypatch.setattr(reconcile, "_recover", recover)


@plant
def stop_survivors_until_the_back_off_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    original = losses.count_loss

    def count_loss(record: Any, reason: str, now_s: float, *, is_fault: bool) -> Any:
        counted = original(record, reason, now_s, is_fault=is_fault)
        return replace(counted, restarts=replace(counted.restarts, starts_at_s=max(counted.back_offs_at_s)))

    monkeypatch.setattr(losses, "count_loss", count_loss)


@plant
def forget_to_adopt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module.SimExecutor, "recover", lambda self, standing: None)


@plant
def restart_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reconcile._start
    monkeypatch.setattr(reconcile, "_start", lambda *given: [replace(a, restore=None) for a in original(*given)])


@plant
def restart_without_a_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reconcile._start

    def start(record: Any, devices: Any, generation: int, *rest: Any) -> Any:
        return original(record, devices, max(1, record.group.generation), *rest)

    monkeypatch.setattr(reconcile, "_start", start)


@plant
def cancel_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, event: Any, state: Any, now_s: float) -> None:
        job = state.jobs.get(event.workload_id)
        if job is not None:
            state.jobs[event.workload_id] = replace(job, lifecycle=replace(job.lifecycle, state=JobState.CANCELLED))
        else:
            original(event, state, now_s)

    on_event(monkeypatch, events.CancelRequested, handle)


@plant
def book_no_device_time_of_lost_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    original = transitions.lose_replica

    def lose(state: Any, workload_id: Any, replica_id: Any, reason: str, now_s: float) -> None:
        _, replica = find(state, workload_id, replica_id)
        original(state, workload_id, replica_id, reason, now_s if replica is None else replica.started_at_s)

    monkeypatch.setattr(transitions, "lose_replica", lose)


@plant
def forget_who_lived_on_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    on_event(monkeypatch, events.NodeLost, lambda original, event, state, now_s: state.nodes.pop(event.node_id, None))


@plant
def keep_a_finished_job_only_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery forgets that a job has ended."""
    original = controller_module.Controller.restore

    def restore(self: Any, step: Any) -> None:
        original(self, replace(step, actions=tuple(a for a in step.actions if type(a) is not actions.EndJob)))

    monkeypatch.setattr(controller_module.Controller, "restore", restore)


@plant
def repeat_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers tell things once: what is lost on the way is lost for good."""
    from springtide_studies.fault_seeds.machine import Machine

    monkeypatch.setattr(Machine, "_resend", lambda self, process, seq: None)


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    for index in range(begin_in_ci(RARE.get(name, 0)), MAX_SEEDS):
        result = run_seed(BASE_SEED + index, POLICIES[index % len(POLICIES)])
        if result.violation:
            print(f"{name}: found by {result.violation} after {index + 1} seeds")
            return
    pytest.fail(f"{name} was not found within {MAX_SEEDS} seeds")
