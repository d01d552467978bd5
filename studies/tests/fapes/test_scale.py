"""Table 3 of FaPES: what is left of a tide from a moment on, and rounds with loans and without on a small cluster."""

from __future__ import annotations

import pytest

from springtide.core.events import CancelRequested, LoadObserved, ServiceDeployed
from springtide.core.workload import Entrypoint, InferenceService, WorkloadId
from springtide_studies.fapes.scale import PUBLISHED, draw_scale_jobs, from_moment, run_scale

SOURCE = Entrypoint(source_path="trace", object_name="Serve", kind="class")


def deployed(name: str, minimum: int = 1) -> ServiceDeployed:
    service = InferenceService(
        service_id=WorkloadId(name), name=name, entrypoint=SOURCE, min_replicas=minimum, max_replicas=8
    )
    return ServiceDeployed(service=service)


def load(name: str, in_flight: int) -> LoadObserved:
    return LoadObserved(service_id=WorkloadId(name), arrivals_per_s=1.0, in_flight=in_flight, queued=0, idle_s=0.0)


def test_from_a_moment_on_only_what_is_left_is_told() -> None:
    timed_events = [
        (0.0, deployed("gone")),
        (1.0, deployed("stays")),
        (2.0, load("stays", 3)),
        (3.0, load("gone", 9)),
        (4.0, load("stays", 5)),
        (5.0, CancelRequested(workload_id=WorkloadId("gone"))),
        (20.0, load("stays", 7)),
    ]
    found = from_moment(timed_events, 10.0)
    assert found == [(0.0, deployed("stays")), (0.0, load("stays", 5)), (10.0, load("stays", 7))]


def test_jobs_are_drawn_by_the_size_of_the_cluster_and_the_load() -> None:
    few, many = draw_scale_jobs(0, 128, 4.0, 1.0), draw_scale_jobs(0, 1280, 4.0, 1.0)
    assert 5.0 < len(many) / max(1, len(few)) < 20.0
    assert many == draw_scale_jobs(0, 1280, 4.0, 1.0)


@pytest.mark.slow
def test_rounds_with_loans_and_without() -> None:
    told: list[str] = []
    table, rows = run_scale(
        lambda parameters: f"fapes:{parameters}",
        0,
        timer=lambda: 0.0,
        tell=told.append,
        rounds_s=(600.0,),
        cluster="8x8@4+4",
        n_r_max=3,
        hours=2.0,
    )
    assert [row["policy"] for row in table] == ["dedicated, rounds of 10 min", "two-way, rounds of 10 min"]
    without, with_loans = table
    assert (without["paper_utilisation"], with_loans["paper_jct_min"]) == (
        PUBLISHED["dedicated", 600.0][0],
        PUBLISHED["two-way", 600.0][1],
    )
    assert without["lent_mean"] == 0.0
    assert with_loans["lent_mean"] > 0.5
    assert without["minimums_broken"] == with_loans["minimums_broken"] == 0
    assert [row["case"] for row in rows] == [
        "scale, rounds of 10 min: JCT",
        "scale, rounds of 10 min: utilisation",
    ]
    assert "paper 38.5" in told[1]
