"""Reports on the pools of nodes: their present state, the tide and its forecast, past handovers."""

from __future__ import annotations

from springtide.core.status.pools import PoolsReport, TideBand
from springtide.service.history.history import HistoryIndex
from springtide.service.ports import PlatformLike
from springtide.service.status.pools import TideForecasts, most_needed, node_statuses, pool_statuses, tide_status

MAX_HANDOVERS = 50


class PoolReports:
    """Builds reports from the platform's present state and its history."""

    def __init__(self, platform: PlatformLike, history: HistoryIndex) -> None:
        self._platform = platform
        self._history = history
        self._tides = TideForecasts()

    def report(self, past_days: int = 1) -> PoolsReport:
        """The report of this instant: the tide of `past_days`, and a forecast over half that time, at most one day."""
        platform = self._platform
        view, shown, now_s = platform.view(), platform.snapshot(), platform.now_s()
        nodes = node_statuses(view, shown.drains)
        tide = shown.tide
        horizon_s = tide.day_s * min(1.0, past_days / 2)
        tide_report = tide_status(
            tide,
            past_days,
            self._history.pool_sizes(now_s - past_days * tide.day_s) if nodes else (),
            self._tides.bands(tide, now_s, horizon_s, most_needed(view)),
        )
        return PoolsReport(
            now_s=now_s,
            wall_clock_offset_s=platform.wall_clock_offset_s,
            pools=pool_statuses(nodes),
            nodes=nodes,
            tide=tide_report,
            handovers=self._history.handovers()[-MAX_HANDOVERS:],
        )

    def coming(self, horizon_s: float) -> tuple[TideBand, ...]:
        """The forecast for the next `horizon_s`; empty until a full day has been observed."""
        platform = self._platform
        tide = platform.snapshot().tide
        return self._tides.bands(tide, platform.now_s(), horizon_s, most_needed(platform.view()))
