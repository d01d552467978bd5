import threading

import numpy as np
import pytest

from kits.runtime.models_of_users import KEYS, NUM_SAMPLES, Growing, Replicas, Softmax, points, whole_plan
from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.core.errors import CheckpointError, InvalidRequest, StorageError
from springtide.core.function_search import BatchPhase
from springtide.core.wire.functions import Place
from springtide.runtime.data.samples import array_samples
from springtide.runtime.data.shards import SampleSchedule, StreamSchedule
from springtide.runtime.functions.data_parallel.gradients import GradientLayout

PHASES = (BatchPhase(from_epoch=1, global_batch_size=11), BatchPhase(from_epoch=2, global_batch_size=5))
# 44 samples: epochs of 6, 4 and 9 steps, and the first of the fourth.
JOB = job_of(batch=8, epochs=4, batch_schedule=PHASES)
NUM_STEPS = 20


def plain(make_model, num_steps, job=JOB):
    """The losses and the model of training in a loop, whole batches, without the worker."""
    x, y = points()
    schedule = SampleSchedule(
        num_samples=NUM_SAMPLES,
        global_batch_size=job.global_batch_size,
        num_epochs=job.num_epochs,
        seed=job.seed,
        phases=job.batch_schedule,
    )
    model, losses = make_model(), []
    for step in range(num_steps):
        ids = schedule.batch(step).ids
        loss, gradients = model.gradients(x[ids], y[ids])
        model.apply(gradients)
        losses.append(loss)
    return losses, model


@pytest.mark.parametrize(
    ("num_replicas", "collective"), [(1, "duplex"), (2, "duplex"), (3, "smlt"), (3, "parameter-server")]
)
def test_replicas_train_as_one_process_while_the_batch_changes(num_replicas, collective):
    expected, model = plain(Softmax, NUM_STEPS)
    replicas = Replicas(Softmax, num_replicas, job=JOB, collective=collective)
    assert np.allclose(replicas.run(NUM_STEPS), expected, atol=1e-6, rtol=0)
    for worker in replicas.workers:
        assert np.allclose(worker.model.weights, model.weights, atol=1e-6, rtol=0)
        # Replicas hold the same bits.
        assert np.array_equal(worker.model.weights, replicas.workers[0].model.weights)
        assert worker.position == replicas.workers[0].position
    assert replicas.workers[0].global_batch_size == 5


def test_the_number_of_replicas_changes_between_two_steps_and_whoever_stays_keeps_its_model():
    expected, model = plain(Softmax, NUM_STEPS)
    replicas = Replicas(Softmax, 2, job=JOB)
    first = replicas.workers[0].model
    losses = replicas.run(5)
    replicas.change(3)
    losses += replicas.run(6)
    replicas.change(1)
    losses += replicas.run(4)
    replicas.change(2)
    losses += replicas.run(5)
    assert replicas.workers[0].model is first
    assert np.allclose(losses, expected, atol=1e-6, rtol=0)
    assert np.allclose(replicas.workers[1].model.weights, model.weights, atol=1e-6, rtol=0)
    once = Replicas(Softmax, 1, job=JOB)
    once.run(NUM_STEPS)
    assert replicas.workers[1].position == once.workers[0].position


def test_every_sample_of_every_epoch_is_used_once():
    replicas = Replicas(Softmax, 2, job=JOB)
    total = replicas.workers[0].total_steps
    assert total == 6 + 4 + 9 + 9
    assert replicas.workers[0].samples_needed is None
    replicas.run(total)
    for epoch in range(4):
        ids = [int(sample) for each in replicas.outcomes if each.batch.epoch == epoch for sample in each.batch.ids]
        assert sorted(ids) == list(range(NUM_SAMPLES))
    assert replicas.workers[0].is_over
    assert replicas.workers[0].epoch == 3


def test_the_same_run_gives_the_same_bits_and_float64_stays_float64():
    job = job_of(batch=8, epochs=2)

    def run():
        replicas = Replicas(
            lambda: Softmax(dtype=np.float64), 3, job=job, samples=lambda: array_samples(points(np.float64))
        )
        replicas.run(6)
        assert replicas.workers[0].gradient_bytes == 8 * (6 * 3 + 3 + 1)
        return replicas.workers[2].model

    one, other = run(), run()
    assert one.weights.dtype == np.float64
    assert np.array_equal(one.weights, other.weights)


def test_a_replica_without_samples_takes_part_in_the_exchange():
    # Batches of two samples among three replicas: one of them never has any.
    job = job_of(batch=2, epochs=1)
    expected, model = plain(Softmax, 4, job)
    replicas = Replicas(Softmax, 3, job=job)
    assert np.allclose(replicas.run(4), expected, atol=1e-6, rtol=0)
    assert np.allclose(replicas.workers[0].model.weights, model.weights, atol=1e-6, rtol=0)
    assert replicas.workers[0].num_exchanged == 6 * 3 + 3 + 1


