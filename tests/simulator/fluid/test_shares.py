"""Devices held in parts on the executor of long traces: the pace of a job follows what its neighbours use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, SetShare, StartReplica, StopReplica
from springtide.core.events import Event, JobFinished, LoadObserved, NodeJoined, ProgressReported, ReplicaReady
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.shares import Share, make_share
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.simulator.fluid.invariants import FluidInvariants, InvariantViolation
from springtide.simulator.fluid.rules import OverheadRule

SOURCE = Entrypoint(source_path="trace")
FULL = make_share(0.5, 1.0)


def job(name: str, steps: int = 1000) -> TrainingJob:
    return TrainingJob(
        job_id=name,
        name=name,
        entrypoint=SOURCE,
        global_batch_size=10,
        max_workers=2,
        total_steps=steps,
        profile_steps_per_s={1: 1.0, 2: 2.0},
        checkpoint_interval_s=30.0,
    )


SERVICE = InferenceService(service_id="s", name="s", entrypoint=SOURCE, max_replicas=2, target_in_flight=4)


class Driver:
    """One node of two devices; everybody's worker is named after its number and its device."""

    def __init__(self, timed_events: Sequence[tuple[float, Event]] = (), **options: object) -> None:
        self.clock = VirtualClock()
        node = make_node("n", 2)
        self.executor = FluidExecutor(self.clock, [node], timed_events=timed_events, **options)
        self.executor.wait(0.0)
        self.events: list[Event] = []

    def wait(self, until_s: float) -> None:
        while self.clock.now_s() < until_s and not self.executor.is_over:
            self.events += self.executor.wait(until_s)

    def start(self, workload, share: Share | None, *devices: int) -> None:
        """Start a replica on each device and, for a job, let them train as its first generation."""
        who = workload.job_id if isinstance(workload, TrainingJob) else workload.service_id
        ids = tuple(f"{who}.{device}" for device in devices)
        for replica_id, device in zip(ids, devices, strict=True):
            self.executor.start(
                StartReplica(
                    workload=workload, replica_id=replica_id, device_id=f"n/{device}", generation=1, share=share
                )
            )
        if isinstance(workload, TrainingJob):
            self.executor.start(ResizeJob(job_id=who, generation=1, replica_ids=ids, global_batch_size=10))

    def done(self, name: str) -> float:
        run = self.executor.runs[name]
        run.settle(self.clock.now_s())
        return run.done_steps


def test_a_job_slows_down_and_speeds_up_with_its_neighbours():
    driver = Driver()
    driver.start(job("a"), make_share(0.3, 0.8), 0)
    driver.wait(100.0)
    assert driver.done("a") == pytest.approx(80.0)
    driver.start(job("b", 60), make_share(0.3, 0.6), 0)
    driver.wait(200.0)
    assert driver.done("a") == pytest.approx(80.0 + 50.0)
    assert driver.done("b") == pytest.approx(50.0)
    driver.executor.start(SetShare(workload_id="b", replica_id="b.0", share=make_share(0.6, 0.6)))
    driver.wait(300.0)
    # 10 steps at 0.6 of the device, while a has what is left of it; then it is alone.
    assert [e.job_id for e in driver.events if isinstance(e, JobFinished)] == ["b"]
    assert driver.done("a") == pytest.approx(130.0 + (10 / 0.6) * 0.4 + (100 - 10 / 0.6) * 0.8)
    driver.executor.start(EndJob(job_id="b", state=JobState.SUCCEEDED))
    driver.wait(2000.0)
    run = driver.executor.runs["a"]
    assert run.done_steps == run.length
    assert driver.executor.timeline.efficiency[-1] == 0.0


def test_a_group_is_as_fast_as_the_member_that_gets_least():
    driver = Driver()
    driver.start(job("wide"), FULL, 0, 1)
    driver.start(job("narrow"), make_share(0.5, 0.5), 1)
    driver.wait(100.0)
    # Two workers at half a device each, however free the other device is.
    assert driver.done("wide") == pytest.approx(100.0)
    assert driver.done("narrow") == pytest.approx(50.0)


def test_an_overhead_is_paid_and_a_change_within_it_counts_from_its_end():
    driver = Driver(rule=OverheadRule(name="test", pause=replace(OverheadRule(name="none").pause, change_s=10.0)))
    driver.start(job("a"), FULL, 0)
    driver.wait(5.0)
    driver.start(job("b"), make_share(0.5, 0.5), 0)
    driver.wait(110.0)
    assert driver.done("a") == pytest.approx(50.0)
    assert driver.done("b") == pytest.approx(95.0 * 0.5)


def test_checkpoints_count_what_was_done_at_each_pace():
    driver = Driver()
    driver.start(job("a"), make_share(0.5, 1.0), 0)
    driver.wait(45.0)
    driver.start(job("b"), make_share(0.5, 0.5), 0)
    driver.wait(70.0)
    driver.executor.lose_replica("a.0")
    # The checkpoint of the 60th second: 45 steps at full speed, 7.5 at half.
    assert driver.executor.runs["a"].saved_steps == 52.0


