"""Rented machines: what a step takes on them, and what is charged for how long."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import WorkerModel
from springtide.core.functions import MIB
from springtide_studies.rivals.vm_costs import EC2_C5, all_vm_runs, charged_usd, vm_run, vm_step_s

MODEL = WorkerModel(parameter_bytes=100_000_000, sample_s=0.1, sample_bytes=MIB, micro_batch_size=8)
LARGE = EC2_C5[0]


def test_one_machine_has_nothing_to_exchange_and_more_of_them_share_the_batch() -> None:
    alone_s = vm_step_s(MODEL, LARGE, 1, 64)
    assert alone_s == pytest.approx(64 * 0.1 / (1 / (0.05 + 0.95 / 2)))
    ring_s = 2 * 3 * (25_000_000 / LARGE.bytes_per_s + 0.0005)
    assert vm_step_s(MODEL, LARGE, 4, 64) == pytest.approx(alone_s / 4 + ring_s)


def test_seconds_are_charged_a_minute_at_least_and_begun_hours_whole() -> None:
    assert charged_usd(LARGE, 2, 10.0) == pytest.approx(2 * 0.085 / 60)
    assert charged_usd(LARGE, 2, 1800.0) == pytest.approx(0.085)
    assert charged_usd(LARGE, 1, 3601.0, "hour") == pytest.approx(2 * 0.085)


def test_a_run_boots_and_takes_the_steps_of_every_batch() -> None:
    run = vm_run(MODEL, LARGE, 1, [(64, 10), (128, 5)], boot_s=100.0)
    assert run.took_s == pytest.approx(
        100.0 + 10 * vm_step_s(MODEL, LARGE, 1, 64) + 5 * vm_step_s(MODEL, LARGE, 1, 128)
    )
    assert run.usd == pytest.approx(run.took_s / 3600 * 0.085)
    slow = vm_run(MODEL, LARGE, 1, [(64, 10), (128, 5)], boot_s=100.0, slowdown=2.0)
    assert slow.took_s - 100.0 == pytest.approx(2 * (run.took_s - 100.0))


def test_kinds_that_do_not_hold_the_model_are_left_out_and_refused() -> None:
    large = WorkerModel(parameter_bytes=2_000_000_000, sample_s=1.0, state_factor=4.5)
    assert {run.kind.name for run in all_vm_runs(large, [(64, 1)])}.isdisjoint({"c5.large", "c5.xlarge"})
    with pytest.raises(InvalidRequest, match="take a larger one"):
        vm_step_s(large, LARGE, 1, 64)
    assert max(run.count for run in all_vm_runs(MODEL, [(4, 1)])) == 4
