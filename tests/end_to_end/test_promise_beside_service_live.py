"""A promised job beside a service that sleeps and is asked every few seconds, on real processes.

The promise is met whatever is asked. Without slack no device is taken from the job, and callers are told what the
service waits for and when to come again; with slack the job goes on with fewer devices, in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import ECHO, TINY, LivePlatform, ended_after
from kits.simulation.sweeps import only_in_full
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.actions import ResizeJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.xdist_group("measures")]
# 240 steps of four times four samples, 50 ms each time: 24 s on two workers.
EPOCHS = 40
SHARD_S = 0.05
ASKED_EVERY_S = 3.0
SHARE = {"request": 0.3, "limit": 0.6}


@pytest.fixture(params=[None, SHARE], ids=["whole", "shared"])
def two_slots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LivePlatform]:
    """A platform that knows how fast the job is on one worker and on two, with a service that sleeps."""
    with ended_after(LivePlatform(tmp_path / "state", slots=2)) as live:
        live.start(policy="springtide")
        for count in (1, 2):
            assert live.wait_job(submit(live, epochs=3, least=count, most=count))["state"] == "SUCCEEDED"
        options = {"min_replicas": 0, "max_replicas": 1, "idle_s": 2.0, "grace_s": 5.0}
        options |= {} if request.param is None else {"share": request.param}
        source = {"filename": "svc.py", "text": ECHO, "object_name": "Echo", "kind": "class"}
        live.request("PUT", "/v1/services/echo", {"source": source, "options": options})
        yield live


def submit(live: LivePlatform, *, epochs: int = EPOCHS, least: int = 1, most: int = 2, **options: float) -> str:
    return live.submit(
        "fit", shard_s=SHARD_S, num_epochs=epochs, min_workers=least, max_workers=most, num_virtual_shards=4, **options
    )


def slow_end_s(live: LivePlatform) -> float:
    """When the job would end at the slow end of its speed, on both devices."""
    source = {"filename": "job.py", "text": TINY, "object_name": "fit", "kind": "function"}
    options = {"global_batch_size": 16, "num_epochs": EPOCHS, "max_workers": 2, "num_virtual_shards": 4}
    quote = live.request(
        "POST",
        "/v1/quote",
        {"name": "fit", "source": source, "options": {**options, "params": {"shard_s": str(SHARD_S)}}},
    )
    assert quote["workers"] == 2, quote
    return float(quote["finish_s"]["p90"])


def asked_to_the_end(live: LivePlatform, job_id: str) -> tuple[dict, list]:
    """The job at its end, and the answers that callers got until then."""
    answers = []
    while True:
        job = live.job(job_id)
        if job["state"] in ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"):
            return job, answers
        assert live.http is not None
        headers = {"X-Springtide-Timeout": f"{ASKED_EVERY_S:g}"}
        answers.append(live.http.post("/f/echo", json={"numbers": [1.0]}, headers=headers))
        time.sleep(ASKED_EVERY_S / 2)


def sizes_of(live: LivePlatform, job_id: str) -> list[int]:
    """How many workers the job was to have, from change to change."""
    journal = SqliteJournal(live.state_dir / "journal.db", read_only=True)
    try:
        return [
            len(action.replica_ids)
            for _, step in journal.read()
            for action in step.actions
            if isinstance(action, ResizeJob) and action.job_id == job_id
        ]
    finally:
        journal.close()


@pytest.mark.parametrize("factor", [pytest.param(1.1, id="tight"), pytest.param(3.0, id="loose", marks=only_in_full)])
def test_a_service_that_is_asked_breaks_no_promise(two_slots: LivePlatform, factor: float) -> None:
    live = two_slots
    job_id = submit(live, deadline_s=factor * slow_end_s(live))
    job, answers = asked_to_the_end(live, job_id)
    assert job["state"] == "SUCCEEDED", job
    assert job["slack_s"] >= 0.0, (job, sizes_of(live, job_id))
    served = [answer for answer in answers if answer.status_code == 200]
    if factor > 2.0:
        assert served
        return
    told = [answer for answer in answers if answer.status_code == 503]
    assert told
    first = told[0]
    assert "promised deadlines need" in first.json()["error"]["message"]
    assert 2 < int(first.headers["retry-after"]) <= 60
