import numpy as np
import pytest
import torch

from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.client.functions import Task
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.runtime.data.dataset_reader import open_dataset
from springtide.runtime.data.samples import array_samples, dataset_of, schedule_of
from springtide.runtime.data.shards import SampleSchedule, StreamSchedule
from springtide.runtime.functions.pipeline.task_parts import tensor_samples
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.datasets.store import append_dataset, put_dataset
from springtide.storage.stores.open import memory_store

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10)


class Pairs:
    def __init__(self, give):
        self.give = give

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.give(index)


@pytest.mark.parametrize(
    ("dataset", "has_targets"),
    [
        ((X, Y), True),
        ((torch.as_tensor(X), torch.as_tensor(Y)), True),
        (torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y)), True),
        (Pairs(lambda index: (X[index], Y[index])), True),
        (Pairs(lambda index: {"x": X[index], "y": Y[index]}), True),
        (X, False),
        ((X,), False),
        (Pairs(lambda index: X[index]), False),
        (Pairs(lambda index: {"x": X[index]}), False),
    ],
)
def test_samples_of_any_dataset_are_arrays(dataset, has_targets):
    samples = array_samples(dataset)
    assert samples.num_samples == 10
    assert samples.stream == ""
    x, y = samples.fetch([3, 1])
    assert np.array_equal(x, X[[3, 1]])
    assert np.array_equal(y, Y[[3, 1]]) if has_targets else y is None
    samples.close()


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (3, "needs __len__ and __getitem__"),
        ((X, Y[:3]), "differ in length"),
        ((), "samples along the first axis"),
        ((X[:0], Y[:0]), "the dataset is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        array_samples(dataset)


def test_a_dataset_may_come_from_a_factory_that_knows_the_params():
    def make(params):
        return X[: int(params["count"])]

    assert len(dataset_of(Task(model=dict, dataset=make), {"count": "4"})) == 4
    assert dataset_of(Task(model=dict, dataset=X), {}) is X


def test_a_dataset_of_the_platform_is_visited_shard_by_shard_and_each_sample_once():
    store = memory_store()
    x, y = np.arange(4000.0).reshape(1000, 4), np.arange(1000)
    put_dataset(store, "numbers", {"x": x, "y": y}, at_unix_s=0.0, part_id="1", shard_bytes=4096)
    reference = DatasetReference(name="numbers", num_mixed=2)
    samples = array_samples(reference, store)
    schedule = schedule_of(
        job_of(batch=64, epochs=2, batch_schedule=(BatchPhase(from_epoch=1, global_batch_size=128),)), samples
    )
    assert isinstance(schedule, SampleSchedule)
    assert schedule.total_steps == 16 + 8
    batches = [schedule.batch(step) for step in range(schedule.total_steps)]
    for epoch in range(2):
        ids = np.concatenate([batch.ids for batch in batches if batch.epoch == epoch])
        assert np.array_equal(np.sort(ids), np.arange(1000))
    order = open_dataset(reference, store).order(job_of().seed, 0)
    assert set(batches[0].ids.tolist()) == set(order[:64].tolist())
    found, targets = samples.fetch(batches[3].ids.tolist())
    assert np.array_equal(found, x[batches[3].ids])
    assert np.array_equal(targets, batches[3].ids)
    tensors, _ = tensor_samples(reference, store).fetch([5])
    assert torch.equal(tensors, torch.as_tensor(x[5:6]))


def test_a_stream_has_a_schedule_of_its_own():
    store = memory_store()
    append_dataset(store, "clicks", {"x": X}, at_unix_s=0.0, part_id="1")
    samples = array_samples(DatasetReference(name="clicks", is_stream=True), store)
    assert samples.stream == "clicks"
    schedule = schedule_of(job_of(batch=8, batch_schedule=(BatchPhase(from_epoch=0, global_batch_size=4),)), samples)
    assert isinstance(schedule, StreamSchedule)
    assert schedule.samples_needed(1) == 8
    assert samples.fetch([9])[1] is None
