"""The kit for executors: actions are idempotent, reports repeat until acknowledged, a restart adopts and fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from springtide.core.actions import (
    Action,
    DrainNode,
    LabelNode,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
    StopReplica,
)
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
from springtide.core.shares import Share
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


class SharedWorld(World, Protocol):
    """A world whose devices can be held in parts."""

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """What the machines, not the control plane, hold a living replica to; None: nothing, it has the whole."""
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
    """Events that were not acknowledged before the control plane died are reported again to the next one."""
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
    """A replica on a draining node goes on until it is stopped; a label that admits it changes nothing for it."""
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


_ONE = Share(request=0.3, limit=0.6)
_OTHER = Share(request=0.4, limit=0.8)
_CHANGED = Share(request=0.5, limit=0.7)


def _share_a_device(world: SharedWorld) -> tuple[StartReplica, StartReplica]:
    """A serving replica and a worker that trains, beside each other on the first device."""
    serving = replace(start_of(world.service, world.devices[0]), share=_ONE)
    worker = replace(start_of(world.long_job, world.devices[0]), share=_OTHER)
    world.executor.start(serving)
    world.executor.start(worker)
    expect(world, world.executor, ReplicaReady, 2)
    world.executor.start(resize_of(world.long_job, 1, 0))
    expect(world, world.executor, JobResized)
    return serving, worker


def check_shares_change_in_place(world: SharedWorld) -> None:
    """Two sit on a device, each held to its share; another share is no news, however often it is said."""
    serving, worker = _share_a_device(world)
    assert world.share_of(serving.replica_id) == _ONE
    assert world.share_of(worker.replica_id) == _OTHER
    change = SetShare(workload_id=worker.workload_id, replica_id=worker.replica_id, share=_CHANGED)
    for _ in range(2):
        world.executor.start(change)
    # A repeated start is no way back to the share that it was started with.
    world.executor.start(worker)
    expect_none(world, world.executor, ReplicaReady, ReplicaLost, ReplicaStopped, JobResized)
    assert world.share_of(worker.replica_id) == _CHANGED
    assert world.share_of(serving.replica_id) == _ONE
    world.executor.start(StopReplica(workload_id=serving.workload_id, replica_id=serving.replica_id, grace_s=1.0))
    expect(world, world.executor, ReplicaStopped)
    assert world.share_of(serving.replica_id) is None, "a replica that is gone still holds a share"
    assert world.share_of(worker.replica_id) == _CHANGED


def check_whole_devices_have_no_share(world: SharedWorld) -> None:
    """A replica started without a share has the whole device; a share for an unknown replica changes nothing."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(start)
    expect(world, world.executor, ReplicaReady)
    assert world.share_of(start.replica_id) is None
    unknown = ReplicaId(f"{start.workload_id}.7")
    world.executor.start(SetShare(workload_id=start.workload_id, replica_id=unknown, share=_ONE))
    expect_none(world, world.executor, ReplicaReady, ReplicaLost, ReplicaStopped)
    assert world.share_of(start.replica_id) is None
    assert world.share_of(unknown) is None


def check_shares_outlive_the_control_plane(world: SharedWorld) -> None:
    """A new control plane finds every replica held to its journaled share, including one a crash cut off."""
    serving, worker = _share_a_device(world)
    fresh = world.restart()
    generations = {world.long_job.job_id: 1}
    changed = replace(worker, share=_CHANGED)
    fresh.recover(Standing(replicas=(serving, changed), generations=generations))
    expect_none(world, fresh, ReplicaLost, ReplicaStopped, JobResized)
    assert world.share_of(serving.replica_id) == _ONE
    assert world.share_of(worker.replica_id) == _CHANGED
    fresh.start(SetShare(workload_id=serving.workload_id, replica_id=serving.replica_id, share=_OTHER))
    expect_none(world, fresh, ReplicaLost, ReplicaStopped)
    assert world.share_of(serving.replica_id) == _OTHER


def check_sharers_die_alone(world: SharedWorld) -> None:
    """A killed replica is reported lost, once; its neighbour on the device goes on."""
    serving, worker = _share_a_device(world)
    world.kill(serving.replica_id)
    found = expect(world, world.executor, ReplicaLost)
    assert [event.replica_id for event in found if isinstance(event, ReplicaLost)] == [serving.replica_id]
    expect_none(world, world.executor, ReplicaLost, ReplicaStopped)
    assert world.share_of(worker.replica_id) == _OTHER


# For executors whose devices can be held in parts.
SHARE_CHECKS: tuple[Callable[[SharedWorld], None], ...] = (
    check_shares_change_in_place,
    check_whole_devices_have_no_share,
    check_shares_outlive_the_control_plane,
    check_sharers_die_alone,
)
