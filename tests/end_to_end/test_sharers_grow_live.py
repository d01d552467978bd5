"""Jobs on parts of devices on real processes: one grows into what another leaves, and gives way when one comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, artifact_digest, assert_exactly_once, ended_after, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL, LARGE = {"request": 0.4, "limit": 0.8}, {"request": 0.7, "limit": 0.7}
EPOCHS = 60


@pytest.fixture
def two_slots(tmp_path: Path) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path / "state", slots=2)) as live:
        live.start(policy="springtide")
        yield live


def submit(live: LivePlatform, name: str, share: dict[str, float], most: int, epochs: int) -> str:
    options = {"min_workers": 1, "max_workers": most, "num_virtual_shards": 4, "num_epochs": epochs}
    return live.submit(name, shard_s=0.05, share=share, **options)


def wait_workers(live: LivePlatform, job_id: str, count: int) -> None:
    """Wait until the job trains on so many workers; it must not end before."""

    def has_them() -> bool:
        found = live.job(job_id)
        assert found["state"] in ("PENDING", "STARTING", "RUNNING"), found
        return found["state"] == "RUNNING" and found["num_workers"] == count

    wait_for(has_them, 120.0, lambda: f"{count} workers of {job_id}: {live.job(job_id)}")


def test_a_job_on_parts_grows_and_shrinks_with_what_others_leave(two_slots: LivePlatform) -> None:
    first = submit(two_slots, "first", LARGE, 1, 10_000)
    two_slots.wait_job(first, states=("RUNNING",))
    grows = submit(two_slots, "grows", SMALL, 3, EPOCHS)
    wait_workers(two_slots, grows, 1)
    two_slots.request("POST", f"/v1/jobs/{first}/cancel")
    wait_workers(two_slots, grows, 2)
    second = submit(two_slots, "second", LARGE, 1, 10_000)
    wait_workers(two_slots, grows, 1)
    two_slots.wait_job(second, states=("RUNNING",))
    assert "'second' needs" in str(two_slots.request("GET", f"/v1/workloads/{grows}/why"))
    assert two_slots.wait_job(grows, 300.0)["state"] == "SUCCEEDED"
    alone = submit(two_slots, "alone", SMALL, 1, EPOCHS)
    assert two_slots.wait_job(alone, 300.0)["state"] == "SUCCEEDED"
    folders = [two_slots.workload(job_id) for job_id in (grows, alone)]
    assert artifact_digest(folders[0]) == artifact_digest(folders[1])
    assert_exactly_once(folders[0], num_samples=96, batch=16, num_epochs=EPOCHS)
