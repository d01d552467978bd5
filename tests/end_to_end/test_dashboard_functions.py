"""A real browser on jobs on functions: places with memory and lifetime, where a step's time goes, and the bill."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.end_to_end.browser import (
    CHROMIUM,
    DRAWN,
    EVIL,
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
from springtide.core.functions import Bill, FunctionPlan, FunctionStage
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus
from springtide.core.status.platform import DeviceStatus, PlatformStatus
from springtide.core.wire.functions import LaneTimes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
MIB = 1 << 20
PLAN = FunctionPlan(
    stages=(
        FunctionStage(first_layer=0, end_layer=4, memory_mb=2048),
        FunctionStage(first_layer=4, end_layer=8, memory_mb=1024),
        FunctionStage(first_layer=8, end_layer=11, memory_mb=1024),
    ),
    num_replicas=2,
    num_micro_batches=8,
    micro_batch_size=4,
)
PHASES = {(0, 0): "training", (1, 0): "training", (2, 0): "leaving", (0, 1): "training", (1, 1): "lost", (2, 1): "warm"}


def place(stage: int, replica: int) -> PlaceStatus:
    phase = PHASES[stage, replica]
    step_s = 1.9 - 0.2 * stage
    lanes = LaneTimes(
        step_s=step_s, forward_s=0.3, backward_s=0.6, update_s=0.02, flush_s=0.5 - 0.1 * stage, sync_s=0.3, upload_s=0.2
    )
    is_lost = phase == "lost"
    return PlaceStatus(
        stage=stage,
        replica=replica,
        incarnation=3,
        phase=phase,
        memory_mb=PLAN.stages[stage].memory_mb,
        memory_used_bytes=0 if is_lost else (970 if stage == 2 else 610) * MIB,
        invoked_at_s=NOW_S - (52 if phase == "leaving" else 20),
        lifetime_left_s=None if is_lost else 8.0 if phase == "leaving" else 40.0,
        step=0 if is_lost else 118,
        lanes=LaneTimes() if is_lost else lanes,
        num_replaced=2 if is_lost else 0,
        num_handovers=stage,
        error=f"killed by its provider {EVIL}" if is_lost else "",
    )


def functions_status() -> PlatformStatus:
    """The busy platform, connected to a function service with a job that has just lost a function."""
    run = FunctionRunStatus(
        service="emulator",
        plan=PLAN,
        places=tuple(place(stage, replica) for stage in range(3) for replica in range(2)),
        step_s=1.92,
        predicted_step_s=1.7,
        saved_step=117,
        num_invocations=19,
        num_replaced=2,
        num_handovers=6,
        num_throttled=1,
        num_redone_steps=2,
        bill=Bill(function_usd=0.0241, request_usd=0.0093, invocation_usd=0.0000038, storage_usd=0.0000007),
        budget_usd=0.05,
    )
    job = make_job(
        "functions-gpt-77aa", "functions-gpt", reason="6 functions (3 x 2), 2048+1024+1024 MB: the recommended of 9",
        step=118, total_steps=360, progress_fraction=0.328, loss=2.871, on="emulator", functions=run, cost_usd=0.0334,
        min_workers=1, max_workers=1, samples_per_s=33.0, eta_s=465.0, budget_usd=0.05, checkpoint_step=117,
    )  # fmt: skip
    status = busy_status()
    places = tuple(
        DeviceStatus(
            device_id=f"functions/{index}", node_id="functions", kind="function",
            workload_id=None if index else job.job_id, workload_name=None if index else job.name, replica_id=None,
        )
        for index in range(2)
    )  # fmt: skip
    return replace(status, jobs=(job, *status.jobs), devices=(*status.devices, *places))


def show(double: PlatformDouble, status: PlatformStatus) -> None:
    """Have the page get another status: the double tells one on each stream, so the stream is cut once."""
    double.status = status
    double.goes_away = True
    time.sleep(0.2)
    double.goes_away = False


def test_places_bars_and_the_bill_are_drawn(tmp_path: Path) -> None:
    double = PlatformDouble(functions_status(), busy_timeline())
    with serving(double) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert count(browser, "#functions .place") == 6
        assert count(browser, "#functions .phase.lost") == 1
        assert count(browser, "#functions .bars li") == 3
        section = text(browser, "#functions")
        assert "6 functions (3 stages \N{MULTIPLICATION SIGN} 2 replicas), 2048+1024+1024 MB" in section
        assert "1.9 s measured, 1.7 s predicted (13 % more)" in section
        assert "$0.0334 of $0.05, $0.0166 left" in section
        assert "19 invocations, 6 handed over in time, 2 replaced after they died" in section
        assert "object requests$0.0093" in section
        assert "610 of 2048 MB" in section
        assert "no function yet" in section
        label = browser.evaluate("document.querySelector('#functions .bars-bar').getAttribute('aria-label')")
        assert label == "stage 0: a step of 1.9 s: computation 48 %, flush 26 %, synchronisation 15 %"
        widths = "Array.from(document.querySelectorAll('#functions .bars li:first-child .part'), p => p.offsetWidth)"
        computation, flush, sync = browser.evaluate(widths)
        assert computation > flush > sync > 0
        assert count(browser, "#functions img") == 0, "what a function says stays text"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"
        assert "6 functions" in text(browser, "#jobs")


def test_a_card_is_updated_in_place_and_goes_with_its_job(tmp_path: Path) -> None:
    status = functions_status()
    double = PlatformDouble(status, busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        browser.evaluate("document.querySelector('#functions .place').dataset.mine = 'yes'")
        run = status.jobs[0].functions
        assert run is not None
        whole = tuple(replace(each, phase="training", lifetime_left_s=50.0) for each in run.places)
        job = replace(status.jobs[0], functions=replace(run, places=whole))
        show(double, replace(status, seq=status.seq + 1, jobs=(job, *status.jobs[1:])))
        browser.wait_for("document.querySelectorAll('#functions .phase.training').length === 6")
        assert count(browser, "#functions .place[data-mine=yes]") == 1
        show(double, replace(status, seq=status.seq + 2, jobs=status.jobs[1:]))
        browser.wait_for("document.querySelector('#functions').hidden")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_sticks_out_light_dark_narrow(tmp_path: Path, width: int, dark: bool) -> None:
    double = PlatformDouble(functions_status(), busy_timeline())
    with serving(double) as address, browsing(f"{address}/?window=all", tmp_path / "profile", dark=dark) as browser:
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.wait_for(DRAWN)
        browser.wait_for("document.querySelectorAll('#functions .place').length === 6")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if os.environ.get("SPRINGTIDE_SCREENSHOTS"):
            name = f"functions-{width}-{'dark' if dark else 'light'}.png"
            browser.evaluate("document.querySelector('#functions').scrollIntoView()")
            browser.screenshot(Path(os.environ["SPRINGTIDE_SCREENSHOTS"]) / name)
