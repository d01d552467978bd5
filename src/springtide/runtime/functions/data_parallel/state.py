"""A whole model's state as a frame: its weights, its optimizer's arrays, and the worker's own values.

The frame has `model/NAME` for weights, `optimizer/NAME` for arrays that the model names so, and `values` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from springtide.core.errors import CheckpointError, InvalidRequest, StorageError
from springtide.core.model import OPTIMIZER_PREFIX
from springtide.storage.frames import Frame, FrameTensor, dtype_code, encode, tensor_of

MODEL_PREFIX = "model/"
_VALUES = "values"


def frame_of(state: Mapping[str, Any], values: Mapping[str, Any]) -> bytes:
    """Encode a model's state; `values` are JSON values. Raises InvalidRequest for types that a frame cannot hold."""
    tensors = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"a model's state has names that are strings, not {name!r:.80}")
        key = name if name.startswith(OPTIMIZER_PREFIX) else MODEL_PREFIX + name
        tensors[key] = _tensor(name, value)
    text = json.dumps(values).encode()
    tensors[_VALUES] = FrameTensor("uint8", (len(text),), np.frombuffer(text, dtype=np.uint8))
    return encode(tensors)


def _tensor(name: str, value: Any) -> FrameTensor:
    if isinstance(value, FrameTensor):
        return value
    array = np.asarray(value)
    try:
        if array.dtype.kind in "biufc" and array.dtype.name != "longdouble":
            return tensor_of(array)
        # Other libraries' types (bfloat16, say) do not support the buffer protocol.
        bits = np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")
        return FrameTensor(dtype_code(array.dtype.name), array.shape, bits.reshape(-1))
    except (StorageError, TypeError) as error:
        raise InvalidRequest(f"the model's state {name!r} cannot be saved: {error}") from None


def values_of(frame: Frame) -> Mapping[str, Any]:
    """The JSON values of a frame. Raises CheckpointError."""
    try:
        values = json.loads(bytes(frame.tensors[_VALUES].data))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the saved state is malformed: {error!r}") from None
    if not isinstance(values, dict):
        raise CheckpointError("the saved state is malformed: its values are no object")
    return values


def state_of(frame: Frame, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The state in a frame, as copies in the types of `wanted`, the model's present state.

    Raises CheckpointError if names, types or shapes of the weights differ.
    """
    found: dict[str, Any] = {}
    for key, tensor in frame.tensors.items():
        if key.startswith(MODEL_PREFIX):
            found[key.removeprefix(MODEL_PREFIX)] = tensor
        elif key.startswith(OPTIMIZER_PREFIX):
            found[key] = tensor
    for name, value in wanted.items():
        if name.startswith(OPTIMIZER_PREFIX):
            continue
        if name not in found:
            raise CheckpointError(f"the saved state has no {name!r}; it is of another model")
        own = _tensor(name, value)
        if found[name].dtype != dtype_code(own.dtype) or tuple(found[name].shape) != tuple(own.shape):
            raise CheckpointError(
                f"{name!r} was saved as {found[name].dtype} {list(found[name].shape)}, the model has "
                f"{dtype_code(own.dtype)} {list(own.shape)}"
            )
    if any(isinstance(value, FrameTensor) for value in wanted.values()):
        # A model whose state consists of FrameTensors also loads FrameTensors.
        return found
    return {name: _array(tensor, wanted.get(name)) for name, tensor in found.items()}


def _array(tensor: FrameTensor, like: Any) -> Any:
    """The tensor as an array of the type of `like`."""
    array = tensor.array().copy()
    dtype = getattr(like, "dtype", None)
    if dtype is not None and array.dtype.name != str(dtype) and dtype_code(str(dtype)) == tensor.dtype:
        return array.view(dtype)
    return array
