"""A real browser on a job whose batch changes: its charts over time, and what is planned for it in the Gantt."""

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
    Browser,
    PlatformDouble,
    browsing,
    busy_status,
    busy_timeline,
    count,
    serving,
    text,
)
from springtide.core.status.platform import Planned, ProgressPoint, ProgressSeries

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
# Where somebody wants to look at the pages themselves.
PICTURES = os.environ.get("SPRINGTIDE_PICTURES", "")


def growing_series() -> ProgressSeries:
    """Ten minutes in which the batch grew twice, the second prediction better than the first."""
    points = []
    for index in range(60):
        at_s, phase = NOW_S - 300 + 5 * index, min(2, index // 20)
        speed = 400.0 * (1 + phase)
        points.append(
            ProgressPoint(
                at_s=at_s,
                step=40 * index,
                progress_fraction=index / 80,
                num_workers=1 + phase,
                global_batch_size=64 * 2**phase,
                samples_per_s=speed,
                goodput_samples_per_s=speed * (1.0, 0.9, 0.75)[phase],
                noise_scale=None if index < 3 else 100 + 200 * (1 - math.exp(-index / 20)),
                predicted_finish_at_s=NOW_S + (400, 60, 115)[phase],
                loss=2.0 * math.exp(-index / 20),
                metrics={"val/accuracy": 1.0 - math.exp(-index / 15), "margin": index / 20 - 1.0},
            )
        )
    return ProgressSeries(job_id="digits-3f2a", now_s=NOW_S, points=tuple(points))


def earlier_series() -> ProgressSeries:
    """A run with half the steps and without the second metric."""
    points = [
        ProgressPoint(at_s=at_s, step=40 * index, loss=1.5 - 0.03 * index, metrics={"val/accuracy": 0.02 * index})
        for index in range(30)
        for at_s in (10.0 + index,)
    ]
    return ProgressSeries(job_id="sweep-lr-0.01-aa07", now_s=NOW_S, points=tuple(points))


class AdaptiveDouble(PlatformDouble):
    """The busy platform, with a plan, and a first job whose batch changes."""

    def __init__(self) -> None:
        status, timeline = busy_status(), busy_timeline()
        jobs = tuple(
            replace(
                job,
                initial_batch_size=64,
                batch_bounds=(64, 512),
                global_batch_size=256,
                noise_scale=287.0,
                efficiency_fraction=0.75,
                goodput_samples_per_s=609.0,
                learning_rate_factor=3.0,
            )
            if job.name == "digits"
            else job
            for job in status.jobs
        )
        planned = (
            Planned(
                workload_id="digits-3f2a", workload_name="digits", num_devices=2, start_s=NOW_S, end_s=NOW_S + 110.0
            ),
            Planned(workload_id="gpt-91bc", workload_name="gpt", num_devices=1, start_s=NOW_S, end_s=NOW_S + 95.0),
            Planned(
                workload_id="sweep-lr-0.01-aa07",
                workload_name="sweep-lr-0.01",
                num_devices=2,
                start_s=NOW_S + 112.0,
                end_s=NOW_S + 220.0,
            ),
        )
        super().__init__(replace(status, jobs=jobs), replace(timeline, planned=planned))

    def routes(self) -> list[Route]:
        return [Route("/v1/jobs/{job_id}/series", self.answer_series), *super().routes()]

    async def answer_series(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        known = {series.job_id: series for series in (growing_series(), earlier_series())}
        return self._json(known.get(job_id) or ProgressSeries(job_id=job_id, now_s=NOW_S, points=()))


def keep_picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.screenshot(Path(PICTURES) / f"{name}.png")


@pytest.mark.parametrize("dark", [False, True])
def test_the_plan_is_hatched_and_the_batch_stands_in_the_table(tmp_path: Path, dark: bool) -> None:
    with serving(AdaptiveDouble()) as address, browsing(f"{address}/?window=600", tmp_path, dark=dark) as browser:
        browser.wait_for(DRAWN)
        browser.wait_for("document.querySelectorAll('#gantt rect.planned').length === 5")
        assert count(browser, "#gantt rect.forecast") == 0, "where there is a plan it stands in the forecast's place"
        assert "planned: sweep-lr-0.01 on 2 devices" in text(browser, "#gantt")
        jobs = text(browser, "#jobs")
        assert "batch 256 of 64..512" in jobs
        assert "noise 287, 75 % efficient" in jobs
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"
        keep_picture(browser, f"plan-{'dark' if dark else 'light'}")


@pytest.mark.parametrize("dark", [False, True])
def test_a_job_over_time_shows_progress_goodput_batch_and_noise(tmp_path: Path, dark: bool) -> None:
    with serving(AdaptiveDouble()) as address, browsing(address, tmp_path, dark=dark) as browser:
        browser.wait_for(DRAWN)
        browser.evaluate("document.querySelector('[data-series=\"digits-3f2a\"]').click()")
        browser.wait_for("document.querySelectorAll('#series[open] #series-noise path.line').length")
        assert text(browser, "#series-title") == "How digits trains"
        assert count(browser, "#series-progress path.predicted") == 3
        assert count(browser, "#series-goodput path.line") == 2
        assert text(browser, "#series-batch-now") == "256"
        assert text(browser, "#series-progress-now") == "73 %"
        assert "V" in browser.evaluate("document.querySelector('#series-batch path.line').getAttribute('d')")
        keep_picture(browser, f"series-{'dark' if dark else 'light'}")
        browser.evaluate("document.querySelector('#series-close').click()")
        assert count(browser, "#series[open]") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_two_runs_are_drawn_over_their_steps(tmp_path: Path, dark: bool) -> None:
    with serving(AdaptiveDouble()) as address, browsing(address, tmp_path, dark=dark) as browser:
        browser.wait_for(DRAWN)
        browser.evaluate("document.querySelector('[data-series=\"digits-3f2a\"]').click()")
        browser.wait_for("document.querySelectorAll('#series-metrics svg path.line').length === 2")
        assert text(browser, "#series-metrics").count("over") == 0
        assert browser.evaluate("document.getElementById('series-metric-margin-now').textContent") == "1.95"
        assert not browser.evaluate("document.querySelector('#series-legend').checkVisibility()")
        browser.evaluate(
            "const choice = document.querySelector('#series-beside'); choice.value = 'sweep-lr-0.01-aa07';"
            "choice.dispatchEvent(new Event('change'))"
        )
        browser.wait_for("document.querySelectorAll('#series-loss path.line.other').length === 1")
        assert text(browser, "#series-loss-now") == "0.1047 / 0.63"
        assert "step 2,360" in text(browser, "#series-loss")
        assert count(browser, "#series-progress path.predicted") == 0
        assert text(browser, "#series-other") == "sweep-lr-0.01-aa07"
        keep_picture(browser, f"series-beside-{'dark' if dark else 'light'}")


def test_a_job_that_has_reported_nothing_says_so(tmp_path: Path) -> None:
    with serving(AdaptiveDouble()) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        browser.evaluate("document.querySelector('[data-series=\"gpt-91bc\"]').click()")
        browser.wait_for("document.querySelector('#series-state').textContent.includes('Nothing has been reported')")
        assert "not known yet" in text(browser, "#series-noise")
