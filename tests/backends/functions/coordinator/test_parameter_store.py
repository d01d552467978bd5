"""A job's parameter store, in the world of events: there while functions exchange, anew when it has died."""

from __future__ import annotations

import pytest

from kits.functions.world import World, whole_plan
from springtide.backends.functions.coordinator import messages
from springtide.core import events


def storing(num_replicas: int = 2, **fields: int) -> World:
    return World(plan=whole_plan(num_replicas), has_parameter_store=True, **fields)


def at_step(world: World, step: int) -> None:
    world.run(until=lambda: world.coordinator.run.progress.furthest >= step)


def ask(world: World, num_replicas: int) -> None:
    world.generation += 1
    world.tell(messages.RunRequested(generation=world.generation, plan=whole_plan(num_replicas)))


def test_it_is_up_before_the_first_function_and_down_after_the_last() -> None:
    world = storing()
    world.start()
    world.run(until=lambda: bool(world.functions))
    assert world.is_store_up
    assert {function.order.parameter_url for function in world.functions} == {"redis://1"}
    world.run()
    assert world.of(events.JobFinished)
    assert not world.is_store_up
    usage = world.coordinator.run.ledger.usage(world.now_s)
    assert 0.0 < usage.parameter_store_s < world.now_s


def test_a_function_alone_needs_none_and_who_joins_it_brings_it_along() -> None:
    world = storing(1, total_steps=60)
    world.start()
    at_step(world, 10)
    assert not world.is_store_up
    assert world.coordinator.run.ledger.usage(world.now_s).parameter_store_s == 0.0
    ask(world, 3)
    at_step(world, 30)
    assert world.is_store_up
    assert world.coordinator.run.num_redone_steps == 0
    # The one that was alone goes on, by the address in the record.
    assert world.functions[0].order.parameter_url == ""
    assert world.functions[0].wire_url == "redis://1"
    ask(world, 1)
    at_step(world, 50)
    assert not world.is_store_up
    used_s = world.coordinator.run.ledger.usage(world.now_s).parameter_store_s
    world.run()
    assert world.of(events.JobFinished)
    assert world.coordinator.run.ledger.usage(world.now_s).parameter_store_s == used_s
    assert len(world.functions) == 3


@pytest.mark.parametrize("moves", [False, True])
def test_one_that_dies_is_brought_up_again_and_nobody_restarts(moves: bool) -> None:
    world = storing(total_steps=40)
    world.faults.store_moves = moves
    world.start()
    at_step(world, 10)
    world.is_store_up = False
    world.run()
    assert world.of(events.JobFinished)
    assert world.model == list(range(1, 41))
    assert len(world.functions) == 2
    assert world.coordinator.run.num_redone_steps <= 2
    assert {function.wire_url for function in world.functions} == {"redis://2" if moves else "redis://1"}


def test_one_that_never_does_its_work_gives_the_place_back() -> None:
    world = storing(total_steps=400)
    world.restarts_left = 0
    world.start()
    at_step(world, 10)
    world.faults.store_dies_per_s = 4.0
    world.run()
    [lost] = world.of(events.ReplicaLost)
    assert "parameter store fails again and again" in lost.reason


def test_what_its_host_counts_is_what_is_charged() -> None:
    world = storing()
    world.start()
    at_step(world, 5)
    world.tell(messages.TimePassed(parameter_store_s=1000.0))
    assert world.coordinator.run.ledger.usage(world.now_s).parameter_store_s == 1000.0


def test_who_dies_while_it_is_brought_up_is_counted_like_any_other() -> None:
    world = storing(total_steps=40)
    world.start()
    at_step(world, 10)
    world.is_store_up = False
    world.run(until=lambda: world.coordinator.run.mode == "opening")
    world.die(world.functions[0], "killed")
    world.tell(messages.InvocationEnded(number=1, place=world.functions[0].place, incarnation=1, outcome="killed"))
    world.run()
    assert world.of(events.JobFinished)
    world.check_told()
    status = world.coordinator.status()
    assert status is not None
    assert status.num_replaced == 1
    assert [place.num_replaced for place in status.places] == [1, 0]
