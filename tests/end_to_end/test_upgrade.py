"""The state directories of earlier releases are opened, and nothing in them is lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import sys
import tarfile
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, assert_exactly_once, ended_after, wait_for
from kits.releases.installed import install_revision
from kits.releases.record import PLACE
from kits.simulation.sweeps import only_in_full
from springtide.control.journal.export import export_older
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.journal import read_journal
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
    exported = export_older(journal, int(kept.stem.rpartition("-")[2]), tmp_path / "back.db")
    assert (exported.num_steps, exported.left_out) == (len(before), {})
    with sqlite3.connect(tmp_path / "back.db") as back, sqlite3.connect(kept) as old:
        assert [json.loads(step) for (step,) in back.execute("SELECT step FROM steps ORDER BY seq")] == before
        facts = [dict(db.execute("SELECT key, value FROM meta")) for db in (back, old)]
    assert facts[0] == facts[1]
    back.close()
    old.close()
    journal.close()


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the last release's wheel."""
    return str(install_revision(RELEASES[-1].name.partition(".")[0], tmp_path_factory.mktemp("release")))


@only_in_full
def test_jobs_go_on_when_the_platform_under_them_is_upgraded(last_release: str, tmp_path: Path) -> None:
    with ended_after(LivePlatform(tmp_path / "state", python=last_release)) as live:
        live.start(policy="springtide")
        done = live.submit("done", num_epochs=2)
        live.wait_job(done)
        running = [
            live.submit(f"job-{n}", num_epochs=60, shard_s=0.01, max_workers=2, key=f"key-{n}") for n in range(3)
        ]
        wait_for(lambda: all(live.job(job_id)["step"] >= 10 for job_id in running), 90.0, "all of them to train")
        version = live.request("GET", "/v1/status")["version"]
        live.kill()
        live.python = sys.executable
        live.start(policy="springtide")
        assert live.http is not None
        assert live.request("GET", "/v1/status")["version"] >= version
        assert live.job(done)["state"] == "SUCCEEDED"
        for job_id in running:
            ended = live.wait_job(job_id)
            assert ended["state"] == "SUCCEEDED", ended
            assert_exactly_once(live.workload(job_id), num_samples=96, batch=16, num_epochs=60)
        live.stop()
    journal = SqliteJournal(tmp_path / "state" / "journal.db", read_only=True)
    report = inspect_journal(journal)
    assert (report.damaged_seq, report.problem, report.damaged_past) == (None, "", "")
    assert report.num_snapshots >= 1, "there was no snapshot at the orderly end"
    journal.close()


@only_in_full
def test_a_platform_goes_back_to_the_last_release_with_its_jobs(last_release: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ended_after(LivePlatform(state)) as live:
        live.start(policy="springtide")
        done = live.submit("done", num_epochs=2)
        live.wait_job(done)
        training = live.submit("training", num_epochs=100, shard_s=0.01, max_workers=2, deadline_s=3600.0)
        wait_for(lambda: live.job(training)["step"] >= 20, 90.0, "it to train")
        before = live.request("GET", "/v1/status")
        live.stop()
        with contextlib.closing(read_journal("", state)) as journal:
            exported = export_older(journal, 1, tmp_path / "older.db")
        assert exported.left_out
        for path in state.glob("journal.*"):
            path.rename(tmp_path / path.name)
        (tmp_path / "older.db").rename(state / "journal.db")
        live.python = last_release
        live.start(policy="springtide")
        status = live.request("GET", "/v1/status")
        assert abs(status["wall_clock_offset_s"] - before["wall_clock_offset_s"]) < 5.0
        assert live.job(done)["state"] == "SUCCEEDED"
        ended = live.wait_job(training)
        assert ended["state"] == "SUCCEEDED", ended
        assert_exactly_once(live.workload(training), num_samples=96, batch=16, num_epochs=100)
        live.stop()
