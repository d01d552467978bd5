"""Raw tensors to arrays and back."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.serving.tensors import DATATYPES, array_document, array_from_json, array_of, raw_of

NUMBERS = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BOOL": "?",
}


@pytest.mark.parametrize(("datatype", "code"), NUMBERS.items())
def test_numbers_are_little_endian_row_by_row(datatype, code):
    raw = struct.pack(f"<6{code}", 0, 1, 0, 1, 1, 0)
    array = array_of("x", datatype, [2, 3], raw)
    assert array.tolist() == [[0, 1, 0], [1, 1, 0]]
    assert (array.dtype == bool) is (datatype == "BOOL")
    assert raw_of(datatype, [0, 1, 0, 1, 1, 0]) == raw


def test_every_datatype_is_known_here():
    assert {*NUMBERS, "BF16", "BYTES"} == DATATYPES


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 3.0e38, 1.0078125, float("inf")])
def test_a_bf16_is_the_upper_half_of_an_fp32(value):
    raw = struct.pack("<f", value)[2:]
    (read,) = array_of("x", "BF16", [1], raw)
    assert struct.pack("<f", read)[2:] == raw
    assert raw_of("BF16", [read]) == raw


def test_a_bf16_is_rounded_to_the_nearest():
    bits = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x7F7FFFFF: 0x7F80}
    values = np.array(list(bits), dtype="<u4").view("<f4")
    assert raw_of("BF16", values) == np.array(list(bits.values()), dtype="<u2").tobytes()
    assert np.isnan(array_of("x", "BF16", [1], raw_of("BF16", [float("nan")])))


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5))
def test_bytes_come_back_as_they_were(elements):
    raw = raw_of("BYTES", elements)
    assert array_of("x", "BYTES", [len(elements)], raw).tolist() == elements
    for cut in range(len(raw)):
        with pytest.raises(InvalidRequest):
            array_of("x", "BYTES", [len(elements)], raw[:cut])
    with pytest.raises(InvalidRequest, match="bytes more"):
        array_of("x", "BYTES", [len(elements)], raw + b"\0\0\0\0")


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "why"),
    [
        ("FP32", [2], b"\0" * 7, "needs 8 bytes"),
        ("FP32", [2], b"\0" * 9, "needs 8 bytes"),
        ("FP32", [1 << 31] * 8, b"\0" * 4, "needs"),
        ("BYTES", [1 << 31] * 8, b"\0" * 4, "has 1"),
        ("BYTES", [1], b"\xff\xff\xff\xffab", "past the end"),
        ("BYTES", [1], b"\0\0", "past the end"),
        ("FP32", [-1], b"\0" * 4, "none negative"),
        ("FP32", [-1, -1], b"\0" * 4, "none negative"),
        ("FP32", [0], b"", "none negative, zero"),
        ("FP32", [1] * 9, b"\0" * 4, "at most 8 sizes"),
        ("FP32", [(1 << 31) + 1], b"\0" * 4, "huge"),
        ("FP31", [1], b"\0" * 4, "not known"),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(datatype, shape, raw, why):
    with pytest.raises(InvalidRequest, match=why):
        array_of("x", datatype, shape, raw)


def test_an_array_passes_through_json():
    array = array_from_json(array_document("FP16", [2, 1], struct.pack("<2e", 0.5, 2)))
    assert (array.dtype, array.tolist()) == (np.float16, [[0.5], [2.0]])
    array[0, 0] = 7
    assert array_from_json([[1, 2], [3, 4]]).shape == (2, 2)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"datatype": "FP32", "shape": [1], "base64": "AAA"},
        {"datatype": "FP32", "shape": [1], "base64": "AAAA"},
        {"datatype": "FP32", "shape": [True], "base64": "AAAAAA=="},
        {"datatype": "FP32", "shape": 1, "base64": "AAAAAA=="},
        {"datatype": "what", "shape": [1], "base64": "AAAAAA=="},
        {"datatype": "FP32", "shape": [1], "base64": "é"},
        [[1, 2], [3]],
    ],
)
def test_what_is_no_array_is_a_value_error(value):
    with pytest.raises(ValueError, match=r"."):
        array_from_json(value)
