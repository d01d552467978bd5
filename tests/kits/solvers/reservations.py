"""What tests of the reservation table share."""

from __future__ import annotations

import math

from springtide.solvers.reservations.fit import work_done
from springtide.solvers.reservations.profile import devices_at
from springtide.solvers.reservations.reservation_table import TOLERANCE_S, ReservationTable


def enlarge_all(table: ReservationTable) -> None:
    """Let each job, in order of arrival, hold as many more devices as are free and end it earlier."""
    for entry in table.entries.values():
        for count in reversed(entry.sizes):
            now = entry.size_at(table.now_s)
            is_free = now < count <= now + table.profile.at(table.now_s) and not entry.is_fixed and bool(entry.runs)
            if is_free and table.enlarge(entry, count, min_effort=0):
                break


def verify(table: ReservationTable, *, slack_s: float = TOLERANCE_S) -> list[str]:
    """Check the table by its schedules alone; returns its faults as sentences, none if every promise is kept.

    Never more devices are in use than there are, every schedule does the work of its job, its runs do not overlap, and
    every job that is not late ends by its deadline.
    """
    faults: list[str] = []
    changes: dict[float, int] = {}
    for entry in table.entries.values():
        previous_s = -math.inf
        for start_s, end_s, n, _ in entry.runs:
            if start_s < previous_s or end_s < start_s or n < 1:
                faults.append(f"{entry.key}: its runs overlap or are empty: {entry.runs}")
            previous_s = end_s
            if end_s > table.now_s:
                begin_s = max(start_s, table.now_s)
                changes[begin_s] = changes.get(begin_s, 0) + n
                changes[end_s] = changes.get(end_s, 0) - n
        if not entry.runs and not entry.is_late:
            faults.append(f"{entry.key}: it has no schedule")
        done = work_done(entry.runs, entry.rates, math.inf)
        missing = (entry.work if entry.runs is entry.committed else entry.left) - done
        if entry.runs and missing > TOLERANCE_S * max(1.0, entry.work) + 1e-3 * entry.rates[entry.sizes[0]]:
            faults.append(f"{entry.key}: {missing:g} steps are left at the end of its schedule")
        if not entry.is_late and entry.end_s > entry.deadline_s + slack_s:
            faults.append(f"{entry.key}: ends {entry.end_s - entry.deadline_s:g} s after its deadline")
    for moment_s in [from_s for from_s, _ in table.steps if from_s > table.now_s]:
        changes.setdefault(moment_s, 0)
    used = 0
    for moment_s in sorted(changes):
        used += changes[moment_s]
        if used > max(0, devices_at(table.steps, moment_s)):
            faults.append(f"{used} of {devices_at(table.steps, moment_s)} devices are in use at {moment_s:g} s")
            break
    return faults
