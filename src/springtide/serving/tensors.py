"""The raw form of tensors in the Open Inference Protocol: little-endian values, row by row.

A BOOL is one byte. An element of BYTES is its length as a 32-bit integer, then the bytes themselves.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest

_DTYPES = MappingProxyType(
    {
        "BOOL": "|u1",
        **{
            f"{sign}INT{bits}": f"<{kind}{bits // 8}"
            for sign, kind in (("", "i"), ("U", "u"))
            for bits in (8, 16, 32, 64)
        },
        # numpy has no BF16: it is the upper half of an FP32.
        "BF16": "<u2",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
    }
)
_LENGTH_BYTES = 4
DATATYPES = frozenset({*_DTYPES, "BYTES"})
FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 31


def num_elements(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements a tensor has. Raises InvalidRequest for an unknown datatype, and for a shape without any."""
    if datatype not in DATATYPES:
        raise InvalidRequest(f"the datatype {datatype!r:.40} is not known; use one of {sorted(DATATYPES)}")
    if len(shape) > MAX_DIMENSIONS or any(not 1 <= size <= MAX_SIZE for size in shape):
        raise InvalidRequest(
            f"the shape of {name!r:.80} must have at most {MAX_DIMENSIONS} sizes, none negative, zero or huge"
        )
    return math.prod(shape)


def array_of(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array of this shape: BF16 as float32, BYTES as objects of type bytes.

    Raises InvalidRequest if `raw` does not hold exactly the elements of the shape.
    """
    count = num_elements(name, datatype, shape)
    array: npt.NDArray[Any]
    if datatype == "BYTES":
        elements = _elements(name, count, raw)
        array = np.empty(count, dtype=object)
        array[:] = elements
        return array.reshape(shape)
    dtype = np.dtype(_DTYPES[datatype])
    if count * dtype.itemsize != len(raw):
        raise InvalidRequest(
            f"the input {name!r:.80} of shape {list(shape)} needs {count * dtype.itemsize} bytes of {datatype}, "
            f"it has {len(raw)}"
        )
    array = np.frombuffer(raw, dtype).reshape(shape)
    if datatype == "BOOL":
        return array.astype(np.bool_)
    if datatype == "BF16":
        # The bits of an FP32 with an empty lower half.
        return (array.astype("<u4") << 16).view("<f4")
    return array


def _elements(name: str, count: int, raw: bytes | memoryview) -> list[bytes]:
    found: list[bytes] = []
    at, end = 0, len(raw)
    while at < end and len(found) < count:
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(raw[at:begin], "little")
        if begin > end or at > end:
            raise InvalidRequest(f"element {len(found)} of the input {name!r:.80} goes past the end of its bytes")
        found.append(bytes(raw[begin:at]))
    if len(found) != count or at != end:
        raise InvalidRequest(
            f"the input {name!r:.80} of shape for {count} elements of BYTES has {len(found)}"
            + (f" and {end - at} bytes more" if at < end else "")
        )
    return found


def raw_of(datatype: str, values: Sequence[Any]) -> bytes:
    """Return flat values of the datatype in their raw form; elements of BYTES are bytes or texts."""
    if datatype == "BYTES":
        parts: list[bytes] = []
        for value in values:
            element = value.encode("utf-8", "replace") if isinstance(value, str) else value
            parts += (len(element).to_bytes(_LENGTH_BYTES, "little"), element)
        return b"".join(parts)
    with np.errstate(over="ignore"):
        # Too large for the datatype is infinite.
        array = np.asarray(values, dtype="<f4" if datatype == "BF16" else _DTYPES[datatype])
    if datatype == "BF16":
        bits = array.view("<u4")
        # To the nearest, ties to even; NaN keeps a bit that makes it one.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
    return array.tobytes()


def array_document(datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> dict[str, Any]:
    """Return a tensor as JSON can hold it, for a parameter of `predict` that is a numpy array."""
    data = binascii.b2a_base64(raw, newline=False).decode()
    return {"datatype": datatype, "shape": list(shape), "base64": data}


def array_from_json(value: Any) -> npt.NDArray[Any]:
    """Return the array of an `array_document`, or of nested lists. Raises ValueError."""
    if not isinstance(value, dict):
        return np.asarray(value)
    datatype, shape, data = (value.get(key) for key in ("datatype", "shape", "base64"))
    is_shape = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not (isinstance(datatype, str) and isinstance(data, str) and isinstance(shape, list) and is_shape):
        raise ValueError("an array is nested lists, or an object with datatype, shape and base64")
    try:
        # A copy, because `predict` may write into its arguments.
        return array_of("array", datatype, shape, binascii.a2b_base64(data)).copy()
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
