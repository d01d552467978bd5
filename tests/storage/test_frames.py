"""Frames are the format's own bytes, carry any type, and nothing hostile passes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import StorageError
from springtide.storage.frames import ELEMENT_BYTES, FrameLimits, FrameTensor, decode, dtype_code, encode, tensor_of

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    named = {}
    for name in draw(st.sets(NAMES, max_size=5)):
        dtype = draw(st.sampled_from(sorted(ELEMENT_BYTES)))
        shape = draw(SHAPES)
        size = int(np.prod(shape)) * ELEMENT_BYTES[dtype]
        named[name] = FrameTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return named


def frame_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.slow
@given(tensors(), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_what_is_encoded_is_decoded_and_the_formats_library_reads_it(named, words):
    data = encode(named, words)
    frame = decode(data)
    assert frame.metadata == words
    assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in frame.tensors.items()} == {
        name: (t.dtype, t.shape, t.data) for name, t in named.items()
    }
    read = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    assert read == {name: (t.dtype, t.shape, t.data) for name, t in named.items()}
    assert encode(dict(reversed(named.items())), words) == data


def test_the_bytes_are_those_of_the_formats_library():
    rng = np.random.default_rng(0)
    arrays = {
        "weight": rng.normal(size=(3, 4)).astype(np.float32),
        "bias": rng.normal(size=(3,)),
        "steps": np.array(7, dtype=np.int64),
        "mask": np.array([True, False, True]),
        "none": np.zeros((0, 2), np.float16),
    }
    data = encode({name: tensor_of(array) for name, array in arrays.items()}, {"step": "7"})
    assert data == safetensors.numpy.save(arrays, {"step": "7"})
    for name, tensor in decode(data).tensors.items():
        np.testing.assert_array_equal(tensor.array(), arrays[name])
        assert tensor.array().dtype == arrays[name].dtype


def test_reading_copies_nothing_and_cannot_write():
    data = bytearray(encode({"a": tensor_of(np.arange(4, dtype=np.float32))}))
    tensor = decode(data).tensors["a"]
    data[-4:] = np.float32(9.0).tobytes()
    assert tensor.array()[-1] == 9.0
    assert tensor.data.readonly


def test_arrays_that_lie_otherwise_are_made_row_major_and_little_endian():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for given_array in (array.T, array[:, ::2], array.astype(">f4")):
        back = decode(encode({"a": tensor_of(given_array)})).tensors["a"].array()
        np.testing.assert_array_equal(back, given_array)


def test_types_go_by_all_their_names_and_raw_bits_come_back():
    assert dtype_code("torch.bfloat16") == dtype_code("bfloat16") == dtype_code("BF16") == "BF16"
    bits = np.array([0x3F80, 0x4000], np.uint16)
    tensor = decode(encode({"a": FrameTensor("torch.bfloat16", (2,), bits)})).tensors["a"]
    assert tensor.dtype == "BF16"
    np.testing.assert_array_equal(tensor.array(), bits)
    for wrong in ("float", "object", "F4", "U128"):
        with pytest.raises(StorageError, match="no frame can hold"):
            dtype_code(wrong)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (FrameTensor("F32", (2,), b"1234567"), "has 7 bytes, but F32 of shape"),
        (FrameTensor("F32", (-1, -1), b"1234"), "has 4 bytes"),
        (FrameTensor("U8", (2,), np.arange(4, dtype=np.uint8)[::2]), "not contiguous"),
        (FrameTensor("object", (1,), b"1"), "no frame can hold the type 'object'"),
    ],
)
def test_what_does_not_fit_together_is_not_encoded(tensor, words):
    with pytest.raises(StorageError, match=words):
        encode({"a": tensor})


def test_the_formats_own_name_is_no_tensors():
    with pytest.raises(StorageError, match="__metadata__"):
        encode({"__metadata__": FrameTensor("U8", (0,), b"")})


def entry(dtype="F32", shape=(1,), first=0, end=4, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end], **more}


HOSTILE = {
    "nothing": b"",
    "too short for a length": b"\0" * 7,
    "ends within its header": frame_of({}, length=1000),
    "a huge header": frame_of(b"{}", length=1 << 62),
    "a header over the limit": frame_of(b" " * 5000),
    "no JSON": frame_of(b"{]"),
    "not UTF-8": frame_of(b'{"\xff":1}'),
    "a list": frame_of([]),
    "deep nesting": frame_of(b'{"a":' + b"[" * 4000),
    "an entry that is none": frame_of({"a": 1}, bytes(4)),
    "an entry with more": frame_of({"a": entry(more=1)}, bytes(4)),
    "words that are numbers": frame_of({"__metadata__": {"a": 1}}),
    "a wrong type": frame_of({"a": entry("F33")}, bytes(4)),
    "a type of half bytes": frame_of({"a": entry("F4", (2,), 0, 1)}, bytes(1)),
    "offsets over the end": frame_of({"a": entry(end=8, shape=(2,))}, bytes(4)),
    "offsets backwards": frame_of({"a": entry(first=4, end=0)}, bytes(4)),
    "negative offsets": frame_of({"a": entry(first=-4, end=0)}, bytes(4)),
    "fractions": frame_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4]}}, bytes(4)),
    "overlapping": frame_of({"a": entry(), "b": entry(first=2, end=6)}, bytes(6)),
    "one over the other": frame_of({"a": entry(), "b": entry()}, bytes(4)),
    "a gap": frame_of({"a": entry(), "b": entry(first=8, end=12)}, bytes(12)),
    "bytes before": frame_of({"a": entry(first=4, end=8)}, bytes(8)),
    "bytes after": frame_of({"a": entry()}, bytes(5)),
    "bytes of no tensor": frame_of({}, bytes(1)),
    "a shape that is larger": frame_of({"a": entry(shape=(2,))}, bytes(4)),
    "a shape that overflows": frame_of({"a": entry(shape=(1 << 62, 4, 1 << 62, 4))}, bytes(4)),
    "a shape beyond counting": frame_of(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 400 + b'],"data_offsets":[0,4]}}', bytes(4)
    ),
    "a negative shape": frame_of({"a": entry(shape=(-1, -1))}, bytes(4)),
    "too many dimensions": frame_of({"a": entry(shape=(1,) * 65)}, bytes(4)),
    "the same name twice": frame_of(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}',
        bytes(6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_wholly_a_frame_is_refused(what):
    with pytest.raises(StorageError, match="frame") as caught:
        decode(HOSTILE[what], FrameLimits(max_header_bytes=4500))
    assert len(str(caught.value)) < 400


def test_limits_are_looked_at_before_anything_is_parsed():
    data = encode({str(number): FrameTensor("U8", (1,), b"1") for number in range(10)})
    for limits in (FrameLimits(max_bytes=100), FrameLimits(max_header_bytes=100), FrameLimits(max_tensors=9)):
        with pytest.raises(StorageError, match="over the limit"):
            decode(data, limits)
    assert len(decode(data, FrameLimits(max_tensors=10)).tensors) == 10


@given(tensors(), st.data())
def test_a_damaged_frame_is_a_frame_or_a_storage_error(named, data):
    frame = bytearray(encode(named, {"a": "b"}))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = frame[: data.draw(st.integers(0, len(frame)))]
    for damaged in (frame, cut):
        try:
            read = decode(damaged)
        except StorageError:
            continue
        assert sum(tensor.data.nbytes for tensor in read.tensors.values()) <= len(damaged)


@given(st.binary(max_size=200))
def test_noise_is_no_frame(noise):
    with pytest.raises(StorageError):
        decode(len(noise).to_bytes(8, "little") + b"[" + noise)
