"""Searches for what sharers could leave to others, a bounded number of plans at each decision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from springtide.core.decision import Plan
from springtide.scheduling.sharing.answer import Lack
from springtide.scheduling.sharing.plan import SharePlan

# In one decision as many further plans are made as look at so many devices together.
DEVICES_PER_DECISION = 8192


class Tried(NamedTuple):
    """What was lacking in one plan of a search; the plan itself, if this decision has made it."""

    lacking: frozenset[Lack]
    made: tuple[SharePlan, Plan] | None


class Search:
    """The plans of a search, by name: those that were made in the decisions before (`found`, with what was lacking in
    each), and those that are made in this one.

    A plan is made as long as fewer than `most` were made anew. One that goes on with a search may make one in any case;
    one that is `final` makes all.
    """

    def __init__(
        self,
        most: int,
        count: Callable[[], int],
        found: Mapping[str, Collection[Lack]],
        *,
        goes_on: bool,
    ) -> None:
        """`count` tells how many plans were made anew in this decision until now."""
        self.found = {name: frozenset(lacking) for name, lacking in found.items()}
        self.is_final = self.is_waiting = False
        self._most, self._count, self._goes_on = most, count, goes_on

    def ask(
        self,
        name: str,
        make: Callable[[], tuple[SharePlan, Plan]],
        lacking_in: Callable[[SharePlan, Plan], set[Lack]],
        helps: Callable[[frozenset[Lack]], bool] | None = None,
    ) -> Tried | None:
        """What is lacking in the plan of this name, which `make` makes; None if that has to wait for the next decision.
        One that `helps` by what is known of it from before is made anew, since it is carried out."""
        known = self.found.get(name)
        if known is not None and (helps is None or not helps(known)):
            return Tried(known, None)
        if not (self.is_final or self._count() < self._most or self._goes_on):
            self.is_waiting = True
            return None
        before = self._count()
        parts, plan = make()
        if self._count() > before:
            self._goes_on = False
        self.found[name] = frozenset(lacking_in(parts, plan))
        return Tried(self.found[name], (parts, plan))
