"""The critical path of a step: never shorter than the computation, never longer than the sum, and the recursion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.core.workload import GradientBucket, StepProfile
from springtide.perf.goodput import step_total_s
from springtide.perf.timeline import (
    bucket_bytes,
    computation_scale,
    exchange_intervals,
    fixed_fraction_of,
    iteration_s,
)

seconds = st.floats(min_value=0.0, max_value=10.0, allow_nan=False)


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    forward_s, backward_s = draw(seconds), draw(seconds)
    moments = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=0, max_size=6)))
    return StepProfile(
        local_batch_size=draw(st.integers(1, 64)),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=draw(st.floats(0.0, 1.0)),
        buckets=tuple(
            GradientBucket(ready_s=forward_s + part * backward_s, num_bytes=1000 * (index + 1))
            for index, part in enumerate(moments)
        ),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepProfile, np.ndarray, np.ndarray, np.ndarray]:
    profile = draw(profiles())
    num_candidates = draw(st.integers(1, 5))
    width = len(profile.buckets)
    times = [draw(st.lists(seconds, min_size=width, max_size=width)) for _ in range(num_candidates)]
    batches = [draw(st.integers(1, 256)) for _ in range(num_candidates)]
    passes = [draw(st.integers(1, 4)) for _ in range(num_candidates)]
    return profile, np.array(batches), np.array(passes), np.array(times).reshape(num_candidates, width)


def one_by_one(profile: StepProfile, batch: int, bucket_s: np.ndarray) -> float:
    scale = batch / profile.local_batch_size
    end_s = 0.0
    for bucket, took_s in zip(profile.buckets, bucket_s, strict=True):
        end_s = max(scale * bucket.ready_s, end_s) + took_s
    return max(end_s, scale * (profile.forward_s + profile.backward_s)) + profile.update_s


@given(cases())
def test_a_step_is_the_recursion_over_its_buckets(case):
    profile, batches, passes, bucket_s = case
    step_s, sync_s = iteration_s(profile, batches, passes, bucket_s)
    expected = [one_by_one(profile, batch, row) for batch, row in zip(batches, bucket_s, strict=True)]
    assert step_s == pytest.approx(expected)
    computing_s = batches / profile.local_batch_size * (profile.forward_s + profile.backward_s)
    assert step_s - sync_s == pytest.approx(computing_s)


@given(cases())
def test_a_step_lies_between_its_computation_and_the_sum_of_all(case):
    profile, batches, passes, bucket_s = case
    step_s, sync_s = iteration_s(profile, batches, passes, bucket_s)
    computing_s = batches / profile.local_batch_size * (profile.forward_s + profile.backward_s) + profile.update_s
    tolerance = 1e-9 * (1.0 + computing_s + bucket_s.sum(axis=-1))
    assert np.all(step_s >= computing_s - tolerance)
    assert np.all(step_s <= computing_s + bucket_s.sum(axis=-1) + tolerance)
    assert np.all(sync_s >= profile.update_s - tolerance)


@given(cases(), st.floats(0.0, 5.0))
def test_slower_exchanges_larger_batches_and_more_passes_never_make_it_faster(case, more_s):
    profile, batches, passes, bucket_s = case
    step_s, sync_s = iteration_s(profile, batches, passes, bucket_s)
    slower_s, _ = iteration_s(profile, batches, passes, bucket_s + more_s)
    larger_s, _ = iteration_s(profile, batches + 1, passes, bucket_s)
    assert np.all(slower_s >= step_s - 1e-9)
    assert np.all(larger_s >= step_s - 1e-9)
    whole_s = step_total_s(step_s, sync_s, passes)
    assert np.all(whole_s >= step_s - 1e-9)
    assert np.all(step_total_s(step_s, sync_s, passes + 1) >= whole_s - 1e-9)


@given(cases())
def test_candidates_do_not_touch_each_other(case):
    profile, batches, passes, bucket_s = case
    together, _ = iteration_s(profile, batches, passes, bucket_s)
    alone = [
        float(iteration_s(profile, int(batch), int(count), row)[0])
        for batch, count, row in zip(batches, passes, bucket_s, strict=True)
    ]
    assert together == pytest.approx(alone)


PROFILE = StepProfile(
    local_batch_size=8,
    forward_s=0.1,
    backward_s=0.2,
    update_s=0.05,
    buckets=(GradientBucket(ready_s=0.2, num_bytes=4_000), GradientBucket(ready_s=0.3, num_bytes=2_000)),
)


def test_exchanges_hide_behind_the_backward_pass_or_stand_out():
    # The first bucket's exchange ends before the second is ready; the second stands out whole.
    step_s, sync_s = iteration_s(PROFILE, 8, 1, [0.05, 0.04])
    assert float(step_s) == pytest.approx(0.3 + 0.04 + 0.05)
    assert float(sync_s) == pytest.approx(0.04 + 0.05)
    # The second has to wait for the first.
    assert float(iteration_s(PROFILE, 8, 1, [0.5, 0.04])[0]) == pytest.approx(0.2 + 0.5 + 0.04 + 0.05)
    assert np.array(exchange_intervals(PROFILE, [0.5, 0.04])) == pytest.approx(np.array([(0.2, 0.7), (0.7, 0.74)]))
    assert exchange_intervals(PROFILE, [0.1, 0.1], 16)[0] == pytest.approx((0.4, 0.5))


def test_a_grid_of_allocations_and_batches_is_one_call():
    bucket_s = np.array([[0.0, 0.0], [0.1, 0.1], [0.4, 0.2]])
    batches = np.array([8, 16])
    step_s, sync_s = iteration_s(PROFILE, batches, 1, bucket_s[:, None, :])
    assert step_s.shape == sync_s.shape == (3, 2)
    assert step_s[0] == pytest.approx([0.35, 0.65])
    assert step_total_s(step_s, sync_s, 3)[0] == pytest.approx([0.95, 1.85])
    assert bucket_bytes(PROFILE).tolist() == [4_000, 2_000]


def test_without_buckets_a_step_is_its_computation():
    alone = StepProfile(local_batch_size=4, forward_s=1.0, backward_s=2.0, update_s=0.5)
    step_s, sync_s = iteration_s(alone, [4, 8], 1, np.zeros((2, 0)))
    assert step_s == pytest.approx([3.5, 6.5])
    assert sync_s == pytest.approx([0.5, 0.5])


def test_two_profiles_tell_what_the_batch_does_not_change():
    def profile(batch: int) -> StepProfile:
        return StepProfile(local_batch_size=batch, forward_s=0.03 + 0.01 * batch, backward_s=0.01 + 0.02 * batch)

    fixed = fixed_fraction_of(profile(8), profile(4))
    assert fixed == pytest.approx(0.04 / 0.28)
    assert fixed == pytest.approx(fixed_fraction_of(profile(8), profile(16)))
    at_four = float(computation_scale(profile(8), 4, fixed)) * 0.28
    assert at_four == pytest.approx(0.16)
    # Noise may say that a smaller batch takes longer: then nothing depends on it, and never less than nothing.
    assert fixed_fraction_of(profile(8), StepProfile(local_batch_size=4, forward_s=1.0, backward_s=0.0)) == 1.0
    assert fixed_fraction_of(profile(8), StepProfile(local_batch_size=4, forward_s=0.01, backward_s=0.0)) == 0.0


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidRequest, match="2 buckets"):
        iteration_s(PROFILE, 8, 1, [0.1])
    with pytest.raises(InvalidRequest, match="at least one pass"):
        iteration_s(PROFILE, 8, 0, [0.1, 0.1])
    with pytest.raises(InvalidRequest, match="same local batch"):
        fixed_fraction_of(PROFILE, PROFILE)
