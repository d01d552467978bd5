"""Fixed sizes: all the workers that were asked for, or none."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from springtide.core.workload import JobState
from springtide.scheduling.placement.gangs import devices_text, fixed_size, remaining_s
from springtide_studies.rivals.policies.tiresias import Tiresias


@pytest.mark.parametrize(
    ("view", "total", "size"),
    [
        (make_view("a", ask=3), 8, 3),
        (make_view("a", ask=None), 8, 8),
        (make_view("a", ask=1, least=2), 8, 2),
        (make_view("a", ask=8, most=4), 8, 4),
        (make_view("a", ask=8), 4, 4),
        (make_view("a", ask=8, least=6), 4, 0),
        (make_view("a", ask=2, most=3, elastic=False), 8, 3),
        (make_view("a", ask=2, most=3, elastic=False), 2, 0),
    ],
)
def test_the_size_is_what_was_asked_for_within_the_bounds_and_the_cluster(view, total, size):
    assert fixed_size(view, total) == size


def test_time_left_takes_off_what_was_done_since_the_last_report():
    view = with_fields(make_view("a", steps=100, done=20), progress_at_s=50.0)
    assert remaining_s(view, 4, now_s=60.0) == 20.0
    running = replace(view, state=JobState.RUNNING)
    assert remaining_s(running, 4, now_s=60.0, num_held=4) == 10.0
    assert remaining_s(running, 8, now_s=1000.0, num_held=4) == 0.0
    assert remaining_s(replace(view, total_steps=None), 4, now_s=60.0) == math.inf
    assert remaining_s(make_view("a", profile={}), 4, now_s=60.0) == math.inf


def test_after_the_loss_of_a_device_a_running_job_goes_on_with_what_it_has():
    running = make_view("a", ask=4, state=JobState.RUNNING, started_at_s=0.0)
    plan = look(Tiresias(), [running, make_view("b", ask=3, at_s=1.0)], slots=3, held={"a": (0, 1)})
    assert counts(plan) == {"a": 3}, "the cluster is its size now"
    other = make_view("other", ask=2, state=JobState.RUNNING, started_at_s=-1.0)
    plan = look(Tiresias(), [other, running], slots=5, held={"a": (0, 1), "other": (3, 4)})
    assert counts(plan) == {"other": 2, "a": 2}, "three are left of the four it asked for"


def test_numbers_in_words():
    assert (devices_text(1), devices_text(2)) == ("1 device", "2 devices")
