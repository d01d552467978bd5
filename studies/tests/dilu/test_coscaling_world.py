"""The co-scaling world: nothing is lost, shares and starts cost what the model says, the same run twice is the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from springtide_studies.dilu.coscaling_play import play, profile_of
from springtide_studies.dilu.coscaling_world import ARMS, Profile, ScalingArm, ServedModel
from springtide_studies.workloads.request_rates import draw_arrivals, draw_rates

MODEL = ServedModel()
PROFILE = Profile(request_per_s=45.0, limit_per_s=103.0)


class Script:
    """Wants what a list says, then its last entry."""

    def __init__(self, wanted):
        self.wanted = list(wanted)

    def look(self, look):
        return self.wanted.pop(0) if len(self.wanted) > 1 else self.wanted[0]


def run(wanted, arrivals_s, num_seconds, *, fraction=None, minimum=1, model=MODEL):
    arm = ScalingArm(
        name="x",
        what="",
        make=lambda profile, rates: Script(wanted),
        fraction=None if fraction is None else lambda model: fraction,
        min_replicas=minimum,
    )
    return play(model, PROFILE, arm, arrivals_s, [0.0] * num_seconds)


def test_a_batch_is_faster_on_more_up_to_what_it_can_use():
    assert MODEL.batch_s(4, 0.2) > MODEL.batch_s(4, 0.4)
    assert MODEL.batch_s(1, 0.2) == MODEL.batch_s(1, 0.9), "one request cannot use more"
    # The published profile of RoBERTa-large: 57.7, 34.2, 30.7 and 26.5 ms for batches of 4 on 20, 30, 40 and 60 %.
    published = {0.2: 0.0577, 0.3: 0.0342, 0.4: 0.0307, 0.6: 0.0265}
    for fraction, seconds in published.items():
        assert MODEL.batch_s(4, fraction) == pytest.approx(seconds, rel=0.13)


def test_a_lone_request_takes_a_batch_of_one():
    figures = run([1], [0.5], 3, fraction=0.2)
    assert figures.latencies_s == (pytest.approx(MODEL.batch_s(1, 0.2)),)
    assert (figures.late, figures.refused, figures.cold_starts) == (0, 0, 1)
    assert figures.reserved_gpu_s == pytest.approx(3 * 0.2)
    assert figures.used_gpu_s == pytest.approx(0.2 * MODEL.batch_s(1, 0.2))


def test_vertical_scaling_begins_at_the_request_and_is_soon_at_the_limit():
    arrivals = [1.0] * 9
    static, limited, vertical = (run([1], arrivals, 3, fraction=part).latencies_s[-1] for part in (0.2, 0.4, None))
    assert limited <= vertical < static
    assert vertical - limited < MODEL.reaction_s
    asleep = msgspec.structs.replace(MODEL, reaction_s=100.0)
    assert run([1], arrivals, 3, model=asleep).latencies_s[-1] == pytest.approx(static)
    crowded = msgspec.structs.replace(MODEL, neighbour_fraction=0.8)
    assert run([1], arrivals, 3, model=crowded).latencies_s[-1] == pytest.approx(static), "no room, no scaling"


def test_a_cold_start_makes_the_first_requests_wait():
    figures = run([1], [0.5, 0.6], 20, minimum=0)
    assert figures.cold_starts == 1
    assert figures.late == 2
    assert figures.latencies_s[-1] == pytest.approx(MODEL.cold_start_s + MODEL.batch_s(1, 0.2), rel=0.05)
    assert MODEL.cold_start_s == MODEL.schedule_s + MODEL.load_s + MODEL.first_answer_s


def test_starts_stops_and_their_device_time_are_counted():
    figures = run([3, 3, 3, 1, 1, 2, 2, 2, 2, 2], [], 10, fraction=0.2)
    assert figures.cold_starts == 1 + 2 + 1
    assert figures.stops == 2
    assert figures.replicas == (3, 3, 3, 1, 1, 2, 2, 2, 2, 2)
    assert figures.replica_s == pytest.approx(10 + 2 * 3 + 4)


def test_a_replica_that_leaves_answers_what_it_has():
    slow = msgspec.structs.replace(MODEL, base_s=2.0)
    arrivals = [8.1 + number * 1e-4 for number in range(16)]
    figures = run([2] * 8 + [1], arrivals, 40, model=slow)
    assert len(figures.latencies_s) == 16
    assert figures.stops == 1


def test_a_full_queue_refuses_and_refusals_count():
    arrivals = draw_arrivals(np.full(20, 400.0), 0).tolist()
    figures = run([1], arrivals, 20)
    assert figures.refused > 1000
    assert len(figures.latencies_s) + figures.refused == figures.num_requests == len(arrivals)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_answers_or_refuses_everything_twice_alike(arm):
    rates = draw_rates("bursty", 2, 60) * 25.0
    arrivals = draw_arrivals(rates, 2).tolist()
    first = play(MODEL, PROFILE, arm, arrivals, rates.tolist())
    assert first == play(MODEL, PROFILE, arm, arrivals, rates.tolist())
    assert len(first.latencies_s) + first.refused == first.num_requests
    assert first.late == sum(latency_s > MODEL.slo_s for latency_s in first.latencies_s)
    assert len(first.replicas) == 60
    assert first.cold_starts - first.stops == first.replicas[-1]


def test_the_profile_is_what_keeps_the_objective():
    profile = profile_of(MODEL, duration_s=40)
    assert profile.request_per_s < profile.limit_per_s < MODEL.capacity_per_s(MODEL.limit)
    assert 0.4 * MODEL.capacity_per_s(0.2) < profile.request_per_s < 0.9 * MODEL.capacity_per_s(0.2)
