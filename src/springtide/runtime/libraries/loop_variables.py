"""The variables of a program's own loop: counters, sums, the best score so far, lists of losses, averages of weights.

A worker that joins runs the program from its top, without the steps that are over, so that its variables lack what
these left in them. What a loop decides by them (when to stop, what to save) must be the same on all workers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

from springtide.runtime.libraries.plain_values import ChangedValues, is_of_program


def program_frames() -> list[FrameType]:
    """The frames of the program's own code from here outwards, innermost first; those of packages are left out."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            frames.append(frame)
            if frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return frames


class LoopVariables:
    """The values in the variables around a loop, as far as they have changed since it began.

    All calls are made below the one by which the program asks for its next batch.
    """

    def __init__(self, known: Collection[int] = ()) -> None:
        """`known` are the ids of the objects whose states move in another way."""
        self._known = known
        self._before = [ChangedValues(frame.f_locals, known) for frame in program_frames()]

    def read(self) -> list[dict[str, Any]]:
        """Copies of what has changed, a dict for each frame."""
        frames = program_frames()
        return [
            {"function": frame.f_code.co_name, **before.read(frame.f_locals)}
            for frame, before in zip(frames, self._padded(len(frames)), strict=True)
        ]

    def write(self, found: Sequence[dict[str, Any]]) -> None:
        """Set the variables to what `read` has found, as long as the functions around the loop are the same."""
        frames = program_frames()
        for frame, before, one in zip(frames, self._padded(len(frames)), found, strict=False):
            if frame.f_code.co_name != one["function"]:
                return
            variables = frame.f_locals
            before.write(variables, {"states": {}, "tensors": {}, **one})
            if variables is not frame.f_globals:
                # Before Python 3.13 the variables of a function are a copy, which this call writes back.
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def _padded(self, num_frames: int) -> list[ChangedValues]:
        return [*self._before, *(ChangedValues({}, self._known) for _ in range(num_frames))][:num_frames]
