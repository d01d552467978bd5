"""What is expected of steps: errors shrink with measurements, spreads grow with distance, families give a start."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from springtide.core.job_parts import StepTime
from springtide.perf.step_estimate import MAX_FAMILY_STEPS, UNSEEN_ERROR, fit_model, fit_throughput, merge_step_times
from springtide.perf.throughput import ThroughputModel

TRUE = ThroughputModel(alpha_c=0.02, beta_c=0.001, alpha_n=0.08, beta_n=0.003, alpha_r=0.03, beta_r=0.001, gamma=1.8)


def step(placement, local=64, factor=1.0, has_sync=True):
    step_s, sync_s = TRUE.step_s(len(placement), sum(placement), local)
    return StepTime(
        placement=placement,
        local_batch_size=local,
        step_s=float(step_s) * factor,
        sync_s=float(sync_s) * factor if has_sync else None,
    )


FEW = (step((1,)), step((1,), 128), step((2,)), step((4,)))
MANY = (*FEW, step((4, 4)), step((4,) * 4), step((4,) * 4, 128))


def expected_s(estimate, num_nodes, num_workers, local=64):
    model, _ = estimate.model.step_s(num_nodes, num_workers, local)
    error, _ = estimate.error(num_nodes, num_workers, local)
    return float(model * np.exp(error[0]))


def test_nothing_measured_is_nothing_known():
    assert fit_throughput(()) is None
    assert fit_throughput((msgspec.structs.replace(FEW[0], step_s=0.0),)) is None
    assert fit_throughput((msgspec.structs.replace(FEW[0], step_s=math.nan),)) is None


def test_the_spread_grows_with_the_distance_from_what_was_measured():
    estimate = fit_throughput(MANY)
    _, spread = estimate.error([4, 8, 16], [16, 32, 64], [128, 128, 128])
    assert spread[0] < spread[1] < spread[2]
    _, spread = estimate.error([4, 4, 4], [16, 16, 16], [128, 512, 4096])
    assert spread[0] < spread[1] < spread[2]


def test_a_link_that_was_never_used_is_the_least_sure():
    few, many = fit_throughput(FEW), fit_throughput(MANY)
    assert few.error(2, 8, 64)[1][0] > 0.8 * UNSEEN_ERROR
    assert many.error(2, 8, 64)[1][0] < 0.5 * few.error(2, 8, 64)[1][0]
    assert few.error(1, 4, 64)[1][0] < 0.5 * few.error(2, 8, 64)[1][0]


def test_measurements_that_agree_make_surer_and_those_that_do_not_make_less_sure():
    shapes = [(4,) * n for n in range(2, 17)]
    steady = fit_throughput((*FEW, *(step(shape) for shape in shapes)))
    shaky = fit_throughput((*FEW, *(step(shape, factor=1.5 if len(shape) % 2 else 0.7) for shape in shapes)))
    assert steady.error(8, 32, 64)[1][0] < 0.1 < shaky.error(8, 32, 64)[1][0]


def test_where_the_model_was_off_it_is_expected_to_be_off_again():
    odd = (*MANY, *(step((4,) * n, factor=1.6) for n in (6, 7)))
    estimate = fit_throughput(odd)
    model, _ = estimate.model.step_s(6, 24, 64)
    true = odd[-2].step_s
    assert abs(math.log(expected_s(estimate, 6, 24) / true)) < abs(math.log(float(model) / true))


def test_the_spread_covers_what_it_says():
    rng = np.random.default_rng(11)
    shapes = [(n,) for n in (1, 2, 3, 4)] + [(4,) * n for n in range(2, 17)]
    steps = [step(shape, local, math.exp(rng.normal(0, 0.12))) for shape in shapes for local in (32, 64, 128)]
    within = []
    for _ in range(20):
        order = rng.permutation(len(steps))
        estimate = fit_throughput(tuple(steps[i] for i in order[:20]))
        for i in order[20:]:
            shape = len(steps[i].placement), sum(steps[i].placement), steps[i].local_batch_size
            model, _ = estimate.model.step_s(*shape)
            error, spread = estimate.error(*shape)
            within.append(abs(math.log(steps[i].step_s / float(model)) - error[0]) < spread[0])
    assert 0.55 < np.mean(within) < 0.85


def test_a_family_is_where_a_new_job_starts():
    start = fit_throughput((), MANY)
    assert start.model == fit_throughput(MANY).model
    own = fit_throughput((step((1,)),), MANY)
    assert expected_s(own, 4, 16) == pytest.approx(step((4,) * 4).step_s, rel=0.05)
    # On its own the job would know nothing of the network.
    assert expected_s(fit_throughput((step((1,)),)), 4, 16) < 0.8 * step((4,) * 4).step_s


def test_a_slower_member_of_a_family_is_slower_everywhere():
    own = (step((1,), factor=2.0), step((1,), 128, factor=2.0), step((2,), factor=2.0))
    slower = expected_s(fit_throughput(own, MANY), 4, 16) / step((4,) * 4).step_s
    assert 1.5 < slower < 2.1


def test_own_measurements_stand_before_those_of_the_family():
    own = tuple(msgspec.structs.replace(each, step_s=each.step_s * 3, sync_s=each.sync_s * 3) for each in MANY)
    assert fit_throughput(own, MANY).model == fit_throughput(own).model


def test_the_same_steps_give_the_same_answer_and_are_remembered():
    assert fit_throughput(MANY) is fit_throughput(tuple(MANY))
    again = msgspec.json.decode(msgspec.json.encode(MANY), type=tuple[StepTime, ...])
    assert fit_throughput(again).model == fit_throughput(MANY).model


def test_the_model_alone_is_that_of_the_estimate():
    assert fit_model(MANY) == fit_throughput(MANY).model
    assert fit_model(()) is None


def test_merging_keeps_the_newest_of_each_shape_in_one_order():
    newer = step((1,), factor=2.0)
    merged = merge_step_times(MANY, (newer,))
    assert newer in merged
    assert len(merged) == len(MANY)
    assert merge_step_times(reversed(merged), ()) == merged
    assert merge_step_times(merged, merged) == merged


def test_a_large_family_is_thinned_evenly():
    merged = merge_step_times((), (step((4,) * n, local) for n in range(1, 17) for local in range(1, 21)))
    assert len(merged) == MAX_FAMILY_STEPS
    assert {len(each.placement) for each in merged} == set(range(1, 17))
    assert merge_step_times(merged, ()) == merged


PLACEMENTS = st.lists(st.integers(1, 8), min_size=1, max_size=4).map(lambda sizes: tuple(sorted(sizes, reverse=True)))
STEPS = st.builds(
    StepTime,
    placement=PLACEMENTS,
    local_batch_size=st.integers(1, 512),
    step_s=st.floats(1e-4, 1e3),
    sync_s=st.one_of(st.none(), st.floats(0.0, 1e3)),
)
# No parameter can be told from another by these.
TWICE_THE_WORK_TWICE_AS_LONG = [
    StepTime(placement=(5,), local_batch_size=1, step_s=384.0, sync_s=None),
    StepTime(placement=(1, 1), local_batch_size=2, step_s=776.0, sync_s=None),
]


@settings(max_examples=25, deadline=None)
@given(own=st.lists(STEPS, max_size=6), family=st.lists(STEPS, max_size=6))
@example(own=[], family=TWICE_THE_WORK_TWICE_AS_LONG)
def test_whatever_was_measured_the_answer_is_finite(own, family):
    estimate = fit_throughput(tuple(own), tuple(family))
    assert (estimate is None) == (not own and not family)
    if estimate is not None:
        step_s, sync_s = estimate.model.step_s([1, 1, 4], [1, 4, 16], 64)
        expected, spread = estimate.error([1, 1, 4], [1, 4, 16], 64)
        assert np.all(np.isfinite(step_s))
        assert np.all(step_s > 0)
        assert np.all(sync_s >= -1e-9)
        assert np.all(np.isfinite(expected))
        assert np.all(spread > 0)
