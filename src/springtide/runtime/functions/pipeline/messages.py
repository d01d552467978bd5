"""Activations and gradients as frames: what one stage writes into the store and the next one reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from springtide.core.errors import StorageError
from springtide.runtime.models.named_tensors import as_bytes, dtype_name
from springtide.storage.frames import Frame, FrameTensor, decode, dtype_code, encode

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        dtype_code(dtype_name(dtype)): dtype
        for dtype in (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        )
    }
)
_TUPLE, _LAST = "tuple", "last"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a message holds: tensors (None where there is no gradient for one), and how they were handed over.

    `is_tuple` tells one tensor from a tuple of one. `is_last` says that the step which it belongs to is the last one.
    """

    tensors: tuple[torch.Tensor | None, ...]
    is_tuple: bool = False
    is_last: bool = False


def pack_parcel(parcel: Parcel) -> bytes:
    """The parcel as a frame; each tensor is copied once."""
    tensors = {str(index): frame_tensor(tensor) for index, tensor in enumerate(parcel.tensors) if tensor is not None}
    words = {_TUPLE: str(len(parcel.tensors)) if parcel.is_tuple else ""}
    if parcel.is_last:
        words[_LAST] = "1"
    return encode(tensors, words)


def unpack_parcel(data: bytes) -> Parcel:
    """The parcel of a frame, with tensors of their own. Raises StorageError for what is none."""
    frame = decode(data)
    count = frame.metadata.get(_TUPLE, "")
    is_tuple = bool(count)
    if count and not (count.isascii() and count.isdecimal() and len(count) < 6):
        raise StorageError(f"a message between stages says that it holds {count[:20]!r} tensors")
    num_tensors = int(count) if count else 1
    known = {str(index) for index in range(num_tensors)}
    if not known >= frame.tensors.keys():
        raise StorageError("a message between stages holds other tensors than it says")
    tensors = tuple(
        torch_tensor(frame.tensors[str(index)]) if str(index) in frame.tensors else None for index in range(num_tensors)
    )
    return Parcel(tensors, is_tuple, bool(frame.metadata.get(_LAST)))


def frame_tensor(tensor: torch.Tensor) -> FrameTensor:
    """A tensor for a frame, over the same memory where it is contiguous."""
    return FrameTensor(dtype_name(tensor.dtype), tuple(tensor.shape), as_bytes(tensor.cpu()).numpy())


def torch_tensor(saved: FrameTensor) -> torch.Tensor:
    """A frame's tensor as one of torch's, in memory of its own. Raises StorageError for a type that torch lacks."""
    dtype = _DTYPES.get(saved.dtype)
    if dtype is None:
        raise StorageError(f"a frame holds a tensor of the type {saved.dtype}, which cannot travel between stages")
    tensor = torch.empty(saved.shape, dtype=dtype)
    # What is read lies in memory that others may read, too, and user code may write over its input.
    np.copyto(as_bytes(tensor).numpy(), np.frombuffer(saved.data, dtype=np.uint8))
    return tensor


def torch_tensors(frame: Frame, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin so, under the rest of their names."""
    return {
        name.removeprefix(prefix): torch_tensor(tensor)
        for name, tensor in frame.tensors.items()
        if name.startswith(prefix)
    }


def frame_tensors(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, FrameTensor]:
    """Tensors for a frame, their names with the prefix before them."""
    return {prefix + name: frame_tensor(tensor) for name, tensor in tensors.items()}


def present(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """All of them. Raises StorageError where one is missing: an activation is whole."""
    found = tuple(tensor for tensor in tensors if tensor is not None)
    if len(found) != len(tensors):
        raise StorageError("an activation came without one of its tensors")
    return found
