"""Jobs on a dataset that grows, in the world of events: they train on what comes, rest for nothing, and end whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kits.functions.world import BATCH, Faults, World, service_of, whole_plan
from kits.simulation.sweeps import part
from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.function_pool import StreamRules
from springtide.core import events

RULES = StreamRules(min_start_steps=4, max_wait_s=120.0, idle_s=10.0)


def arrive(world: World, num_samples: int, *, at_s: float = 0.0, closes: bool = False) -> None:
    """So many samples more, after a while."""

    def come() -> None:
        assert world.stream is not None
        there = world.stream.num_samples + num_samples
        world.stream = replace(world.stream, num_samples=there, is_closed=closes or world.stream.is_closed)

    world.after(at_s, come)


def streaming(seed: int = 0, num_replicas: int = 2, rules: StreamRules = RULES) -> World:
    return World(seed, plan=whole_plan(num_replicas), stream_rules=rules, total_steps=0)


def alive(world: World) -> int:
    return sum(not function.done for function in world.functions)


def rests(world: World) -> Callable[[], bool]:
    return lambda: world.coordinator.run.mode == "resting"


def check_whole(world: World, num_samples: int) -> None:
    """Every batch was trained on once, the rest too."""
    assert len(world.of(events.JobFinished)) == 1
    assert world.model == list(range(1, -(-num_samples // BATCH) + 1))
    assert all(function.done for function in world.functions)


def test_it_trains_on_what_comes_and_ends_with_the_stream() -> None:
    world = streaming()
    arrive(world, 80)
    arrive(world, 83, at_s=20.0)
    arrive(world, 0, at_s=60.0, closes=True)
    world.start()
    world.run()
    check_whole(world, 163)
    seen = [event.stream for event in world.of(events.StreamObserved)]
    assert [view.num_samples for view in seen] == sorted(view.num_samples for view in seen)
    assert seen[-1].is_closed
    progress = world.of(events.ProgressReported)[-1]
    assert (progress.step, progress.total_steps) == (21, 21)


def test_nothing_runs_before_there_is_enough() -> None:
    world = streaming()
    arrive(world, 20)
    arrive(world, 30, at_s=40.0)
    world.start()
    world.run(until_s=30.0)
    assert world.functions == []
    status = world.coordinator.status()
    assert status is not None
    assert status.idle_reason == "waits for data of 'clicks' (20 of 32 samples)"
    assert status.bill.total_usd < 1e-4
    # Its place is held: the control plane need not wait for it.
    assert [event.direction for event in world.of(events.JobResized)] == ["start"]
    world.run(until_s=60.0)
    assert alive(world) == 2
    assert world.coordinator.status().idle_reason == ""


def test_a_stream_that_runs_dry_costs_nothing_until_more_comes() -> None:
    world = streaming()
    arrive(world, 80)
    world.start()
    world.run(until=lambda: world.coordinator.run.mode == "resting" and bool(world.functions))
    assert alive(world) == 0
    assert world.coordinator.run.progress.furthest == 10
    assert world.of(events.CheckpointCommitted)[-1].step == 10
    assert "idle: waits for data of 'clicks' (0 of 32 samples)" in world.coordinator.run.reason
    usage = world.coordinator.run.ledger.usage(world.now_s)
    rested_s = world.now_s
    world.run(until_s=rested_s + 3600.0)
    after = world.coordinator.run.ledger.usage(world.now_s)
    assert after.function_gb_s == usage.function_gb_s
    assert after.parameter_store_s == usage.parameter_store_s
    arrive(world, 16)
    world.run(until_s=world.now_s + 60.0)
    # Two batches are not worth a start yet.
    assert alive(world) == 0
    arrive(world, 16)
    world.run(until_s=world.now_s + 20.0)
    assert alive(world) == 2
    arrive(world, 3, closes=True)
    world.run()
    check_whole(world, 115)


def test_a_little_is_trained_on_after_a_while() -> None:
    world = streaming()
    arrive(world, 9)
    world.start()
    world.run(until_s=100.0)
    assert world.functions == []
    world.run(until_s=200.0)
    assert world.coordinator.run.progress.furthest == 1
    world.run(until=rests(world))
    # The one sample that is left is no batch: it waits for the end.
    world.run(until_s=world.now_s + 1000.0)
    assert alive(world) == 0
    arrive(world, 0, closes=True)
    world.run()
    check_whole(world, 9)


def test_functions_wait_a_moment_before_they_rest() -> None:
    world = streaming()
    for batch in range(20):
        arrive(world, 16, at_s=6.0 * batch)
    arrive(world, 0, at_s=125.0, closes=True)
    world.start()
    world.run()
    check_whole(world, 320)
    # Gaps shorter than a start are waited out.
    assert len(world.functions) == 2
    assert world.coordinator.run.num_redone_steps == 0
    # What was waited is no part of a step's time.
    told = [event.measurement.step_s for event in world.of(events.FunctionsMeasured)]
    assert told
    assert max(told) < 2 * world.step_s


def test_an_end_that_comes_while_nobody_runs_finishes_the_job() -> None:
    world = streaming()
    arrive(world, 80)
    world.start()
    world.run(until=lambda: world.coordinator.run.mode == "resting" and bool(world.functions))
    arrive(world, 0, closes=True)
    world.run()
    check_whole(world, 80)
    assert len(world.functions) == 2


def test_an_empty_stream_that_is_closed_fails_with_a_sentence() -> None:
    world = streaming()
    world.start()
    arrive(world, 0, at_s=20.0, closes=True)
    world.run()
    [failed] = world.of(events.JobFailed)
    assert failed.error == "the stream 'clicks' was closed without a sample"


def test_a_stream_that_vanishes_pauses_the_job_with_its_sentence() -> None:
    world = streaming()
    arrive(world, 800)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 5)
    world.tell(messages.StreamRead(error="the stream 'clicks' has vanished from the store: append to it anew"))
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert "vanished" in paused.reason
    assert len(world.of(events.ReplicaStopped)) == 1
    assert alive(world) == 0
    # What was learnt is kept.
    assert world.of(events.CheckpointCommitted)[-1].step >= 4


def test_at_rest_it_is_preempted_stopped_and_given_another_plan_at_once() -> None:
    for asked in (messages.PreemptRequested(generation=2, grace_s=5.0), messages.StopRequested()):
        world = streaming()
        arrive(world, 80)
        world.start()
        world.run(until=lambda world=world: world.coordinator.run.mode == "resting" and bool(world.functions))
        world.tell(asked)
        assert len(world.of(events.ReplicaStopped)) == 1
    world = streaming()
    arrive(world, 80)
    world.start()
    world.run(until=lambda: world.coordinator.run.mode == "resting" and bool(world.functions))
    world.generation = 2
    world.tell(messages.RunRequested(generation=2, plan=whole_plan(4)))
    assert [event.generation for event in world.of(events.JobResized)] == [1, 2]
    arrive(world, 80, closes=True)
    world.run()
    check_whole(world, 160)
    assert len(world.functions) == 6


def test_a_plan_that_is_being_prepared_when_the_stream_runs_dry_is_taken_up_later() -> None:
    world = streaming(rules=replace(RULES, idle_s=0.0))
    arrive(world, 80)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 9)
    world.faults.throttled = 1.0
    world.generation = 2
    world.tell(messages.RunRequested(generation=2, plan=whole_plan(4)))
    world.run(until=rests(world))
    assert world.of(events.JobResized)[-1].generation == 2
    world.faults.throttled = 0.0
    arrive(world, 80, closes=True)
    world.run()
    check_whole(world, 160)
    status = world.coordinator.status()
    assert status is not None
    assert status.plan == whole_plan(4)


def test_more_workers_join_while_the_others_wait_for_samples() -> None:
    world = streaming(rules=replace(RULES, idle_s=60.0))
    arrive(world, 80)
    world.start()
    world.run(until=lambda: any(function.phase == "waiting" for function in world.functions))
    world.generation = 2
    world.tell(messages.RunRequested(generation=2, plan=whole_plan(3)))
    arrive(world, 80, at_s=30.0, closes=True)
    world.run()
    check_whole(world, 160)
    assert len(world.functions) == 3
    assert world.of(events.JobResized)[-1].generation == 2


def faulty_stream(seed: int) -> tuple[World, int]:
    """Samples in bursts, under any faults, with wishes for other plans."""
    rules = StreamRules(min_start_steps=seed % 5 + 1, max_wait_s=60.0, idle_s=(None, 0.0, 5.0, 20.0)[seed % 4])
    world = World(
        seed, plan=whole_plan(seed % 3 + 1), stream_rules=rules, total_steps=0, has_parameter_store=seed % 2 == 0
    )
    draw = world.random
    world.step_s = draw.choice([0.5, 2.0])
    world.service = service_of(lifetime_s=draw.choice([60.0, 900.0]), cold_start_s=draw.choice([0.5, 3.0]))
    world.faults = Faults(
        killed_per_s=draw.choice([0.0, 0.002, 0.01]),
        throttled=draw.choice([0.0, 0.1]),
        vanishes=draw.choice([0.0, 0.1]),
        starts_late=draw.choice([0.0, 0.1]),
        lost_contact=draw.choice([0.0, 0.1]),
        unread=draw.choice([0.0, 0.3]),
        stale=draw.choice([0.0, 0.2]),
        store_dies_per_s=draw.choice([0.0, 0.01]),
        store_moves=draw.choice([False, True]),
    )
    world.num_coordinators = 0
    world.queue.clear()
    world.new_coordinator()
    at_s, total = 0.0, 0
    for _ in range(draw.randint(1, 6)):
        at_s += draw.choice([0.0, 5.0, 30.0, 200.0])
        samples = draw.randint(1, 150)
        total += samples
        arrive(world, samples, at_s=at_s)
    arrive(world, 0, at_s=at_s + draw.choice([0.0, 50.0]), closes=True)

    def wish() -> None:
        if not (world.is_over or world.of(events.JobFinished) or world.of(events.JobFailed)):
            resized = world.of(events.JobResized)
            if resized and resized[-1].generation == world.generation and world.coordinator.run.mode != "over":
                world.generation += 1
                world.plan = whole_plan(draw.randint(1, 4), draw.choice([1024, 2048]))
                world.tell(messages.RunRequested(generation=world.generation, plan=world.plan))
            world.after(draw.uniform(5.0, 60.0), wish)

    if draw.random() < 0.5:
        world.after(draw.uniform(0.0, 30.0), wish)
    return world, total


def play(world: World, num_samples: int) -> bool:
    world.start()
    world.run()
    assert world.is_over, f"it still runs after {world.now_s:.0f} s in mode {world.coordinator.run.mode}"
    is_finished = bool(world.of(events.JobFinished))
    assert is_finished or world.of(events.JobFailed) or len(world.of(events.ReplicaLost)) == 4
    if is_finished:
        assert world.model == list(range(1, -(-num_samples // BATCH) + 1))
    world.is_over = False
    world.run(until_s=world.now_s + 1000.0)
    assert all(function.done for function in world.functions), "functions are left running"
    return is_finished


def play_seeds(seeds: range) -> int:
    """How many jobs finished."""
    finished = 0
    for seed in seeds:
        world, num_samples = faulty_stream(seed)
        try:
            finished += play(world, num_samples)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, 6))
def test_whatever_happens_to_a_stream(first: int) -> None:
    assert play_seeds(range(first, first + 6)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 12 + part(240), 60))
def test_whatever_happens_to_a_stream_two_hundred_times(first: int) -> None:
    assert play_seeds(range(first, first + 60)) >= 54
