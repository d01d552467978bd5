"""Frames: named tensors as bytes in the safetensors format, without torch and without copies on reading.

Eight bytes of header length, a JSON header (dtype, shape and offsets by name), then the tensors without gaps; see
https://huggingface.co/docs/safetensors. Frames come from a store that others write, so everything in them is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.core.decoding import decode_json, json_decoder
from springtide.core.errors import StorageError

# Bytes of one element by the format's type names, in the order in which its library sorts types: the widest come last.
# Types of less than a byte (4 and 6 bit) are refused.
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
        "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
        "I32": 4, "U32": 4, "F32": 4,
        "C64": 8, "F64": 8, "I64": 8, "U64": 8,
    }
)  # fmt: skip
# The format's type names by those of numpy and torch.
_CODES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
        "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
        "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }
)  # fmt: skip
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


class FrameLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a reader, checked before anything is parsed or allocated."""

    max_bytes: int = 8 << 30
    max_header_bytes: int = 4 << 20
    max_tensors: int = 16_384
    max_dimensions: int = 16


class FrameTensor(msgspec.Struct, frozen=True):
    """A tensor's type, shape and bytes (little-endian, row-major).

    `dtype` is a name of `ELEMENT_BYTES`, numpy or torch ("float32", "torch.bfloat16"); `data` is any contiguous buffer.
    Decoded tensors have the format's names, and read-only views of the frame as data.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def array(self) -> npt.NDArray[Any]:
        """A numpy array over the same bytes; types that numpy lacks (bfloat16, 8-bit floats) as uint16 and uint8."""
        code = dtype_code(self.dtype)
        names = {code: name for name, code in _CODES.items()}
        is_known = code in {"BOOL", "C64"} or code[0] in "UI" or code in {"F16", "F32", "F64"}
        numpy_name = names[code] if is_known else f"uint{8 * ELEMENT_BYTES[code]}"
        return np.frombuffer(self.data, dtype=numpy_name).reshape(self.shape)


class Frame(msgspec.Struct, frozen=True):
    """The content of a frame: tensors by name, in the frame's order, and metadata."""

    tensors: dict[str, FrameTensor]
    metadata: dict[str, str]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def dtype_code(name: str) -> str:
    """The format's name of a type given by any of its names. Raises StorageError for types that a frame cannot hold."""
    code = name if name in ELEMENT_BYTES else _CODES.get(name.removeprefix("torch."))
    if code is None:
        raise StorageError(f"no frame can hold the type {name!r}; it can hold {', '.join(_CODES)}")
    return code


def tensor_of(array: npt.NDArray[Any]) -> FrameTensor:
    """A numpy array as a frame's tensor; copied only if it is not contiguous. Raises StorageError for unknown types."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return FrameTensor(dtype_code(array.dtype.name), array.shape, np.ascontiguousarray(array).reshape(-1))


def encode(tensors: Mapping[str, FrameTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode a frame. The same tensors and metadata give the same bytes; each tensor is copied once.

    Raises StorageError if the bytes of a tensor do not fit its type and shape.
    """
    named = [(name, dtype_code(tensor.dtype), tensor) for name, tensor in tensors.items()]
    # Wide types first, then by name, so that every tensor starts at a multiple of its element size.
    order = list(ELEMENT_BYTES)
    named.sort(key=lambda each: (-order.index(each[1]), each[0]))
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    buffers: list[memoryview] = []
    offset = 0
    for name, code, tensor in named:
        if name == _METADATA:
            raise StorageError(f"no tensor may be called {_METADATA}: the format keeps that name for metadata")
        view = _bytes_of(name, tensor, code)
        end = offset + view.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        buffers.append(view)
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers])


def _bytes_of(name: str, tensor: FrameTensor, code: str) -> memoryview:
    view = memoryview(tensor.data)
    if not view.c_contiguous:
        raise StorageError(f"the bytes of tensor {name} are not contiguous; make a contiguous copy first")
    # An empty view whose shape contains a zero cannot be cast.
    view = view.cast("B") if view.nbytes else memoryview(b"")
    wanted = math.prod(tensor.shape) * ELEMENT_BYTES[code]
    if any(size < 0 for size in tensor.shape) or view.nbytes != wanted:
        raise StorageError(
            f"tensor {name} has {view.nbytes} bytes, but {code} of shape {list(tensor.shape)} takes {wanted}"
        )
    return view


DEFAULT_LIMITS = FrameLimits()


def decode(data: bytes | bytearray | memoryview, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """Decode a frame; its tensors are views of `data`. Raises StorageError for anything that is not a valid frame."""
    view = memoryview(data).toreadonly()
    view = view.cast("B") if view.nbytes else view
    if view.nbytes > limits.max_bytes:
        raise StorageError(f"a frame of {view.nbytes:,} bytes is over the limit of {limits.max_bytes:,}")
    if view.nbytes < _LENGTH_BYTES:
        raise StorageError(f"{view.nbytes} bytes are too few for a frame")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > limits.max_header_bytes:
        raise StorageError(f"a frame's header of {length:,} bytes is over the limit of {limits.max_header_bytes:,}")
    if length > view.nbytes - _LENGTH_BYTES:
        raise StorageError(f"the frame ends within its header of {length} bytes")
    entries, metadata = _header(view[_LENGTH_BYTES : _LENGTH_BYTES + length], limits)
    return Frame(_tensors(entries, view[_LENGTH_BYTES + length :], limits), metadata)


def _header(text: memoryview, limits: FrameLimits) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        raw = decode_json(text, dict[str, msgspec.Raw])
        metadata = decode_json(raw.pop(_METADATA, msgspec.Raw(b"{}")), dict[str, str])
        if len(raw) > limits.max_tensors:
            raise StorageError(f"a frame of {len(raw)} tensors is over the limit of {limits.max_tensors}")
        decoder = json_decoder(_Entry)
        return {name: decoder.decode(entry) for name, entry in raw.items()}, metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"a frame's header is not what the format asks for: {error}") from None


def _tensors(entries: dict[str, _Entry], data: memoryview, limits: FrameLimits) -> dict[str, FrameTensor]:
    tensors: dict[str, FrameTensor] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        first, last = entry.data_offsets
        size = ELEMENT_BYTES.get(entry.dtype)
        if size is None:
            raise StorageError(f"a frame's tensor {name[:80]!r} has the type {entry.dtype[:40]!r}, which is unknown")
        if len(entry.shape) > limits.max_dimensions or any(not 0 <= each < 1 << 63 for each in entry.shape):
            raise StorageError(f"a frame's tensor {name[:80]!r} has an impossible shape")
        if first != end or last < first or last > data.nbytes:
            raise StorageError(f"a frame's tensor {name[:80]!r} overlaps another, leaves a gap or ends outside")
        if math.prod(entry.shape) * size != last - first:
            raise StorageError(f"a frame's tensor {name[:80]!r} has {last - first} bytes, not those of its shape")
        tensors[name] = FrameTensor(entry.dtype, tuple(entry.shape), data[first:last])
        end = last
    if end != data.nbytes:
        raise StorageError(f"a frame has {data.nbytes - end} bytes after its last tensor")
    return tensors
