"""What sharers were asked to leave to workloads on whole devices, and what came of it: not asked anew at each event."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId

# An answer holds for so many seconds at most: what others hold and need changes slowly. One in vain holds for less
# where the inner policy plans anew: what has changed may be what was lacking.
HOLDS_S, HOLDS_IN_VAIN_S = 60.0, 10.0
# Where promises would be lost otherwise: weaker claims open no device, and make room before a promise does.
ALL_WEAK = ("all", WorkloadId(""))
# A workload, and the number of the replica that it lacks or what else is lacking (see `policy`).
Lack = tuple[WorkloadId, int]


class Answer(NamedTuple):
    """At `at_s`, of the devices that could be given up (`devices`) those in `yielded` were, and the claims in `barred`
    were to open none; beside that, some workloads were still lacking."""

    at_s: float
    barred: frozenset[tuple[str, WorkloadId]] = frozenset()
    yielded: frozenset[DeviceId] = frozenset()
    lacking: frozenset[Lack] = frozenset()
    devices: frozenset[DeviceId] = frozenset()

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
        barred, lacking = ([list(pair) for pair in sorted(pairs)] for pairs in (self.barred, self.lacking))
        return [self.at_s, barred, sorted(self.yielded), lacking, sorted(self.devices)]


def read_answer(kept: Any) -> Answer | None:
    """From plain values; None without any."""
    if not kept:
        return None
    at_s, barred, yielded, lacking, devices = kept
    return Answer(
        at_s,
        frozenset([(claim, WorkloadId(who)) for claim, who in barred]),
        frozenset(map(DeviceId, yielded)),
        frozenset([(WorkloadId(who), number) for who, number in lacking]),
        frozenset(map(DeviceId, devices)),
    )
