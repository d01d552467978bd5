"""A copy of the training state as a step began, with which updates in the midst of the step are taken back."""

from __future__ import annotations

from typing import Any

import torch

from springtide.runtime.models.named_tensors import TrainingState


class StateCopy:
    """Parameters, buffers, and all that the optimizers have. Costs their memory once more, and a copy each step."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._tensors: dict[str, torch.Tensor] = {}
        self._optimizers: list[dict[Any, dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Copy the state as it is now."""
        self._tensors = _copies(self._state.model_tensors(), self._tensors)
        before = self._optimizers or [{} for _ in self._state.optimizers]
        self._optimizers = [
            {parameter: _copies(values, memory.get(parameter, {})) for parameter, values in optimizer.state.items()}
            for optimizer, memory in zip(self._state.optimizers, before, strict=True)
        ]
        self._groups = [_copies(_without_params(group), {}) for group in self._state.groups]

    def restore(self) -> None:
        """Set the state to what was kept."""
        buffers = self._state.buffers()
        with torch.no_grad():
            for name, parameter in self._state.parameters.items():
                parameter.copy_(self._tensors[name])
        for name in buffers:
            # Another tensor, because a graph may still have the old one.
            self._state.replace_buffer(name, self._tensors[name].clone())
        for optimizer, kept in zip(self._state.optimizers, self._optimizers, strict=True):
            optimizer.state.clear()
            optimizer.state.update({parameter: _copies(values, {}) for parameter, values in kept.items()})
        for group, values in zip(self._state.groups, self._groups, strict=True):
            group.update(_copies(values, {}))


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copies(values: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """The values, with copies of the tensors among them; in the memory of earlier copies where there are any."""
    found = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
        elif name in memory:
            found[name] = memory[name].copy_(value.detach())
        else:
            found[name] = value.detach().clone()
    return found
