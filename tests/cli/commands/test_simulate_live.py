"""The live state played forward: figures for each policy and a line for each job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from springtide.cli.commands.simulate_live import forecast_answer, forecast_text, play_live
from springtide.cli.session import Session
from springtide.core.decision import JobView, PoolAllocation, Snapshot
from springtide.core.job_parts import JobBounds, JobProgress, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.status.export import LiveState
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob
from springtide.scheduling.registry import make_policy


def view(
    name: str, minutes: float | None, deadline_s: float | None = None, state: JobState = JobState.PENDING
) -> JobView:
    job = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=Entrypoint(source_path=""),
        max_workers=2,
        goal=Goal(deadline_s=deadline_s),
        total_steps=None if minutes is None else round(minutes * 60),
        profile_steps_per_s={} if minutes is None else {1: 1.0, 2: 1.5},
    )
    return JobView(
        job=job,
        state=state,
        submitted_at_s=40.0,
        total_steps=job.total_steps,
        bounds=JobBounds(min_workers=1, max_workers=2),
        learnt=LearntSpeed(throughput_samples_per_s={}),
        progress=JobProgress(progress_at_s=100.0),
    )


@pytest.fixture
def live() -> LiveState:
    running = view("running", 10, state=JobState.RUNNING)
    return LiveState(
        policy="fifo",
        snapshot=Snapshot(
            now_s=100.0,
            cluster=Topology(nodes=(make_node("n", 2),)),
            jobs=(running, view("waiting", 5, deadline_s=500.0)),
            allocations={"running": PoolAllocation(device_ids=("n/0", "n/1"))},
        ),
        wall_clock_offset_s=0.0,
        usd_per_device_hour=0.36,
    )


def test_each_policy_has_the_usual_figures_and_a_row_for_each_job(live: LiveState) -> None:
    answer = forecast_answer(live, {name: make_policy(name) for name in ("fifo", "edf")})
    assert answer["cluster"] == "1x2"
    fifo, edf = answer["policies"]["fifo"], answer["policies"]["edf"]
    assert (fifo["jobs"], fifo["deadline_jobs"], fifo["deadlines_met"]) == (2, 1, 0)
    assert edf["deadlines_met"] == 1
    first, second = fifo["rows"]
    assert first["finish_s"] == pytest.approx(400.0)
    assert (second["start_s"], second["finish_s"]) == (pytest.approx(400.0), pytest.approx(600.0))
    assert first["cost_usd"] == pytest.approx(2 * 400 / 3600 * 0.36)
    assert fifo["makespan_s"] == pytest.approx(600.0)
    assert fifo["jct_mean_s"] == pytest.approx((460 + 660) / 2)


def test_it_reads_as_tables(live: LiveState) -> None:
    text = forecast_text(forecast_answer(live, {"fifo": make_policy("fifo")}))
    assert "live state of 1x2 devices, policy fifo" in text
    assert "missed by 3m20" in text
    assert "waiting" in text


def test_an_unknown_end_is_shown_as_unknown(live: LiveState) -> None:
    snapshot = msgspec.structs.replace(live.snapshot, jobs=(view("x", None, deadline_s=500.0),), allocations={})
    answer = forecast_answer(msgspec.structs.replace(live, snapshot=snapshot), {"fifo": make_policy("fifo")})
    assert answer["policies"]["fifo"]["rows"][0]["finish_s"] is None
    assert "unknown" in forecast_text(answer)


def test_the_live_state_survives_the_wire(live: LiveState, client: Any, tmp_path: Path, capsys: Any) -> None:
    client.live = msgspec.json.decode(msgspec.json.encode(live), type=LiveState)
    assert client.live.snapshot.jobs[0].job.profile_steps_per_s == {1: 1.0, 2: 1.5}
    session = Session(connect=lambda state_dir: client)
    with click.Context(click.Command("x")):
        play_live(session, ["fifo"], str(tmp_path / "out.json"))
        assert "DEADLINES MET" in capsys.readouterr().out
        play_live(session, ["fifo"], "-")
    assert json.loads(capsys.readouterr().out)["policies"]["fifo"]["jobs"] == 2
    assert json.loads((tmp_path / "out.json").read_text())["trace"] == "live"
