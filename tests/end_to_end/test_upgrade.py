"""The state directories of earlier releases are opened, and nothing in them is lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, assert_exactly_once, ended_after
from kits.releases.record import PLACE
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.sqlite import SqliteJournal

RELEASES = sorted((Path(__file__).parents[1] / "fixtures" / "releases").glob("*.tar.gz"))
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("releases")]


@pytest.mark.parametrize("release", [pytest.param(path, id=path.name.partition(".")[0]) for path in RELEASES])
def test_a_platform_killed_under_an_earlier_release_goes_on(release: Path) -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    with tarfile.open(release) as archive:
        archive.extractall(PLACE / "state", filter="data")
    with ended_after(LivePlatform(PLACE / "state")) as live:
        live.start(policy="springtide")
        jobs = {job["name"]: job for job in live.request("GET", "/v1/status")["jobs"]}
        assert {name: job["state"] for name, job in jobs.items() if name != "training"} == {
            "done": "SUCCEEDED",
            "paused": "PAUSED",
        }
        assert jobs["done"]["step"] == 12
        assert jobs["paused"]["step"] >= 20
        assert live.request("POST", "/f/echo", {"numbers": [4.0]})["outputs"] == [8.0]
        ended = live.wait_job(jobs["training"]["job_id"])
        assert ended["state"] == "SUCCEEDED", ended
        assert_exactly_once(live.workload(ended["job_id"]), num_samples=96, batch=16, num_epochs=100)
        live.request("POST", f"/v1/jobs/{jobs['paused']['job_id']}/resume")
        live.wait_job(jobs["paused"]["job_id"], states=("RUNNING",))
        live.request("POST", f"/v1/jobs/{jobs['paused']['job_id']}/cancel")
        live.wait_job(jobs["paused"]["job_id"])
        live.stop()
    journal = SqliteJournal(PLACE / "state" / "journal.db", read_only=True)
    report = inspect_journal(journal)
    assert (report.damaged_seq, report.problem) == (None, "")
    assert report.events["ClockAnchored"] == 1
    journal.close()
    shutil.rmtree(PLACE)


@pytest.mark.parametrize("release", [pytest.param(path, id=path.name.partition(".")[0]) for path in RELEASES])
def test_every_step_of_an_earlier_release_is_kept_to_the_letter(release: Path, tmp_path: Path) -> None:
    with tarfile.open(release) as archive:
        archive.extractall(tmp_path, filter="data")
    SqliteJournal(tmp_path / "journal.db").close()
    (kept,) = tmp_path.glob("journal.schema-*.db")
    with sqlite3.connect(kept) as old:
        before = [json.loads(step) for (step,) in old.execute("SELECT step FROM steps ORDER BY seq")]
    old.close()
    journal = SqliteJournal(tmp_path / "journal.db", read_only=True)
    assert [json.loads(row.step) for row in journal.rows()] == before
    journal.check_end()
    journal.close()
