"""How a step changes a model's buffers: what is added up over the members, and how it is applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.runtime.models.named_tensors import TrainingState


class BufferChanges:
    """The changes of a model's buffers since the step began, each flattened, in the order of names.

    Changes of buffers of floats are averaged, not values, so that a constant buffer (a mask with infinities, say) stays
    exact. Buffers are set in place, or, where `replaces`, by other tensors: a graph that is yet to run backward keeps
    what it has seen.
    """

    def __init__(self, state: TrainingState, *, replaces: bool = False) -> None:
        self._state = state
        self._replaces = replaces
        buffers = state.buffers()
        self.floats = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        self.integers = [name for name, buffer in buffers.items() if not buffer.is_floating_point()]
        self._sizes = {name: buffer.numel() for name, buffer in buffers.items()}
        self._start: dict[str, torch.Tensor] = {}

    def size(self, names: Sequence[str]) -> int:
        """How many elements these buffers have."""
        return sum(self._sizes[name] for name in names)

    def begin_step(self) -> None:
        """Remember the buffers: every part of the step starts from them."""
        self._start = {name: buffer.detach().clone() for name, buffer in self._state.buffers().items()}

    def reset(self) -> None:
        """Set the buffers to what they were when the step began."""
        with torch.no_grad():
            for name, buffer in self._state.buffers().items():
                self._set(name, buffer, self._start[name])

    def changed(self) -> list[bool]:
        """For each of `floats` and `integers`, in this order, whether it has changed."""
        buffers = self._state.buffers()
        return [not torch.equal(buffers[name], self._start[name]) for name in (*self.floats, *self.integers)]

    def write_floats(self, out: torch.Tensor, names: Sequence[str], weight: float) -> None:
        """Write the changes of these buffers of floats, times the weight of what changed them."""
        buffers, at = self._state.buffers(), 0
        for name in names:
            now, start = buffers[name].detach().to(out.dtype), self._start[name].to(out.dtype)
            change = torch.where(now == start, 0.0, (now - start) * weight).to(out.dtype)
            out[at : at + now.numel()] = change.reshape(-1)
            at += now.numel()

    def write_integers(self, out: torch.Tensor, names: Sequence[str]) -> None:
        """Write the changes of these buffers of integers."""
        buffers, at = self._state.buffers(), 0
        for name in names:
            change = buffers[name].to(torch.int64) - self._start[name].to(torch.int64)
            out[at : at + change.numel()] = change.reshape(-1).to(out.dtype)
            at += change.numel()

    def apply_floats(self, changes: torch.Tensor, names: Sequence[str]) -> None:
        """Set these buffers to what they were when the step began, plus the reduced changes."""
        buffers, at = self._state.buffers(), 0
        with torch.no_grad():
            for name in names:
                buffer, start = buffers[name], self._start[name]
                change = changes[at : at + buffer.numel()].view(buffer.shape).to(buffer.device)
                self._set(name, buffer, torch.where(change == 0, start, start + change.to(start.dtype)))
                at += buffer.numel()

    def apply_integers(self, changes: torch.Tensor, names: Sequence[str]) -> None:
        """The same for buffers of integers."""
        buffers, at = self._state.buffers(), 0
        with torch.no_grad():
            for name in names:
                buffer, start = buffers[name], self._start[name]
                change = changes[at : at + buffer.numel()].view(buffer.shape).to(buffer.device, torch.int64)
                self._set(name, buffer, start.to(torch.int64) + change)
                at += buffer.numel()

    def _set(self, name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
        if self._replaces:
            self._state.replace_buffer(name, value.to(buffer.dtype, copy=True))
        else:
            buffer.copy_(value)
