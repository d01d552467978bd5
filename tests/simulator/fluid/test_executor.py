"""The executor of long traces, action by action: progress is continuous, overhead is paid, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from springtide.core.actions import EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.decision import Overheads
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    JobFinished,
    JobResized,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    ProgressReported,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.resources import make_node
from springtide.core.workload import Checkpoint, Entrypoint, JobState, TrainingJob
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import MAX_IDLE_TURNS, FluidExecutor
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds

JOB = TrainingJob(
    job_id="a",
    name="a",
    entrypoint=Entrypoint(source_path="trace"),
    max_workers=4,
    total_steps=1000,
    profile_steps_per_s={1: 1.0, 2: 2.0, 4: 3.0},
)


class Driver:
    """Starts actions and collects events; every device is named by its number."""

    def __init__(self, *, num_nodes: int = 1, num_devices: int = 4, **options: object) -> None:
        self.clock = VirtualClock()
        self.nodes = [make_node(f"n{index}", num_devices) for index in range(num_nodes)]
        self.devices = [device.device_id for node in self.nodes for device in node.devices]
        self.executor = FluidExecutor(self.clock, self.nodes, [(0.0, JOB)], **options)
        self.events = list(self.executor.wait(0.0))

    @property
    def run(self):
        return self.executor.runs["a"]

    def wait(self, until_s: float) -> list[Event]:
        """Everything that happens up to a moment."""
        found: list[Event] = list(self.executor.wait(until_s))
        while self.clock.now_s() < until_s and not self.executor.is_over:
            found += self.executor.wait(until_s)
        return found

    def start(self, *numbers: int, generation: int = 1, restore: int | None = None) -> None:
        checkpoint = None if restore is None else Checkpoint(generation=generation - 1, step=restore, path="p")
        for number in numbers:
            self.executor.start(
                StartReplica(
                    workload=JOB,
                    replica_id=f"a.{generation}.{number}",
                    device_id=self.devices[number],
                    generation=generation,
                    restore=checkpoint,
                )
            )

    def form(self, members: Sequence[str], generation: int, *, forced: bool = False) -> None:
        self.executor.start(
            ResizeJob(
                job_id="a", generation=generation, replica_ids=tuple(members), global_batch_size=32, forced=forced
            )
        )


def kinds(events: Sequence[Event]) -> list[type]:
    return [type(event) for event in events]


def test_a_job_runs_from_its_submission_to_its_last_step() -> None:
    driver = Driver()
    assert kinds(driver.events) == [NodeJoined, JobSubmitted]
    driver.start(0, 1)
    assert kinds(driver.executor.wait(0.0)) == [ReplicaReady, ReplicaReady]
    driver.form(["a.1.0", "a.1.1"], 1)
    (resized,) = driver.executor.wait(0.0)
    assert (resized.direction, resized.world_size, resized.pause_s) == ("start", 2, 0.0)
    (finished,) = driver.executor.wait(None)
    assert isinstance(finished, JobFinished)
    assert driver.clock.now_s() == 500.0
    driver.executor.start(EndJob(job_id="a", state=JobState.SUCCEEDED))
    assert kinds(driver.executor.wait(None)) == [ReplicaStopped, ReplicaStopped]
    assert (driver.run.device_s, driver.run.ended_s, driver.executor.num_open) == (1000.0, 500.0, 0)
    assert list(driver.executor.wait(None)) == []
    assert driver.executor.is_over


def test_overhead_is_paid_at_every_change_and_anew_within_itself() -> None:
    rule = OverheadRule(name="test", pause=Overheads(change_s=10.0))
    driver = Driver(rule=rule)
    driver.start(0, 1)
    driver.form(["a.1.0", "a.1.1"], 1)
    driver.wait(60.0)
    # 50 s at 2 steps a second are behind it; the first change pays 10 s, the second within it another 10 s.
    driver.form(["a.1.0"], 2)
    driver.wait(64.0)
    assert driver.run.done_steps == 100.0
    driver.start(2, generation=2)
    driver.form(["a.1.0", "a.2.2"], 3)
    (finished,) = [event for event in driver.wait(2000.0) if isinstance(event, JobFinished)]
    assert driver.run.num_resizes == 2
    assert finished.step == 1000
    assert driver.run.paused_device_s == pytest.approx(10.0 * 2 + 4.0 + 10.0 * 2)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(64.0 + 10.0 + 900 / 2.0)


def test_a_new_set_of_devices_costs_more_and_is_known_to_everyone_afterwards() -> None:
    rule = OverheadRule(name="test", pause=Overheads(change_s=2.0, fresh_s=2.0, fresh_per_doubling_s=2.0))
    driver = Driver(rule=rule)
    pauses = []
    for generation, members in enumerate([(0, 1), (0,), (0, 1), (0, 1, 2, 3)], start=1):
        driver.start(*members, generation=generation)
        driver.form([f"a.{generation}.{number}" for number in members], generation)
        pauses += [event.pause_s for event in driver.wait(100.0 * generation) if isinstance(event, JobResized)]
    assert pauses == [2.0 + 2.0 + 2.0, 2.0 + 2.0, 2.0, 2.0 + 2.0 + 4.0]


def test_a_set_that_is_passed_through_in_one_instant_counts_neither_as_used_nor_as_a_resize() -> None:
    rule = OverheadRule(name="test", pause=Overheads(change_s=2.0, fresh_s=5.0))
    driver = Driver(rule=rule)
    driver.start(0, 1, 2)
    driver.form(["a.1.0"], 1)
    driver.wait(100.0)
    driver.form(["a.1.0", "a.1.1"], 2)
    driver.form(["a.1.0", "a.1.1", "a.1.2"], 3)
    driver.wait(200.0)
    driver.form(["a.1.0", "a.1.1"], 4)
    (resized,) = [event for event in driver.wait(200.0) if isinstance(event, JobResized)]
    assert resized.pause_s == 7.0
    assert driver.run.num_resizes == 2


def test_leavers_are_gone_before_the_new_group_is_confirmed() -> None:
    driver = Driver()
    driver.start(0, 1)
    driver.form(["a.1.0", "a.1.1"], 1)
    driver.wait(10.0)
    driver.form(["a.1.1"], 2)
    stopped, resized = driver.executor.wait(10.0)
    assert isinstance(stopped, ReplicaStopped)
    assert stopped.replica_id == "a.1.0"
    assert (resized.direction, resized.step) == ("shrink", 20)


def test_preemption_keeps_the_fraction_of_a_step() -> None:
    driver = Driver()
    driver.start(0)
    driver.form(["a.1.0"], 1)
    driver.wait(10.7)
    driver.executor.start(PreemptJob(job_id="a", generation=2, replica_ids=("a.1.0",)))
    checkpoint, stopped = driver.executor.wait(10.7)
    assert (type(checkpoint), type(stopped)) == (CheckpointCommitted, ReplicaStopped)
    assert (checkpoint.step, checkpoint.generation) == (10, 2)
    driver.wait(50.0)
    driver.start(1, generation=3, restore=10)
    driver.form(["a.3.1"], 3)
    assert driver.executor.wait(50.0)[-1].direction == "resume"
    driver.wait(2000.0)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(50.0 + 1000 - 10.7)


def test_a_cold_start_delays_the_replica_not_the_job() -> None:
    driver = Driver(rule=OverheadRule(name="test", pause=Overheads(change_s=1.0), cold_start_s=5.0))
    driver.start(0)
    assert kinds(driver.wait(4.9)) == []
    assert kinds(driver.wait(5.0)) == [ReplicaReady]
    assert OverheadRule(name="test", pause=Overheads(change_s=1.0), cold_start_s=5.0).announced.change_s == 6.0
    driver.start(1)
    driver.executor.start(StopReplica(workload_id="a", replica_id="a.1.1"))
    assert kinds(driver.wait(20.0)) == [ReplicaStopped], "whoever stops while warming up never gets ready"


def test_scattered_groups_are_slower() -> None:
    driver = Driver(num_nodes=2, num_devices=2)
    driver.start(0, 2)
    driver.form(["a.1.0", "a.1.2"], 1)
    driver.wait(2000.0)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(500.0 * 2.17 ** (1 / 3))
    compact = Driver(num_nodes=2, num_devices=2, speeds=ProfiledSpeeds(devices_per_node=2, feels_placement=False))
    compact.start(0, 2)
    compact.form(["a.1.0", "a.1.2"], 1)
    compact.wait(2000.0)
    assert compact.executor.timeline.time_s[-1] == pytest.approx(500.0)


class OneFault(NodeFaults):
    """The first node fails at a given moment and is back ten seconds later."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def first_failures_s(self, nodes):
        yield next(iter(nodes)), self.at_s

    def draw_life_s(self, node_id):
        return 1e9

    def draw_repair_s(self, node_id):
        return 10.0


