"""A real browser on a search for a job's functions: the map, what was tried, speed and batch over time."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kits.end_to_end.browser import (
    CHROMIUM,
    DRAWN,
    NOW_S,
    PlatformDouble,
    browsing,
    busy_status,
    busy_timeline,
    count,
    make_job,
    serving,
    text,
)
from springtide.core.function_search import BatchPhase
from springtide.core.functions import Bill, FunctionPlan, FunctionStage
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus, PlanChange
from springtide.core.status.platform import PlatformStatus, ProgressPoint, ProgressSeries
from springtide.core.status.search import ExpectedConfiguration, SearchStatus, StreamStatus, TriedConfiguration
from springtide.core.wire.functions import LaneTimes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
PICTURES = os.environ.get("SPRINGTIDE_PICTURES", "")
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SIZES_MB = (512, 1024, 1536, 2048, 3072, 4096, 6144)
TRIED = ((2, 1024, 64, 18, False), (8, 2048, 64, 9, True), (4, 1536, 64, 22, False), (8, 1536, 256, 31, False))


def made_up_step_s(workers: int, memory_mb: int, batch: int = 256) -> float:
    """A surface with an optimum inside: computation shrinks with the workers, the exchange grows."""
    return batch * 0.012 / workers / min(1.9, memory_mb / 1769) + 0.05 * math.log2(workers + 1) + 0.01 * workers


def expected_map() -> tuple[ExpectedConfiguration, ...]:
    return tuple(
        ExpectedConfiguration(
            num_workers=workers,
            memory_mb=memory_mb,
            step_s=made_up_step_s(workers, memory_mb),
            step_usd=made_up_step_s(workers, memory_mb) * workers * memory_mb / 1024 * 1.7e-5,
            error_fraction=0.08,
            model_step_s=0.8 * made_up_step_s(workers, memory_mb),
            meets_goal=made_up_step_s(workers, memory_mb) < 1.2,
        )
        for workers in WORKERS
        for memory_mb in SIZES_MB
    )


def tried() -> tuple[TriedConfiguration, ...]:
    return tuple(
        TriedConfiguration(
            num_workers=workers,
            memory_mb=memory_mb,
            global_batch_size=batch,
            gradient_bytes=4 << 20,
            num_steps=num_steps,
            step_s=made_up_step_s(workers, memory_mb, batch) * 1.06,
            step_usd=1.2e-5 * workers,
            sync_s=0.1,
            collective="duplex",
            model_step_s=0.8 * made_up_step_s(workers, memory_mb, batch),
            is_running=index == len(TRIED) - 1,
            is_left=is_left,
        )
        for index, (workers, memory_mb, batch, num_steps, is_left) in enumerate(TRIED)
    )


def plan(workers: int, memory_mb: int) -> FunctionPlan:
    return FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=11, memory_mb=memory_mb),), num_replicas=workers)


def search_status() -> PlatformStatus:
    """The busy platform with a job whose batch has grown a while ago, and one that waits for data."""
    now = plan(8, 1536)
    changes = tuple(
        PlanChange(step=step, at_s=NOW_S - ago_s, plan=plan(*which), pause_s=0.4, num_stayed=stayed)
        for step, ago_s, which, stayed in ((0, 300, (2, 1024), 0), (18, 240, (8, 2048), 0), (27, 210, (4, 1536), 0),
                                           (49, 110, (8, 1536), 4))
    )  # fmt: skip
    places = tuple(
        PlaceStatus(stage=0, replica=replica, incarnation=1, phase="training", memory_mb=1536,
                    memory_used_bytes=400 << 20, invoked_at_s=NOW_S - 100, lifetime_left_s=200.0, step=80,
                    lanes=LaneTimes(step_s=0.7, forward_s=0.2, backward_s=0.3, sync_s=0.15))
        for replica in range(8)
    )  # fmt: skip
    run = FunctionRunStatus(
        service="emulator", plan=now, places=places, step_s=0.71, predicted_step_s=0.66, saved_step=79,
        num_invocations=26, bill=Bill(function_usd=0.0121, request_usd=0.0042), budget_usd=0.05, changes=changes,
    )  # fmt: skip
    search = SearchStatus(
        goal="fastest within $0.05", phase="searching", num_workers=8, memory_mb=1536, max_workers=32,
        reason="the batch grew to 256: 8 x 1536 MB is expected to save 41 s of what is left for $0.003",
        sizes_mb=SIZES_MB, tried=tried(), num_left=1, num_earlier=3, search_s=6.2, search_usd=0.00071,
        model_error_fraction=0.31, error_fraction=0.06,
    )  # fmt: skip
    job = make_job(
        "wave-1f2e", "wave", reason="8 functions (1 x 8), 1536 MB each: fastest within $0.05", step=80,
        total_steps=240, progress_fraction=0.33, loss=1.92, on="emulator", functions=run, search=search, epoch=4,
        global_batch_size=256, min_workers=1, max_workers=1, samples_per_s=360.0, eta_s=113.0, budget_usd=0.05,
        cost_usd=0.0163, batch_schedule=(BatchPhase(from_epoch=0, global_batch_size=64),
                                         BatchPhase(from_epoch=4, global_batch_size=256)),
    )  # fmt: skip
    idle = make_job(
        "clicks-77aa", "clicks", step=64, loss=0.4, on="emulator",
        functions=FunctionRunStatus(service="emulator", plan=plan(2, 1024), bill=Bill(function_usd=0.002)),
        stream=StreamStatus(name="clicks", num_samples=4133, num_used=4096, num_waiting=37, arrivals_per_s=1.4,
                            is_idle=True),
    )  # fmt: skip
    status = busy_status()
    return replace(status, jobs=(job, idle, *status.jobs))


def growing_series() -> ProgressSeries:
    """Five minutes with three changes of plan, the last one after the batch had grown."""
    points = []
    for index in range(100):
        at_s = NOW_S - 300 + 3 * index
        phase = sum(at_s >= NOW_S - ago_s for ago_s in (240, 210, 110))
        workers, batch, speed = ((2, 64, 60), (8, 64, 150), (4, 64, 120), (8, 256, 360))[phase]
        points.append(
            ProgressPoint(
                at_s=at_s,
                step=index,
                progress_fraction=index / 300,
                num_workers=workers,
                global_batch_size=batch,
                samples_per_s=speed * (1 + 0.05 * math.sin(index)),
            )
        )
    return ProgressSeries(job_id="wave-1f2e", now_s=NOW_S, points=tuple(points))


class SearchDouble(PlatformDouble):
    """The platform of `search_status`; the map and the points are asked for apart."""

    def __init__(self) -> None:
        super().__init__(search_status(), busy_timeline())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/jobs/{job_id}/series", self.answer_series),
            Route("/v1/jobs/{job_id}", self.answer_job),
            *super().routes(),
        ]

    async def answer_series(self, request: Request) -> Response:
        series = growing_series()
        empty = ProgressSeries(job_id=request.path_params["job_id"], now_s=NOW_S, points=())
        return self._json(series if series.job_id == request.path_params["job_id"] else empty)

    async def answer_job(self, request: Request) -> Response:
        job = next(job for job in self.status.jobs if job.job_id == request.path_params["job_id"])
        if job.search is not None:
            job = replace(job, search=replace(job.search, expected=expected_map()))
        return self._json(job)


SHOWN = "document.querySelectorAll('#functions .map .map-cell').length && document.querySelector('.over-time .line')"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_map_table_and_lines_over_time(tmp_path: Path, width: int, dark: bool) -> None:
    with serving(SearchDouble()) as address, browsing(f"{address}/", tmp_path / "profile", dark=dark) as browser:
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=1100, deviceScaleFactor=1, mobile=False)
        browser.wait_for(DRAWN)
        browser.wait_for(SHOWN)
        assert count(browser, ".map .map-cell") == len(WORKERS) * len(SIZES_MB)
        assert count(browser, ".map .tried") == 1, "of the batch that it has now"
        assert count(browser, ".map .tried.running") == 1
        assert count(browser, ".map .map-misses") > 0
        assert count(browser, ".tried-table tbody tr") == 4
        section = text(browser, "#functions")
        assert "fastest within $0.05" in section
        assert "searching, now 8 \N{MULTIPLICATION SIGN} 1536 MB: the batch grew to 256" in section
        assert "6.2 s and $0.00071 beyond the best known, in 1 configuration left again" in section
        assert "model alone off by 31 %, corrected 6 %, 3 measurements from earlier runs" in section
        assert "256 now; 64 from epoch 0, 256 from epoch 4" in section
        assert "clicks: 37 samples waiting, 4,096 used, 1.4 a second arrive; idle: no function runs" in section
        assert count(browser, ".over-time .line") == 3
        assert count(browser, ".over-time .change") == 4
        assert "V" in browser.evaluate("document.querySelector('.over-time .row-1').getAttribute('d')"), "it steps"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        if PICTURES:
            browser.evaluate("document.querySelector('#functions').scrollIntoView()")
            browser.screenshot(Path(PICTURES) / f"search-{width}-{'dark' if dark else 'light'}.png")


def test_the_map_shows_time_or_cost(tmp_path: Path) -> None:
    with serving(SearchDouble()) as address, browsing(f"{address}/", tmp_path) as browser:
        browser.wait_for(DRAWN)
        browser.wait_for(SHOWN)
        before = browser.evaluate("document.querySelector('.map .map-cell').style.fill")
        assert " ms" in text(browser, ".map-legend")
        browser.evaluate("document.querySelector('[data-measure=cost]').click()")
        assert "$" in text(browser, ".map-legend")
        assert browser.evaluate("document.querySelector('.map .map-cell').style.fill") != before
        assert count(browser, "[data-measure=cost][aria-pressed=true]") == 1
        tip = text(browser, ".map .tried title")
        assert tip.startswith("4: 8 \N{MULTIPLICATION SIGN} 1536 MB with batch 256")
        assert "runs now" in tip
