"""Building the parts of a declared torch task in the same order as on machines: model, layers, loss, samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from springtide.core.errors import InvalidRequest
from springtide.core.model import call_factory
from springtide.core.ports import Store
from springtide.runtime.data.fetching import sample_fetcher, x_and_y
from springtide.runtime.data.samples import Fetch, Samples, dataset_of, named_samples
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.functions.pipeline.state import StageTraining
from springtide.runtime.functions.spilling import bring_back
from springtide.runtime.models.layers import Layer, Stage, build_stage, is_plain_sequence, layers_of
from springtide.runtime.process.deferred_compiler import defer_compiler


@dataclass(slots=True)
class TaskParts:
    """The parts of a task. `samples` are tensors; `layers` is empty if the model cannot be cut."""

    model: torch.nn.Module
    layers: list[Layer]
    loss: Callable[[Any, Any], Any]
    make_optimizer: Callable[[Any], Any]
    samples: Samples

    @property
    def fetch(self) -> Fetch:
        return self.samples.fetch

    @property
    def num_samples(self) -> int:
        return self.samples.num_samples


_NO_PARAMS: Mapping[str, str] = MappingProxyType({})


def task_parts(
    task: Any,
    seed: int,
    *,
    params: Mapping[str, str] = _NO_PARAMS,
    store: Store | None = None,
    samples: Samples | None = None,
) -> TaskParts:
    """Build the task's parts from the seed, in the same order as a worker on machines, so that weights are the same.

    `store` holds named datasets; `samples`, if given, replace the task's dataset. Raises InvalidRequest, StorageError,
    and whatever the user's code raises.
    """
    if not all(hasattr(task, name) for name in ("model", "dataset", "loss", "optimizer")):
        raise InvalidRequest(
            "only a declared st.Task can run on functions: its model is cut into stages, which a training function's "
            "own loop does not allow; write st.Task(model=..., dataset=..., loss=..., optimizer=...)"
        )
    seed_everything(seed)
    model = torch_model(task, params)
    loss = task.loss() if isinstance(task.loss, type) else task.loss
    samples = samples or tensor_samples(dataset_of(task, params), store)
    model.train()
    return TaskParts(
        model=model,
        layers=layers_or_none(model),
        loss=loss,
        make_optimizer=lambda parameters: call_factory(task.optimizer, parameters, params=params),
        samples=samples,
    )


def torch_model(task: Any, params: Mapping[str, str]) -> torch.nn.Module:
    """The task's model. Raises InvalidRequest if it is not a torch module, or there is no loss or optimizer."""
    for name in ("loss", "optimizer"):
        if not callable(getattr(task, name)):
            raise InvalidRequest(f"a task with a torch model needs a loss and an optimizer; this one has no {name}")
    defer_compiler()
    model = task.model if isinstance(task.model, torch.nn.Module) else call_factory(task.model, params=params)
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequest(
            f"the task's model is a {type(model).__name__}, not a torch.nn.Module; a model that has its own "
            "gradients() and apply() comes without loss and optimizer: st.Task(model=..., dataset=...)"
        )
    return model


def layers_or_none(model: torch.nn.Module) -> list[Layer]:
    """The model's layers; [] for a model that is trained as a whole, because it has none or changes its size."""
    names_layers = callable(getattr(model, "pipeline_layers", None)) or is_plain_sequence(model)
    if hasattr(model, "begin_epoch") or not names_layers:
        return []
    return layers_of(model)


def tensor_samples(dataset: Any, store: Store | None) -> Samples:
    """The samples of any dataset as tensors. Raises InvalidRequest, StorageError."""
    named = named_samples(dataset, store)
    if named is not None:
        inner = named.fetch

        def fetch_tensors(ids: Sequence[int]) -> tuple[Any, Any]:
            x, y = inner(ids)
            return torch.from_numpy(x), None if y is None else torch.from_numpy(y)

        return replace(named, fetch=fetch_tensors)
    fetch, num_samples = sample_fetcher(dataset)
    if num_samples <= 0:
        raise InvalidRequest("the dataset is empty; hand over at least one sample")
    return Samples(lambda ids: x_and_y(fetch(ids)), num_samples)


def stage_training(parts: TaskParts, first_layer: int, end_layer: int) -> StageTraining:
    """One stage of the model with its own optimizer. Raises InvalidRequest."""
    stage = build_stage(parts.model, parts.layers, first_layer, end_layer)
    bring_back(stage)
    stage.train()
    return StageTraining(stage, _optimizer(parts.make_optimizer, stage))


def _optimizer(make: Callable[[Any], Any], stage: Stage) -> torch.optim.Optimizer | None:
    parameters = list(stage.parameters())
    if not parameters:
        return None
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidRequest(
            f"the task's optimizer must be a factory of a torch optimizer, as in lambda p: torch.optim.SGD(p, 0.1); "
            f"it gave a {type(made).__name__}"
        )
    return made
