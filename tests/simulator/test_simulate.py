"""Figures of played traces: hand-computed where one can, reproducible everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.simulator.simulate import simulate

# What scripts read (PRODUCT.md, machine-readable answers).
PROMISED_KEYS = {
    *("jobs", "deadline_jobs", "deadlines_met", "deadline_satisfactory_ratio", "admitted", "admitted_and_broken"),
    *("jct_mean_s", "jct_p50_s", "jct_p95_s", "jct_p99_s", "queueing_mean_s", "makespan_s", "cluster_efficiency"),
    *("utilisation", "resizes", "gpu_hours", "decision_ms_p50", "decision_ms_p99", "decision_ms_max", "cpu_s"),
}
OWN_HEADER = (
    "job_id,submit_s,samples,global_batch_size,min_workers,max_workers,deadline_s,samples_per_s_1,parallel_fraction"
)


def write(tmp_path: Path, *rows: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([OWN_HEADER, *rows]), encoding="utf-8")
    return str(path)


def test_two_jobs_on_one_device_run_one_after_the_other(tmp_path: Path) -> None:
    trace = write(tmp_path, "first,0,6400,64,1,1,120,100,0.9", "second,0,6400,64,1,1,100,100,0.9")
    figures = simulate(trace, "1x1", ["fifo"], overhead="none")["policies"]["fifo"]
    assert set(figures) >= PROMISED_KEYS
    assert (figures["jobs"], figures["deadline_jobs"], figures["deadlines_met"]) == (2, 2, 1)
    # Each trains for 64 s.
    assert figures["makespan_s"] == pytest.approx(128.0)
    assert figures["jct_mean_s"] == pytest.approx(96.0)
    assert figures["queueing_mean_s"] == pytest.approx(32.0)
    assert figures["cluster_efficiency"] == pytest.approx(1.0)
    assert figures["utilisation"] == pytest.approx(1.0)
    assert figures["gpu_hours"] == pytest.approx(128.0 / 3600)
    assert (figures["resizes"], figures["admitted_and_broken"], figures["misses"]) == (0, 1, {"scheduler": 1})
    assert figures["decision_ms_p50"] is None


def test_overhead_is_paid_at_each_start(tmp_path: Path) -> None:
    trace = write(tmp_path, "first,0,6400,64,1,1,,100,0.9", "second,0,6400,64,1,1,,100,0.9")
    figures = simulate(trace, "1x1", ["fifo"])["policies"]["fifo"]
    # 2 s at each start, and 2 s more for the set of devices that nobody has used before.
    assert figures["makespan_s"] == pytest.approx(128.0 + 4.0 + 2.0)
    assert figures["overhead_gpu_hours"] == pytest.approx(6.0 / 3600)
    assert figures["cluster_efficiency"] == pytest.approx(128.0 / 134.0)


def test_same_seed_gives_the_same_figures_and_the_timer_changes_none() -> None:
    ticks = iter(range(10**9))
    plain = simulate("generated:30", "2x4", ["elastic"], seed=5)
    timed = simulate("generated:30", "2x4", ["elastic"], seed=5, timer=lambda: float(next(ticks)))
    measured = {"decision_ms_p50", "decision_ms_p99", "decision_ms_max", "cpu_s", "jobs_per_cpu_s"}
    plain_figures, timed_figures = plain["policies"]["elastic"], timed["policies"]["elastic"]
    for key in set(plain_figures) - measured:
        assert plain_figures[key] == timed_figures[key], key
    assert timed_figures["decision_ms_p50"] == 1000.0
    assert timed_figures["cpu_s"] > 0
    assert plain == simulate("generated:30", "2x4", ["elastic"], seed=5)


def test_every_job_ends_under_every_policy() -> None:
    answer = simulate("generated:40", "2x4", ["fifo", "edf", "elastic"], seed=1)
    for figures in answer["policies"].values():
        assert figures["jobs"] == 40
        assert figures["jct_p99_s"] > 0
        assert 0 < figures["cluster_efficiency"] <= figures["utilisation"] <= 1
        missed = figures["deadline_jobs"] - figures["deadlines_met"]
        assert sum(figures["misses"].values()) == missed
