"""Whose turn it is in a step of several optimizers; tests/runtime/elastic/test_turns.py trains with them."""

from __future__ import annotations

from springtide.runtime.elastic.steps.method import Flags, Reduced
from springtide.runtime.elastic.steps.turns import Turns


def test_turns_that_the_state_has_are_repeated_once() -> None:
    turns = Turns()
    turns.begin_step()
    turns.begin(0, num_updates=1)
    assert turns.is_repeated
    assert turns.end()
    turns.begin(1, num_updates=1)
    assert not turns.is_repeated
    assert not turns.end()
    assert turns.place == 1


def test_a_new_step_counts_from_its_first_turn() -> None:
    turns = Turns()
    turns.begin(0, num_updates=0)
    turns.end()
    turns.begin_step()
    turns.begin(0, num_updates=1)
    assert turns.is_repeated


def test_the_outcome_of_the_last_turn_is_taken_once() -> None:
    turns = Turns()
    assert turns.pop_last() is None
    turns.last = reduced = Reduced(loss=1.0, flags=Flags(), has_gradient=[])
    assert turns.pop_last() is reduced
    assert turns.pop_last() is None
