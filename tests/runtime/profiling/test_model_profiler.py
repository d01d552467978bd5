from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kits.runtime.models_of_users import Softmax, points
from kits.runtime.whole_model import Whole, samples
from springtide.client.functions import Task
from springtide.core.errors import InvalidRequest
from springtide.runtime.data.samples import array_samples
from springtide.runtime.profiling import model_profiler
from springtide.runtime.profiling.model_profiler import profile_model
from springtide.runtime.profiling.place import fixed_part_s
from springtide.runtime.profiling.task_profiler import profile_task
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.datasets.store import append_dataset
from springtide.storage.stores.open import open_store


class Clocked(Softmax):
    """A model whose work moves a clock: 5 s a pass, 2 s a sample, 1 s an update."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.slowdown = 1.0

    def gradients(self, x, y):
        self.now_s += self.slowdown * (5.0 + 2.0 * len(x))
        return super().gradients(x, y)

    def apply(self, gradients):
        self.now_s += 1.0
        super().apply(gradients)


class Hungry(Softmax):
    """Holds 80 kB for each sample while it works."""

    def gradients(self, x, y):
        held = np.ones((len(x), 10_000))
        held += 1.0
        return super().gradients(x, y)


def profile(model, num_samples=44, **fields):
    given = array_samples(points(num_samples=num_samples))
    fields = {"name": "m", "micro_batch_size": 4, "memory_mb": 1024, "num_rounds": 2, **fields}
    return profile_model(model, given.fetch, given.num_samples, **fields)


def test_fixed_time_and_time_per_sample_are_told_apart():
    model = Clocked()
    found = profile(model, clock=lambda: model.now_s)
    assert found.fixed_s == pytest.approx(5.0 + 1.0)
    (layer,) = found.layers
    assert layer.backward_s[0] == pytest.approx(6.0 + 4 * 2.0)
    assert layer.forward_s == (0.0,)
    assert layer.parameter_bytes == 4 * (6 * 3 + 3)
    assert (found.micro_batch_size, found.memory_mb) == (4, (1024,))


def test_what_a_sample_holds_is_measured():
    (layer,) = profile(Hungry()).layers
    assert 80_000 <= layer.activation_bytes / 4 < 200_000


def test_one_sample_is_enough_and_none_is_too_few():
    assert profile(Softmax(), num_samples=1, micro_batch_size=1).fixed_s >= 0.0
    with pytest.raises(InvalidRequest, match="no sample yet"):
        profile_model(Softmax(), lambda ids: points(), 0, name="m", micro_batch_size=1, memory_mb=1)
    with pytest.raises(InvalidRequest, match="at least one round"):
        profile(Softmax(), num_rounds=0)


def test_transfers_beside_the_passes_give_the_slowdown():
    model = Clocked()

    @contextmanager
    def beside():
        model.slowdown = 1.5
        yield
        model.slowdown = 1.0

    found = profile(model, clock=lambda: model.now_s, transfer=beside)
    assert found.slowdown == pytest.approx(1.5)
    assert found.fixed_s == pytest.approx(6.0)


def test_small_passes_are_put_together_while_a_pass_holds_little(monkeypatch):
    assert profile(Softmax(), largest_micro_batch=20).micro_batch_size == 20
    # The data ends before.
    assert profile(Softmax(), num_samples=10, largest_micro_batch=20).micro_batch_size == 10
    # A sample takes 80 kB: no more than eight are held at a time.
    monkeypatch.setattr(model_profiler, "_PASS_BYTES", 650_000)
    assert 4 <= profile(Hungry(), largest_micro_batch=20).micro_batch_size <= 8


def test_a_line_through_two_sizes():
    assert fixed_part_s(4, 13.0, 16, 37.0) == pytest.approx(5.0)
    assert fixed_part_s(4, 1.0, 16, 8.0) == 0.0
    assert fixed_part_s(4, 3.0, 16, 2.0) == 3.0
    assert fixed_part_s(4, 3.0, 4, 3.0) == 0.0


def test_any_task_is_profiled_and_layers_only_where_there_are_some(tmp_path, monkeypatch):
    numpy_task = Task(model=lambda params: Softmax(rate=float(params["rate"])), dataset=points)
    taken = profile_task(numpy_task, name="n", micro_batch_size=4, memory_mb=1, num_rounds=1, params={"rate": "1"})
    assert (taken.num_samples, [layer.name for layer in taken.profile.layers]) == (44, ["model"])
    loss, sgd = torch.nn.functional.cross_entropy, lambda parameters: torch.optim.SGD(parameters, 0.1)
    whole = Task(model=Whole, dataset=samples, loss=loss, optimizer=sgd)
    taken = profile_task(whole, name="w", micro_batch_size=4, memory_mb=1, num_rounds=1)
    assert [layer.name for layer in taken.profile.layers] == ["model"]
    assert taken.profile.layers[0].parameter_bytes >= 4 * sum(each.numel() for each in Whole().parameters())
    cut = Task(
        model=torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)),
        dataset=samples,
        loss=loss,
        optimizer=sgd,
    )
    taken = profile_task(cut, name="c", micro_batch_size=4, memory_mb=1, num_rounds=1)
    assert len(taken.profile.layers) == 2
    total_s = sum(layer.forward_s[0] + layer.backward_s[0] for layer in taken.profile.layers)
    assert 0.0 <= taken.profile.fixed_s <= total_s
    monkeypatch.setenv("SPRINGTIDE_STATE", str(tmp_path))
    x, y = points()
    store = open_store(data_store_url(tmp_path))
    append_dataset(store, "clicks", {"x": x, "y": y}, at_unix_s=0.0, part_id="1")
    stream = Task(model=Softmax, dataset=DatasetReference(name="clicks", is_stream=True))
    taken = profile_task(stream, name="s", micro_batch_size=4, memory_mb=1, num_rounds=1)
    assert (taken.num_samples, taken.stream) == (None, "clicks")
