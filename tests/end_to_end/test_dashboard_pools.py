"""A real browser on pools: nodes with their labels, the tide with its forecast, loans and reclaims."""

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
    EVIL,
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
from springtide.core.status.platform import DeviceStatus, Interval, Mark, PlatformStatus, Timeline
from springtide.core.status.pools import (
    AffectedJob,
    DrainStatus,
    Handover,
    LoanInterval,
    NodeStatus,
    PoolSize,
    PoolsReport,
    TideBand,
    TideStatus,
)
from springtide.service.status.pools import pool_statuses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
# Where somebody wants to look at the pages themselves.
PICTURES = os.environ.get("SPRINGTIDE_PICTURES", "")
DAY_S = 86_400.0
BIN_S = DAY_S / 96
REASON = "forecast for 07:30 needs 3 more"


def need_at(at_s: float) -> float:
    """Low by night, a shoulder in the morning, the peak in the evening."""
    hour = (at_s / 3600.0) % 24
    return 3 + 7 * math.exp(-(((hour - 10.5) / 2.6) ** 2)) + 9 * math.exp(-(((hour - 19.5) / 2.8) ** 2))


def tide() -> TideStatus:
    """A day and a half past a start at which the clock stood at 0, seen at 06:00 of the second day."""
    now_s = NOW_S
    open_bin = int(now_s // BIN_S)
    peaks = tuple(round(need_at((open_bin - 95 + index) * BIN_S + 21_600.0)) for index in range(96))
    bands = []
    for index in range(49):
        expected = need_at((open_bin + index) * BIN_S + 21_600.0)
        width = 0.6 + 0.05 * index
        bands.append(
            TideBand(
                at_s=(open_bin + index) * BIN_S,
                expected=expected,
                lower=max(0.0, expected - width),
                upper=expected + width,
            )
        )
    sizes = []
    for index in range(96):
        at_s = (open_bin - 95 + index) * BIN_S
        num_open = min(14, 2 * math.ceil((max(peaks[index : index + 4]) + 1) / 2))
        if not sizes or sizes[-1].num_open != num_open:
            sizes.append(PoolSize(at_s=at_s, num_open=num_open, num_owned=10))
    return TideStatus(
        bin_s=BIN_S, day_s=DAY_S, from_at_s=(open_bin - 95) * BIN_S, peaks=peaks, level=peaks[-1],
        forecast_bin_s=BIN_S, forecast=tuple(bands), sizes=tuple(sizes),
    )  # fmt: skip


def nodes() -> tuple[NodeStatus, ...]:
    """Ten servers of two devices: three are on loan, one of them comes back and one goes over to services."""
    made = []
    for index in range(10):
        owner = "training" if index < 5 else "inference"
        pool = "training" if index < 8 else "inference"
        drain = None
        if index == 6:
            drain = DrainStatus(
                pool="inference", since_at_s=NOW_S - 40, reclaim_at_s=NOW_S - 12, reason=REASON, cost_s=420.0
            )
        if index == 4:
            drain = DrainStatus(
                pool="inference", since_at_s=NOW_S - 90, reclaim_at_s=None, reason="forecast for 19:00", cost_s=0.0
            )
        made.append(
            NodeStatus(
                node_id=f"gpu-{index:02d}", pool=pool, owner=owner, is_loaned=pool != owner, num_devices=2,
                num_training=2 if pool == "training" and index != 7 else 0, num_serving=int(pool == "inference"),
                drain=drain,
            )
        )  # fmt: skip
    return tuple(made)


def handovers() -> tuple[Handover, ...]:
    """A loan by night, a reclaim that shrank a job, one that stopped one, and one under way."""
    digits = AffectedJob(
        workload_id="digits-3f2a", name="digits", effect="shrunk", num_workers_before=4, num_workers_after=2
    )
    gpt = AffectedJob(workload_id="gpt-91bc", name="gpt", effect="stopped", num_workers_before=2, num_workers_after=0)
    out = {"kind": "loan", "from_pool": "inference", "to_pool": "training", "is_return": False, "num_devices": 2}
    back = {"kind": "reclaim", "from_pool": "training", "to_pool": "inference", "num_devices": 2, "reason": REASON}
    return (
        Handover(node_id="gpu-05", state="done", demanded_at_s=310.0, labelled_at_s=310.0,
                 reason="services need 4 devices until 07:00", **out),
        Handover(node_id="gpu-08", is_return=True, state="done", demanded_at_s=620.0, reclaim_at_s=640.0,
                 labelled_at_s=651.5, serving_at_s=654.0, cost_s=180.0, reclaim_kind="shrinking", affected=(digits,),
                 **back),
        Handover(node_id="gpu-09", is_return=True, state="done", demanded_at_s=700.0, reclaim_at_s=700.0,
                 labelled_at_s=729.8, serving_at_s=733.1, cost_s=1260.0, reclaim_kind="interrupting", affected=(gpt,),
                 **(back | {"reason": "sentiment's minimum of 4 is missing 2"})),
        Handover(node_id="gpu-03", is_return=False, state="called off", demanded_at_s=800.0,
                 **(back | {"reason": EVIL})),
        Handover(node_id="gpu-06", is_return=True, state="draining", demanded_at_s=NOW_S - 40,
                 reclaim_at_s=NOW_S - 12, cost_s=420.0, reclaim_kind="shrinking", affected=(digits,), **back),
    )  # fmt: skip


def pooled_status() -> PlatformStatus:
    """The busy platform on ten servers of two pools."""
    devices = []
    for node in nodes():
        for slot in range(2):
            workload_id, name = (None, None)
            if slot < node.num_training:
                workload_id, name = "digits-3f2a", "digits"
            elif slot < node.num_serving:
                workload_id, name = "sentiment-7c1d", "sentiment"
            devices.append(
                DeviceStatus(
                    device_id=f"{node.node_id}/{slot}", node_id=node.node_id, kind="gpu", workload_id=workload_id,
                    workload_name=name, replica_id=None,
                )
            )  # fmt: skip
    return replace(busy_status(), devices=tuple(devices), nodes=nodes(), pools=pool_statuses(nodes()))


def pooled_timeline() -> Timeline:
    """One bar on each held device, two loans, one of them over, and the marks of a loan and a reclaim."""
    intervals = tuple(
        Interval(
            device_id=device.device_id, workload_id=device.workload_id, workload_name=str(device.workload_name),
            workload_kind="service" if device.workload_id == "sentiment-7c1d" else "job",
            replica_id=device.device_id, start_s=500.0, end_s=None,
        )
        for device in pooled_status().devices
        if device.workload_id
    )  # fmt: skip
    loans = (
        LoanInterval(node_id="gpu-05", owner="inference", pool="training", start_s=310.0, end_s=None),
        LoanInterval(node_id="gpu-08", owner="inference", pool="training", start_s=560.0, end_s=651.5),
    )
    marks = (
        Mark(at_s=640.0, workload_id="", node_id="gpu-08", kind="reclaim", text=f"gpu-08 is reclaimed: {REASON}"),
        Mark(at_s=560.0, workload_id="", node_id="gpu-08", kind="loan", text="gpu-08 goes to training"),
    )
    return Timeline(now_s=NOW_S, intervals=intervals, marks=(*busy_timeline().marks, *marks), loans=loans)


class PooledDouble(PlatformDouble):
    """The busy platform with pools."""

    def __init__(self, report: PoolsReport | None = None) -> None:
        super().__init__(pooled_status(), pooled_timeline())
        self.asked: list[str] = []
        offset_s = 1_763_700_000.0 // DAY_S * DAY_S + 21_600.0 - NOW_S
        self.status = replace(self.status, wall_clock_offset_s=offset_s)
        self.report = report or PoolsReport(
            now_s=NOW_S, wall_clock_offset_s=offset_s, pools=self.status.pools, nodes=self.status.nodes, tide=tide(),
            handovers=handovers(),
        )  # fmt: skip

    def routes(self) -> list[Route]:
        return [Route("/v1/pools", self.answer_pools), *super().routes()]

    async def answer_pools(self, request: Request) -> Response:
        self.asked.append(request.query_params["past_days"])
        return self._json(self.report)


TIDE_DRAWN = "document.querySelector('#tide .need') && document.querySelectorAll('#handovers tbody tr').length"


def keep_picture(browser: Browser, name: str, part: str = "#pools") -> None:
    if PICTURES:
        browser.evaluate(f"document.querySelector('{part}').scrollIntoView()")
        browser.screenshot(Path(PICTURES) / f"{name}.png")


@pytest.mark.parametrize("dark", [False, True])
def test_pools_show_labels_loans_the_tide_and_its_forecast(tmp_path: Path, dark: bool) -> None:
    with serving(PooledDouble()) as address, browsing(f"{address}/?window=all", tmp_path, dark=dark) as browser:
        browser.wait_for(DRAWN)
        browser.wait_for(TIDE_DRAWN)
        assert count(browser, "#pool-nodes .node") == 10
        assert count(browser, "#pool-nodes .node.loaned") == 3
        assert count(browser, "#pool-nodes .node.draining") == 2
        assert "training 8 servers (3 on loan) · inference 2 servers" in text(browser, "#pools-summary")
        labels = text(browser, "#pool-nodes")
        assert "training → inference" in labels
        assert "reclaimed for 1" in labels
        assert "on loan from inference" in labels
        assert count(browser, "#tide .band") == 1
        assert count(browser, "#tide .open") == 1
        assert "devices needed now" in text(browser, "#tide-now")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"
        keep_picture(browser, f"pools-{'dark' if dark else 'light'}")


def test_every_loan_and_reclaim_says_why_what_it_cost_and_how_long_it_took(tmp_path: Path) -> None:
    with serving(PooledDouble()) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(DRAWN)
        browser.wait_for(TIDE_DRAWN)
        assert count(browser, "#handovers tbody tr") == 5
        first = text(browser, "#handovers tbody tr")
        assert "RECLAIM gpu-06" in first
        assert REASON in first
        assert "digits shrank 4 → 2" in first
        assert "420 device\u2011s" in first
        rows = text(browser, "#handovers tbody")
        assert "label 29.8 s, serving 33.1 s" in rows
        assert "label 11.5 s, serving 14.0 s" in rows, "from the moment somebody had to go"
        assert "gpt stopped" in rows
        assert "called off" in rows
        assert "LOAN gpu-05" in rows
        assert EVIL in rows
        assert count(browser, "main img") == 0


def test_the_gantt_hatches_what_is_on_loan_and_marks_reclaims(tmp_path: Path) -> None:
    with serving(PooledDouble()) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert count(browser, "#gantt rect.loan-row.pool-training") == 4, "two devices of two nodes"
        assert count(browser, "#gantt path.mark.reclaim") == 1
        assert count(browser, "#gantt path.mark.loan") == 1
        assert "gpu-05 of inference, on loan to training" in text(browser, "#gantt")
        assert "gpu-08 is reclaimed" in text(browser, "#story")
        keep_picture(browser, "pools-gantt", "#gantt")


def test_on_a_narrow_screen_nothing_sticks_out(tmp_path: Path) -> None:
    with serving(PooledDouble()) as address, browsing(address, tmp_path) as browser:
        browser.send("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
        browser.wait_for(TIDE_DRAWN)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        keep_picture(browser, "pools-narrow")


def test_the_picture_of_the_tide_says_what_is_under_the_pointer(tmp_path: Path) -> None:
    with serving(PooledDouble()) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(TIDE_DRAWN)
        point = (
            "(where) => {{ const tide = document.querySelector('#tide'); const box = tide.getBoundingClientRect();"
            " tide.dispatchEvent(new PointerEvent('{kind}', {{clientX: box.left + where * box.width,"
            " clientY: box.top + 40, bubbles: true}})); }}"
        )
        browser.evaluate(f"({point.format(kind='pointermove')})(0.4)")
        assert "needed, 12 open to services of 10 owned" in text(browser, "#tide-now")
        browser.evaluate(f"({point.format(kind='pointermove')})(0.9)")
        assert "expected," in text(browser, "#tide-now")
        browser.evaluate(f"({point.format(kind='pointerleave')})(0)")
        assert "highest ahead" in text(browser, "#tide-now")


def test_many_servers_are_told_in_a_word_each(tmp_path: Path) -> None:
    double = PooledDouble()
    many = tuple(replace(nodes()[index % 10], node_id=f"gpu-{index:03d}") for index in range(64))
    double.status = replace(double.status, nodes=many)
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(TIDE_DRAWN)
        assert count(browser, "#pool-nodes.dense .node") == 64
        assert browser.evaluate("document.querySelector('#pool-nodes').clientHeight") < 500
        assert "labelled for training" in browser.evaluate("document.querySelector('#pool-nodes .node').title")
        keep_picture(browser, "pools-dense")


def test_another_window_of_the_tide_is_asked_for(tmp_path: Path) -> None:
    double = PooledDouble()
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(TIDE_DRAWN)
        assert browser.evaluate("document.querySelector('[data-days=\"1\"]').ariaPressed") == "true"
        browser.evaluate("document.querySelector('[data-days=\"7\"]').click()")
        browser.wait_for("document.querySelector('[data-days=\"7\"]').ariaPressed === 'true'")
        while "7" not in double.asked:
            browser.evaluate("1")


def test_where_nothing_is_known_yet_the_section_says_so(tmp_path: Path) -> None:
    young = PoolsReport(
        now_s=NOW_S, wall_clock_offset_s=0.0, pools=(), nodes=(), handovers=(),
        tide=TideStatus(bin_s=BIN_S, day_s=DAY_S, from_at_s=0.0, peaks=(), level=None),
    )  # fmt: skip
    with serving(PooledDouble(young)) as address, browsing(address, tmp_path) as browser:
        browser.wait_for("document.querySelector('#handovers-none:not([hidden])')")
        assert "no service has been deployed yet" in text(browser, "#tide-now")


def test_a_platform_without_pools_shows_no_such_section(tmp_path: Path) -> None:
    with serving(PlatformDouble(busy_status(), busy_timeline())) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert browser.evaluate("document.querySelector('#pools').hidden")
        assert browser.evaluate("document.querySelector('.of-pools').hidden")
