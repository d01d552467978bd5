"""The plain variables of a program's own loop: counters, sums, the best score so far, lists of losses.

A worker that joins runs the program from its top, without the steps that are over, so that its variables lack what
these left in them. What a loop decides by them (when to stop, what to save) must be the same on all workers.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import springtide

# Larger values stay where they are.
_MAX_ITEMS = 10_000
_PLAIN = (bool, int, float, str, type(None))
_NOT_OF_USERS = tuple(
    str(Path(folder))
    for folder in {
        str(Path(springtide.__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def program_frames() -> list[FrameType]:
    """The frames of the program's own code from here outwards, innermost first; those of packages are left out."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_NOT_OF_USERS, "<")):
            frames.append(frame)
            if frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return frames


class LoopVariables:
    """The plain variables around a loop, as far as they have changed since it began.

    All calls are made below the one by which the program asks for its next batch.
    """

    def __init__(self) -> None:
        self._before = [_plain_values(frame) for frame in program_frames()]

    def read(self) -> list[dict[str, Any]]:
        """Copies of what has changed, a dict for each frame."""
        frames, found = program_frames(), []
        for frame, before in zip(frames, self._padded(len(frames)), strict=True):
            found.append({"function": frame.f_code.co_name, "values": _changed(frame, before)})
        return found

    def write(self, found: Sequence[dict[str, Any]]) -> None:
        """Set the variables to what `read` has found, as long as the functions around the loop are the same."""
        frames = program_frames()
        for frame, before, one in zip(frames, self._padded(len(frames)), found, strict=False):
            if frame.f_code.co_name != one["function"]:
                return
            # What has changed here only goes back to what it was.
            again = {name: before[name] for name in _changed(frame, before) if name in before}
            _set(frame, {**again, **one["values"]})

    def _padded(self, num_frames: int) -> list[dict[str, Any]]:
        return [*self._before, *({} for _ in range(num_frames))][:num_frames]


_NONE = object()


def _changed(frame: FrameType, before: dict[str, Any]) -> dict[str, Any]:
    values = _plain_values(frame)
    return {name: value for name, value in values.items() if not _is_same(value, before.get(name, _NONE))}


def _plain_values(frame: FrameType) -> dict[str, Any]:
    copies = {}
    for name, value in list(frame.f_locals.items()):
        if not name.startswith("__"):
            copy = _copied(value, [_MAX_ITEMS])
            if copy is not _NONE:
                copies[name] = copy
    return copies


def _copied(value: Any, room: list[int]) -> Any:
    """A copy of a plain value; `_NONE` for what is not plain, or has more items than there is room for."""
    room[0] -= 1
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Tensor and value.numel() == 1:
        return value.detach().clone()
    if type(value) not in (list, tuple, dict) or len(value) > room[0]:
        return _NONE
    items = []
    for item in value.values() if isinstance(value, dict) else value:
        copy = _copied(item, room)
        if copy is _NONE:
            return _NONE
        items.append(copy)
    if not isinstance(value, dict):
        return type(value)(items)
    return dict(zip(value, items, strict=True)) if all(type(key) in _PLAIN for key in value) else _NONE


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and value.shape == other.shape
            and torch.equal(value, other)
        )
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def _set(frame: FrameType, values: dict[str, Any]) -> None:
    variables = frame.f_locals
    for name, value in values.items():
        present, copy = variables.get(name), _copied(value, [_MAX_ITEMS])
        if isinstance(copy, torch.Tensor) and isinstance(present, torch.Tensor):
            copy = copy.to(present.device)
        # In place, because other variables may be the same list.
        if isinstance(copy, list) and type(present) is list:
            present[:] = copy
        elif isinstance(copy, dict) and type(present) is dict:
            present.clear()
            present.update(copy)
        else:
            variables[name] = copy
    if variables is not frame.f_globals:
        # Before Python 3.13 the variables of a function are a copy, which this call writes back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
