"""The published files themselves, where they are: they are not shipped with the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.workloads.drawing import check_complete, draw_missing
from springtide.workloads.profiles import Profiles, find_profiles, rate_at
from springtide.workloads.readers import read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
ELASTICFLOW, POLLUX = DATA / "elasticflow", DATA / "pollux"

pytestmark = pytest.mark.skipif(not ELASTICFLOW.is_dir(), reason="the published traces are not here")

TRACES = {
    "195job": 195,
    "cluster01": 1595,
    "cluster02": 5778,
    "cluster03": 3011,
    "cluster04": 15802,
    "cluster05": 3629,
    "cluster10": 260,
    "elasticVpollux_e": 195,
    "philly_103959": 876,
    "resnet_cifar_trace": 5,
}


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_of_elasticflow_is_read_whole(name: str) -> None:
    path = ELASTICFLOW / "traces" / f"{name}.csv"
    trace = check_complete(read_trace(path))
    assert len(trace.jobs) == TRACES[name]
    assert trace.skipped == {}
    assert trace.drawn == ()
    profiles = Profiles.read(find_profiles(path, trace.pairs))
    assert profiles.name == ("throughputs_T4" if name == "elasticVpollux_e" else "throughputs_A100")
    for job in trace.jobs:
        assert job.deadline_s is not None or job.is_best_effort
        assert profiles.knows(*job.pair)


@pytest.mark.parametrize("name", ["195job", "cluster10", "elasticVpollux_e", "philly_103959"])
def test_iterations_are_duration_times_rate(name: str) -> None:
    """The README's rule, which also proves that the right columns and the right tables are read."""
    path = ELASTICFLOW / "traces" / f"{name}.csv"
    trace = read_trace(path)
    profiles = Profiles.read(find_profiles(path, trace.pairs))
    for job in trace.jobs:
        assert job.duration_s is not None
        rate = rate_at(profiles.steps_per_s(*job.pair), job.num_devices)
        # Durations and iterations are both rounded to whole numbers in the files.
        assert abs(job.num_steps / rate - job.duration_s) <= 1.0 + 2.0 / rate, job.job_id


def test_generated_traces_have_their_best_effort_jobs() -> None:
    for share in ("0.1", "0.5", "0.9"):
        trace = read_trace(ELASTICFLOW / "generated" / f"gen_fig11_200jobs_lam900_be{share}.csv")
        found = sum(job.is_best_effort for job in trace.jobs) / len(trace.jobs)
        assert found == pytest.approx(float(share), abs=0.1)


@pytest.mark.skipif(not POLLUX.is_dir(), reason="the workloads of Pollux are not here")
def test_every_workload_of_pollux_and_sia_is_read() -> None:
    paths = sorted(POLLUX.glob("workloads-*/**/*.csv"))
    assert len(paths) > 50
    for path in paths:
        trace = read_trace(path)
        assert trace.format == "pollux"
        assert all(job.num_steps > 0 for job in trace.jobs), path


@pytest.mark.slow
@pytest.mark.skipif(not POLLUX.is_dir(), reason="the reduction of Philly is not here")
def test_the_reduction_of_philly_is_read_and_drawn() -> None:
    trace = read_trace(POLLUX / "philly_jobs.csv")
    assert len(trace.jobs) == 82_247
    first = draw_missing(read_trace(POLLUX / "philly_jobs.csv", limit=500), _a100(), seed=0)
    assert len(check_complete(first).jobs) == 500


def _a100() -> Profiles:
    return Profiles.read(ELASTICFLOW / "throughputs_A100")
