"""The kit for executors: actions are idempotent, events repeat until acknowledged, a restart adopts and fences.

Implement World for your executor, and run every check with a fresh one:

    @pytest.mark.parametrize("check", CHECKS)
    def test_the_executor_keeps_its_contract(check, tmp_path):
        check(MyWorld(tmp_path))

Every check raises AssertionError with the events that it got. POOL_CHECKS and SHARE_CHECKS are for executors whose
nodes have pools, or whose devices can be shared.
"""

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
    """What the caller provides: an executor over some machines, with a way to restart only the control plane.

    `long_job` trains for minutes, `short_job` for one or two seconds; there are at least two `devices`.
    """

    clock: Clock
    executor: Executor
    long_job: TrainingJob
    short_job: TrainingJob
    service: InferenceService
    devices: Sequence[DeviceId]

    def restart(self) -> Executor:
        """Discard the current executor as a crash would, and return a new one over the same machines."""
        ...

    def kill(self, replica_id: ReplicaId) -> None:
        """Kill a worker, as by SIGKILL."""
        ...


class PooledWorld(World, Protocol):
    """A world with `pooled_node`: a running node, labelled for inference, which stores its label itself."""

    pooled_node: NodeId

    def label_of(self, node_id: NodeId) -> Pool:
        """The node's label as the machines have it, not as the control plane remembers it."""
        ...


class SharedWorld(World, Protocol):
    """A world whose devices can be shared."""

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """The share that the machines enforce for a living replica; None if it has the whole device."""
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
    """Wait for `count` events of one kind and return all events. Raises AssertionError with the events otherwise."""
    found = gather(world, executor, lambda seen: _count(seen, kind) >= count, LIMIT_S)
    assert _count(found, kind) == count, f"wanted {count} {kind.__name__}, got {found}"
    return found


def expect_none(world: World, executor: Executor, *kinds: type[Event]) -> None:
    """Raise AssertionError if an event of these kinds arrives within SILENCE_S."""
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
    """`wait` returns no events at its deadline, not earlier."""
    gather(world, world.executor, lambda seen: False, 0.5)
    until_s = world.clock.now_s() + 0.3
    assert list(world.executor.wait(until_s)) == []
    assert world.clock.now_s() >= until_s - 0.001


def check_repeated_actions(world: World) -> None:
    """An action that is repeated takes effect once."""
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
    """Stopping a replica that was never started reports it stopped, so that its device becomes free."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(StopReplica(workload_id=start.workload_id, replica_id=start.replica_id, grace_s=1.0))
    expect(world, world.executor, ReplicaStopped)


def check_lost_worker(world: World) -> None:
    """A worker that dies unexpectedly is reported lost once."""
    start = start_of(world.service, world.devices[0])
    world.executor.start(start)
    expect(world, world.executor, ReplicaReady)
    world.kill(start.replica_id)
    expect(world, world.executor, ReplicaLost)
    expect_none(world, world.executor, ReplicaLost, ReplicaStopped)


def check_preemption(world: World) -> None:
    """A preempted job commits a checkpoint as the new generation, and all its workers stop."""
    starts = _train(world, world.long_job, num_workers=2)
    ids = tuple(start.replica_id for start in starts)
    world.executor.start(PreemptJob(job_id=world.long_job.job_id, generation=2, replica_ids=ids, grace_s=10.0))
    found = expect(world, world.executor, ReplicaStopped, 2)
    checkpoints = [event for event in found if isinstance(event, CheckpointCommitted)]
    assert [event.generation for event in checkpoints][-1:] == [2], f"no checkpoint of generation 2 in {found}"


def check_unacknowledged_reports_repeat(world: World) -> None:
    """Events that were not acknowledged before a crash of the control plane are reported again to the next one."""
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
    """A new control plane adopts running replicas, reports missing ones lost, and fences unknown ones."""
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
    """A node has the label of the last LabelNode, also if repeated; a drain changes no label; neither causes events."""
    node_id, executor = world.pooled_node, world.executor
    gather(world, executor, lambda seen: False, 0.5)
    drain = DrainNode(node_id=node_id, pool="training", is_reclaim=True)
    for _ in range(2):
        executor.start(drain)
        assert world.label_of(node_id) == "inference", "a drain changed the label"
    for _ in range(2):
        executor.start(LabelNode(node_id=node_id, pool="training"))
        assert world.label_of(node_id) == "training"
    # A drain is cancelled by a LabelNode with the node's present label.
    executor.start(DrainNode(node_id=node_id, pool="inference"))
    executor.start(LabelNode(node_id=node_id, pool="training"))
    assert world.label_of(node_id) == "training"
    found = gather(world, executor, lambda seen: False, 0.5)
    assert not found, f"unexpected {found}"


def check_labels_outlive_the_control_plane(world: PooledWorld) -> None:
    """Labels survive a crash of the control plane, and `recover` sets journaled labels that a crash prevented."""
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
    """A replica on a draining node runs until it is stopped; a label that admits it does not affect it."""
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
    """Start a serving replica and a training worker together on the first device."""
    serving = replace(start_of(world.service, world.devices[0]), share=_ONE)
    worker = replace(start_of(world.long_job, world.devices[0]), share=_OTHER)
    world.executor.start(serving)
    world.executor.start(worker)
    expect(world, world.executor, ReplicaReady, 2)
    world.executor.start(resize_of(world.long_job, 1, 0))
    expect(world, world.executor, JobResized)
    return serving, worker


def check_shares_change_in_place(world: SharedWorld) -> None:
    """Two replicas share a device, each held to its share; SetShare, also repeated, changes one without events."""
    serving, worker = _share_a_device(world)
    assert world.share_of(serving.replica_id) == _ONE
    assert world.share_of(worker.replica_id) == _OTHER
    change = SetShare(workload_id=worker.workload_id, replica_id=worker.replica_id, share=_CHANGED)
    for _ in range(2):
        world.executor.start(change)
    # A repeated StartReplica must not restore the share that the replica was started with.
    world.executor.start(worker)
    expect_none(world, world.executor, ReplicaReady, ReplicaLost, ReplicaStopped, JobResized)
    assert world.share_of(worker.replica_id) == _CHANGED
    assert world.share_of(serving.replica_id) == _ONE
    world.executor.start(StopReplica(workload_id=serving.workload_id, replica_id=serving.replica_id, grace_s=1.0))
    expect(world, world.executor, ReplicaStopped)
    assert world.share_of(serving.replica_id) is None, "a replica that is gone still holds a share"
    assert world.share_of(worker.replica_id) == _CHANGED


def check_whole_devices_have_no_share(world: SharedWorld) -> None:
    """A replica started without a share has the whole device; SetShare for an unknown replica does nothing."""
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
    """After a crash of the control plane every replica is held to its journaled share, also a change not yet made."""
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
    """A killed replica is reported lost once; the other replica on its device runs on."""
    serving, worker = _share_a_device(world)
    world.kill(serving.replica_id)
    found = expect(world, world.executor, ReplicaLost)
    assert [event.replica_id for event in found if isinstance(event, ReplicaLost)] == [serving.replica_id]
    expect_none(world, world.executor, ReplicaLost, ReplicaStopped)
    assert world.share_of(worker.replica_id) == _OTHER


# For executors whose devices can be shared.
SHARE_CHECKS: tuple[Callable[[SharedWorld], None], ...] = (
    check_shares_change_in_place,
    check_whole_devices_have_no_share,
    check_shares_outlive_the_control_plane,
    check_sharers_die_alone,
)
