"""The coordinator in a world of its own: what it does without faults, with each one, and with all of them at once."""

from __future__ import annotations

import pytest

from kits.functions.world import Faults, World, plan_of, service_of
from kits.simulation.sweeps import sampled
from springtide.backends.functions.coordinator import messages
from springtide.core import events


def losses_of(world: World) -> list[tuple[int, float, int]]:
    return world.coordinator.run.progress.losses


def check_finished(world: World) -> None:
    assert world.of(events.JobFinished), [type(event).__name__ for event in world.events[-3:]]
    assert len(world.of(events.JobFinished)) == 1
    assert world.model == list(range(1, world.total_steps + 1))
    world.check_told()
    steps = [event.step for event in world.of(events.ProgressReported)]
    assert steps == sorted(set(steps))
    assert steps[-1] == world.total_steps
    assert len(world.of(events.ReplicaStopped)) == 1


def test_a_job_without_faults_runs_to_its_end() -> None:
    world = World(plan=plan_of(2, 2))
    world.start()
    world.run()
    check_finished(world)
    assert [event.direction for event in world.of(events.JobResized)] == ["start"]
    assert [loss[0] for loss in losses_of(world)] == list(range(1, 21))
    # Two replicas of eight samples each, and their mean.
    assert losses_of(world)[9] == (10, pytest.approx(0.1), 16)
    assert len(world.functions) == 4
    assert world.of(events.CheckpointCommitted)[-1].step == 20
    status = world.coordinator.status()
    assert status is not None
    assert status.num_replaced == status.num_handovers == status.num_redone_steps == 0


def test_the_bill_is_what_was_used() -> None:
    world = World(plan=plan_of(2, 2))
    world.start()
    world.run()
    status = world.coordinator.status()
    assert status is not None
    assert status.usage.function_gb_s == pytest.approx(world.billed_gb_s, rel=0.02)
    assert status.usage.num_invocations == 4
    assert world.of(events.UsageReported)[-1].bill.total_usd == pytest.approx(status.bill.total_usd, rel=0.01)


def test_a_killed_function_is_replaced_and_nobody_else() -> None:
    world = World(total_steps=30)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 12)
    victim = next(f for f in world.functions if f.order.stage == 1)
    world.die(victim, "killed")
    world.run()
    check_finished(world)
    assert len(world.functions) == 3
    status = world.coordinator.status()
    assert status is not None
    assert (status.num_replaced, status.num_handovers) == (1, 0)
    assert status.num_redone_steps <= 4
    assert world.control is not None
    assert world.control.attempt == 2


def test_lifetimes_end_without_a_step_redone() -> None:
    world = World(total_steps=60, service=service_of(lifetime_s=45.0))
    world.start()
    world.run()
    check_finished(world)
    status = world.coordinator.status()
    assert status is not None
    assert status.num_handovers >= 4
    assert status.num_redone_steps == status.num_replaced == 0
    assert world.control is not None
    assert world.control.attempt == 1


def test_a_leaver_without_a_successor_is_followed_all_the_same() -> None:
    world = World(total_steps=40, service=service_of(lifetime_s=45.0))
    world.start()
    world.run(until=lambda: len(world.functions) > 2)
    for function in world.functions[2:]:
        world.die(function, "killed")
    world.run()
    check_finished(world)
    status = world.coordinator.status()
    assert status is not None
    assert status.num_redone_steps == 0


def test_an_invocation_that_vanishes_is_tried_again() -> None:
    world = World()
    world.faults.vanishes = 1.0
    world.start()
    world.run(until_s=5.0)
    world.faults.vanishes = 0.0
    world.run()
    check_finished(world)
    assert world.coordinator.run.pool.num_lost == 2


def test_a_late_one_finds_itself_superseded() -> None:
    world = World()
    world.faults.starts_late = 1.0
    world.start()
    world.run(until_s=1.0)
    world.faults.starts_late = 0.0
    world.run(until=lambda: bool(world.of(events.JobFinished)))
    world.is_over = False
    world.run(until_s=world.now_s + 200)
    assert world.model == list(range(1, 21))


def test_throttling_is_waited_out() -> None:
    world = World()
    world.faults.throttled = 1.0
    world.start()
    world.run(until_s=20.0)
    status = world.coordinator.status()
    assert status is not None
    assert {place.phase for place in status.places} == {"throttled"}
    world.faults.throttled = 0.0
    world.run()
    check_finished(world)
    # What was refused is not charged.
    assert world.coordinator.run.pool.num_invocations == 2


