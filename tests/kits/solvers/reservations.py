"""What tests of the reservation table share."""

from __future__ import annotations

from springtide.solvers.reservations.reservation_table import ReservationTable


def enlarge_all(table: ReservationTable) -> None:
    """Let each job, in order of arrival, hold as many more devices as are free and end it earlier."""
    for entry in table.entries.values():
        for count in reversed(entry.sizes):
            now = entry.size_at(table.now_s)
            is_free = now < count <= now + table.profile.at(table.now_s) and not entry.is_fixed and bool(entry.runs)
            if is_free and table.enlarge(entry, count, min_effort=0):
                break
