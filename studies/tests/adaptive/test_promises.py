"""Deadlines of jobs whose batch may change: how they are drawn, and that the default policy keeps what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import overhead_rule
from springtide.workloads.formats.pollux import read
from springtide_studies.adaptive.jobs import goodput_arrivals
from springtide_studies.adaptive.play import make_nodes
from springtide_studies.adaptive.promises import figures_of, with_deadlines
from springtide_studies.adaptive.speeds import GoodputSpeeds
from springtide_studies.adaptive.truth import make_truths
from springtide_studies.workloads.pollux_tables import read_applications

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "pollux"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the published measurements are not at {DATA}")


def played(policy, asked, truths):
    speeds = GoodputSpeeds(truths, whole_seconds=True)
    rule = overhead_rule("pollux", 16)
    return play(
        DecisionCache(make_policy(policy)), asked, make_nodes(4), rule=rule, speeds=speeds, reports_progress=True
    )


@pytest.mark.slow
def test_promises_to_jobs_whose_batch_may_change_are_kept():
    truths = make_truths(read_applications(DATA / "profiles"))
    arrivals = goodput_arrivals(read(DATA / "workloads-osdi21" / "workloads" / "workload-1.csv", 24), truths)
    asked = with_deadlines(arrivals, truths, 0.6, 1.0, 2.0, seed=1)
    assert asked == with_deadlines(arrivals, truths, 0.6, 1.0, 2.0, seed=1)
    assert asked != with_deadlines(arrivals, truths, 0.6, 1.0, 2.0, seed=2)
    due = [job for _, job in asked if job.goal.deadline_s is not None]
    assert 3 <= len(due) < len(asked)
    ours = figures_of(played("springtide", asked, truths))
    assert ours["deadlines"] == len(due) == ours["met"] + ours["late"] + ours["refused"]
    assert ours["promised"] >= 1
    assert ours["broken"] == 0
    others = figures_of(played("goodput:round_s=60", asked, truths))
    assert (others["promised"], others["refused"]) == (0, 0)
