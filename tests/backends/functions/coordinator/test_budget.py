"""Another budget for a job whose functions are at work: it holds from the next step on, whatever is under way."""

from __future__ import annotations

import pytest

from kits.functions.world import World
from springtide.backends.functions.coordinator import messages
from springtide.core import events

NUM_STEPS = 200
SMALL_USD = 0.004


def begun(budget_usd: float | None, until_step: int = 10) -> World:
    world = World(total_steps=NUM_STEPS, budget_usd=budget_usd)
    world.start()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= until_step)
    return world


def told(world: World, budget_usd: float | None) -> None:
    world.budget_usd = budget_usd
    world.tell(messages.BudgetChanged(budget_usd=budget_usd))


def is_closing(world: World) -> bool:
    return world.coordinator.run.mode in ("closing", "looking_last") and world.coordinator.run.after == "budget"


@pytest.mark.parametrize("budget_usd", [1.0, None])
def test_a_larger_one_is_taken_up_without_a_pause(budget_usd: float | None) -> None:
    world = begun(SMALL_USD)
    told(world, budget_usd)
    world.run()
    assert not world.of(events.PauseRequested)
    assert world.model == list(range(1, NUM_STEPS + 1))
    assert world.coordinator.run.num_redone_steps == 0
    assert world.coordinator.run.ledger.budget_usd == budget_usd
    world.check_told()


def test_a_smaller_one_is_the_cap_from_then_on() -> None:
    world = begun(None, 40)
    budget_usd = world.spent_usd() + SMALL_USD
    told(world, budget_usd)
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert "is nearly spent" in paused.reason
    assert world.spent_usd() <= budget_usd
    assert world.of(events.CheckpointCommitted)[-1].step > 40


def test_one_below_what_was_spent_stops_at_once() -> None:
    world = begun(None, 40)
    told(world, world.spent_usd() / 2)
    before = world.coordinator.run.progress.furthest
    world.run()
    assert len(world.of(events.PauseRequested)) == 1
    assert world.coordinator.run.progress.furthest <= before + 2


def test_one_that_comes_while_everybody_stops_for_the_old_one_calls_the_rest_off() -> None:
    world = begun(SMALL_USD)
    world.run(until=lambda: is_closing(world))
    assert is_closing(world)
    told(world, 1.0)
    world.run()
    assert not world.of(events.PauseRequested)
    assert world.model == list(range(1, NUM_STEPS + 1))
    world.check_told()


def test_one_that_is_still_too_small_then_calls_nothing_off() -> None:
    world = begun(SMALL_USD)
    world.run(until=lambda: is_closing(world))
    told(world, SMALL_USD * 1.0001)
    world.run()
    [paused] = world.of(events.PauseRequested)
    assert world.model is None
    assert world.spent_usd() <= SMALL_USD * 1.0001
    assert "is nearly spent" in paused.reason