def test_who_leaves_gives_back_what_it_used():
    driver = Driver()
    driver.start(job("a"), FULL, 0)
    driver.start(job("b"), make_share(0.5, 0.5), 0)
    driver.wait(10.0)
    driver.executor.start(PreemptJob(job_id="b", generation=2, replica_ids=("b.0",), reason="test"))
    driver.wait(20.0)
    assert driver.done("a") == pytest.approx(5.0 + 10.0)
    assert driver.executor.sharing.shares_on("n/0") == (FULL,)


def test_a_service_uses_what_its_load_asks_for():
    def load(at_s: float, in_flight: int) -> tuple[float, Event]:
        return at_s, LoadObserved(service_id="s", arrivals_per_s=1.0, in_flight=in_flight, queued=0, idle_s=0.0)

    driver = Driver(timed_events=[load(10.0, 1), load(20.0, 8), load(30.0, 0)])
    driver.start(job("a"), make_share(0.4, 1.0), 0)
    driver.start(SERVICE, make_share(0.4, 0.5), 0)
    driver.wait(10.0)
    assert [e.replica_id for e in driver.events if isinstance(e, ReplicaReady)] == ["a.0", "s.0"]
    assert driver.done("a") == pytest.approx(10.0)
    driver.wait(20.0)
    assert driver.done("a") == pytest.approx(10.0 + 7.5)
    driver.wait(30.0)
    assert driver.done("a") == pytest.approx(17.5 + 5.0)
    driver.wait(40.0)
    assert driver.done("a") == pytest.approx(22.5 + 10.0)


def test_a_load_is_spread_over_the_replicas_that_are_left():
    load = LoadObserved(service_id="s", arrivals_per_s=1.0, in_flight=4, queued=0, idle_s=0.0)
    driver = Driver(timed_events=[(1.0, load)])
    driver.start(SERVICE, make_share(0.4, 0.8), 0, 1)
    driver.wait(2.0)
    assert driver.executor.sharing.rate("s.0") == 0.5
    driver.executor.start(StopReplica(workload_id="s", replica_id="s.1", grace_s=1.0))
    assert driver.executor.sharing.rate("s.0") == 0.8
    driver.executor.lose_replica("s.0")
    assert driver.executor.sharing.shares_on("n/0") == ()


def test_reports_tell_the_new_pace():
    driver = Driver(reports_progress=True)
    driver.start(job("a"), make_share(0.5, 1.0), 0)
    driver.wait(100.0)
    driver.start(job("b"), make_share(0.5, 0.5), 0)
    driver.wait(200.0)
    told = [e.samples_per_s for e in driver.events if isinstance(e, ProgressReported) and e.job_id == "a"]
    assert told == [10.0, 5.0]


# --- invariants -----------------------------------------------------------------------------------------------------


def start(name: str, share: Share | None) -> StartReplica:
    return StartReplica(workload=job(name), replica_id=f"{name}.0", device_id="n/0", generation=1, share=share)


@pytest.mark.parametrize(
    ("actions", "word"),
    [
        ([start("a", make_share(0.6, 0.6)), start("b", make_share(0.5, 0.5))], "requests"),
        ([start("a", make_share(0.5, 0.9)), start("b", make_share(0.5, 0.7))], "limits"),
        ([start("a", make_share(0.5, 0.5, 600)), start("b", make_share(0.5, 0.5, 600))], "MB"),
        ([start("a", None), start("b", make_share(0.5, 0.5))], "the whole"),
        ([start("a", make_share(0.5, 0.5)), start("b", None)], "the whole"),
        (
            [
                start("a", make_share(0.5, 0.5)),
                start("b", make_share(0.5, 0.5)),
                SetShare(workload_id="a", replica_id="a.0", share=make_share(0.6, 0.6)),
            ],
            "requests",
        ),
    ],
)
def test_what_does_not_fit_on_a_device_is_found(actions: list[Action], word: str) -> None:
    invariants = FluidInvariants([make_node("n", 1, memory_mb=1000)])
    invariants.note(Step(now_s=0.0, events=(NodeJoined(node=make_node("n", 1, memory_mb=1000)),)))
    invariants.note(Step(now_s=1.0, actions=tuple(actions[:-1])))
    with pytest.raises(InvariantViolation, match=rf"device-once.*{word}"):
        invariants.note(Step(now_s=2.0, actions=tuple(actions[-1:])))


def test_a_share_for_one_who_holds_nothing_is_found() -> None:
    invariants = FluidInvariants([make_node("n", 1)])
    with pytest.raises(InvariantViolation, match="capacity"):
        invariants.note(Step(now_s=0.0, actions=(SetShare(workload_id="a", replica_id="a.0", share=make_share(0.5)),)))
