"""Each invariant of long traces finds what it is there for, and names the command that runs the seed again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from springtide.core.actions import Action, AdmitJob, EndJob, PreemptJob, ResizeJob, StartReplica
from springtide.core.events import Event, JobSubmitted, NodeJoined, NodeLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob
from springtide.simulator.fluid.invariants import FluidInvariants, InvariantViolation

NODE = make_node("n0", 2)


def job(name: str, deadline_s: float | None = None) -> TrainingJob:
    return TrainingJob(
        job_id=name, name=name, entrypoint=Entrypoint(source_path="trace"), goal=Goal(deadline_s=deadline_s)
    )


def start(name: str, device: str = "n0/0", number: int = 0) -> StartReplica:
    return StartReplica(workload=job(name), replica_id=f"{name}.{number}", device_id=device, generation=1)


def resize(name: str, *numbers: int, cause: str = "plan") -> ResizeJob:
    members = tuple(f"{name}.{number}" for number in numbers)
    return ResizeJob(job_id=name, generation=1, replica_ids=members, global_batch_size=1, cause=cause)


def end(name: str, state: JobState = JobState.SUCCEEDED) -> EndJob:
    return EndJob(job_id=name, state=state)


BEGIN: tuple[Event, ...] = (NodeJoined(node=NODE), JobSubmitted(job=job("a", 50.0)), JobSubmitted(job=job("b")))


def check(*steps: tuple[float, Sequence[Event], Sequence[Action]], reasons: dict[str, str] | None = None) -> None:
    invariants = FluidInvariants([NODE], command="springtide simulate --seed 3")
    for now_s, events, actions in steps:
        invariants.reasons = reasons or {}
        invariants.note(Step(now_s=now_s, events=tuple(events), actions=tuple(actions)))
    if steps[-1][0] == 99.0:
        invariants.check_end(99.0)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("device-once", [(0.0, BEGIN, [start("a"), start("b")])]),
        ("capacity", [(0.0, BEGIN, [start("a", "n1/0")])]),
        ("capacity", [(0.0, BEGIN, []), (1.0, [NodeLost(node_id="n0")], [start("a")])]),
        ("capacity", [(0.0, BEGIN, [resize("a", 0)])]),
        ("reason-for-change", [(0.0, BEGIN, [start("a")]), (1.0, [], [resize("a", 0)])]),
        ("reason-for-change", [(0.0, BEGIN, [PreemptJob(job_id="a", generation=2, replica_ids=())])]),
        ("one-end", [(0.0, BEGIN, [end("a"), end("a")])]),
        ("one-end", [(0.0, BEGIN, [end("c")])]),
        ("end-is-final", [(0.0, BEGIN, [end("a"), start("a")])]),
        ("end-is-final", [(0.0, BEGIN, [start("a"), end("a"), resize("a", 0)])]),
        ("one-promise", [(0.0, BEGIN, [AdmitJob(job_id="a", finish_s=9.0), AdmitJob(job_id="a", finish_s=9.0)])]),
        ("promise-kept", [(0.0, BEGIN, [AdmitJob(job_id="a", finish_s=9.0)]), (50.1, [], [end("a")])]),
        (
            "promise-kept",
            [(0.0, BEGIN, [AdmitJob(job_id="a", finish_s=9.0)]), (9.0, [], [end("a", JobState.REJECTED)])],
        ),
        ("all-end", [(99.0, BEGIN, [end("a")])]),
        ("nothing-left", [(99.0, BEGIN, [start("a"), end("a"), end("b")])]),
    ],
)
def test_it_is_found(name: str, steps: list[tuple[float, Sequence[Event], Sequence[Action]]]) -> None:
    with pytest.raises(InvariantViolation, match="springtide simulate --seed 3") as found:
        check(*steps)
    assert found.value.name == name


def test_what_is_right_passes() -> None:
    check(
        (0.0, BEGIN, [AdmitJob(job_id="a", finish_s=9.0), start("a"), resize("a", 0, cause="replicas ready")]),
        (50.0, [], [end("a")]),
        (50.0, [ReplicaStopped(workload_id="a", replica_id="a.0")], [start("b"), resize("b", 0)]),
        (60.0, [], [end("b")]),
        (99.0, [ReplicaStopped(workload_id="b", replica_id="b.0")], []),
        reasons={"b": "starting"},
    )


def test_a_reason_that_was_given_when_the_workers_started_counts_for_their_resize() -> None:
    invariants = FluidInvariants([NODE])
    invariants.reasons = {"a": "idle devices"}
    invariants.note(Step(now_s=0.0, events=BEGIN, actions=(start("a"), start("a", "n0/1", 1))))
    invariants.reasons = {}
    invariants.note(Step(now_s=4.0, actions=(resize("a", 0, cause="member lost"),)))
    invariants.note(Step(now_s=5.0, actions=(resize("a", 0, 1),)))
    with pytest.raises(InvariantViolation):
        invariants.note(Step(now_s=6.0, actions=(resize("a", 0),)))


def test_under_faults_broken_promises_are_listed_and_not_raised() -> None:
    invariants = FluidInvariants([NODE], keeps_promises=False)
    invariants.note(Step(now_s=0.0, events=BEGIN, actions=(AdmitJob(job_id="a", finish_s=9.0),)))
    invariants.note(Step(now_s=60.0, actions=(end("a"),)))
    assert invariants.broken == ["a"]
