"""A real browser on shared devices: bars of what is granted and used, the last minutes, EMERGENCY, what is enforced."""

from __future__ import annotations

import math
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
    PlatformDouble,
    browsing,
    busy_status,
    busy_timeline,
    count,
    serving,
    text,
)
from kits.end_to_end.pictures import keep_picture
from springtide.core.shares import Share
from springtide.core.status.platform import DeviceHolder, Interval, PlatformStatus
from springtide.core.status.shares import SharingStatus, TenantStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
SHARES = {
    "s1": ("sentiment-7c1d", "sentiment", 0.3, 0.5),
    "d1": ("digits-3f2a", "digits", 0.4, 0.5),
    "g3": ("gpt-91bc", "gpt", 0.2, 0.4),
}
ON_DEVICE = {"local/0": ("s1", "d1"), "local/2": ("g3",)}


def shared_status() -> PlatformStatus:
    """A service and a job on one device, a job alone with a part of another."""
    plain = busy_status()
    devices = []
    for device in plain.devices:
        holders = tuple(
            DeviceHolder(
                workload_id=SHARES[replica][0], workload_name=SHARES[replica][1], replica_id=replica,
                share=Share(request=SHARES[replica][2], limit=SHARES[replica][3]),
            )
            for replica in ON_DEVICE.get(device.device_id, ())
        )  # fmt: skip
        devices.append(replace(device, holders=holders))
    return replace(plain, devices=tuple(devices))


def tenants(number: int, *, is_urgent: bool) -> tuple[TenantStatus, ...]:
    """What they use and are granted at the `number`-th look: the service surges now and then."""
    surge = max(0.0, math.sin(number / 6))
    service = TenantStatus(
        workload_id="sentiment-7c1d", replica_id="s1", device_id="local/0", request=0.3, limit=0.5,
        granted=0.5 if is_urgent else 0.3, used=0.08 + 0.36 * surge, state="EMERGENCY" if is_urgent else "NONE",
        reason=f"an iteration of 4 has run for 50 ms, 25 ms is usual {EVIL}" if is_urgent else "granted its request",
        throttled_s=2.3,
    )  # fmt: skip
    job = TenantStatus(
        workload_id="digits-3f2a", replica_id="d1", device_id="local/0", request=0.4, limit=0.5,
        granted=0.4 if is_urgent else 0.5, used=0.39 if is_urgent else 0.49,
        state="NONE" if is_urgent else "RECOVERY", throttled_s=83.0,
        reason="held to its request while sentiment is in trouble" if is_urgent else "nobody needs the rest",
    )  # fmt: skip
    alone = TenantStatus(
        workload_id="gpt-91bc", replica_id="g3", device_id="local/2", request=0.2, limit=0.4, granted=0.4, used=0.38,
        reason="nobody else is here",
    )  # fmt: skip
    return (service, job, alone)


class SharedDouble(PlatformDouble):
    """The busy platform with shared devices, whose tenants change from look to look."""

    def __init__(self, *, always_urgent: bool = False, on_gpu: bool = False) -> None:
        super().__init__(shared_status(), busy_timeline())
        self.on_gpu = on_gpu
        self.num_looks = 0
        self.always_urgent = always_urgent
        self.has_tenants = True

    def routes(self) -> list[Route]:
        return [Route("/v1/sharing", self.answer_sharing), *super().routes()]

    async def answer_sharing(self, request: Request) -> Response:
        self.num_looks += 1
        is_urgent = self.always_urgent or math.sin(self.num_looks / 6) > 0.6
        told = SharingStatus(
            mechanism="cgroup-v1",
            enforced="CPU time of each replica and worker with a share; not memory, not caches",
            device_cpus=0.5,
            tick_s=0.005,
            late_p99_s=0.0004,
            reaction_p99_s=0.0071,
            tenants=tenants(self.num_looks, is_urgent=is_urgent) if self.has_tenants else (),
        )
        return self._json(_on_gpu(told) if self.on_gpu else told)


def _on_gpu(told: SharingStatus) -> SharingStatus:
    first, second, third = told.tenants
    busy = replace(first, memory_mb=1000, num_launches=810, memory_used_mb=900, num_open=3, num_denied=1)
    tenants = (busy, replace(second, num_launches=1), third)
    return replace(told, mechanism="cuda-preload", device_cpus=0.0, tenants=tenants)


SHARED = f"{DRAWN} && document.querySelectorAll('#shared-devices .sharer').length"


