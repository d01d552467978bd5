"""Tensors to arguments and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest
from springtide.serving.inference_protocol import arguments_of, infer_answer, model_metadata, parse_infer
from springtide.serving.schema import ServiceSchema, derive_schema


class Rows:
    def predict(self, rows: list[list[float]], limit: int = 3) -> list[float]:
        raise NotImplementedError


SCHEMA = derive_schema(Rows)


def arguments(**tensor):
    base = {"name": "rows", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return arguments_of(parse_infer(json.dumps({"inputs": [{**base, **tensor}]}).encode()), SCHEMA)


def test_flat_and_nested_data_become_rows():
    assert arguments() == {"rows": [[1.0, 2.0], [3.0, 4.0]]}
    assert arguments(data=[[1, 2], [3, 4]]) == arguments()
    assert arguments(name="limit", shape=[1], datatype="INT64", data=[7]) == {"limit": 7}


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [3, 2]},
        {"shape": [-2, -2]},
        {"shape": [0, 2], "data": []},
        {"shape": [1] * 9 + [4]},
        {"datatype": "FP31"},
        {"data": [1, 2, [3], 4]},
        {"datatype": "BYTES"},
        {"datatype": "BOOL"},
        {"datatype": "INT8", "data": [1, 2, 3, 400]},
        {"datatype": "UINT8", "data": [1, 2, 3, -4]},
        {"datatype": "INT64", "data": [1, 2, 3, 4.5]},
        {"data": [1, 2, 3, True]},
        {"data": [1, 2, 3, 10**400]},
        {"data": [1, 2, 3, None]},
    ],
)
def test_tensors_that_do_not_hold_together_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        arguments(**wrong)


def answer(returned, schema=SCHEMA, **request):
    parsed = parse_infer(json.dumps({"inputs": [], **request}).encode())
    return infer_answer(parsed, "m", "1", schema, returned)["outputs"]


def test_outputs_are_tensors_where_they_can_be():
    assert answer([1, 2]) == [{"name": "outputs", "shape": [2], "datatype": "FP64", "data": [1, 2]}]
    assert answer([1, 2], ServiceSchema())[0]["datatype"] == "INT64"
    assert answer([[True], [False]])[0] == {
        "name": "outputs",
        "shape": [2, 1],
        "datatype": "BOOL",
        "data": [True, False],
    }
    assert answer([[1], [1, 2]])[0] == {"name": "outputs", "shape": [2], "datatype": "BYTES", "data": ["[1]", "[1,2]"]}
    assert answer(5, ServiceSchema())[0]["shape"] == [1]
    named = answer({"a": [1.5], "b": ["x"]}, outputs=[{"name": "b"}])
    assert named == [{"name": "b", "shape": [1], "datatype": "BYTES", "data": ["x"]}]
    with pytest.raises(InvalidRequest, match="no output"):
        answer([1], outputs=[{"name": "zz"}])


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_what_comes_back_is_what_went_in(rows):
    (tensor,) = answer(rows)
    body = {"inputs": [{**tensor, "name": "rows"}]}
    assert arguments_of(parse_infer(json.dumps(body).encode()), SCHEMA) == {"rows": rows}


def test_metadata_is_empty_until_the_schema_is_known():
    assert model_metadata("m", "2", None)["inputs"] == []
    assert model_metadata("m", "2", SCHEMA)["inputs"][0] == {"name": "rows", "datatype": "FP64", "shape": [-1, -1]}
