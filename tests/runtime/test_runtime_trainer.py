"""Whole trainings in real worker processes: the number of workers never shows in the result."""

from __future__ import annotations

import pytest


@pytest.fixture
def static_hash(make_plane):
    """The result of one worker that nobody disturbs."""

    def run(**options):
        plane = make_plane(**options)
        plane.start_group("s0")
        plane.wait_finished()
        return plane.result_hash()

    return run


def test_one_worker_trains_to_the_end_and_logs_every_step(make_plane):
    plane = make_plane()
    plane.start_group("a")
    plane.wait_finished()
    steps = plane.steps()
    assert [record["step"] for record in steps] == list(range(1, 27))
    assert sum(record["num_samples"] for record in steps) == 2 * 200
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_two_workers_give_the_same_bits_as_one(make_plane, static_hash):
    plane = make_plane()
    plane.start_group("a", "b")
    plane.wait_finished()
    assert plane.result_hash() == static_hash()
