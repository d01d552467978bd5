"""Replicas that hold their share of two devices each, on real processes: both are held, and they are lost together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.live_platform import (
    TINY,
    LivePlatform,
    artifact_digest,
    assert_exactly_once,
    ended_after,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HALF = {"request": 0.5, "limit": 0.6}
BUSY = """
import time


class Busy:
    def predict(self, items: list[float]) -> list[float]:
        end_s = time.process_time() + 0.05
        while time.process_time() < end_s:
            pass
        return [2 * item for item in items]
"""


SEES_ITS_DEVICES = TINY.replace(
    "    torch.manual_seed(7)\n", "    assert len(ctx.devices) == 2\n    torch.manual_seed(7)\n"
)


@pytest.fixture
def four_slots(tmp_path: Path) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path / "state", slots=4)) as live:
        live.start(policy="springtide")
        yield live


def deploy(live: LivePlatform, name: str, **options: Any) -> dict[str, Any]:
    source = {"filename": "busy.py", "text": BUSY, "object_name": "Busy", "kind": "class"}
    answer: dict[str, Any] = live.request(
        "PUT", f"/v1/services/{name}", {"source": source, "options": {"share": HALF, **options}}
    )
    return answer


def ready(live: LivePlatform, name: str, count: int, *, not_id: str = "") -> list[list[str]]:
    """Wait until so many replicas and no others are there, all ready; the devices of each."""

    def replicas() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = live.request("GET", f"/v1/services/{name}")["replicas"]
        return found

    def are_ready() -> bool:
        found = replicas()
        is_there = any(each["replica_id"] == not_id for each in found)
        return len(found) == count and not is_there and all(each["state"] == "READY" for each in found)

    wait_for(are_ready, 120.0, lambda: f"{count} replicas of {name}: {replicas()}")
    return [[each["device_id"], *each["more_devices"]] for each in replicas()]


def requests_on(live: LivePlatform) -> dict[str, float]:
    """The sum of the requests that the share daemon holds on each device."""
    found: dict[str, float] = {}
    for tenant in live.request("GET", "/v1/sharing")["tenants"]:
        found[tenant["device_id"]] = found.get(tenant["device_id"], 0.0) + tenant["request"]
    return found


def test_replicas_on_two_devices_are_packed_held_killed_and_adopted(four_slots: LivePlatform) -> None:
    live = four_slots
    deploy(live, "wide", devices_each=2, min_replicas=1, max_replicas=2)
    (pair,) = ready(live, "wide", 1)
    assert len(set(pair)) == 2
    assert "[2.0, 4.0]" in str(live.request("POST", "/f/wide", {"items": [1.0, 2.0]}))
    wait_for(lambda: requests_on(live) == dict.fromkeys(pair, 0.5), 30.0, lambda: f"both held: {requests_on(live)}")

    # What has room on both comes beside it, and what fits on one device of its own.
    deploy(live, "beside", devices_each=2, min_replicas=1)
    assert [set(each) for each in ready(live, "beside", 1)] == [set(pair)]
    wait_for(lambda: requests_on(live) == dict.fromkeys(pair, 1.0), 30.0, lambda: f"both full: {requests_on(live)}")
    shown = {device["device_id"]: device["holders"] for device in live.request("GET", "/v1/status")["devices"]}
    assert [sorted(each["workload_id"] for each in shown[device]) for device in pair] == [["beside", "wide"]] * 2

    # A second replica does not fit there.
    live.request("POST", "/v1/workloads/wide/scale", {"minimum": 2, "maximum": 2})
    others = ready(live, "wide", 2)
    assert len({device for each in others for device in each}) == 4

    killed = next(iter(name for name in live.worker_pids() if name.startswith("wide.")))
    os.kill(live.worker_pids()[killed], signal.SIGKILL)
    again = ready(live, "wide", 2, not_id=killed)
    assert len({device for each in again for device in each}) == 4

    # The next control plane takes both over with all of their devices.
    pids = live.worker_pids()
    live.kill()
    live.start(policy="springtide")
    assert sorted(ready(live, "wide", 2)) == sorted(again)
    assert live.worker_pids() == pids
    total = {device: 0.5 + (0.5 if device in pair else 0.0) for device in shown}
    wait_for(lambda: requests_on(live) == total, 30.0, lambda: f"all held again: {requests_on(live)}")

    # A change of the share alone is made in place, on both devices.
    deploy(live, "beside", devices_each=2, min_replicas=1, share={"request": 0.4, "limit": 0.6})
    total = {device: 0.5 + (0.4 if device in pair else 0.0) for device in shown}
    wait_for(lambda: requests_on(live) == pytest.approx(total), 30.0, lambda: f"less held: {requests_on(live)}")
    assert live.worker_pids() == pids
    told = str(live.request("GET", "/v1/workloads/beside/why"))
    assert all(f"holds 0.4 of a device (up to 0.6) on {device}" in told for device in pair)


def devices_of(job: dict[str, Any]) -> list[list[str]]:
    return [[replica["device_id"], *replica["more_devices"]] for replica in job["replicas"]]


def test_a_job_on_parts_of_two_devices_each_grows_and_gives_way_in_whole_workers(four_slots: LivePlatform) -> None:
    live, epochs = four_slots, 60
    options = {"share": {"request": 0.4, "limit": 0.8}, "devices_each": 2, "num_virtual_shards": 4, "shard_s": 0.05}

    def wait_workers(job_id: str, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def has_them() -> bool:
            found.update(live.job(job_id))
            assert found["state"] in ("PENDING", "STARTING", "RUNNING"), found
            return found["state"] == "RUNNING" and found["num_workers"] == count == len(found["replicas"])

        wait_for(has_them, 120.0, lambda: f"{count} workers of {job_id}: {found}")
        return found

    wide = live.submit("wide", text=SEES_ITS_DEVICES, max_workers=2, num_epochs=epochs, **options)
    held = devices_of(wait_workers(wide, 2))
    assert [len(each) for each in held] == [2, 2]
    assert len({device for each in held for device in each}) == 4
    wait_for(
        lambda: requests_on(live) == dict.fromkeys([device for each in held for device in each], 0.4),
        30.0,
        lambda: f"each part held: {requests_on(live)}",
    )
    assert "workers of 2 devices each" in str(live.request("GET", f"/v1/workloads/{wide}/why"))

    # A service that needs more of two devices than is left there takes a whole worker.
    deploy(live, "large", devices_each=2, min_replicas=1, share={"request": 0.7, "limit": 0.7})
    ready(live, "large", 1)
    (left,) = devices_of(wait_workers(wide, 1))
    assert left in held
    (replica,) = live.job(wide)["replicas"]
    os.kill(live.worker_pids()[replica["replica_id"]], signal.SIGKILL)
    assert live.wait_job(wide, 300.0)["state"] == "SUCCEEDED"
    assert_exactly_once(live.workload(wide), num_samples=96, batch=16, num_epochs=epochs)
    live.request("DELETE", "/v1/services/large")

    alone = live.submit("alone", max_workers=1, num_epochs=epochs, num_virtual_shards=4)
    assert live.wait_job(alone, 300.0)["state"] == "SUCCEEDED"
    assert artifact_digest(live.workload(wide)) == artifact_digest(live.workload(alone))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"devices_each": 8}, "the largest node here has"),
        ({"devices_each": 3}, "1, 2, 4 or 8 devices of one node"),
        ({"devices_each": 2, "share": None}, "add it"),
        ({"devices_each": 2, "min_replicas": 3, "max_replicas": 3}, "cannot be guaranteed 3 replicas"),
    ],
)
def test_what_no_node_can_hold_is_refused(standing: LivePlatform, options: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        deploy(standing, "wide", **options)
