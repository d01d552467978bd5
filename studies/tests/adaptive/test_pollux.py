"""Pollux on the published measurements: the same again from its journal, and its figures are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kits.simulation.sweeps import only_in_full
from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import verify
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.rules import overhead_rule
from springtide.workloads.formats.pollux import read
from springtide_studies.adaptive.play import GoodputSetting, play_workload

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "pollux"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the published measurements are not at {DATA}")
WORKLOADS = DATA / "workloads-osdi21" / "workloads"
CHEAP = "pollux:population=16:generations=6"


@pytest.mark.slow
@needs_data
def test_a_journal_decides_the_same_again_and_batches_and_workers_grow():
    journal = MemoryJournal()
    trace = read(WORKLOADS / "workload-6.csv", limit=6)
    played = play_workload(make_policy(CHEAP), trace, DATA / "profiles", GoodputSetting(num_nodes=4), journal=journal)
    assert all(run.has_ended for run in played.runs.values())
    assert max(run.batch_size / run.job.global_batch_size for run in played.runs.values()) > 2
    assert max(played.timeline.devices) == 16
    told = overhead_rule("pollux", 16).announced
    assert verify(Controller(make_policy(CHEAP), overheads=told), journal) > 50


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(3000)
@only_in_full
@pytest.mark.parametrize("workload", ["workload-1", "workload-6"])
def test_pollux_lands_within_three_percent_of_the_published_mean(workload):
    published = json.loads((DATA / "published-osdi21" / "jobload_pollux-1.0.json").read_text())["avgs"][workload]
    setting = GoodputSetting(whole_seconds=True)
    played = play_workload(make_policy("pollux"), WORKLOADS / f"{workload}.csv", DATA / "profiles", setting)
    times_s = [run.ended_s - run.submitted_s for run in played.runs.values()]
    assert sum(times_s) / len(times_s) == pytest.approx(published, rel=0.03)
