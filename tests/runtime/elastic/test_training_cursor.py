"""Where a training stands: every sample once whatever the batches, noise from shards, the rate's factor."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kits.runtime.training_jobs import ADAPTIVE, make_job, make_script
from springtide.core.errors import InvalidRequest
from springtide.core.workload import AdaptiveBatch
from springtide.perf.noise_scale import DECAY
from springtide.runtime.elastic.training_cursor import (
    LEAST_NOISE_STEPS,
    NOISE_STRIDE,
    NUM_DENSE_STEPS,
    Cursor,
    TrainingCursor,
)
from springtide.runtime.models.named_tensors import TrainingState


@given(st.integers(1, 150), st.integers(1, 3), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_every_sample_of_every_epoch_is_used_once_whatever_the_batches(num_samples, num_epochs, sizes):
    training_cursor = TrainingCursor(make_job(num_epochs=num_epochs, batch=ADAPTIVE))
    training_cursor.start(num_samples)
    seen = {epoch: [] for epoch in range(num_epochs)}
    while not training_cursor.is_over:
        training_cursor.set_batch_size(sizes[training_cursor.step % len(sizes)])
        total_steps = training_cursor.total_steps
        batch = training_cursor.next_batch()
        assert batch.epoch == training_cursor.epoch
        assert len(batch.ids) <= training_cursor.cursor.global_batch_size
        parts = [batch.shard_bounds(shard, 4) for shard in range(4)]
        seen[batch.epoch] += [int(i) for low, high in parts for i in batch.ids[low:high]]
        training_cursor.commit(batch, None, 0.0)
        assert training_cursor.total_steps == total_steps
    assert all(sorted(ids) == list(range(num_samples)) for ids in seen.values())
    assert training_cursor.progress == training_cursor.total_progress


def test_a_cursor_of_a_checkpoint_that_says_only_the_step_stands_where_it_always_did():
    training_cursor = TrainingCursor(make_job())
    training_cursor.cursor = Cursor(step=17, num_seen=None)
    training_cursor.set_batch_size(0)
    training_cursor.start(200)
    # 13 steps an epoch of 200 samples: the fifth of the second epoch is next.
    assert (training_cursor.epoch, training_cursor.num_seen, training_cursor.total_steps) == (1, 264, 26)
    other = TrainingCursor(make_job())
    other.start(200)
    for _ in range(17):
        other.commit(other.next_batch(), None, 0.0)
    assert np.array_equal(training_cursor.next_batch().ids, other.next_batch().ids)


def test_progress_is_steps_of_the_initial_batch_and_steps_where_it_never_changes():
    fixed, changing = TrainingCursor(make_job()), TrainingCursor(make_job(batch=ADAPTIVE))
    for training_cursor in (fixed, changing):
        training_cursor.start(200)
        training_cursor.set_batch_size(16)
        training_cursor.commit(training_cursor.next_batch(), None, 0.0)
    changing.set_batch_size(48)
    for training_cursor in (fixed, changing):
        training_cursor.commit(training_cursor.next_batch(), None, 0.0)
    assert (fixed.progress, changing.progress) == (2.0, 4.0)


def test_a_cursor_survives_its_journey_as_json():
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE))
    training_cursor.start(200)
    for square in (3.1, 2.7, 1.0 / 3.0):
        training_cursor.commit(training_cursor.next_batch(), (square, square / 7), training_cursor.last_square)
    assert msgspec.json.decode(msgspec.json.encode(training_cursor.cursor), type=Cursor) == training_cursor.cursor


def run_noise(batch_size, *, num_steps=400, sigma=2.0, mean=0.5, dimension=20):
    """A gradient that is `mean` in every coordinate plus noise of variance sigma^2 for each sample."""
    rng = np.random.default_rng(3)
    job = make_job(num_epochs=10_000, num_virtual_shards=4, batch=ADAPTIVE)
    training_cursor = TrainingCursor(job)
    training_cursor.start(1024)
    training_cursor.set_batch_size(batch_size)
    for _ in range(num_steps):
        batch = training_cursor.next_batch()
        parts = [batch.shard_bounds(shard, 4) for shard in range(4)]
        sizes = np.array([high - low for low, high in parts if high > low])
        shards = mean + sigma * rng.standard_normal((len(sizes), dimension)) / np.sqrt(sizes)[:, None]
        weights = sizes / sizes.sum()
        squares = float(weights @ (shards**2).sum(1)), float(((weights @ shards) ** 2).sum())
        training_cursor.commit(batch, squares, training_cursor.last_square)
    return training_cursor.noise


@pytest.mark.parametrize("batch_size", [16, 64])
def test_the_noise_is_that_of_the_initial_batch_whatever_the_batch_in_force(batch_size):
    noise = run_noise(batch_size)
    assert noise.grad_sqr == pytest.approx(20 * 0.25, rel=0.15)
    assert noise.grad_var == pytest.approx(20 * 4.0 / 16, rel=0.15)


def test_rank_zeros_square_is_the_one_that_counts():
    one, other = TrainingCursor(make_job(batch=ADAPTIVE)), TrainingCursor(make_job(batch=ADAPTIVE))
    for training_cursor, own in ((one, 1.0), (other, 1.0 + 1e-7)):
        training_cursor.start(2000)
        for _ in range(LEAST_NOISE_STEPS + 1):
            training_cursor.commit(training_cursor.next_batch(), (4.0, own), 1.0)
    assert one.noise == other.noise is not None


def test_after_a_beginning_one_step_of_four_is_measured_and_counts_for_all():
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE, num_epochs=100))
    training_cursor.start(1600)
    measured = []
    for _ in range(NUM_DENSE_STEPS + 16):
        if training_cursor.measures_step:
            measured.append(training_cursor.step)
        training_cursor.commit(
            training_cursor.next_batch(),
            (4.0, 1.0) if training_cursor.measures_step else None,
            training_cursor.last_square,
        )
    assert measured == [*range(NUM_DENSE_STEPS), *range(NUM_DENSE_STEPS, NUM_DENSE_STEPS + 16, NOISE_STRIDE)]
    assert training_cursor.cursor.noise.num_samples == NUM_DENSE_STEPS + 4
    # Each stands for four: as heavy as if all had been measured.
    assert training_cursor.cursor.noise.weight == pytest.approx(1 - DECAY ** (NUM_DENSE_STEPS + 16), rel=0.02)


def test_a_square_that_is_no_number_leaves_the_noise_as_it_was():
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE))
    training_cursor.start(200)
    training_cursor.commit(training_cursor.next_batch(), (4.0, 1.0), 0.0)
    training_cursor.commit(training_cursor.next_batch(), (float("nan"), float("inf")), 1.0)
    before = training_cursor.cursor.noise
    assert before.num_samples == 1
    training_cursor.commit(training_cursor.next_batch(), (4.0, 1.0), 1.0)
    training_cursor.commit(training_cursor.next_batch(), (4.0, 1.0), float("nan"))
    assert training_cursor.cursor.noise == before


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_the_rate_follows_the_batch_by_the_jobs_rule(rule, factor):
    training_cursor = TrainingCursor(make_job(batch=AdaptiveBatch(min_size=16, max_size=64, learning_rate=rule)))
    assert training_cursor.learning_rate_factor == 1.0
    training_cursor.set_batch_size(64)
    assert training_cursor.learning_rate_factor == factor


def test_adascale_gives_the_gain_of_the_batch():
    training_cursor = TrainingCursor(make_job(batch=AdaptiveBatch(min_size=16, max_size=64, learning_rate="adascale")))
    training_cursor.start(2000)
    training_cursor.set_batch_size(64)
    for _ in range(LEAST_NOISE_STEPS + 1):
        # A few steps say too little to stake the rate on.
        assert training_cursor.learning_rate_factor == 1.0
        training_cursor.commit(training_cursor.next_batch(), (4.0, 1.5), training_cursor.last_square)
    noise = training_cursor.noise
    gain = (noise.grad_var + noise.grad_sqr) / (noise.grad_var / 4 + noise.grad_sqr)
    assert training_cursor.learning_rate_factor == pytest.approx(gain)
    assert 1.0 < training_cursor.learning_rate_factor < 4.0


def test_a_job_that_keeps_its_batch_never_sees_a_factor_and_measures_nothing():
    training_cursor = TrainingCursor(make_job())
    assert not training_cursor.measures_noise
    assert training_cursor.learning_rate_factor == 1.0


def test_a_length_in_progress_ends_when_that_is_made_and_not_after_so_many_epochs():
    training_cursor = TrainingCursor(make_job(batch=ADAPTIVE, length_unit="progress", num_epochs=1))
    training_cursor.start(640)
    training_cursor.set_batch_size(64)
    while not training_cursor.is_over:
        training_cursor.commit(training_cursor.next_batch(), (4.0, 3.9), training_cursor.last_square)
    # Hardly any noise: four times the batch is worth little more than one step of the initial size.
    assert training_cursor.total_progress == 40.0
    assert 20 < training_cursor.step <= 41
    assert training_cursor.num_seen > 640
    assert training_cursor.progress == 40.0


def test_an_empty_dataset_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        TrainingCursor(make_job()).start(0)


def test_the_factor_is_in_force_for_one_update_and_no_scheduler_ever_sees_it():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model = torch.nn.Module()
    model.weight = parameter
    state = TrainingState(model, optimizer, torch.device("cpu"))
    moved = []
    for factor in (1.0, 4.0, 4.0):
        before = float(parameter.detach())
        parameter.grad = torch.ones(1)
        state.update(factor)
        moved.append(before - float(parameter.detach()))
        scheduler.step()
    assert moved == [0.5, 1.0, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert scheduler.get_last_lr() == [0.0625]


def test_a_script_says_its_epochs_and_its_batch_itself():
    training_cursor = TrainingCursor(make_script(global_batch_size=64))
    with pytest.raises(InvalidRequest, match=r"for epoch in job\.epochs\(3\)"):
        training_cursor.take_batch_size(16)
    for wrong in (None, 0, 2.0):
        with pytest.raises(InvalidRequest, match="needs the number of epochs"):
            training_cursor.set_epochs(wrong)
    assert training_cursor.set_epochs(3) == 3
    with pytest.raises(InvalidRequest, match="DataLoader with batch_size=N"):
        training_cursor.take_batch_size(0)
    assert training_cursor.take_batch_size(16)
    # What the platform says of the batch is of its own count.
    training_cursor.set_batch_size(64)
    training_cursor.start(40)
    assert (training_cursor.total_steps, training_cursor.global_batch_size, training_cursor.counted_size) == (9, 16, 64)
    passes = []
    while not training_cursor.is_over:
        passes.append(training_cursor.num_passes)
        batch = training_cursor.next_batch()
        assert batch.global_batch_size == 16
        training_cursor.commit(batch, None, 0.0)
    assert (passes, training_cursor.num_passes) == ([0, 0, 0, 1, 1, 1, 2, 2, 2], 3)


def test_a_script_that_goes_on_elsewhere_knows_its_epoch_before_its_data():
    first, second = (TrainingCursor(make_script(global_batch_size=64)) for _ in range(2))
    first.set_epochs(3)
    first.take_batch_size(16)
    first.start(40)
    for _ in range(4):
        first.commit(first.next_batch(), None, 0.0)
    second.cursor = msgspec.json.decode(msgspec.json.encode(first.cursor), type=Cursor)
    assert (second.num_passes, second.epoch) == (1, 1)
    second.set_epochs(3)
    with pytest.raises(InvalidRequest, match="batch_size=32, and the 4 steps before had 16 samples"):
        second.take_batch_size(32)
    second.take_batch_size(16)
    with pytest.raises(InvalidRequest, match="has 41 samples in an epoch, and had 40 before"):
        second.start(41)
    second.start(40)
    assert second.next_batch().ids.tolist() == first.next_batch().ids.tolist()


def test_a_training_function_has_the_epochs_and_the_batch_of_its_job():
    training_cursor = TrainingCursor(make_job(num_epochs=2, global_batch_size=16))
    assert training_cursor.set_epochs(None) == training_cursor.set_epochs(2) == 2
    with pytest.raises(InvalidRequest, match=r"not what the job has: epochs=2; write ctx\.epochs\(\)"):
        training_cursor.set_epochs(3)
    assert not training_cursor.take_batch_size(32)
    assert (training_cursor.global_batch_size, training_cursor.counted_size) == (16, 16)
    with pytest.raises(InvalidRequest, match="does not know its epochs"):
        TrainingCursor(make_job(length_unit="progress", batch=ADAPTIVE)).set_epochs(None)
