"""What sharers were asked to leave to workloads on whole devices, and what came of it: not asked anew at each event."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from springtide.core.decision import EMPTY
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId

# An answer holds for so many seconds at most: what others hold and need changes slowly. One in vain holds for less
# where the inner policy plans anew: what has changed may be what was lacking.
HOLDS_S, HOLDS_IN_VAIN_S = 60.0, 10.0
# A search that is not at its end goes on so many seconds later, or at the next event.
GOES_ON_S = 0.1
# Where promises would be lost otherwise: weaker claims open no device, and make room before a promise does.
ALL_WEAK = ("all", WorkloadId(""))
# A workload, and the number of the replica that it lacks or what else is lacking (see `policy`).
Lack = tuple[WorkloadId, int]


class Answer(NamedTuple):
    """At `at_s`, of the devices that could be given up (`devices`) those in `yielded` were, and the claims in `barred`
    were to open none; beside that, some workloads were still lacking.

    Where the search `is_waiting` for the next decision, `found` has the plans that were made so far, by name, and what
    was lacking in each."""

    at_s: float
    barred: frozenset[tuple[str, WorkloadId]] = frozenset()
    yielded: frozenset[DeviceId] = frozenset()
    lacking: frozenset[Lack] = frozenset()
    devices: frozenset[DeviceId] = frozenset()
    found: Mapping[str, frozenset[Lack]] = EMPTY
    is_waiting: bool = False

    def holds(self, now_s: float, *, is_kept: bool) -> bool:
        """Whether it holds still; `is_kept`: beside what was answered, the inner policy keeps its plan."""
        is_in_vain = not (self.barred or self.yielded)
        lasts_s = HOLDS_S if is_kept else HOLDS_IN_VAIN_S if is_in_vain else 0.0
        if ALL_WEAK in self.barred:
            # Of the claims that open nothing meanwhile some would harm nobody.
            lasts_s = min(lasts_s, HOLDS_IN_VAIN_S)
        return self.at_s <= now_s < self.at_s + lasts_s

    def covers(self, lacking: Collection[Lack], devices: Collection[DeviceId]) -> bool:
        """Whether no other workload lacks anything now, and no other devices could be given up."""
        return self.lacking.issuperset(lacking) and self.devices.issuperset(devices)

    def write(self) -> list[Any]:
        """As plain values."""
        barred, lacking = _pairs(self.barred), _pairs(self.lacking)
        kept = [self.at_s, barred, sorted(self.yielded), lacking, sorted(self.devices)]
        return [*kept, {name: _pairs(found) for name, found in self.found.items()}] if self.is_waiting else kept


def _pairs(pairs: Collection[tuple[Any, Any]]) -> list[list[Any]]:
    return [list(pair) for pair in sorted(pairs)]


def _lacks(kept: Collection[Any]) -> frozenset[Lack]:
    return frozenset([(WorkloadId(who), number) for who, number in kept])


def read_answer(kept: Any) -> Answer | None:
    """From plain values; None without any."""
    if not kept:
        return None
    at_s, barred, yielded, lacking, devices, *found = kept
    return Answer(
        at_s,
        frozenset([(claim, WorkloadId(who)) for claim, who in barred]),
        frozenset(map(DeviceId, yielded)),
        _lacks(lacking),
        frozenset(map(DeviceId, devices)),
        {name: _lacks(lacks) for each in found for name, lacks in each.items()},
        bool(found),
    )
