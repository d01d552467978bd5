"""The kit for executors: actions are idempotent, reports repeat until acknowledged, a restart adopts and fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from springtide.core.actions import Action, DrainNode, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    JobFinished,
    JobResized,
    NodeJoined,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.ports import Clock, Executor, Standing
from springtide.core.resources import DeviceId, NodeId, Pool
from springtide.core.workload import InferenceService, ReplicaId, TrainingJob


class World(Protocol):
    """What a kit's user brings: an executor over some machines, and a way to restart the control plane alone.

    `long_job` trains for minutes, `short_job` for a second or two; `devices` are at least two.
    """

    clock: Clock
    executor: Executor
    long_job: TrainingJob
    short_job: TrainingJob
    service: InferenceService
    devices: Sequence[DeviceId]

    def restart(self) -> Executor:
        """Drop the present executor as a crash would, and return a fresh one over the same machines."""
        ...

    def kill(self, replica_id: ReplicaId) -> None:
        """Let a worker die, as kill -9 would."""
        ...


class PooledWorld(World, Protocol):
    """A world of which `pooled_node` is a node that is up, labelled for inference, and keeps its label by itself."""

    pooled_node: NodeId

    def label_of(self, node_id: NodeId) -> Pool:
        """What the machines, not the control plane, say that the node is labelled for."""
        ...


LIMIT_S = 60.0
SILENCE_S = 3.0


def gather(world: World, executor: Executor, enough: Callable[[list[Event]], bool], limit_s: float) -> list[Event]:
    """Collect and acknowledge events until there are `enough` of them or the limit is reached."""
    found: list[Event] = []
    until_s = world.clock.now_s() + limit_s
    while not enough(found) and world.clock.now_s() < until_s:
        events = executor.wait(min(until_s, world.clock.now_s() + 0.5))
        executor.acknowledge(events)
        found += [event for event in events if not isinstance(event, NodeJoined)]
    return found


def expect(world: World, executor: Executor, kind: type[Event], count: int = 1) -> list[Event]:
    """Wait for so many events of one kind. Raises AssertionError with what came instead."""
    found = gather(world, executor, lambda seen: _count(seen, kind) >= count, LIMIT_S)
    assert _count(found, kind) == count, f"wanted {count} {kind.__name__}, got {found}"
    return found


def expect_none(world: World, executor: Executor, *kinds: type[Event]) -> None:
    """Make sure that for a while nothing of these kinds comes."""
    found = gather(world, executor, lambda seen: False, SILENCE_S)
    wrong = [event for event in found if isinstance(event, kinds)]
    assert not wrong, f"unexpected {wrong}"


def _count(events: Sequence[Event], kind: type[Event]) -> int:
    return len({repr(event) for event in events if isinstance(event, kind)})


def start_of(workload: TrainingJob | InferenceService, device_id: DeviceId, number: int = 0) -> StartReplica:
    """The action that starts a workload's n-th replica in its first generation."""
    workload_id = workload.job_id if isinstance(workload, TrainingJob) else workload.service_id
    return StartReplica(
        workload=workload, replica_id=ReplicaId(f"{workload_id}.{number}"), device_id=device_id, generation=1
    )


def resize_of(job: TrainingJob, generation: int, *numbers: int, forced: bool = False) -> ResizeJob:
    """The action that forms a generation of the replicas with these numbers."""
    return ResizeJob(
        job_id=job.job_id,
        generation=generation,
        replica_ids=tuple(ReplicaId(f"{job.job_id}.{number}") for number in numbers),
        global_batch_size=job.global_batch_size,
        forced=forced,
    )


def _train(world: World, job: TrainingJob, *, num_workers: int = 1) -> list[StartReplica]:
    starts = [start_of(job, world.devices[number], number) for number in range(num_workers)]
    for start in starts:
        world.executor.start(start)
    expect(world, world.executor, ReplicaReady, num_workers)
    world.executor.start(resize_of(job, 1, *range(num_workers)))
    expect(world, world.executor, JobResized)
    return starts


def check_deadline(world: World) -> None:
    """`wait` returns with nothing at its deadline, not before."""
    gather(world, world.executor, lambda seen: False, 0.5)
    until_s = world.clock.now_s() + 0.3
    assert list(world.executor.wait(until_s)) == []
    assert world.clock.now_s() >= until_s - 0.001


def check_repeated_actions(world: World) -> None:
    """Whatever comes twice has happened once."""
    starts = _train(world, world.long_job, num_workers=2)
    actions: list[Action] = [*starts, resize_of(world.long_job, 1, 0, 1)]
    for action in actions:
        world.executor.start(action)
    expect_none(world, world.executor, ReplicaReady, ReplicaLost, ReplicaStopped)
    stop = StopReplica(workload_id=world.long_job.job_id, replica_id=starts[0].replica_id, grace_s=1.0)
    world.executor.start(stop)
    world.executor.start(stop)
    expect(world, world.executor, ReplicaStopped)
    world.executor.start(starts[0])
    expect_none(world, world.executor, ReplicaReady, ReplicaStopped)


def check_unknown_replica_stops(world: World) -> None:
    """A replica that was never started counts as stopped, so that its device becomes free."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(StopReplica(workload_id=start.workload_id, replica_id=start.replica_id, grace_s=1.0))
    expect(world, world.executor, ReplicaStopped)


def check_lost_worker(world: World) -> None:
    """A worker that dies without being asked is reported lost, once."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(start)
    expect(world, world.executor, ReplicaReady)
    world.kill(start.replica_id)
    expect(world, world.executor, ReplicaLost)
    expect_none(world, world.executor, ReplicaLost, ReplicaStopped)


