"""Encoding activations and gradients as frames, which one stage writes into the store and the next one reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from springtide.core.errors import StorageError
from springtide.runtime.models.packing import as_bytes, dtype_name
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
    """The content of a message: tensors, None for a missing gradient.

    `is_tuple` tells a tuple of one tensor from a single tensor. `is_last`: the message's step is the last one.
    """

    tensors: tuple[torch.Tensor | None, ...]
    is_tuple: bool = False
    is_last: bool = False


def pack_parcel(parcel: Parcel) -> bytes:
    """Encode a parcel as a frame, copying each tensor once."""
    tensors = {str(index): frame_tensor(tensor) for index, tensor in enumerate(parcel.tensors) if tensor is not None}
    words = {_TUPLE: str(len(parcel.tensors)) if parcel.is_tuple else ""}
    if parcel.is_last:
        words[_LAST] = "1"
    return encode(tensors, words)


def unpack_parcel(data: bytes) -> Parcel:
    """Decode a parcel into new tensors. Raises StorageError for malformed data."""
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
    """A tensor for a frame, sharing memory if it is contiguous and on the CPU."""
    return FrameTensor(dtype_name(tensor.dtype), tuple(tensor.shape), as_bytes(tensor.cpu()).numpy())


def torch_tensor(saved: FrameTensor) -> torch.Tensor:
    """A copy of a frame's tensor as a torch tensor. Raises StorageError for a type that torch lacks."""
    dtype = _DTYPES.get(saved.dtype)
    if dtype is None:
        raise StorageError(f"a frame holds a tensor of the type {saved.dtype}, which cannot travel between stages")
    tensor = torch.empty(saved.shape, dtype=dtype)
    # Copied, because user code may write to its input, and the frame's memory may be shared.
    np.copyto(as_bytes(tensor).numpy(), np.frombuffer(saved.data, dtype=np.uint8))
    return tensor


def torch_tensors(frame: Frame, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names have the prefix, by their names without it."""
    return {
        name.removeprefix(prefix): torch_tensor(tensor)
        for name, tensor in frame.tensors.items()
        if name.startswith(prefix)
    }


def frame_tensors(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, FrameTensor]:
    """Tensors for a frame, with the prefix added to their names."""
    return {prefix + name: frame_tensor(tensor) for name, tensor in tensors.items()}


def present(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The tensors of an activation. Raises StorageError if one is None."""
    found = tuple(tensor for tensor in tensors if tensor is not None)
    if len(found) != len(tensors):
        raise StorageError("an activation came without one of its tensors")
    return found
