"""Decisions by kind of event with everything on: each event is a turn of its own, and every kind is there."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from kits.simulation.sweeps import part
from springtide.core.errors import InvalidRequest
from springtide.core.events import ServiceDeployed
from springtide.scheduling.registry import make_live_policy
from springtide_studies.decision.bench import run_bench
from springtide_studies.decision.everything import CASES, MixedCrowd
from springtide_studies.decision.kinds import ALL, PARTS, kinds_markdown
from springtide_studies.decision.platform import BenchPlatform

# Some 20 turns follow each other at a moment where jobs move.
MOST_AT_A_MOMENT = 100


def test_the_crowd_has_jobs_and_services_of_every_kind_and_is_the_same_again() -> None:
    crowd, again = MixedCrowd("models", 512, 3), MixedCrowd("models", 512, 3)
    jobs = [job for _, job in crowd.warm()]
    assert jobs == [job for _, job in again.warm()]
    assert crowd.timed_events == again.timed_events
    kinds = Counter(job.job_id.partition("-")[0] for job in jobs)
    assert kinds["adaptive"] == 32
    assert kinds["sharer"] == 8
    asked = sum(job.requested_workers or 0 for job in jobs if job.job_id.startswith("job-"))
    assert 128 <= asked < 128 + 32
    # First runs: a deadline without a profile, with a batch that may change and without.
    first_runs = [job for job in jobs if job.goal.is_hard and not job.profile_steps_per_s]
    assert {job.batch is None for job in first_runs} == {True, False}
    services = [event.service for _, event in crowd.timed_events if isinstance(event, ServiceDeployed)]
    assert {service.share is None for service in services} == {True, False}
    assert any(service.min_replicas for service in services)
    assert {device.accelerator for node in crowd.nodes for device in node.devices} == {"fast", "slow"}
    assert {node.pool for node in MixedCrowd("pools", 512, 3).nodes} == {"training", "inference"}


def test_a_job_is_followed_by_one_of_its_kind() -> None:
    crowd = MixedCrowd("together", 128, 0)
    gone = next(job for _, job in crowd.warm() if job.job_id.startswith("sharer"))
    crowd.ended(gone.job_id)
    assert crowd.next(100.0).share is not None
    assert crowd.next(100.0).share is None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(1, 1 + part(4, least=1)))
def test_no_moment_goes_on_for_ever(case: str, seed: int) -> None:
    """Workloads that gave way to each other in turn, at each event, would start and stop at one moment without end."""
    platform = BenchPlatform(make_live_policy(CASES[case]), MixedCrowd(case, 256, seed), time.process_time)
    at_s, num_turns = 0.0, 0
    while not platform.is_over and platform.now_s < 120.0:
        platform.step(platform.wait())
        at_s, num_turns = platform.now_s, num_turns + 1 if platform.now_s == at_s else 0
        assert num_turns < MOST_AT_A_MOMENT, f"{case} with seed {seed} at {at_s} s"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_times_are_by_kind_of_event_and_by_part(case: str) -> None:
    ticks = itertools.count()
    told: list[str] = []
    report = run_bench(cases=[case], sizes=[64], timer=lambda: next(ticks) * 1e-3, num_events=8, tell=told.append)
    (found,) = report["mixed"]
    *kinds, whole = found["times"]
    assert whole["kind"] == ALL
    assert whole["count"] == sum(times["count"] for times in kinds)
    assert {"submit", "replica", "resize"} <= {times["kind"] for times in kinds}
    # Every decision takes one tick here: it is one event's.
    assert all([times["p50_ms"], times["max_ms"]] == pytest.approx([1.0, 1.0]) for times in found["times"])
    assert sum(found["parts"].values()) == pytest.approx(1.0)
    assert set(PARTS) < set(found["parts"])
    assert [row["bound"] for row in report["rows"]] == [None]
    assert not report["passed"], "the size that the aim is about was not measured"
    assert len(told) == 1
    assert "submit" in kinds_markdown(report["mixed"])


def test_a_case_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="together"):
        run_bench(cases=["nonsense"], sizes=[64], timer=lambda: 0.0)
