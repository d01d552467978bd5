"""Figures of runs without faults: hand-computed where one can, reproducible everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.sim.experiment import simulate
from springtide.sim.trace import COLUMNS

KEYS = {
    *("jobs", "deadline_jobs", "deadlines_met", "deadline_satisfactory_ratio", "admitted", "admitted_and_broken"),
    *("jct_mean_s", "jct_p50_s", "jct_p95_s", "jct_p99_s", "queueing_mean_s", "makespan_s", "cluster_efficiency"),
    *("utilisation", "resizes", "gpu_hours", "decision_ms_p50", "decision_ms_p99", "decision_ms_max", "cpu_s"),
}


def test_two_jobs_on_one_device_run_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["first,0,6400,64,1,1,120,100,0.9", "second,0,6400,64,1,1,100,100,0.9"]
    path.write_text("\n".join([",".join(COLUMNS), *rows]), encoding="utf-8")
    figures = simulate(str(path), 1, 1, ["fifo"])["policies"]["fifo"]
    assert set(figures) == KEYS
    assert (figures["jobs"], figures["deadline_jobs"], figures["deadlines_met"]) == (2, 2, 1)
    assert figures["admitted_and_broken"] == 1
    # Each trains for 64 s; starting and switching cost about half a second more.
    assert figures["makespan_s"] == pytest.approx(129.1, abs=0.5)
    assert figures["jct_mean_s"] == pytest.approx((64.5 + 129.1) / 2, abs=0.5)
    assert figures["cluster_efficiency"] == pytest.approx(128.0 / 129.1, abs=0.01)
    assert figures["resizes"] == 0
    assert figures["decision_ms_p50"] is None


def test_same_seed_gives_the_same_figures_and_the_timer_changes_none() -> None:
    ticks = iter(range(10**9))
    plain = simulate("generated:30", 2, 4, ["elastic"], 5)
    timed = simulate("generated:30", 2, 4, ["elastic"], 5, timer=lambda: float(next(ticks)))
    measured = {"decision_ms_p50", "decision_ms_p99", "decision_ms_max", "cpu_s"}
    plain_figures, timed_figures = plain["policies"]["elastic"], timed["policies"]["elastic"]
    for key in KEYS - measured:
        assert plain_figures[key] == timed_figures[key], key
    assert timed_figures["decision_ms_p50"] == 1000.0
    assert timed_figures["cpu_s"] > 0
    assert plain == simulate("generated:30", 2, 4, ["elastic"], 5)


def test_every_job_ends_under_every_policy() -> None:
    report = simulate("generated:40", 2, 4, ["fifo", "edf", "elastic"], 1)
    for figures in report["policies"].values():
        assert figures["jobs"] == 40
        assert figures["jct_p99_s"] > 0
        assert 0 < figures["cluster_efficiency"] <= figures["utilisation"] <= 1
