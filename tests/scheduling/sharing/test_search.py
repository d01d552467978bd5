"""How many plans a search makes in one decision."""

from __future__ import annotations

import pytest

from springtide.scheduling.sharing.search import Search

LOST, OTHER = frozenset([("w", -1)]), frozenset([("v", -1)])


def asked(search, made, *names, lacking=LOST, helps=None):
    def make(name):
        made.append(name)
        return None, None

    return [search.ask(name, lambda name=name: make(name), lambda *_: set(lacking), helps) for name in names]


@pytest.mark.parametrize(
    ("most", "goes_on", "is_final", "num_made"),
    [(1, False, False, 1), (2, False, False, 2), (0, True, False, 1), (1, True, False, 1), (0, False, True, 3)],
)
def test_it_makes_so_many_plans_and_waits_for_the_rest(most, goes_on, is_final, num_made):
    made: list[str] = []
    search = Search(most, lambda: len(made), {}, goes_on=goes_on)
    search.is_final = is_final
    found = asked(search, made, "all", "1", "2")
    assert made == ["all", "1", "2"][:num_made]
    assert [tried is None for tried in found] == [n >= num_made for n in range(3)]
    assert search.is_waiting is (num_made < 3)
    assert search.found == dict.fromkeys(made, LOST)


def test_what_was_found_before_is_not_planned_again_unless_it_helps():
    made: list[str] = []
    search = Search(9, lambda: len(made), {"1": [("w", -1)], "2": [("v", -1)]}, goes_on=True)
    first, second, third = asked(search, made, "1", "2", "4", lacking=OTHER, helps=lambda found: found == OTHER)
    assert made == ["2", "4"]
    assert (first.lacking, first.made) == (LOST, None)
    assert second.made is not None
    assert third.lacking == OTHER
