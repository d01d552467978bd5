"""A real browser on the dashboard: what the platform streams becomes device cards, table rows and Gantt bars."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.end_to_end.browser import (
    CHROMIUM,
    DRAWN,
    EVIL,
    Browser,
    PlatformDouble,
    browsing,
    busy_status,
    busy_timeline,
    count,
    serving,
    text,
)
from springtide.core.status.platform import (
    DeviceStatus,
    PlatformStatus,
    Timeline,
)


def empty_status() -> PlatformStatus:
    free = DeviceStatus(
        device_id="local/0", node_id="local", kind="cpu", workload_id=None, workload_name=None, replica_id=None
    )
    return PlatformStatus(
        version="0.1.0", policy="elastic", seq=1, now_s=2.0, wall_clock_offset_s=time.time() - 2.0,
        devices=(free,), jobs=(), services=(),
    )  # fmt: skip


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]


def test_browser_draws_devices_jobs_services_and_bars(tmp_path: Path) -> None:
    double = PlatformDouble(busy_status(), busy_timeline())
    with serving(double) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert text(browser, "#live-text") == "live"
        assert count(browser, "#devices .device") == 4
        assert count(browser, "#jobs tbody tr") == 5
        assert count(browser, "#services tbody tr") == 1
        assert count(browser, "#gantt rect.bar") == 11
        assert count(browser, "#gantt rect.hatch") == 2, "the bars of a service are hatched"
        assert count(browser, "#gantt path.mark.crash") == 1
        told = "[...document.querySelectorAll('#gantt .marks title')].map((title) => title.textContent).join('; ')"
        marks = browser.evaluate(told)
        assert "3 to 1 worker for gpt" in marks
        assert "started" not in marks, "where a bar begins there is no mark of a resize"
        assert count(browser, "#gantt line.deadline") == 3
        jobs = text(browser, "#jobs")
        assert "812" in jobs
        assert "accuracy 0.873" in jobs
        assert "aimed at\nslack +1m08" in jobs
        assert re.search(r"promised, missed by its plan\nsince \d\d:\d\d:\d\d\nlate by 35\.0 s", jobs)
        assert "--deadline 8m30" in jobs, "what would be accepted stands beside the refusal"
        assert "88 ms" in text(browser, "#services")
        assert "7 refused in 1 min" in text(browser, "#services")
        assert count(browser, "#services td[title='so that the SLO is kept']") == 1
        assert "killed (signal 9)" in text(browser, "#story")
        assert "pause 41 ms" in text(browser, "#gantt"), "the pause is in the tick's tooltip"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"


def test_a_job_with_several_devices_each_says_so_beside_its_workers(tmp_path: Path) -> None:
    status = busy_status()
    digits = next(job for job in status.jobs if job.job_id == "digits-3f2a")
    first, second = digits.replicas
    wide = replace(digits, devices_each=2, num_workers=1, replicas=(replace(first, more_devices=(second.device_id,)),))
    held = [replace(each, replica_id="d1") if each.device_id == second.device_id else each for each in status.devices]
    double = PlatformDouble(
        replace(status, jobs=tuple(wide if job is digits else job for job in status.jobs), devices=tuple(held)),
        busy_timeline(),
    )
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert text(browser, "#jobs").count("11..4\n2 devices each") == 1
        assert text(browser, "#devices").count("digits" + "rank 0, ready") == 2, "one worker on both"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"


def test_what_stalls_or_has_no_finite_loss_has_a_badge(tmp_path: Path) -> None:
    status = busy_status()
    changes = {
        "digits-3f2a": {"stalled_since_s": status.now_s - 720.0, "eta_s": None},
        "gpt-91bc": {"stalled_since_s": status.now_s - 720.0, "is_diverged": True, "loss": None},
        "warmup-0c11": {"is_diverged": True, "loss": None},
    }
    jobs = tuple(replace(job, **changes.get(job.job_id, {})) for job in status.jobs)
    (service,) = status.services
    service = replace(service, rolled_back="revision 2 was rolled back: exit code 1")
    double = PlatformDouble(replace(status, jobs=jobs, services=(service,)), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        found = [re.sub(r"12m\d\d", "12m", line) for line in badges(browser, "#jobs")]
        assert sorted(found) == [
            "digits-3f2a RUNNING STALLED 12m",
            "gpt-91bc RUNNING STALLED 12m LOSS NOT FINITE",
            "warmup-0c11 SUCCEEDED LOSS NOT FINITE",
        ]
        assert badges(browser, "#services") == [f"{service.service_id} {service.state} ROLLED BACK"]
        assert "not finite" in text(browser, "#jobs")
        assert text(browser, "#jobs").count("waiting") == 1, "what has run is not said to wait since it was submitted"
        # It goes with what it tells of.
        double.status = status
        browser.wait_for("document.querySelectorAll('#jobs .badge').length === 0")
        assert badges(browser, "#services") == []


def badges(browser: Browser, table: str) -> list[str]:
    """Of each row with badges: what it is, its state, and the badges."""
    script = f"""[...document.querySelectorAll('{table} tr:has(.badge)')].map((row) => {{
        const states = [...row.querySelectorAll('.state')].map((each) => each.textContent);
        return [row.querySelector('[data-why]').dataset.why, ...states].join(' ');
    }})"""
    return browser.evaluate(script)


def test_a_name_full_of_markup_stays_text(tmp_path: Path) -> None:
    double = PlatformDouble(busy_status(), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert EVIL in text(browser, "#jobs")
        assert count(browser, "main img") == 0
        assert browser.evaluate("document.title") == "(2) Springtide"


def test_why_is_answered_in_place(tmp_path: Path) -> None:
    double = PlatformDouble(busy_status(), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        browser.evaluate("document.querySelector('tr[data-state=PENDING] [data-why]').click()")
        browser.wait_for("document.querySelectorAll('#why[open] #why-history li').length")
        assert "sweep-lr-0.01 is PENDING" in text(browser, "#why-title")
        assert "all 4 devices are held" in text(browser, "#why-reason")
        assert "4 of 4 devices" in text(browser, "#why-evidence")
        assert "springtide cancel" in text(browser, "#why-steps")
        browser.evaluate("document.querySelector('#why-close').click()")
        assert count(browser, "#why[open]") == 0


def test_zooming_in_leaves_out_what_is_past_and_colours_stay(tmp_path: Path) -> None:
    double = PlatformDouble(busy_status(), busy_timeline())
    colour = "document.querySelector('#devices .device').className"
    with serving(double) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(DRAWN)
        before = browser.evaluate(colour)
        browser.evaluate("document.querySelector('[data-window=\"120\"]').click()")
        assert count(browser, "#gantt rect.bar") == 4
        assert browser.evaluate(colour) == before
        assert browser.evaluate("document.querySelector('[data-window=\"120\"]').ariaPressed") == "true"


def test_page_says_when_the_connection_is_lost_and_when_it_is_back(tmp_path: Path) -> None:
    double = PlatformDouble(busy_status(), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        double.goes_away = True
        browser.wait_for("document.querySelector('#live.is-lost')")
        assert "Connection lost" in text(browser, "#alert")
        assert "springtide up" in text(browser, "#alert")
        assert count(browser, "#gantt rect.bar") > 0, "what was known stays on the page"
        double.goes_away = False
        browser.wait_for("document.querySelector('#live.is-live')")
        assert browser.evaluate("document.querySelector('#alert').hidden")


def test_newcomer_is_told_what_to_type(tmp_path: Path) -> None:
    timeline = Timeline(now_s=2.0, intervals=(), marks=())
    with serving(PlatformDouble(empty_status(), timeline)) as address, browsing(address, tmp_path) as browser:
        browser.wait_for("document.querySelector('#live.is-live') && !document.querySelector('#empty').hidden")
        assert "springtide run examples/digits.py" in text(browser, "#empty")
        assert count(browser, "#devices .device.free") == 1
        assert "No device has been held yet" in text(browser, "#gantt")


def test_browser_without_access_is_told_how_to_get_in(tmp_path: Path) -> None:
    double = PlatformDouble(empty_status(), busy_timeline(), refuses=True)
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for("document.querySelector('#live.is-refused')")
        assert "springtide dashboard" in text(browser, "#alert")