def test_whoever_wants_the_step_to_be_the_last_tells_everyone():
    replicas = Replicas(Softmax, 3)
    assert len(replicas.run(9, ends_at=4)) == 4
    assert replicas.outcomes[-1].is_last
    assert [worker.position.step for worker in replicas.workers] == [4, 4, 4]


def test_a_step_that_is_given_up_leaves_the_model_as_it_was():
    class Enough(Exception):
        pass

    replicas = Replicas(Softmax, 2)
    replicas.run(2)
    worker = replicas.workers[0]
    before = worker.model.weights.copy()
    began = threading.Event()

    def check():
        began.set()
        raise Enough

    worker._check = check
    with pytest.raises(Enough):
        worker.run_step(KEYS.wire(1, 8, 2))
    assert began.is_set()
    assert np.array_equal(worker.model.weights, before)
    assert worker.position.step == 2
    # The other attempt, with both, goes on as if nothing had been.
    worker._check = replicas.check
    replicas.attempt = 9
    expected, _ = plain(Softmax, 4, replicas.job)
    assert np.allclose(replicas.run(2), expected[2:], atol=1e-6, rtol=0)


def test_a_model_that_grows_goes_on_from_a_saved_state_and_back_to_an_earlier_one():
    job = job_of(batch=11, epochs=4)
    undisturbed = Replicas(Growing, 1, job=job)
    expected = undisturbed.run(16)
    assert undisturbed.workers[0].model.epochs == [0, 1, 2, 3]
    assert undisturbed.workers[0].num_exchanged == 5 * 3 + 3 + 1
    replicas = Replicas(Growing, 2, job=job)
    losses = replicas.run(4)
    # Saved where an epoch ends: the next one has not begun.
    replicas.change(3)
    assert len(replicas.workers[2].model.weights) == 2
    losses += replicas.run(6)
    assert np.allclose(losses, expected[:10], atol=1e-6, rtol=0)
    # Back into the first epoch: the model has its first size again.
    for worker in replicas.workers:
        worker.load_state(replicas.store, KEYS, 4)
    replicas.attempt += 1
    assert np.allclose(replicas.run(12), expected[4:], atol=1e-6, rtol=0)
    assert replicas.workers[1].num_exchanged == 5 * 3 + 3 + 1


def test_what_cannot_be_loaded_is_said():
    replicas = Replicas(Softmax, 1)
    worker = replicas.workers[0]
    with pytest.raises(CheckpointError, match="no state after step 3"):
        worker.load_state(replicas.store, KEYS, 3)
    replicas.run(1)
    worker.save_state(replicas.store, KEYS)
    assert worker.has_state(replicas.store, KEYS, 1)
    assert not worker.has_state(replicas.store, KEYS, 2)
    other = Replicas(lambda: Softmax(num_classes=4), 1)
    with pytest.raises(CheckpointError, match=r"'weights' was saved as F32 \[6, 3\], the model has F32 \[6, 4\]"):
        other.workers[0].load_state(replicas.store, KEYS, 1)


def test_plans_and_gradients_that_cannot_be_are_refused():
    replicas = Replicas(Softmax, 1)
    worker = replicas.workers[0]
    with pytest.raises(InvalidRequest, match="no place"):
        worker.set_plan(whole_plan(1), Place(0, 1))
    layout = GradientLayout.of({"a": np.zeros(2, np.float32)})
    with pytest.raises(InvalidRequest, match=r"other names than before \(a\)"):
        layout.add(layout.zeros(), {"b": np.zeros(2, np.float32)}, 1.0)
    with pytest.raises(InvalidRequest, match="change its size in begin_epoch"):
        layout.add(layout.zeros(), {"a": np.zeros(3, np.float32)}, 1.0)
    with pytest.raises(InvalidRequest, match="gradients are floats"):
        GradientLayout.of({"a": np.zeros(2, np.int64)})

    class Wordless(Softmax):
        def gradients(self, x, y):
            return 1.0

    with pytest.raises(InvalidRequest, match="must return the mean loss and the gradients by name"):
        Replicas(Wordless, 1).run(1)


def test_a_stream_is_trained_in_order_of_arrival_until_it_is_closed():
    replicas = Replicas(Softmax, 2, job=job_of(batch=8))
    for worker in replicas.workers:
        worker._schedule = StreamSchedule(global_batch_size=8)
    worker = replicas.workers[0]
    assert worker.total_steps is None
    assert worker.samples_needed == 8
    with pytest.raises(StorageError, match="step 1 needs 8 samples of the stream, which has 0"):
        worker.run_step(KEYS.wire(1, 0, 0))
    for each in replicas.workers:
        each.set_available(17, is_closed=False)
    replicas.run(2)
    assert worker.samples_needed == 24
    assert not worker.is_over
    for each in replicas.workers:
        each.set_available(21, is_closed=True)
    assert (worker.total_steps, worker.samples_needed) == (3, 21)
    replicas.run(1)
    assert worker.is_over
    assert [int(sample) for each in replicas.outcomes for sample in each.batch.ids] == list(range(21))
