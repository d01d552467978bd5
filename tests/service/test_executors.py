"""One executor out of two: each action goes to the executor of its job, and events come out of one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from springtide.core.actions import (
    Action,
    AdmitJob,
    EndJob,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
    StopReplica,
)
from springtide.core.events import Event, PlatformStarted, ReplicaReady
from springtide.core.functions import FunctionMenu
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import Entrypoint, JobState, MachineRun, ReplicaId, TrainingJob, WorkloadId
from springtide.service.executors import RoutedExecutor

HERE, THERE, RESTED = WorkloadId("here"), WorkloadId("there"), WorkloadId("rested")


class Recorder:
    """An executor that remembers what it was asked."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.standing: Standing | None = None
        self.events: list[Event] = []
        self.acknowledged: list[Event] = []
        self.send: Callable[[Event], None] = lambda event: None

    def recover(self, standing: Standing) -> None:
        self.standing = standing

    def start(self, action: Action) -> None:
        self.actions.append(action)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        events, self.events = self.events, []
        return events

    def acknowledge(self, events: Sequence[Event]) -> None:
        self.acknowledged += events

    def post(self, event: Event) -> None:
        self.events.append(event)

    def sharing(self) -> SharingStatus:
        return SharingStatus(mechanism="cgroup-v2", device_cpus=0.5)

    def send_events_to(self, post: Callable[[Event], None]) -> None:
        self.send = post

    def knows(self, job_id: WorkloadId) -> bool:
        return job_id == RESTED

    def status(self, job_id: WorkloadId) -> FunctionRunStatus | None:
        return None


def start_of(job_id: WorkloadId) -> StartReplica:
    menu = FunctionMenu(service="test", options=()) if job_id != HERE else None
    job = TrainingJob(job_id=job_id, name="j", entrypoint=Entrypoint(source_path="j.py"), menu=menu)
    return StartReplica(workload=job, replica_id=ReplicaId(f"{job_id}.0"), device_id=DeviceId("d"), generation=1)


def actions_of(job_id: WorkloadId) -> list[Action]:
    replica = ReplicaId(f"{job_id}.0")
    return [
        start_of(job_id),
        ResizeJob(job_id=job_id, generation=1, replica_ids=(replica,), global_batch_size=8),
        PreemptJob(job_id=job_id, generation=2, replica_ids=(replica,)),
        StopReplica(workload_id=job_id, replica_id=replica),
        EndJob(job_id=job_id, state=JobState.CANCELLED),
    ]


@pytest.fixture
def pair() -> tuple[Recorder, Recorder, RoutedExecutor]:
    machines, functions = Recorder(), Recorder()
    return machines, functions, RoutedExecutor(machines, functions)


def test_each_action_goes_to_the_executor_of_its_job(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    for one, other in zip(actions_of(HERE), actions_of(THERE), strict=True):
        routed.start(one)
        routed.start(other)
    assert machines.actions == actions_of(HERE)
    assert functions.actions == actions_of(THERE)


def test_a_job_that_moves_is_first_of_one_executor_and_then_of_the_other(
    pair: tuple[Recorder, Recorder, RoutedExecutor],
) -> None:
    machines, functions, routed = pair
    before = actions_of(HERE)[:4]
    for action in before:
        routed.start(action)
    start, resize, preempt, stop, end = actions_of(HERE)
    assert isinstance(start, StartReplica)
    assert isinstance(start.workload, TrainingJob)
    run = MachineRun(step=4, cost_usd=0.0)
    moved = replace(start.workload, menu=FunctionMenu(service="test", options=()), machine_run=run)
    after = [replace(start, workload=moved), resize, preempt, stop]
    for action in after:
        routed.start(action)
    assert machines.actions == before
    assert functions.actions == after
    # Functions could not start from its checkpoint: it goes back, and both have something of it to clear in the end.
    for action in (start, resize, end):
        routed.start(action)
    assert machines.actions == [*before, start, resize, end]
    assert functions.actions == [*after, end]


def test_what_belongs_to_no_job_goes_to_the_machines(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    routed.start(AdmitJob(job_id=THERE, finish_s=1.0))
    routed.start(StopReplica(workload_id=WorkloadId("service"), replica_id=ReplicaId("service.0")))
    assert len(machines.actions) == 2
    assert not functions.actions


def test_shares_are_the_machines_own(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    action = SetShare(workload_id=HERE, replica_id=ReplicaId("r"), share=Share(request=0.3, limit=0.6))
    routed.start(action)
    assert machines.actions == [action]
    assert not functions.actions
    assert routed.sharing() == machines.sharing()


def test_a_rested_job_is_cleared_where_it_ran(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    routed.start(EndJob(job_id=RESTED, state=JobState.CANCELLED))
    assert functions.actions
    assert not machines.actions


def test_both_speak_in_one_stream(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    ready = ReplicaReady(workload_id=THERE, replica_id=ReplicaId("there.0"))
    functions.send(ready)
    routed.post(PlatformStarted())
    events = routed.wait(0.0)
    assert events == [ready, PlatformStarted()]
    routed.acknowledge(events)
    assert machines.acknowledged == events
    # Who directs functions learns there which goals are durable.
    assert functions.acknowledged == events


def test_what_stands_is_split(pair: tuple[Recorder, Recorder, RoutedExecutor]) -> None:
    machines, functions, routed = pair
    both = (start_of(HERE), start_of(THERE))
    generations = {HERE: 1, THERE: 1}
    actions = (*actions_of(HERE)[1:3], *actions_of(THERE)[1:3])
    routed.recover(Standing(replicas=both, generations=generations, actions=actions))
    assert machines.standing == Standing(replicas=both[:1], generations=generations, actions=actions[:2])
    assert functions.standing == Standing(replicas=both[1:], generations=generations, actions=actions[2:])
    # From now on it is known whose they are.
    routed.start(actions_of(THERE)[1])
    assert functions.actions == [actions_of(THERE)[1]]