def test_survivors_of_a_node_go_on_with_every_step() -> None:
    driver = Driver(num_nodes=2, num_devices=1, faults=OneFault(100.0), speeds=ProfiledSpeeds(devices_per_node=1))
    driver.start(0, 1)
    driver.form(["a.1.0", "a.1.1"], 1)
    assert kinds(driver.wait(100.0))[-1] is NodeLost
    driver.form(["a.1.1"], 2, forced=True)
    resized = driver.executor.wait(100.0)[0]
    assert (resized.direction, resized.step) == ("recover", 200)
    assert driver.run.num_losses == 1
    assert NodeJoined in kinds(driver.wait(110.0))


def test_without_survivors_only_checkpoints_are_kept() -> None:
    driver = Driver(num_devices=1, faults=OneFault(100.0))
    driver.run.job = replace(JOB, checkpoint_interval_s=30.0)
    driver.start(0)
    driver.form(["a.1.0"], 1)
    checkpoint, lost = driver.wait(100.0)[-2:]
    assert (type(checkpoint), checkpoint.step, type(lost)) == (CheckpointCommitted, 90, NodeLost)
    driver.wait(120.0)
    driver.start(0, generation=2, restore=90)
    driver.form(["a.2.0"], 2)
    driver.wait(3000.0)
    assert driver.executor.timeline.time_s[-1] == pytest.approx(120.0 + 910.0)


