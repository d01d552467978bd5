"""Adapts a torch module with its loss and optimizer to core.model.Model, whether or not it can be cut into layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from springtide.core.errors import InvalidRequest
from springtide.core.model import OPTIMIZER_PREFIX
from springtide.runtime.functions.pipeline.task_parts import TaskParts, stage_training, torch_model
from springtide.runtime.models.gradients import GradientVector
from springtide.runtime.models.layers import Layer
from springtide.storage.frames import Frame

_MODEL_PREFIX = "model/"
# The model's only "gradient": the vector of gradients, changes of buffers and counts.
_ALL = "all"


def torch_models(task: Any, parts: TaskParts, params: Mapping[str, str]) -> Callable[[], TorchModel]:
    """A factory of the task's model as it is before the first step; a module that grows is built anew each time."""
    is_value = isinstance(task.model, torch.nn.Module)
    grows = hasattr(parts.model, "begin_epoch")
    pristine = copy.deepcopy(parts.model) if is_value and grows else None
    unused = [parts.model]

    def make() -> TorchModel:
        if unused or not grows:
            model = unused.pop() if unused else parts.model
        else:
            model = torch_model(task, params) if pristine is None else copy.deepcopy(pristine)
        model.train()
        return TorchModel(replace(parts, model=model))

    return make


class TorchModel:
    """Implements core.model.Model for a torch module.

    Its gradients also hold the forward pass's changes of buffers (running means), to be averaged over the batch, and
    for each parameter whether it has a gradient: the optimizer skips a parameter that has none on any replica. A module
    with a method `begin_epoch(epoch)` may change its size there; its optimizer is then made anew.
    """

    def __init__(self, parts: TaskParts) -> None:
        self._parts = parts
        self._begin()

    def _begin(self) -> None:
        module = self._parts.model
        self._parts.layers = [Layer("model", module)]
        self.training = stage_training(self._parts, 0, 1)
        self._vector = GradientVector(self.training.stage)

    @property
    def module(self) -> torch.nn.Module:
        """The module as it is now."""
        return self._parts.model

    @property
    def grows(self) -> bool:
        """Whether the module may change its size when an epoch begins."""
        return hasattr(self._parts.model, "begin_epoch")

    def begin_epoch(self, epoch: int) -> None:
        """Call the module's `begin_epoch`, if it has one; a change of its size resets the optimizer."""
        begin = getattr(self._parts.model, "begin_epoch", None)
        if callable(begin):
            before = [(name, tensor.shape) for name, tensor in self._parts.model.state_dict().items()]
            begin(epoch)
            after = [(name, tensor.shape) for name, tensor in self._parts.model.state_dict().items()]
            if before != after:
                self._begin()

    def gradients(self, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        """The mean loss over these samples, and its gradients. Raises InvalidRequest if the loss is not one number."""
        vector = self._vector
        vector.begin_step()
        vector.begin_micro_batch()
        loss = self._parts.loss(self.training.stage(x), y)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidRequest("the task's loss must give the mean loss of the batch as a tensor of one element")
        loss = loss.reshape(())
        vector.end_forward(1.0)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        vector.seal(flag=False)
        found = np.array(vector.array, copy=True)
        vector.begin_micro_batch()
        return float(loss.detach()), {_ALL: found}

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """Take one step of the optimizer."""
        self._vector.begin_step()
        np.copyto(self._vector.array, gradients[_ALL])
        self._vector.take()
        self.training.update()

    def state(self) -> Mapping[str, Any]:
        """Weights and persistent buffers under the names of state_dict; all else under the optimizer's prefix."""
        return {_own_name(name): tensor for name, tensor in self.training.frame_tensors().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises CheckpointError if it does not fit; the model is then unchanged."""
        self.training.take_frame(Frame({_frame_name(name): tensor for name, tensor in state.items()}, {}))


def _own_name(name: str) -> str:
    """`model/NAME` becomes NAME; other tensors of a stage's frame get the prefix `optimizer/`."""
    return name.removeprefix(_MODEL_PREFIX) if name.startswith(_MODEL_PREFIX) else OPTIMIZER_PREFIX + name


def _frame_name(name: str) -> str:
    return name.removeprefix(OPTIMIZER_PREFIX) if name.startswith(OPTIMIZER_PREFIX) else _MODEL_PREFIX + name
