"""Services and reclaims on the executor of long traces: starts, drains, slow checkpoints, labels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from springtide.core.actions import DrainNode, EndJob, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    LoadObserved,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ServiceDeployed,
)
from springtide.core.ports import Standing
from springtide.core.resources import make_node
from springtide.core.workload import Checkpoint, Entrypoint, InferenceService, JobState, TrainingJob
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.rules import Times

SOURCE = Entrypoint(source_path="trace")
JOB = TrainingJob(
    job_id="a",
    name="a",
    entrypoint=SOURCE,
    max_workers=4,
    total_steps=1000,
    profile_steps_per_s={1: 1.0, 2: 2.0},
    checkpoint_interval_s=30.0,
    family="large",
)
SERVICE = InferenceService(service_id="s", name="s", entrypoint=SOURCE, min_replicas=1, max_replicas=4)
DEPLOYED = ServiceDeployed(service=SERVICE)


class Driver:
    """Two nodes of two devices, the job on its way, and whatever happens to services."""

    def __init__(self, timed_events: Sequence[tuple[float, Event]] = (), **options: object) -> None:
        self.clock = VirtualClock()
        nodes = [make_node("n0", 2, pool="training"), make_node("n1", 2, pool="inference")]
        self.executor = FluidExecutor(self.clock, nodes, [(0.0, JOB)], timed_events=timed_events, **options)
        self.executor.wait(0.0)

    @property
    def run(self):
        return self.executor.runs["a"]

    def wait(self, until_s: float) -> list[tuple[float, Event]]:
        """Everything that happens up to a moment, with when it was told."""
        found: list[tuple[float, Event]] = []
        while True:
            found += [(self.clock.now_s(), event) for event in self.executor.wait(until_s)]
            if self.clock.now_s() >= until_s or self.executor.is_over:
                return found

    def serve(self, name: str, device: str) -> None:
        self.executor.start(StartReplica(workload=SERVICE, replica_id=name, device_id=device, generation=1))

    def stop(self, name: str, *, who: str = "s", grace_s: float = 15.0) -> None:
        self.executor.start(StopReplica(workload_id=who, replica_id=name, grace_s=grace_s))

    def train(self, generation: int = 1, *, restore: int | None = None) -> None:
        """Two workers on the first node."""
        checkpoint = None if restore is None else Checkpoint(generation=1, step=restore, path="p")
        names = tuple(f"a.{generation}.{number}" for number in range(2))
        for number, name in enumerate(names):
            self.executor.start(
                StartReplica(
                    workload=JOB,
                    replica_id=name,
                    device_id=f"n0/{number}",
                    generation=generation,
                    restore=checkpoint,
                )
            )
        self.executor.start(ResizeJob(job_id="a", generation=generation, replica_ids=names, global_batch_size=32))
        self.executor.wait(self.clock.now_s())

    def preempt(self, grace_s: float = 15.0) -> None:
        members = self.run.members
        self.executor.start(PreemptJob(job_id="a", generation=2, replica_ids=members, grace_s=grace_s))


def told(found: Sequence[tuple[float, Event]]) -> list[tuple[float, type]]:
    return [(at_s, type(event)) for at_s, event in found]


# --- services ---------------------------------------------------------------------------------------------------------


def test_a_replica_takes_its_time_to_start_and_to_drain_and_holds_its_device_all_along() -> None:
    driver = Driver(times=Times(service_start_s=4.0, service_stop_s=2.0))
    driver.serve("s.0", "n1/0")
    assert told(driver.wait(10.0)) == [(4.0, ReplicaReady)]
    driver.stop("s.0")
    assert told(driver.wait(20.0)) == [(12.0, ReplicaStopped)]
    assert driver.executor.timeline.occupied_s(20.0) == (0.0, 12.0)
    driver.stop("s.0")
    driver.serve("s.0", "n1/0")
    assert told(driver.wait(30.0)) == [], "a name is used once"


def test_without_times_both_are_done_in_the_instant() -> None:
    driver = Driver()
    driver.serve("s.0", "n1/0")
    driver.stop("s.0")
    assert told(driver.wait(0.0)) == [(0.0, ReplicaReady), (0.0, ReplicaStopped)]


def test_a_drain_is_no_longer_than_its_grace() -> None:
    driver = Driver(times=Times(service_stop_s=60.0))
    driver.serve("s.0", "n1/0")
    driver.wait(0.0)
    driver.stop("s.0", grace_s=5.0)
    assert told(driver.wait(100.0)) == [(5.0, ReplicaStopped)]


def test_who_is_stopped_while_it_starts_never_gets_ready() -> None:
    driver = Driver(times=Times(service_start_s=4.0, service_stop_s=2.0))
    driver.serve("s.0", "n1/0")
    driver.wait(3.0)
    driver.stop("s.0")
    assert told(driver.wait(20.0)) == [(5.0, ReplicaStopped)]


def test_what_owners_and_gateways_say_comes_at_its_moment() -> None:
    load = LoadObserved(service_id="s", arrivals_per_s=1.0, in_flight=3, queued=0, idle_s=0.0)
    driver = Driver([(5.0, DEPLOYED), (7.5, load)])
    assert driver.wait(10.0) == [(5.0, DEPLOYED), (7.5, load)]


class OneFault(NodeFaults):
    """The serving node fails after ten seconds and is back ten seconds later."""

    def __init__(self) -> None:
        pass

    def first_failures_s(self, nodes):
        yield list(nodes)[1], 10.0

    def draw_life_s(self, node_id):
        return 1e9

    def draw_repair_s(self, node_id):
        return 10.0


def test_a_lost_node_takes_its_replicas_along_and_comes_back_under_its_new_label() -> None:
    driver = Driver(faults=OneFault(), times=Times(service_start_s=1.0))
    driver.serve("s.0", "n1/0")
    driver.wait(5.0)
    driver.executor.start(DrainNode(node_id="n1", pool="training"))
    driver.executor.start(LabelNode(node_id="n1", pool="training"))
    assert told(driver.wait(12.0)) == [(10.0, NodeLost)]
    driver.serve("s.1", "n1/0")
    ((at_s, lost),) = driver.wait(15.0)
    assert (at_s, type(lost)) == (12.0, ReplicaLost)
    ((at_s, joined),) = driver.wait(30.0)
    assert (at_s, type(joined)) == (20.0, NodeJoined)
    assert (joined.node.pool, joined.node.owner) == ("training", "inference")
    assert driver.executor.timeline.occupied_s(30.0) == (0.0, 10.0)


def test_a_new_control_plane_adopts_replicas_and_labels() -> None:
    driver = Driver(faults=OneFault(), times=Times(service_start_s=1.0))
    driver.serve("s.0", "n1/0")
    driver.serve("s.1", "n1/1")
    driver.wait(5.0)
    known = StartReplica(workload=SERVICE, replica_id="s.0", device_id="n1/0", generation=1)
    gone = StartReplica(workload=SERVICE, replica_id="s.9", device_id="n0/0", generation=1)
    driver.executor.acknowledge(driver.executor._unacknowledged)
    driver.executor.recover(Standing(replicas=(known, gone), labels={"n1": "shared"}))
    ((_, lost),) = driver.wait(6.0)
    assert lost.replica_id == "s.9"
    assert driver.executor.timeline.serving[-1] == 1
    assert [event.node.pool for _, event in driver.wait(30.0) if isinstance(event, NodeJoined)] == ["shared"]


def test_a_replica_that_dies_while_it_drains_is_told_once() -> None:
    driver = Driver(times=Times(service_stop_s=5.0))
    driver.serve("s.0", "n1/0")
    driver.wait(1.0)
    driver.stop("s.0")
    driver.wait(2.0)
    driver.executor.lose_replica("s.0")
    assert told(driver.wait(20.0)) == [(2.0, ReplicaLost)]


# --- jobs that make way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "save_s"), [(Times(preempt_s=3.0), 3.0), (Times(family_preempt_s={"large": 6}), 6)])
def test_a_preempted_job_holds_its_devices_until_it_is_saved(times: Times, save_s: float) -> None:
    driver = Driver(times=times)
    driver.train()
    driver.wait(10.25)
    driver.preempt()
    found = driver.wait(50.0)
    assert told(found) == [(10.25 + save_s, CheckpointCommitted)] + [(10.25 + save_s, ReplicaStopped)] * 2
    assert found[0][1].step == 20
    assert driver.run.paused_device_s == 2 * save_s
    driver.train(3, restore=20)
    driver.wait(2000.0)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(50.0 + (1000 - 20.5) / 2.0)
    assert driver.run.lost_device_s == 0.0


def test_a_job_that_cannot_be_saved_within_its_grace_keeps_its_last_checkpoint() -> None:
    driver = Driver(times=Times(preempt_s=20.0))
    driver.train()
    driver.wait(100.0)
    driver.preempt(grace_s=15.0)
    found = driver.wait(200.0)
    assert told(found) == [(115.0, CheckpointCommitted)] + [(115.0, ReplicaStopped)] * 2
    assert found[0][1].step == 180, "one every 30 s"
    driver.train(3, restore=180)
    assert driver.run.lost_device_s == pytest.approx(20 / 2.0 * 2)
    driver.wait(2000.0)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(200.0 + 820 / 2.0)


def test_workers_that_are_stopped_by_force_while_they_save_lose_what_is_not_saved() -> None:
    driver = Driver(times=Times(preempt_s=10.0))
    driver.train()
    driver.wait(100.0)
    driver.preempt()
    driver.wait(105.0)
    driver.stop("a.1.0", who="a", grace_s=0.0)
    driver.stop("a.1.1", who="a", grace_s=0.0)
    found = driver.wait(150.0)
    assert [type(event) for _, event in found] == [ReplicaStopped, CheckpointCommitted, ReplicaStopped]
    assert found[1][1].step == 180
    assert driver.run.replicas == {}


def test_one_of_two_that_is_left_still_saves() -> None:
    driver = Driver(times=Times(preempt_s=10.0))
    driver.train()
    driver.wait(100.0)
    driver.preempt()
    driver.wait(105.0)
    driver.stop("a.1.0", who="a", grace_s=0.0)
    found = driver.wait(150.0)
    assert told(found) == [(105.0, ReplicaStopped), (110.0, CheckpointCommitted), (110.0, ReplicaStopped)]
    assert found[1][1].step == 200


def test_a_job_that_ends_while_it_saves_ends_once() -> None:
    driver = Driver(times=Times(preempt_s=10.0))
    driver.train()
    driver.wait(100.0)
    driver.preempt()
    driver.executor.start(EndJob(job_id="a", state=JobState.CANCELLED))
    assert told(driver.wait(150.0)) == [(100.0, ReplicaStopped)] * 2
    assert driver.run.device_s == 200.0


def test_the_last_member_that_is_stopped_by_force_takes_the_work_since_its_checkpoint_along() -> None:
    driver = Driver()
    driver.run.job = replace(JOB, checkpoint_interval_s=40.0)
    driver.train()
    driver.wait(100.0)
    driver.stop("a.1.0", who="a", grace_s=0.0)
    assert told(driver.wait(100.0)) == [(100.0, ReplicaStopped)]
    driver.executor.start(
        ResizeJob(job_id="a", generation=2, replica_ids=("a.1.1",), global_batch_size=32, forced=True)
    )
    driver.wait(110.0)
    assert driver.run.done_steps == 200.0, "a survivor has it all"
    driver.stop("a.1.1", who="a", grace_s=0.0)
    checkpoint = driver.wait(110.0)[0][1]
    assert (type(checkpoint), checkpoint.step) == (CheckpointCommitted, 160)
