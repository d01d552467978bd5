"""Tensors that a program carries from one batch to the next, with a row for each sample: hidden states, for example.

A worker's part of the next batch has other rows once the group has changed, so that they cannot be divided.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch


class _Watched(torch.Tensor):
    """A tensor that notes that it is used."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class CarriedTensors:
    """Finds them: `watch` as the program gets a batch, `used` before the backward pass of its loss."""

    def __init__(self) -> None:
        # What each variable held when it was looked at last: the tensors and their versions.
        self._seen: dict[tuple[int, str], list[tuple[torch.Tensor, int]]] = {}
        self._restore: list[Callable[[], None]] = []
        self._used: set[str] = set()

    def watch(self, model: torch.nn.Module, frames: Sequence[FrameType], num_samples: int) -> None:
        """Watch what the model's modules and these frames of the program hold of a batch of `num_samples`.

        That is what has changed since the last call. 0 samples: there was no batch yet.
        """
        modules = list(model.modules())
        if any(type(module).__name__ == "OptimizedModule" for module in modules):
            # Compiled code would be compiled again for another kind of tensor.
            return
        for module in modules:
            self._watch(lambda module=module: module.__dict__, num_samples, lambda: None)  # type: ignore[misc]
        for frame in frames:
            self._watch(
                lambda frame=frame: frame.f_locals,  # type: ignore[misc]
                num_samples,
                lambda frame=frame: _write_back(frame),  # type: ignore[misc]
            )

    def used(self) -> str:
        """The name of a tensor that the program has used since `watch`; empty if it has used none. Ends the watch."""
        for restore in self._restore:
            restore()
        used, self._restore, self._used = min(self._used, default=""), [], set()
        return used

    def _watch(self, read: Callable[[], dict[str, Any]], num_samples: int, write: Callable[[], None]) -> None:
        values = read()
        for name, value in list(values.items()):
            tensors = [one for one in _tensors(value) if _is_of_batch(one, num_samples)]
            if not tensors or self._is_known((id(values), name), tensors) or not num_samples:
                continue
            watched = _watched(value, type("_", (_Watched,), {"note": lambda name=name: self._used.add(name)}))
            values[name] = watched

            def restore(name: str = name, value: Any = value, watched: Any = watched) -> None:
                now = read()
                if now.get(name) is watched:
                    now[name] = value
                    write()

            self._restore.append(restore)
        write()

    def _is_known(self, key: tuple[int, str], tensors: list[torch.Tensor]) -> bool:
        before, self._seen[key] = self._seen.get(key, []), [(one, one._version) for one in tensors]
        now = self._seen[key]
        return len(before) == len(now) and all(
            one is other and version == late for (one, version), (other, late) in zip(before, now, strict=True)
        )


def _watched(value: Any, kind: type) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(kind)
    return type(value)(_watched(one, kind) for one in value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list) and value and all(isinstance(one, torch.Tensor) for one in value):
        yield from value


def _is_of_batch(value: torch.Tensor, num_samples: int) -> bool:
    is_plain = value.is_floating_point() and not isinstance(value, torch.nn.Parameter)
    return is_plain and value.dim() >= 2 and (num_samples in value.shape or not num_samples)


def _write_back(frame: FrameType) -> None:
    if frame.f_code.co_name != "<module>":
        # Before Python 3.13 the variables of a function are a copy, which this call writes back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
