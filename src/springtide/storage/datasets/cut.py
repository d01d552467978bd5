"""Cuts named arrays into shards, which are frames of some samples each, and checks which arrays a dataset can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.datasets.manifest import (
    MAX_ARRAYS,
    MAX_DIMENSIONS,
    MAX_FRAME_BYTES,
    MAX_SHARD_BYTES,
    DatasetArray,
)
from springtide.storage.frames import ELEMENT_BYTES, FrameLimits, FrameTensor, decode, dtype_code, encode, tensor_of

# Smaller than the paper's, so that the first step starts sooner and small functions can hold a shard.
DEFAULT_SHARD_BYTES = 32 << 20
FRAME_LIMITS = FrameLimits(max_bytes=MAX_FRAME_BYTES, max_tensors=MAX_ARRAYS, max_header_bytes=1 << 16)
_ARRAY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
Arrays = dict[str, npt.NDArray[Any]]


def checked_arrays(given: Mapping[str, Any]) -> Arrays:
    """Return the arrays in a dataset's order: x and y first, the others as given. Raises InvalidRequest.

    There must be at least one; they hold numbers or booleans and are equally long, with samples along the first axis.
    """
    if not given or len(given) > MAX_ARRAYS:
        raise InvalidRequest(f"a dataset has 1 to {MAX_ARRAYS} named arrays, like x=..., y=...; got {len(given)}")
    arrays: Arrays = {}
    for name in sorted(given, key=lambda each: ("x", "y", each).index(each)):
        if _ARRAY_NAME.fullmatch(name) is None:
            raise InvalidRequest(f"{name!r:.80} cannot name an array: use letters, digits and _, like x or label_1")
        array = np.asarray(given[name])
        if array.dtype.hasobject or array.dtype.kind not in "biufc":
            raise InvalidRequest(
                f"the array {name} holds {array.dtype}, which a dataset cannot: turn it into numbers of a fixed size"
            )
        try:
            dtype_code(array.dtype.name)
        except StorageError as error:
            raise InvalidRequest(f"the array {name} cannot be stored: {error}") from None
        if not 1 <= array.ndim <= MAX_DIMENSIONS:
            raise InvalidRequest(f"the array {name} has {array.ndim} dimensions; the first must count the samples")
        arrays[name] = array
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidRequest(
            f"the arrays differ in length ({', '.join(f'{name}: {count:,}' for name, count in lengths.items())}); "
            "the first dimension counts the samples and must be the same for all"
        )
    if next(iter(lengths.values())) == 0:
        raise InvalidRequest("the arrays have no samples; hand over at least one")
    return arrays


def described(arrays: Arrays) -> tuple[DatasetArray, ...]:
    """Name, type and sample shape of each array."""
    return tuple(DatasetArray(name, dtype_code(array.dtype.name), array.shape[1:]) for name, array in arrays.items())


def sample_bytes(arrays: tuple[DatasetArray, ...]) -> int:
    """Bytes of one sample."""
    return sum(ELEMENT_BYTES[array.dtype] * int(np.prod(array.shape, dtype=np.int64)) for array in arrays)


def cut(arrays: Arrays, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield frames of about `shard_bytes` each, with their number of samples.

    A shard has as many samples as fit, at least one; the same arrays and size give the same frames. Raises
    InvalidRequest for an impossible size.
    """
    if not 1 <= shard_bytes <= MAX_SHARD_BYTES:
        raise InvalidRequest(f"a shard has 1 to {MAX_SHARD_BYTES:,} bytes, not {shard_bytes:,}")
    each = max(1, sample_bytes(described(arrays)))
    if each > MAX_SHARD_BYTES:
        raise InvalidRequest(f"one sample has {each:,} bytes, and a shard at most {MAX_SHARD_BYTES:,}: make it smaller")
    num_samples = len(next(iter(arrays.values())))
    step = max(1, shard_bytes // each)
    for first in range(0, num_samples, step):
        count = min(step, num_samples - first)
        tensors = {name: tensor_of(array[first : first + count]) for name, array in arrays.items()}
        yield encode(tensors), count


def read_shard(data: bytes | memoryview, arrays: tuple[DatasetArray, ...], num_samples: int) -> Arrays:
    """The arrays of one shard, as read-only views of its frame. Raises StorageError if one is missing or differs."""
    frame = decode(data, FRAME_LIMITS)
    found = {}
    for array in arrays:
        tensor = frame.tensors.get(array.name)
        if tensor is None or tensor.dtype != array.dtype or tensor.shape != (num_samples, *array.shape):
            raise StorageError(f"a shard does not hold {num_samples:,} samples of the array {array.name}")
        found[array.name] = tensor.array()
    return found


def shard_contents(data: bytes | memoryview) -> tuple[tuple[DatasetArray, ...], int]:
    """The arrays (sorted by name) and the number of samples in a frame. Raises StorageError if it cannot be a shard."""
    tensors: dict[str, FrameTensor] = decode(data, FRAME_LIMITS).tensors
    lengths = {tensor.shape[0] if tensor.shape else 0 for tensor in tensors.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise StorageError("a shard's arrays must have the same number of samples, at least one")
    arrays = tuple(DatasetArray(name, tensor.dtype, tensor.shape[1:]) for name, tensor in sorted(tensors.items()))
    return arrays, lengths.pop()
