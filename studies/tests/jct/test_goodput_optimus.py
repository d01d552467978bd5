"""The published figures of Tiresias and Optimus come out of our own platform, job by job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from springtide.scheduling.registry import make_policy
from springtide_studies.adaptive.play import GoodputSetting, play_workload
from springtide_studies.adaptive.truth import make_truths
from springtide_studies.jct.goodput_optimus import PublishedOptimus
from springtide_studies.workloads.pollux_tables import read_applications

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "pollux"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the published measurements are not at {DATA}")
EXACT = GoodputSetting(batch="tuned", whole_seconds=True)


@pytest.fixture(scope="module")
def truths():
    return make_truths(read_applications(DATA / "profiles"))


def jcts_s(policy, truths, workload):
    played = play_workload(policy, DATA / "workloads-osdi21" / "workloads" / f"{workload}.csv", truths, EXACT)
    return {str(job_id): run.ended_s - run.submitted_s for job_id, run in played.runs.items()}


def published_s(policy, workload):
    return json.loads((DATA / "published-osdi21" / f"jobload_{policy}-1.0.json").read_text())["jcts"][workload]


@pytest.mark.slow
@needs_data
def test_tiresias_ends_every_job_at_the_published_second(truths):
    found, published = (
        jcts_s(make_policy("tiresias-tuned"), truths, "workload-6"),
        published_s("tiresias", "workload-6"),
    )
    assert found == pytest.approx(published, abs=0.5)
    assert sum(found.values()) / len(found) == pytest.approx(3469.69375, abs=0.01)


@pytest.mark.slow
@needs_data
def test_optimus_ends_nearly_every_job_at_the_published_second(truths):
    found, published = (
        jcts_s(PublishedOptimus(truths=truths), truths, "workload-6"),
        published_s("optimus", "workload-6"),
    )
    assert sum(found.values()) / len(found) == pytest.approx(5301.875, rel=0.001)
    assert sum(abs(found[name] - published[name]) < 1.0 for name in published) >= 150