def test_throttling_without_end_gives_the_place_back() -> None:
    world = World(faults=Faults(throttled=1.0))
    world.restarts_left = 0
    world.start()
    world.run()
    [lost] = world.of(events.ReplicaLost)
    assert "429" in lost.reason
    assert "concurrency" in lost.reason


def test_an_error_of_the_user_s_code_ends_the_job_at_once() -> None:
    world = World(faults=Faults(user_error_at=5))
    world.start()
    world.run()
    [failed] = world.of(events.JobFailed)
    assert failed.error == "ValueError: the loss is not finite"
    assert len(world.functions) == 2
    assert not any(not function.done for function in world.functions)


def test_another_function_is_tried_where_one_does_not_say_what_failed() -> None:
    world = World(faults=Faults(user_error_at=5))
    world.user_error_code = ""
    world.start()
    world.run(until=lambda: bool(world.of(events.ReplicaLost)))
    assert not world.of(events.JobFailed)
    assert len(world.functions) > 2
    assert "could not go on: ValueError: the loss is not finite, 5 times" in world.of(events.ReplicaLost)[0].reason


def test_samples_that_are_gone_pause_the_job_at_its_newest_state() -> None:
    world = World(faults=Faults(user_error_at=5))
    world.user_error, world.user_error_code = "the dataset 'digits' has vanished; put it again", "data"
    world.start()
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert paused.reason == "the dataset 'digits' has vanished; put it again"
    assert not world.of(events.JobFailed)
    assert world.of(events.CheckpointCommitted)[-1].step >= 3
    assert len(world.functions) == 2
    assert not any(not function.done for function in world.functions)


def test_a_place_where_all_functions_die_ends_the_job_with_the_reason() -> None:
    world = World(faults=Faults(killed_per_s=2.0))
    world.start()
    world.run()
    [failed] = world.of(events.JobFailed)
    assert "times in a row" in failed.error
    assert "stage" in failed.error


def test_out_of_memory_gets_the_next_size() -> None:
    world = World(faults=Faults(too_small_mb=3000))
    world.start()
    world.run()
    check_finished(world)
    status = world.coordinator.status()
    assert status is not None
    assert {place.memory_mb for place in status.places} == {3072}


def test_out_of_memory_at_the_largest_size_ends_with_the_mend() -> None:
    world = World(faults=Faults(too_small_mb=10_000))
    world.start()
    world.run()
    [failed] = world.of(events.JobFailed)
    assert "3072 MB" in failed.error
    assert "smaller micro-batches" in failed.error


def test_trouble_with_a_store_gives_the_place_back_and_is_tried_again() -> None:
    world = World(total_steps=40, faults=Faults(trouble_from_s=30.0, trouble_until_s=100.0))
    world.start()
    world.run()
    assert world.model == list(range(1, 41))
    lost = world.of(events.ReplicaLost)
    assert lost
    assert "parameter store does not answer" in lost[0].reason


def test_functions_that_are_all_silent_are_found_by_a_new_attempt() -> None:
    world = World(total_steps=30)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 8)
    victim = world.functions[1]
    victim.is_contact_lost = True
    world.tell(
        messages.InvocationEnded(
            number=victim.invoke.number, place=victim.place, incarnation=victim.order.incarnation, outcome="lost"
        )
    )
    world.die(victim, "killed")
    world.run()
    check_finished(world)
    assert len(world.functions) == 3


def test_preempted_it_saves_and_ends_and_goes_on_later() -> None:
    world = World(total_steps=40)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 10)
    world.tell(messages.PreemptRequested(generation=2, grace_s=15.0))
    world.run()
    assert len(world.of(events.ReplicaStopped)) == 1
    assert all(function.done for function in world.functions)
    step = world.of(events.CheckpointCommitted)[-1].step
    assert 10 <= step <= 14
    world.is_over = False
    world.generation = 2
    world.new_coordinator()
    world.start()
    world.run(until=lambda: bool(world.of(events.JobFinished)))
    assert world.model == list(range(1, 41))
    assert [event.direction for event in world.of(events.JobResized)] == ["start", "resume"]


