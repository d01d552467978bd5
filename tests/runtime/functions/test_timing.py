"""What a function measures of its own steps, on a clock of the test's."""

from __future__ import annotations

import pytest

from springtide.core.wire.functions import LaneTimes
from springtide.runtime.functions.timing import StepTimer

LANES = LaneTimes(forward_s=0.1, backward_s=0.2, update_s=0.1, sync_s=0.3)


def test_the_first_step_of_an_attempt_is_left_out() -> None:
    timer = StepTimer()
    timer.begin()
    timer.committed(100.0, LANES, 64, 1000)
    assert timer.totals.num_steps == 0
    timer.committed(101.0, LANES, 64, 1000)
    timer.committed(104.0, LANES, 64, 1000)
    totals = timer.totals
    assert (totals.num_steps, totals.global_batch_size, totals.gradient_bytes) == (2, 64, 1000)
    assert totals.step_s == pytest.approx(4.0)
    assert totals.step_sqr == pytest.approx(10.0)
    assert totals.compute_s == pytest.approx(0.8)
    assert totals.sync_s == pytest.approx(0.6)


def test_another_size_is_measured_by_itself_without_its_first_step() -> None:
    timer = StepTimer()
    timer.begin()
    for at_s in (1.0, 2.0, 3.0):
        timer.committed(at_s, LANES, 64, 1000)
    timer.committed(9.0, LANES, 128, 1000)
    assert (timer.totals.num_steps, timer.totals.global_batch_size) == (0, 128)
    timer.committed(11.0, LANES, 128, 1000)
    assert (timer.totals.num_steps, timer.totals.step_s) == (1, 2.0)


def test_waits_for_samples_are_no_part_of_a_step() -> None:
    timer = StepTimer()
    timer.begin()
    timer.committed(1.0, LANES, 64, 1000)
    timer.skip(50.0)
    timer.committed(53.0, LANES, 64, 1000)
    assert timer.totals.step_s == pytest.approx(2.0)


def test_a_pause_runs_from_the_last_step_before_to_the_first_after() -> None:
    timer = StepTimer()
    timer.begin()
    timer.committed(1.0, LANES, 64, 1000)
    assert timer.pause_s == 0.0
    timer.committed(2.0, LANES, 64, 1000)
    timer.begin()
    assert timer.totals.num_steps == 0
    timer.committed(7.0, LANES, 64, 1000)
    assert timer.pause_s == pytest.approx(4.6)