@pytest.mark.parametrize("dark", [False, True])
def test_each_shared_device_shows_its_sharers_with_what_is_granted_and_used(tmp_path: Path, dark: bool) -> None:
    with serving(SharedDouble(always_urgent=True)) as address, browsing(address, tmp_path, dark=dark) as browser:
        browser.wait_for(f"{SHARED} && document.querySelector('#shared-devices .is-emergency')")
        assert count(browser, "#shared-devices .shared-device") == 2
        assert count(browser, "#shared-devices .sharer") == 3
        first = text(browser, "#shared-devices .sharer")
        assert "sentiment" in first
        assert "▲ EMERGENCY" in first
        assert "0.3 to 0.5, granted 0.50" in first
        assert "held back for 2.3 s so far" in first
        assert EVIL in first
        assert count(browser, "main img") == 0, "a reason is text"
        assert "2 sharers · requests 0.7 of 1 · limits 1" in text(browser, "#shared-devices .heading")
        assert "by cgroup-v1 · a device is 0.5 of a core · control every 5 ms" in text(browser, "#sharing-enforced")
        bar = browser.evaluate("document.querySelector('#shared-devices .share-granted').style.width")
        assert bar == "50%"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"
        keep_picture(browser, f"sharing-{'dark' if dark else 'light'}")


def test_the_last_minutes_are_drawn_with_the_moments_of_emergency(tmp_path: Path) -> None:
    double = SharedDouble(always_urgent=True)
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(f"{SHARED} && document.querySelector('#shared-devices .share-used-path').getAttribute('d')")
        browser.wait_for("document.querySelector('#shared-devices .share-emergency-path').getAttribute('d')")
        assert double.num_looks >= 2
        label = browser.evaluate("document.querySelector('#shared-devices .share-chart').getAttribute('aria-label')")
        assert "looks in EMERGENCY" in label
        granted = browser.evaluate("document.querySelector('#shared-devices .share-granted-path').getAttribute('d')")
        assert granted.startswith("M")


def test_those_who_shared_a_device_lie_in_lanes_of_its_row(tmp_path: Path) -> None:
    double = SharedDouble()
    plain = busy_timeline()
    beside = Interval(
        device_id="local/0", workload_id="sentiment-7c1d", workload_name="sentiment", workload_kind="service",
        replica_id="s1", start_s=800.0, end_s=None,
    )  # fmt: skip
    double.timeline = replace(plain, intervals=(*plain.intervals, beside))
    heights = "[...document.querySelectorAll('#gantt rect.bar')].map((bar) => bar.getAttribute('height'))"
    with serving(double) as address, browsing(f"{address}/?window=all", tmp_path) as browser:
        browser.wait_for(SHARED)
        drawn = browser.evaluate(heights)
        assert drawn.count("9") == 2, "the two who are on local/0 at once"
        assert drawn.count("20") == len(drawn) - 2, "those who came one after the other fill the row"
        keep_picture(browser, "sharing-gantt")


def test_a_device_card_names_everybody_on_it(tmp_path: Path) -> None:
    with serving(SharedDouble()) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(SHARED)
        card = text(browser, "#devices .device")
        assert "sentiment + digits" in card
        assert "2 sharers, requests 0.7 of 1" in card


def test_who_has_just_been_placed_is_there_before_it_is_held_to_its_share(tmp_path: Path) -> None:
    double = SharedDouble()
    double.has_tenants = False
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(SHARED)
        assert count(browser, "#shared-devices .sharer") == 3
        assert "starting" in text(browser, "#shared-devices .sharer")


def test_a_sharer_of_a_gpu_says_what_it_launches_and_holds(tmp_path: Path) -> None:
    double = SharedDouble(on_gpu=True)
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(SHARED)
        told = browser.evaluate("[...document.querySelectorAll('.share-reason')].map((line) => line.textContent)")
        assert "810 launches, 900 of 1000 MB of its memory" in told[0]
        assert "3 let through unheld · 1 allocation refused for its memory · held back" in told[0]
        assert "1 launch, 0 MB of its memory" in told[1]
        assert "launch" not in told[2], "whoever launched nothing says nothing of it"
        assert "by cuda-preload · control every 5 ms" in text(browser, "#sharing-enforced")
        keep_picture(browser, "sharing-gpu")


def test_on_a_narrow_screen_nothing_sticks_out(tmp_path: Path) -> None:
    with serving(SharedDouble()) as address, browsing(address, tmp_path) as browser:
        browser.send("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
        browser.wait_for(SHARED)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        keep_picture(browser, "sharing-narrow")


def test_where_nobody_shares_there_is_no_such_section(tmp_path: Path) -> None:
    with serving(PlatformDouble(busy_status(), busy_timeline())) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert browser.evaluate("document.querySelector('#sharing').hidden")
