import numpy as np
import pytest
import torch

from kits.runtime.models_of_users import Softmax, points
from kits.runtime.pipeline_tasks_of_users import TASKS
from springtide.client.functions import Task
from springtide.core.errors import InvalidRequest
from springtide.runtime.local.function_task import run_local_task
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.datasets.store import append_dataset, close_dataset, put_dataset
from springtide.storage.frames import decode
from springtide.storage.stores.open import open_store


def saved(result):
    with open(result.artifact_path, "rb") as file:
        return {name: tensor.array() for name, tensor in decode(file.read()).tensors.items()}


def test_a_numpy_model_trains_here_and_its_weights_are_written(tmp_path, capsys):
    task = Task(model=Softmax, dataset=points, epochs=2, global_batch=8, batch_schedule=[(1, 22)])
    result = task.local(tmp_path)
    assert result.num_steps == 6 + 2
    assert result.loss is not None
    assert set(saved(result)) == {"weights", "biases"}
    # Again from the same begin: a task is not used up.
    assert np.array_equal(saved(task.local(tmp_path / "again"))["weights"], saved(result)["weights"])
    assert "task step 8/8  loss" in capsys.readouterr().out


def test_a_torch_task_with_a_batch_schedule_takes_the_same_way(tmp_path):
    task = TASKS["mlp"]
    result = task.local(tmp_path, epochs=2, global_batch=4, batch_schedule=[(1, 16)])
    assert set(saved(result)) == set(task.model().state_dict())
    assert result.num_steps == -(-len(task.dataset()[0]) // 4) + -(-len(task.dataset()[0]) // 16)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_STATE", str(tmp_path / "state"))
    return open_store(data_store_url(tmp_path / "state"))


def as_arrays(low, high):
    x, y = points()
    return {"x": x[low:high], "y": y[low:high]}


def test_a_dataset_of_the_platform_gives_the_same_samples(tmp_path, store):
    put_dataset(store, "points", as_arrays(0, 44), at_unix_s=0.0, part_id="all")
    named = Task(model=Softmax, dataset=DatasetReference(name="points"), epochs=2, global_batch=8)
    given = Task(model=Softmax, dataset=points, epochs=2, global_batch=8)
    assert named.local(tmp_path / "named").loss == given.local(tmp_path / "given").loss
    by_factory = Task(
        model=torch.nn.Sequential(torch.nn.Linear(6, 3)),
        dataset=lambda: DatasetReference(name="points"),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    assert by_factory.local(tmp_path / "torch", global_batch=8).num_steps == 6


def test_a_stream_is_waited_for_until_it_is_closed(tmp_path, store):
    append_dataset(store, "clicks", as_arrays(0, 19), at_unix_s=0.0, part_id="1")
    task, lines = Task(model=Softmax, dataset=DatasetReference(name="clicks", is_stream=True)), []
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 1:
            append_dataset(store, "clicks", as_arrays(19, 40), at_unix_s=1.0, part_id="2")
        else:
            append_dataset(store, "clicks", as_arrays(40, 44), at_unix_s=2.0, part_id="3")
            close_dataset(store, "clicks", at_unix_s=2.0, part_id="4")

    job = task.options.override({"global_batch": 8}, "local()").as_local_job("clicks")
    result = run_local_task(task, job, tmp_path / "out", lines.append, sleep=sleep)
    # 19 samples are two batches, 40 are five, and what is left when it is closed is the sixth.
    assert result.num_steps == 6
    assert len(waited) == 2
    assert "clicks waits for data of 'clicks' (19 of 24 samples)" in lines


def test_a_task_has_a_loss_and_an_optimizer_or_neither():
    with pytest.raises(InvalidRequest, match="has no optimizer"):
        Task(model=Softmax, dataset=points, loss=torch.nn.functional.mse_loss)