def test_stopped_it_ends_at_once() -> None:
    world = World(total_steps=40)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 10)
    asked_s = world.now_s
    world.tell(messages.StopRequested(grace_s=2.0))
    world.run()
    assert len(world.of(events.ReplicaStopped)) == 1
    assert world.now_s - asked_s <= 3.0
    assert not world.of(events.JobFinished)


def test_another_plan_begins_at_a_boundary() -> None:
    world = World(total_steps=40, plan=plan_of(2))
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 10)
    world.generation = 2
    new = plan_of(1, 2)
    new = type(new)(stages=(type(new.stages[0])(first_layer=0, end_layer=4, memory_mb=2048),), num_replicas=2)
    world.tell(messages.RunRequested(generation=2, plan=new))
    world.run(until=lambda: all(function.done for function in world.functions))
    world.plan = new
    world.run()
    assert world.model == list(range(1, 41))
    world.check_told()
    assert [event.direction for event in world.of(events.JobResized)] == ["start", "replace"]
    assert world.of(events.JobResized)[1].pause_s > 0
    assert world.coordinator.run.num_redone_steps == 0


def test_a_budget_is_a_cap() -> None:
    world = World(total_steps=200, budget_usd=0.004)
    world.start()
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert "its budget of $0.004 is nearly spent" in paused.reason
    assert "springtide resume j --budget" in paused.reason
    saved = world.of(events.CheckpointCommitted)[-1].step
    assert f"a checkpoint of step {saved} is kept" in paused.reason
    assert saved > 10
    assert world.spent_usd() <= 0.004
    # Most of it was used for steps.
    assert world.spent_usd() > 0.6 * 0.004


def test_a_budget_too_small_to_begin_begins_nothing() -> None:
    world = World(budget_usd=0.00005)
    world.start()
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert "nothing was begun" in paused.reason
    assert not world.functions


def test_states_that_are_replaced_are_removed() -> None:
    world = World(total_steps=60)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 50)
    steps = {int(key.split("/")[-2]) for key in world.states}
    assert len(steps) <= 6


def random_world(seed: int) -> World:
    world = World(seed)
    draw = world.random
    world.plan = plan_of(draw.randint(1, 3), draw.randint(1, 2))
    world.total_steps = draw.randint(5, 40)
    world.step_s = draw.choice([0.5, 2.0, 5.0])
    world.service = service_of(lifetime_s=draw.choice([60.0, 120.0, 900.0]), cold_start_s=draw.choice([0.5, 3.0]))
    world.faults = Faults(
        killed_per_s=draw.choice([0.0, 0.002, 0.01]),
        throttled=draw.choice([0.0, 0.1, 0.4]),
        vanishes=draw.choice([0.0, 0.05, 0.2]),
        starts_late=draw.choice([0.0, 0.05, 0.2]),
        lost_contact=draw.choice([0.0, 0.05, 0.2]),
        unread=draw.choice([0.0, 0.3]),
        stale=draw.choice([0.0, 0.2]),
        repeated=draw.choice([0.0, 0.2]),
    )
    world.budget_usd = draw.choice([None, None, None, 0.002, 0.01])
    world.num_coordinators = 0
    world.queue.clear()
    world.new_coordinator()
    return world


def check_any_end(world: World) -> None:
    ends = (events.JobFinished, events.JobFailed, events.PauseRequested)
    told = [event for event in world.events if isinstance(event, ends)]
    has_lost_all = len(world.of(events.ReplicaLost)) == 4
    assert len(told) == 1 or has_lost_all, [type(event).__name__ for event in world.events[-4:]]
    if world.of(events.JobFinished):
        assert world.model == list(range(1, world.total_steps + 1))
        world.check_told()
    for coordinator_events in (world.of(events.ProgressReported),):
        steps = [event.step for event in coordinator_events]
        assert all(step <= world.total_steps for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled(range(0, 300, 25)))
def test_whatever_happens_it_ends_and_nothing_is_made_twice(first: int) -> None:
    finished = 0
    for seed in range(first, first + 25):
        world = random_world(seed)
        world.start()
        try:
            world.run()
            assert world.is_over, f"it still runs after {world.now_s:.0f} s in mode {world.coordinator.run.mode}"
            check_any_end(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finished += bool(world.of(events.JobFinished))
    # Most of these jobs get there: giving up is not a way to be safe.
    assert finished >= 10
