"""The flat vector that the replicas of a whole model all-reduce: all gradients by name, and a flag."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest

Vector = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The place of each gradient in the vector: by name in alphabetical order, with the flag as the last element.

    The vector is float32, or float64 if any gradient is. `dtypes` are the gradients' own.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, gradients: Mapping[str, Any]) -> GradientLayout:
        """The layout for these gradients. Raises InvalidRequest if one is not of a floating type."""
        names = tuple(sorted(gradients))
        arrays = [np.asarray(gradients[name]) for name in names]
        for name, array in zip(names, arrays, strict=True):
            # Not a check for floats, because numpy does not know other libraries' float types (bfloat16) as such.
            if array.dtype.kind in "biucOSU":
                raise InvalidRequest(f"the gradient {name!r} is of {array.dtype.name}; gradients are floats")
        return cls(names, tuple(array.shape for array in arrays), tuple(array.dtype.name for array in arrays))

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes) + 1

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.float64 if "float64" in self.dtypes else np.float32

    def zeros(self) -> Vector:
        return np.zeros(self.num_elements, dtype=self.dtype)

    def add(self, vector: Vector, gradients: Mapping[str, Any], weight: float) -> None:
        """Add gradients times `weight` to the vector. Raises InvalidRequest if they do not fit the layout."""
        if len(gradients) != len(self.names):
            raise InvalidRequest(_changed(set(gradients) ^ set(self.names)))
        at = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = math.prod(shape)
            if name not in gradients:
                raise InvalidRequest(_changed({name}))
            array = np.asarray(gradients[name])
            if array.shape != shape:
                raise InvalidRequest(
                    f"the gradient {name!r} has shape {list(array.shape)} and had {list(shape)}; a model may change "
                    "its size in begin_epoch alone"
                )
            vector[at : at + size] += array.astype(vector.dtype, copy=False).reshape(-1) * vector.dtype.type(weight)
            at += size

    def split(self, vector: Vector) -> dict[str, Vector]:
        """The gradients in a vector, in their own types; those of the vector's type are views of it."""
        found: dict[str, Vector] = {}
        at = 0
        for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True):
            size = math.prod(shape)
            part = vector[at : at + size].reshape(shape)
            at += size
            # Types that numpy does not know by name stay in the vector's type.
            found[name] = part.astype(dtype, copy=False) if dtype in {"float16", "float32", "float64"} else part
        return found


def _changed(names: set[str]) -> str:
    return (
        f"gradients() gave other names than before ({', '.join(sorted(names)[:3])}); it gives the same ones each time, "
        "with zeros where there is no gradient"
    )
