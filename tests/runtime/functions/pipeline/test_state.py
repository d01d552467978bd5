import hashlib

import msgspec
import pytest
import torch
from safetensors.torch import load

from kits.runtime.pipeline_tasks_of_users import TASKS, TinyGpt
from springtide.client.functions import Task
from springtide.core.errors import CheckpointError
from springtide.core.wire.functions import Keys
from springtide.runtime.functions.pipeline.state import load_state, read_meta, save_state
from springtide.runtime.functions.pipeline.task_parts import stage_training, task_parts
from springtide.runtime.functions.step import Position
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.memory import MemoryStore
from springtide.storage.stores.open import memory_store

KEYS = Keys("job")
AT = Position(7, 56, "abc")


def trained(name, cuts, *, seed=3, num_steps=2):
    """The stages of a task under that cut, after a few updates with made-up gradients."""
    parts = task_parts(TASKS[name], seed)
    stages = [
        stage_training(parts, first, end) for first, end in zip([0, *cuts], [*cuts, len(parts.layers)], strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for training in stages:
            for parameter in training.stage.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            training.update()
    return stages


def everything(stages):
    """All tensors of all stages, the optimizers' too, by the user's names."""
    found = {}
    for training in stages:
        found |= training.model_tensors()
        for name, parameter in training.stage.named_parameters():
            for key, value in (training.optimizer.state.get(parameter, {}) if training.optimizer else {}).items():
                found[f"{training.stage.names[name][0]}.{key}"] = torch.as_tensor(value)
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutional"])
@pytest.mark.parametrize("cuts", [[], [1], [2, 3]])
def test_a_state_comes_back_whatever_the_cut(name, cuts):
    store = memory_store()
    saved = trained(name, [2])
    for stage, training in enumerate(saved):
        save_state(store, KEYS, stage, training, AT)
    loaded = trained(name, cuts, seed=4, num_steps=1)
    for stage, training in enumerate(loaded):
        position = load_state(store, KEYS, 7, stage, training)
        assert position == Position(7, 56, "abc" if stage == 0 else "")
    expected, found = everything(saved), everything(loaded)
    model_names = {name for name in expected if not name.startswith("rest/")}
    assert model_names == {name for name in found if not name.startswith("rest/")}
    assert all(torch.equal(found[name], expected[name]) for name in model_names)


def test_the_model_has_the_users_names_and_the_rest_has_others():
    store = memory_store()
    for stage, training in enumerate(trained("gpt", [2])):
        save_state(store, KEYS, stage, training, AT)
    names = set()
    for stage in range(2):
        names |= {name for name in load(store.get(KEYS.state(7, stage))) if name.startswith("model/")}
    assert {name.removeprefix("model/") for name in names} == set(TinyGpt().state_dict())


def test_the_hyperparameters_come_back():
    store = memory_store()
    (saved,) = trained("mlp", [])
    saved.optimizer.param_groups[0]["lr"] = 0.025
    save_state(store, KEYS, 0, saved, AT)
    (loaded,) = trained("mlp", [], seed=4)
    load_state(store, KEYS, 7, 0, loaded)
    assert loaded.optimizer.param_groups[0]["lr"] == 0.025
    assert len(loaded.optimizer.param_groups[0]["params"]) == 6


def test_a_stage_without_parameters_has_a_state_too():
    store = memory_store()
    saved = trained("mlp", [1, 2])
    assert saved[1].optimizer is None
    for stage, training in enumerate(saved):
        save_state(store, KEYS, stage, training, AT)
    assert load_state(store, KEYS, 7, 1, saved[1]).step == 7


def test_the_tensors_are_written_before_the_record_that_makes_them_count():
    written = []

    class Noting(MemoryStore):
        def write(self, key, data, *, only_if_absent):
            written.append(key)
            return super().write(key, data, only_if_absent=only_if_absent)

    (training,) = trained("mlp", [])
    meta = save_state(CheckedStore(Noting()), KEYS, 0, training, AT)
    assert written == [KEYS.state(7, 0), KEYS.state_meta(7, 0)]
    assert (meta.first_layer, meta.end_layer, meta.key) == (0, 5, KEYS.state(7, 0))


def test_the_same_state_is_the_same_bytes():
    one, two = trained("gpt", []), trained("gpt", [])
    assert one[0].frame() == two[0].frame()


@pytest.fixture
def saved():
    store = memory_store()
    stages = trained("mlp", [2])
    for stage, training in enumerate(stages):
        save_state(store, KEYS, stage, training, AT)
    return store, stages


def refuse(store, training, sentence, *, stage=0, step=7):
    before = {name: tensor.clone() for name, tensor in training.model_tensors().items()}
    with pytest.raises(CheckpointError, match=sentence):
        load_state(store, KEYS, step, stage, training)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model_tensors().items())


def test_a_torn_state_is_refused(saved):
    store, stages = saved
    data = store.get(KEYS.state(7, 0))
    store.put(KEYS.state(7, 0), data[:-8])
    refuse(store, stages[0], "is torn")
    store.put(KEYS.state(7, 0), data[:-1] + bytes([data[-1] ^ 1]))
    refuse(store, stages[0], "is torn")
    store.delete([KEYS.state(7, 0)])
    refuse(store, stages[0], "has a record but no tensors")


def test_a_missing_stage_is_told(saved):
    store, stages = saved
    store.delete([KEYS.state_meta(7, 1)])
    refuse(store, stages[1], "lacks stage 1", stage=1)
    refuse(store, stages[0], "after step 8 lacks stage 0", step=8)
    assert read_meta(store, KEYS, 7, 1) is None


def test_a_record_that_is_none_is_refused(saved):
    store, stages = saved
    key = KEYS.state_meta(7, 0)
    meta = store.get(key)
    store.put(key, b"{}")
    refuse(store, stages[0], "is unreadable")
    store.put(key, store.get(KEYS.state_meta(7, 1)))
    refuse(store, stages[0], "is another's")
    store.put(key, meta.replace(b'"end_layer":2', b'"end_layer":0'))
    refuse(store, stages[0], "do not follow each other")


def test_a_state_of_another_model_is_refused(saved):
    store, _ = saved
    other = Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)),
        dataset=TASKS["mlp"].dataset,
        loss=TASKS["mlp"].loss,
        optimizer=TASKS["mlp"].optimizer,
    )
    refuse(store, stage_training(task_parts(other, 0), 0, 2), r"was saved as float32 \[9, 6\], the model has")


def test_a_frame_with_other_contents_is_refused(saved):
    store, stages = saved
    data = store.get(KEYS.state_meta(7, 0))
    frame = stages[1].frame()
    store.put(KEYS.state(7, 0), frame)
    meta = msgspec.json.decode(data)
    meta |= {"num_bytes": len(frame), "sha256": hashlib.sha256(frame).hexdigest()}
    store.put(KEYS.state_meta(7, 0), msgspec.json.encode(meta))
    refuse(store, stages[0], "it is of another model")
