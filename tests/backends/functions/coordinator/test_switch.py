"""Plans that change while functions go on, in the world of events: nobody restarts who can stay, whatever happens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kits.functions.world import Faults, World, service_of, whole_plan
from kits.simulation.sweeps import part
from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.switch import MAX_WARMING_S, can_follow
from springtide.core import events
from springtide.core.functions import FunctionPlan

ENDS = (events.JobFinished, events.JobFailed, events.PauseRequested)


def ask(world: World, plan: FunctionPlan) -> None:
    """The control plane wants another plan."""
    world.generation += 1
    world.plan = plan
    world.tell(messages.RunRequested(generation=world.generation, plan=plan))


def at_step(world: World, step: int) -> None:
    world.run(until=lambda: world.coordinator.run.progress.furthest >= step)
    assert not world.is_over


def check_finished(world: World) -> None:
    assert len(world.of(events.JobFinished)) == 1
    assert world.model == list(range(1, world.total_steps + 1))
    world.check_told()
    assert all(function.done for function in world.functions)


def changes(world: World) -> list[events.JobResized]:
    return [event for event in world.of(events.JobResized) if event.direction == "replace"]


def test_only_whole_models_change_without_a_restart() -> None:
    assert can_follow(whole_plan(2), whole_plan(5, 3072))
    other = FunctionPlan(
        stages=(
            whole_plan().stages[0],
            type(whole_plan().stages[0])(first_layer=4, end_layer=6, memory_mb=1024),
        )
    )
    assert not can_follow(whole_plan(2), other)
    assert not can_follow(other, other)


def test_who_can_stay_is_not_restarted() -> None:
    world = World(plan=whole_plan(2), total_steps=40)
    world.start()
    at_step(world, 10)
    stayers = list(world.functions)
    ask(world, whole_plan(4))
    world.run()
    check_finished(world)
    # Two more were called, and nobody twice.
    assert len(world.functions) == 4
    assert [function.order.plan for function in world.functions] == [None, None, world.plan, world.plan]
    assert all(function.step == 40 and function.phase == "finished" for function in stayers)
    [change] = changes(world)
    assert (change.generation, change.direction) == (2, "replace")
    status = world.coordinator.status()
    assert status is not None
    assert status.plan == world.plan
    assert [entry.num_stayed for entry in status.changes] == [0, 2]
    assert status.num_redone_steps == status.num_replaced == 0
    # Nobody stood still for as long as a function takes to start.
    assert 0.0 < change.pause_s < 4.0
    # Everybody trained on while the joiners warmed up.
    assert change.step >= 12


def test_fewer_replicas_need_nobody_new() -> None:
    world = World(plan=whole_plan(4), total_steps=30)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(1))
    world.run()
    check_finished(world)
    assert len(world.functions) == 4
    assert sorted(function.phase for function in world.functions) == ["finished", "stopped", "stopped", "stopped"]
    assert len(changes(world)) == 1
    assert world.coordinator.run.ledger.usage(world.now_s).function_gb_s == pytest.approx(world.billed_gb_s, rel=0.02)


def test_another_memory_size_is_taken_over_by_warm_functions() -> None:
    world = World(plan=whole_plan(2), total_steps=40)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(3, 2048))
    world.run()
    check_finished(world)
    assert len(world.functions) == 5
    assert [function.memory_mb for function in world.functions] == [1024, 1024, 2048, 2048, 2048]
    [change] = changes(world)
    assert change.pause_s < 4.0
    assert world.coordinator.run.num_redone_steps == 0


def test_the_same_functions_take_another_collective() -> None:
    world = World(plan=whole_plan(3), total_steps=30)
    world.start()
    at_step(world, 5)
    ask(world, whole_plan(3, num_chunks=4))
    world.run()
    check_finished(world)
    assert len(world.functions) == 3


def test_a_joiner_that_dies_is_called_again() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(3))
    world.run(until=lambda: len(world.functions) == 3 and world.functions[2].phase == "starting")
    world.die(world.functions[2], "killed")
    world.run()
    check_finished(world)
    assert len(world.functions) == 4
    assert len(changes(world)) == 1


@pytest.mark.parametrize("who", [0, 1, 3])
@pytest.mark.parametrize("phase", ["warm", "parked"])
def test_a_death_on_the_way_does_not_stop_the_change(who: int, phase: str) -> None:
    """A stayer, a leaver or a joiner dies while joiners warm up, or while everybody stands at the boundary."""
    world = World(plan=whole_plan(3), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(2, 2048) if who == 3 else whole_plan(4) if who == 0 else whole_plan(1))
    if phase == "warm":
        world.run(until_s=world.now_s + 0.5)
    else:
        world.run(until=lambda: any(function.phase == "parked" for function in world.functions))
    victim = world.functions[who]
    if not victim.done:
        world.die(victim, "killed")
    world.run()
    check_finished(world)
    assert world.of(events.JobResized)[-1].generation == 2
    assert world.coordinator.run.num_redone_steps <= 4


def test_joiners_that_are_put_off_are_waited_for_while_the_others_train() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    world.faults.throttled = 1.0
    ask(world, whole_plan(4))
    world.run(until_s=world.now_s + 40.0)
    assert world.coordinator.run.progress.furthest > 20
    world.faults.throttled = 0.0
    world.run()
    check_finished(world)
    assert len(world.functions) == 4
    assert len(changes(world)) == 1


def test_joiners_that_never_come_are_not_waited_for_for_ever() -> None:
    world = World(plan=whole_plan(2), total_steps=400)
    world.restarts_left = 0
    world.start()
    at_step(world, 10)
    world.faults.throttled = 1.0
    ask(world, whole_plan(4))
    asked_s = world.now_s
    world.run()
    [lost] = world.of(events.ReplicaLost)
    assert "429" in lost.reason
    assert world.now_s - asked_s < MAX_WARMING_S + 300.0
    assert world.coordinator.run.progress.furthest > 60


def test_where_there_is_no_room_beside_the_others_they_end_first() -> None:
    service = type(service_of())(
        **{
            **{name: getattr(service_of(), name) for name in service_of().__struct_fields__},
            "concurrency": 5,
        }
    )
    world = World(plan=whole_plan(3), total_steps=40, service=service)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(3, 2048))
    world.run(until=lambda: len(world.functions) > 3)
    assert {function.phase for function in world.functions[:3]} == {"parked"}
    world.run()
    check_finished(world)
    assert world.coordinator.run.num_redone_steps == 0


@pytest.mark.parametrize("after_s", [0.2, 1.0, 3.0, 6.0])
def test_preempted_on_the_way_all_functions_save_and_end(after_s: float) -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(4))
    world.run(until_s=world.now_s + after_s)
    world.tell(messages.PreemptRequested(generation=3, grace_s=15.0))
    world.run()
    assert len(world.of(events.ReplicaStopped)) == 1
    assert all(function.done for function in world.functions)
    saved = world.of(events.CheckpointCommitted)[-1].step
    assert saved >= 10
    assert saved >= max(function.step for function in world.functions)


@pytest.mark.parametrize("after_s", [0.2, 1.0, 3.0, 6.0])
def test_stopped_on_the_way_nobody_is_left(after_s: float) -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(4, 2048))
    world.run(until_s=world.now_s + after_s)
    world.tell(messages.StopRequested(grace_s=2.0))
    world.run()
    assert len(world.of(events.ReplicaStopped)) == 1
    world.is_over = False
    world.run(until_s=world.now_s + 30.0)
    assert all(function.done for function in world.functions)


def test_a_newer_wish_replaces_one_that_is_being_prepared() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(8))
    world.run(until_s=world.now_s + 1.0)
    ask(world, whole_plan(3))
    world.run()
    check_finished(world)
    assert changes(world)[-1].generation == 3
    assert world.coordinator.status().plan == whole_plan(3)


def test_one_wish_after_the_other_at_the_boundary() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(4))
    world.run(until=lambda: any(function.phase == "parked" for function in world.functions))
    ask(world, whole_plan(1))
    world.run()
    check_finished(world)
    assert [event.generation for event in changes(world)] == [2, 3]
    assert len(world.functions) == 4


def test_a_lifetime_that_ends_on_the_way_is_handed_over() -> None:
    world = World(plan=whole_plan(2), total_steps=80, service=service_of(lifetime_s=60.0))
    world.start()
    world.run(until_s=40.0)
    ask(world, whole_plan(4))
    world.run()
    check_finished(world)
    assert len(changes(world)) == 1
    assert world.coordinator.run.num_redone_steps <= 4


def test_a_coordinator_that_takes_over_on_the_way_begins_a_new_attempt() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(4))
    world.run(until=lambda: any(function.phase == "parked" for function in world.functions))
    record = world.control
    assert record is not None
    world.new_coordinator()
    world.coordinator.adopt(record, world.now_s, {})
    world.run()
    check_finished(world)


def test_what_a_step_takes_is_told_after_three_and_at_each_doubling() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 40)
    told = [event.measurement for event in world.of(events.FunctionsMeasured)]
    counts = [measurement.num_steps for measurement in told]
    assert 3 <= counts[0] <= 5
    assert all(later >= 2 * earlier for earlier, later in pairwise(counts))
    last = told[-1]
    steps_s = world.now_s / world.coordinator.run.progress.furthest
    assert last.plan == whole_plan(2)
    assert (last.global_batch_size, last.gradient_bytes) == (8, 1000)
    # The start is left out, and however seldom reports are read it is the time from commit to commit.
    assert last.step_s < steps_s
    assert last.step_s == pytest.approx(sum(world.functions[0].timer.totals.step_s for _ in [0]) / 39, rel=0.1)
    assert 0.0 < last.deviation_s < last.step_s
    assert last.compute_s == pytest.approx(0.1 * world.step_s)
    function_usd = 2 * last.step_s * 0.0000166667
    request_usd = 2 * (5e-6 + 3 * 4e-7)
    assert last.usd == pytest.approx(function_usd + request_usd, rel=0.05)


def test_each_plan_is_measured_by_itself() -> None:
    world = World(plan=whole_plan(2), total_steps=60)
    world.start()
    at_step(world, 15)
    ask(world, whole_plan(4))
    world.run()
    told = [event.measurement for event in world.of(events.FunctionsMeasured)]
    assert [plan.num_replicas for plan in dict.fromkeys(measurement.plan for measurement in told)] == [2, 4]
    assert [event.generation for event in world.of(events.FunctionsMeasured)][-1] == 2


def changing_world(seed: int) -> World:
    """Any plan after any other, under any faults, with wishes at any time."""
    world = World(seed, has_parameter_store=bool(seed % 3 == 0))
    draw = world.random
    world.plan = whole_plan(draw.randint(1, 4), draw.choice([1024, 2048]))
    world.total_steps = draw.randint(20, 60)
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
        store_dies_per_s=draw.choice([0.0, 0.01]),
        store_moves=draw.choice([False, True]),
    )
    world.budget_usd = draw.choice([0.003, 0.01]) if seed % 4 == 1 else None
    world.num_coordinators = 0
    world.queue.clear()
    world.new_coordinator()

    def wish() -> None:
        if world.is_over or any(world.of(kind) for kind in ENDS):
            return
        resized = world.of(events.JobResized)
        is_confirmed = bool(resized) and resized[-1].generation == world.generation
        # The control plane waits until a wish is fulfilled; a restart of it may make it wish again before.
        if world.coordinator.run.mode != "over" and (is_confirmed or draw.random() < 0.1):
            ask(world, whole_plan(draw.randint(1, 4), draw.choice([1024, 1024, 2048, 3072])))
        world.after(draw.uniform(1.0, 25.0), wish)

    world.after(draw.uniform(0.0, 20.0), wish)
    return world


def play(world: World) -> bool:
    """Play it to its end and beyond: nothing is made twice, nobody is left running."""
    world.start()
    world.run()
    assert world.is_over, f"it still runs after {world.now_s:.0f} s in mode {world.coordinator.run.mode}"
    told = [event for kind in ENDS for event in world.of(kind)]
    assert len(told) == 1 or len(world.of(events.ReplicaLost)) == 4
    if world.of(events.PauseRequested):
        # Whatever was asked has been answered, or the control plane would not pause it.
        before = world.events[: world.events.index(told[0])]
        assert [event for event in before if isinstance(event, events.JobResized)][-1].generation == world.generation
    if world.of(events.JobFinished):
        assert world.model == list(range(1, world.total_steps + 1))
    generations = [event.generation for event in world.of(events.JobResized)]
    assert generations == sorted(generations)
    world.is_over = False
    world.run(until_s=world.now_s + 1000.0)
    left = [function for function in world.functions if not function.done]
    assert not left, f"{len(left)} functions are left running"
    return bool(world.of(events.JobFinished))


def play_seeds(seeds: range) -> tuple[int, int]:
    """How many jobs finished, and how many changes of plan there were."""
    finished = num_changes = 0
    for seed in seeds:
        world = changing_world(seed)
        try:
            finished += play(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_changes += len(changes(world))
    return finished, num_changes


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 18, 6))
def test_whatever_happens_while_plans_change(first: int) -> None:
    finished, num_changes = play_seeds(range(first, first + 6))
    assert finished >= 3
    assert num_changes >= 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(18, 18 + part(300), 60))
def test_whatever_happens_while_plans_change_three_hundred_times(first: int) -> None:
    finished, num_changes = play_seeds(range(first, first + 60))
    assert finished >= 42
    assert num_changes >= 120


@pytest.mark.parametrize("after_s", [0.5, 3.0, 6.0])
def test_a_budget_that_ends_on_the_way_leaves_no_wish_without_an_answer(after_s: float) -> None:
    """The control plane pauses nothing while it waits for word of a generation."""
    world = World(plan=whole_plan(2), total_steps=400, budget_usd=1.0)
    world.start()
    at_step(world, 10)
    ask(world, whole_plan(4, 2048))
    world.run(until_s=world.now_s + after_s)
    world.coordinator.run.ledger.budget_usd = world.spent_usd()
    world.run()
    [paused] = world.of(events.PauseRequested)
    [last] = [event for event in world.of(events.JobResized) if event.generation == 2]
    assert world.events.index(last) < world.events.index(paused)
    assert all(function.done for function in world.functions)