def test_progress_is_reported_soon_after_a_change_and_every_so_often() -> None:
    driver = Driver(reports_progress=True)
    driver.start(0, 1)
    driver.form(["a.1.0", "a.1.1"], 1)
    reports = [event for event in driver.wait(650.0) if isinstance(event, ProgressReported)]
    assert [(event.step, event.samples_per_s) for event in reports] == [(60, 64.0), (600, 64.0)]


def test_a_group_on_small_nodes_of_one_model_is_not_scattered() -> None:
    job = replace(JOB, profile_steps_per_s={}, profiles={"T4": {1: 1.0, 2: 2.0, 4: 4.0}})
    for node_sizes, is_slower in (({}, True), ({"T4": 2}, False)):
        speeds = ProfiledSpeeds(devices_per_node=8, node_sizes=node_sizes)
        run = speeds.open_run(job, 0.0)
        run.placement, run.accelerators = (2, 2), ("T4",)
        assert (speeds.pace(run).is_scattered, speeds.pace(run).rate < 4.0) == (is_slower, is_slower)


def test_an_estimation_error_is_drawn_from_the_seed_alone() -> None:
    first, again, other = (ProfiledSpeeds(devices_per_node=8, error_fraction=0.3, seed=seed) for seed in (1, 1, 2))
    draws = [first.draw_error() for _ in range(2000)]
    assert draws == [again.draw_error() for _ in range(2000)]
    assert draws[:10] != [other.draw_error() for _ in range(10)]
    assert sum(draws) / len(draws) == pytest.approx(1.0, abs=0.03)


def test_a_run_in_which_nothing_can_happen_any_more_is_over() -> None:
    driver = Driver(reports_progress=True)
    for turn in range(MAX_IDLE_TURNS + 10):
        driver.executor.wait(10.0 * turn)
        if driver.executor.is_over:
            return
    pytest.fail("it goes on for ever")


def test_a_moment_that_has_passed_does_not_stop_the_clock() -> None:
    driver = Driver()
    before_s = driver.clock.now_s()
    driver.executor.wait(before_s - 5.0)
    assert driver.clock.now_s() > before_s
