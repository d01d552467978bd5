"""The flat vector that the replicas of a stage all-reduce: gradients, changes of buffers, and a flag.

Gradients are computed directly into the vector, so the exchange needs no copy. A parameter for which no replica had a
gradient has none in the update either.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from springtide.runtime.models.layers import Stage


class GradientVector:
    """The vector of one stage, with methods that fill it and apply it.

    In a step: `begin_step`; for every micro-batch `begin_micro_batch`, forward, `end_forward`; the backward passes;
    `seal`; the exchange of `array`; `take`. Each micro-batch sees the buffers as they were when the step began, and
    their changes are averaged by its share of the global batch, as the platform's trainer does with its shards.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32
        # Constant buffers (a mask, say) are included; they only cost their space in the vector.
        self._buffers = list(dict(stage.named_buffers()))
        num_gradients = sum(parameter.numel() for parameter in self.parameters)
        num_changes = sum(stage.get_buffer(name).numel() for name in self._buffers)
        self._changes_at = num_gradients
        self._counts_at = num_gradients + num_changes
        self._flag_at = self._counts_at + len(self.parameters)
        self._reserve()
        self._start: dict[str, torch.Tensor] = {}
        self._has_gradient: set[int] = set()
        for index, parameter in enumerate(self.parameters):
            self._watch(index, parameter)

    def _reserve(self) -> None:
        self.vector = torch.zeros(self._flag_at + 1, dtype=self.dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(self.vector[: self._changes_at], sizes)
        self._views = [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def _watch(self, index: int, parameter: torch.nn.Parameter) -> None:
        def note(_: torch.Tensor) -> None:
            self._has_gradient.add(index)

        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @property
    def array(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.vector.numpy()
        return array

    def begin_step(self) -> None:
        """Clear the vector and save the buffers' current values."""
        self.vector.zero_()
        self._has_gradient.clear()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view if parameter.dtype == self.dtype else None
        self._start = {name: self._stage.get_buffer(name).detach().clone() for name in self._buffers}

    def begin_micro_batch(self) -> None:
        """Reset the stage's buffers to the step's start."""
        for name, start in self._start.items():
            if not torch.equal(self._stage.get_buffer(name), start):
                # A new tensor, not a copy in place: the previous micro-batch's backward pass may need the old one.
                module, _, attribute = name.rpartition(".")
                self._stage.get_submodule(module)._buffers[attribute] = start.clone()

    def end_forward(self, weight: float) -> None:
        """Add the forward pass's changes of the buffers; `weight` is the micro-batch's part of the global batch."""
        at = self._changes_at
        with torch.no_grad():
            for name, start in self._start.items():
                now = self._stage.get_buffer(name).detach()
                if now.dtype != torch.bool and not now.is_complex() and not torch.equal(now, start):
                    wide, before = now.to(self.dtype), start.to(self.dtype)
                    # Unchanged elements (infinities of a mask, say) stay exact.
                    change = torch.where(wide == before, 0.0, (wide - before) * weight)
                    self.vector[at : at + now.numel()] += change.reshape(-1).to(self.dtype)
                at += now.numel()

    def seal(self, *, flag: bool) -> None:
        """Complete the vector after all backward passes. `take` returns True on all replicas if one sets `flag`."""
        with torch.no_grad():
            for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
                if parameter.grad is not None and parameter.grad is not view:
                    gradient = parameter.grad
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                self.vector[self._counts_at + index] = float(index in self._has_gradient)
            self.vector[self._flag_at] = float(flag)

    def take(self) -> bool:
        """Set gradients and buffers from the reduced vector; returns whether any replica set the flag."""
        counts = self.vector[self._counts_at : self._flag_at].tolist()
        for parameter, view, count in zip(self.parameters, self._views, counts, strict=True):
            parameter.grad = view.to(parameter.dtype) if count > 0 else None
        at = self._changes_at
        with torch.no_grad():
            for name, start in self._start.items():
                buffer = self._stage.get_buffer(name)
                change = self.vector[at : at + start.numel()].view(start.shape)
                at += start.numel()
                if start.dtype == torch.bool or start.is_complex():
                    continue
                moved = start + (change if start.is_floating_point() else change.round()).to(start.dtype)
                buffer.copy_(torch.where(change == 0, start, moved))
        return float(self.vector[self._flag_at]) > 0.0

    def drop(self) -> None:
        """Discard the step: restore the buffers and clear the gradients."""
        self.begin_micro_batch()
        for parameter in self.parameters:
            parameter.grad = None
        # New memory, because an abandoned exchange may still be writing into the old one.
        self._reserve()
