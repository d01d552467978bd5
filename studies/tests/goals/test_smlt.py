"""Work that changes, kept small: batches that shrink are searched for anew, and all of the work is done."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from kits.simulation.sweeps import only_in_full
from springtide.core.errors import InvalidRequest
from springtide_studies.goals.smlt import PARTS, markdown, run_bench
from springtide_studies.goals.smlt_page import render
from springtide_studies.goals.smlt_parts import BATCHING, play_batching, play_online

CASE = replace(BATCHING, num_samples=4096, num_epochs=4, max_workers=8)


def test_every_step_of_a_schedule_is_done_and_the_course_is_told() -> None:
    result = play_batching(201, ((0, 512), (2, 128)), CASE)
    assert result.is_done
    assert result.ours.usd > 0.0
    assert {"fixed allocation", "LambdaML", "IaaS", "MLCD-like"} <= set(result.others)
    assert result.others["MLCD-like"].profiled_usd > 0.0
    assert result.series["batch"][0][1] == 512
    assert result.series["batch"][-1][1] == 128
    assert all(value > 0 for _, value in result.series["throughput"])


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="batching"):
        run_bench(only=["none"], timer=time.process_time)


@pytest.mark.slow
@only_in_full
def test_a_day_of_data_costs_a_fraction_of_what_never_rests() -> None:
    result = play_online(201)
    assert result.is_done
    assert result.ours.usd < 0.6 * result.others["fixed allocation, always on"].usd


@pytest.mark.slow
def test_a_report_becomes_a_table_and_a_page() -> None:
    assert set(PARTS) == {"batching", "batching-shrinking", "online", "nas"}
    report = run_bench(num_seeds=1, first_seed=201, only=["online"], timer=time.process_time)
    assert "## online" in markdown(report)
    assert "<svg" in render(report)
