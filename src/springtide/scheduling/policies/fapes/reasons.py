"""The reasons that FaPES gives for its decisions."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.resources import DeviceId
from springtide.scheduling.placement.gangs import devices_text


class Words:
    """Sentences about one decision, as of its moment."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def changed(self, before: Sequence[DeviceId], after: Sequence[DeviceId], finish_s: float, is_planned: bool) -> str:
        """Why a job gets other devices than it had."""
        end = f", planned to end in {_minutes(finish_s - self._now_s)}" if finish_s > self._now_s else ""
        if not before:
            return f"starting on {devices_text(len(after))}{end}"
        why = "planned anew" if is_planned else "as planned"
        if len(after) == len(before):
            return f"{why}: moves to other devices{end}"
        more = "grows" if len(after) > len(before) else "shrinks"
        return f"{why}: {more} to {devices_text(len(after))}{end}"

    def waits(self, is_running: bool, start_s: float, size: int) -> str:
        """Why a job holds no devices now although it has a plan."""
        begin = "gives way to others now, goes on" if is_running else "waits: planned to start"
        soon = _minutes(start_s - self._now_s)
        return f"{begin} on {devices_text(size)} in {soon}"

    def no_room(self, is_running: bool, least: int, total: int) -> str:
        """Why a job holds no devices and has no plan."""
        if least > total:
            return f"needs at least {devices_text(least)}, the platform has {total}: lower --workers or add devices"
        begin = "gives way to others" if is_running else "waits"
        return f"{begin}: no room for {devices_text(least)} in the plans of the others"


def _minutes(seconds: float) -> str:
    """A duration in minutes or hours: plans in rounds are not precise to the second."""
    minutes = max(1, round(seconds / 60.0))
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d}"
