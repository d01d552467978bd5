import copy

import pytest
import torch

from kits.runtime.models_of_users import KEYS, Replicas
from kits.runtime.pipeline_tasks_of_users import TASKS, job_of, reference
from kits.runtime.whole_model import Whole, samples
from springtide.client.functions import Task
from springtide.core.errors import CheckpointError
from springtide.runtime.functions.pipeline.task_parts import task_parts
from springtide.runtime.models.torch_model import torch_models
from springtide.storage.frames import decode


class Growing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6)])
        self.out = torch.nn.Linear(6, 3)

    def begin_epoch(self, epoch):
        if epoch:
            layer = torch.nn.Linear(6, 6)
            # Not from the process's generator, which the replicas of a test share.
            torch.nn.init.constant_(layer.weight, 0.1 * epoch)
            torch.nn.init.zeros_(layer.bias)
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def task_of(model):
    return Task(model=model, dataset=samples, loss=torch.nn.functional.cross_entropy, optimizer=adam)


class TorchReplicas(Replicas):
    """Each place builds the task anew, as in a process of its own."""

    def __init__(self, task, num_replicas, **fields):
        self.task = task
        super().__init__(None, num_replicas, **fields)

    def build(self, plan, replica):
        parts = task_parts(self.task, self.job.seed)
        assert not parts.layers
        self.make_model, self.samples = torch_models(self.task, parts, {}), lambda: parts.samples
        return super().build(plan, replica)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_module_that_names_no_layers_trains_as_in_one_process(num_replicas):
    job = job_of(batch=12, epochs=3)
    task = task_of(Whole)
    parts = task_parts(task, job.seed)
    expected, _ = reference(parts, job, 8, num_replicas=num_replicas, micro_batch_size=4)
    replicas = TorchReplicas(task, num_replicas, job=job, micro_batch_size=4)
    assert replicas.run(8) == pytest.approx(expected, abs=1e-6)
    saved = {}
    for worker in replicas.workers:
        worker.save_state(replicas.store, KEYS)
        frame = decode(replicas.store.get(KEYS.state(8, 0)))
        saved = {name: tensor.array().copy() for name, tensor in frame.tensors.items() if name.startswith("model/")}
    state = parts.model.state_dict()
    assert {f"model/{name}" for name in state} == set(saved)
    for name, tensor in state.items():
        assert torch.allclose(torch.as_tensor(saved[f"model/{name}"]).double(), tensor.double(), atol=1e-5), name
    # Nobody had a gradient for it: not even its weights decay.
    assert torch.equal(torch.as_tensor(saved["model/unused.weight"]), task_parts(task, job.seed).model.unused.weight)


def test_gradients_leave_the_module_as_it_was():
    task = task_of(Whole)
    model = torch_models(task, task_parts(task, 1), {})()
    before = copy.deepcopy(dict(model.state()))
    x, y = samples()
    model.gradients(x, y)
    after = model.state()
    assert all(bytes(after[name].data) == bytes(tensor.data) for name, tensor in before.items())


def test_a_saved_state_goes_on_with_the_same_bits_and_fits_no_other_model():
    job = job_of(batch=12, epochs=3)
    losses = TorchReplicas(task_of(Whole), 2, job=job, micro_batch_size=4).run(7)
    replicas = TorchReplicas(task_of(Whole), 2, job=job, micro_batch_size=4)
    assert replicas.run(3) == losses[:3]
    replicas.workers[1].save_state(replicas.store, KEYS)
    for replica in range(2):
        replicas.workers[replica] = replicas.build(replicas.workers[replica].plan, replica)
        replicas.workers[replica].load_state(replicas.store, KEYS, 3)
        replicas.workers[replica].exchange = replicas.communicator(replicas.workers[0].plan, replica)
    replicas.attempt += 1
    assert replicas.run(4) == losses[3:]
    other = TorchReplicas(task_of(Growing), 1, job=job)
    with pytest.raises(CheckpointError, match="it is of another model"):
        other.workers[0].load_state(replicas.store, KEYS, 3)


def test_a_module_may_grow_with_the_epochs():
    job = job_of(batch=22, epochs=3)
    expected = TorchReplicas(task_of(Growing), 1, job=job, micro_batch_size=22)
    losses = expected.run(6)
    replicas = TorchReplicas(task_of(Growing), 2, job=job)
    found = replicas.run(3)
    # Whoever joins in the second epoch has the module of the second epoch.
    replicas.change(3)
    found += replicas.run(3)
    assert found == pytest.approx(losses, abs=1e-5)
    assert len(replicas.workers[2].model._parts.model.layers) == 3


def test_a_sequence_of_layers_is_not_taken_whole():
    assert task_parts(TASKS["mlp"], 0).layers
    assert not task_parts(task_of(Whole()), 0).layers