def check_preemption(world: World) -> None:
    """A preempted job commits a checkpoint as the new generation and all its workers are gone."""
    starts = _train(world, world.long_job, num_workers=2)
    ids = tuple(start.replica_id for start in starts)
    world.executor.start(PreemptJob(job_id=world.long_job.job_id, generation=2, replica_ids=ids, grace_s=10.0))
    found = expect(world, world.executor, ReplicaStopped, 2)
    checkpoints = [event for event in found if isinstance(event, CheckpointCommitted)]
    assert [event.generation for event in checkpoints][-1:] == [2], f"no checkpoint of generation 2 in {found}"


def check_unacknowledged_reports_repeat(world: World) -> None:
    """What nobody acknowledged before the control plane died is said again to the next one."""
    starts = _train(world, world.short_job)
    found: list[Event] = []
    until_s = world.clock.now_s() + LIMIT_S
    while _count(found, JobFinished) == 0 and world.clock.now_s() < until_s:
        found += world.executor.wait(world.clock.now_s() + 0.5)
    assert _count(found, JobFinished) == 1
    fresh = world.restart()
    fresh.recover(Standing(replicas=tuple(starts), generations={world.short_job.job_id: 1}))
    expect(world, fresh, JobFinished)


def check_recovery_adopts(world: World) -> None:
    """A new control plane takes over what runs, reports what is gone and fences what it does not know."""
    known = start_of(world.service, world.devices[0])
    unknown = start_of(world.service, world.devices[1], 1)
    world.executor.start(known)
    world.executor.start(unknown)
    expect(world, world.executor, ReplicaReady, 2)
    gone = start_of(world.service, world.devices[1], 2)
    fresh = world.restart()
    fresh.recover(Standing(replicas=(known, gone)))
    found = expect(world, fresh, ReplicaLost)
    assert [event.replica_id for event in found if isinstance(event, ReplicaLost)] == [gone.replica_id]
    fresh.start(StopReplica(workload_id=known.workload_id, replica_id=known.replica_id, grace_s=1.0))
    found = expect(world, fresh, ReplicaStopped)
    assert [event.replica_id for event in found if isinstance(event, ReplicaStopped)] == [known.replica_id]


CHECKS: tuple[Callable[[World], None], ...] = (
    check_deadline,
    check_repeated_actions,
    check_unknown_replica_stops,
    check_lost_worker,
    check_preemption,
    check_unacknowledged_reports_repeat,
    check_recovery_adopts,
)


def check_labels_are_kept(world: PooledWorld) -> None:
    """A label is what the last LabelNode said, however often it is said; a drain changes none, and neither is news."""
    node_id, executor = world.pooled_node, world.executor
    gather(world, executor, lambda seen: False, 0.5)
    drain = DrainNode(node_id=node_id, pool="training", is_reclaim=True)
    for _ in range(2):
        executor.start(drain)
        assert world.label_of(node_id) == "inference", "a drain changed the label"
    for _ in range(2):
        executor.start(LabelNode(node_id=node_id, pool="training"))
        assert world.label_of(node_id) == "training"
    # A drain that is called off is a label that the node has.
    executor.start(DrainNode(node_id=node_id, pool="inference"))
    executor.start(LabelNode(node_id=node_id, pool="training"))
    assert world.label_of(node_id) == "training"
    found = gather(world, executor, lambda seen: False, 0.5)
    assert not found, f"unexpected {found}"


def check_labels_outlive_the_control_plane(world: PooledWorld) -> None:
    """A new control plane finds the label that the one before it set, and one that a crash cut off is made so."""
    node_id = world.pooled_node
    world.executor.start(LabelNode(node_id=node_id, pool="training"))
    fresh = world.restart()
    assert world.label_of(node_id) == "training", "the label died with its control plane"
    fresh.recover(Standing(labels={node_id: "training"}, actions=(DrainNode(node_id=node_id, pool="inference"),)))
    assert world.label_of(node_id) == "training"
    again = world.restart()
    again.recover(Standing(labels={node_id: "inference"}))
    assert world.label_of(node_id) == "inference", "the label that the journal knows was not made so"
    again.recover(Standing(labels={node_id: "inference"}))
    assert world.label_of(node_id) == "inference"


def check_drain_leaves_replicas_alone(world: PooledWorld) -> None:
    """Who is on a node that drains goes on until it is told to stop; a label that admits it changes nothing for it."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(start)
    expect(world, world.executor, ReplicaReady)
    world.executor.start(DrainNode(node_id=world.pooled_node, pool="training", is_reclaim=True))
    world.executor.start(LabelNode(node_id=world.pooled_node, pool="inference"))
    world.executor.start(LabelNode(node_id=world.pooled_node, pool="shared"))
    expect_none(world, world.executor, ReplicaLost, ReplicaStopped)
    world.executor.start(StopReplica(workload_id=start.workload_id, replica_id=start.replica_id, grace_s=1.0))
    expect(world, world.executor, ReplicaStopped)


# For executors over nodes with pools. `devices` are those of `pooled_node`.
POOL_CHECKS: tuple[Callable[[PooledWorld], None], ...] = (
    check_labels_are_kept,
    check_labels_outlive_the_control_plane,
    check_drain_leaves_replicas_alone,
)
