"""A job whose workers hold two devices each, on real processes: it trains, gives way, and survives a killed worker."""

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

EPOCHS = 40
SHARD_S = 0.05
USD_PER_DEVICE_HOUR = 3.6
SEES_ITS_DEVICES = TINY.replace(
    "    torch.manual_seed(7)\n", "    assert len(ctx.devices) == int(ctx.params['each'])\n    torch.manual_seed(7)\n"
)


@pytest.fixture
def four_slots(tmp_path: Path) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path / "state", slots=4)) as live:
        live.start(policy="springtide", options=("--price", str(USD_PER_DEVICE_HOUR)))
        yield live


def submit(live: LivePlatform, name: str, each: int, **options: Any) -> str:
    params = {"shard_s": str(SHARD_S), "each": str(each)}
    given = {"max_workers": 2, "num_virtual_shards": 4, "params": params, "devices_each": each, **options}
    return live.submit(name, text=SEES_ITS_DEVICES, **given)


def wait_workers(live: LivePlatform, job_id: str, count: int) -> dict[str, Any]:
    """Wait until the job trains on so many workers and holds no more; it must not end before."""
    found: dict[str, Any] = {}

    def has_them() -> bool:
        found.update(live.job(job_id))
        assert found["state"] in ("PENDING", "STARTING", "RUNNING"), found
        return found["state"] == "RUNNING" and found["num_workers"] == count == len(found["replicas"])

    wait_for(has_them, 120.0, lambda: f"{count} workers of {job_id}: {found}")
    return found


def devices(job: dict[str, Any]) -> list[list[str]]:
    return [[replica["device_id"], *replica["more_devices"]] for replica in job["replicas"]]


def test_workers_of_two_devices_train_shrink_for_a_promise_and_survive_a_kill(four_slots: LivePlatform) -> None:
    live = four_slots
    # What a promise needs to know of the speed is measured first.
    assert live.wait_job(submit(live, "promised", 1, num_epochs=3, max_workers=1))["state"] == "SUCCEEDED"
    wide = submit(live, "wide", 2, num_epochs=EPOCHS)
    held = devices(wait_workers(live, wide, 2))
    assert [len(each) for each in held] == [2, 2]
    assert len({device for each in held for device in each}) == 4
    shown = live.request("GET", "/v1/status")
    assert {device["workload_id"] for device in shown["devices"]} == {wide}

    promised = submit(live, "promised", 1, num_epochs=12, max_workers=1, deadline_s=120.0)
    assert [len(each) for each in devices(wait_workers(live, wide, 1))] == [2]
    assert live.wait_job(promised, states=("RUNNING",))["is_promised"]
    (replica,) = live.job(wide)["replicas"]
    os.kill(live.worker_pids()[replica["replica_id"]], signal.SIGKILL)

    assert live.wait_job(promised)["state"] == "SUCCEEDED"
    assert live.wait_job(wide, 300.0)["state"] == "SUCCEEDED"
    wait_for(lambda: not live.job(wide)["replicas"], 60.0, "its last worker to be gone")
    ended = live.job(wide)
    assert_exactly_once(live.workload(wide), num_samples=96, batch=16, num_epochs=EPOCHS)
    bars = [bar for bar in live.request("GET", "/v1/timeline")["intervals"] if bar["workload_id"] == wide]
    assert sum(bar["end_s"] - bar["start_s"] for bar in bars) == pytest.approx(ended["device_seconds"], rel=0.01)
    assert {len([bar for bar in bars if bar["replica_id"] == name]) for name in {b["replica_id"] for b in bars}} == {2}
    assert ended["cost_usd"] == pytest.approx(ended["device_seconds"] / 3600.0 * USD_PER_DEVICE_HOUR)

    alone = submit(live, "alone", 1, num_epochs=EPOCHS)
    assert live.wait_job(alone, 300.0)["state"] == "SUCCEEDED"
    assert artifact_digest(live.workload(wide)) == artifact_digest(live.workload(alone))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"devices_each": 8}, "the largest node here has 4; ask for at most --gpu 4"),
        ({"devices_each": 2, "min_workers": 3}, "room for 2; ask for at most --workers 2"),
        ({"devices_each": 3}, "1, 2, 4 or 8"),
        ({"devices_each": 2, "share": {"request": 0.5}, "min_workers": 3}, "room for 2; ask for at most --workers 2"),
    ],
)
def test_what_no_node_can_hold_is_refused(standing: LivePlatform, options: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        standing.submit("wide", max_workers=4, **options)
