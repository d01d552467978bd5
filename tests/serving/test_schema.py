"""The schema from type hints, and the check of one call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.serving.schema import MalformedRequest, call_decoder, check_call, derive_schema, parse_json


@dataclass
class Point:
    x: float
    y: float


class Node(msgspec.Struct):
    children: list[Node] = []


class Opaque:
    pass


class Sentiment:
    def predict(self, texts: list[str], scale: float = 1.0) -> list[float]:
        """How they feel."""
        raise NotImplementedError


class Pairs:
    def predict(self, left: list[Point], right: list[list[int]]) -> list[bool]:
        raise NotImplementedError


class Single:
    def predict(self, values: list[float]) -> list[float]:
        raise NotImplementedError


class Summary:
    def predict(self, values: list[float]) -> float:
        raise NotImplementedError


class Loose:
    def predict(self, a, b: Opaque, c: Node):
        raise NotImplementedError


def test_list_in_and_list_out_is_batchable():
    schema = derive_schema(Sentiment)
    assert (schema.is_batchable, schema.doc) == (True, "How they feel.")
    assert schema.body_schema()["required"] == ["texts"]
    assert [(each.datatype, each.shape) for each in derive_schema(Pairs).parameters] == [
        ("BYTES", (-1,)),
        ("INT64", (-1, -1)),
    ]
    assert derive_schema(Pairs).parameters[0].json_schema["items"]["properties"]["x"] == {"type": "number"}
    assert not derive_schema(Summary).is_batchable
    assert not derive_schema(Loose).is_batchable


def test_hints_that_json_does_not_know_take_anything_and_a_type_in_itself_ends():
    decoded = call_decoder(Loose).decode(b'{"a": 1, "b": [2], "c": {"children": [{}]}}')
    assert (decoded.a, decoded.b, decoded.c.children) == (1, [2], [Node()])
    json.dumps(derive_schema(Loose).body_schema())


class Arrays:
    def predict(self, x: np.ndarray, y: npt.NDArray[np.float32], z: npt.NDArray[np.bool_] | None = None) -> np.ndarray:
        raise NotImplementedError


def test_a_numpy_array_is_made_of_lists_and_is_not_batched():
    schema = derive_schema(Arrays)
    assert [(one.is_array, one.is_list, one.datatype) for one in schema.parameters[:2]] == [
        (True, False, "FP64"),
        (True, False, "FP32"),
    ]
    assert not schema.is_batchable
    call = call_decoder(Arrays).decode(b'{"x": [[1, 2], [3, 4]], "y": 5}')
    assert (call.x.shape, call.y.shape, call.z) == ((2, 2), (), msgspec.UNSET)
    for wrong in (b'{"x": [[1], [2, 3]], "y": 1}', b'{"x": {"shape": [1]}, "y": 1}'):
        with pytest.raises(msgspec.ValidationError, match="array"):
            call_decoder(Arrays).decode(wrong)


def test_unusable_classes_are_told_why():
    class Nothing:
        pass

    class Starred:
        def predict(self, *args: int) -> int:
            raise NotImplementedError

    class Unknown:
        def predict(self, a: Missing) -> int:  # noqa: F821
            raise NotImplementedError

    for served, told in ((Nothing, "no method"), (Starred, "name its"), (Unknown, "hints")):
        with pytest.raises(InvalidRequest, match=told):
            derive_schema(served)


class Waits:
    async def predict(self, texts: list[str]) -> list[int]:
        raise NotImplementedError


class Yields:
    def predict(self, n: int) -> Iterator[int]:
        yield n


class Streams:
    async def predict(self, n: int):
        yield n


def test_what_predict_is_decides_how_many_calls_work_at_a_time():
    for served, kind, concurrency in (
        (Sentiment, "plain", 1),
        (Waits, "async", 64),
        (Yields, "generator", 1),
        (Streams, "async_generator", 64),
    ):
        schema = derive_schema(served)
        assert (schema.kind, schema.concurrency) == (kind, concurrency)
        assert derive_schema(served, 3).concurrency == 3
    assert not derive_schema(Waits).is_batchable, "calls come one by one"
    assert derive_schema(Yields).answer_schema() == {"type": "integer"}, "of one item"
    assert derive_schema(Streams).is_stream


def checked(served, value):
    body = json.dumps(value).encode()
    return check_call(derive_schema(served), body, parse_json(body))


def test_a_call_knows_its_items_and_what_it_may_be_batched_with():
    one, two = checked(Sentiment, {"texts": ["a", "b"]}), checked(Sentiment, {"texts": ["c"]})
    assert (one.num_items, one.key) == (2, two.key)
    assert checked(Sentiment, {"texts": ["c"], "scale": 2}).key != one.key
    bare = checked(Single, [1, 2, 3])
    assert (bare.num_items, json.loads(bare.body)) == (3, {"values": [1, 2, 3]})


@pytest.mark.parametrize(
    ("served", "value", "told"),
    [
        (Sentiment, ["a"], "bare list"),
        (Sentiment, "a", "bare text"),
        (Sentiment, {"text": ["a"]}, "no parameter 'text'"),
        (Sentiment, {}, "'texts' is missing"),
        (Sentiment, {"texts": "a"}, "must be a list"),
        (Pairs, {"left": [], "right": [[1]]}, "equally long"),
    ],
)
def test_wrong_calls_are_refused_with_the_mend(served, value, told):
    with pytest.raises(InvalidRequest, match=told) as caught:
        checked(served, value)
    assert caught.value.status == 422


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(body):
    try:
        parse_json(body)
    except MalformedRequest:
        return
    json.loads(body)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["texts", "scale", "z"]), inner),
        max_leaves=8,
    )
)
def test_any_json_is_checked_or_refused(value):
    try:
        call = checked(Sentiment, value)
    except InvalidRequest:
        return
    assert call.num_items == len(value["texts"])
