"""Nested values as JSON: types of keys and of dicts stay, and what cannot move is named."""

from __future__ import annotations

import collections
import json
import math

import pytest
import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.models.packing import pack, unpack


def moved(value, live=None):
    """The value on the other side."""
    tensors = {}
    packed = json.loads(json.dumps(pack(value, "it", tensors)))
    landing = {}
    result = unpack(packed, live, torch.device("cpu"), landing)
    for name, tensor in landing.items():
        tensor.copy_(tensors[name])
    return result


def test_keys_keep_their_types_and_dicts_theirs():
    value = {"milestones": collections.Counter({30: 2, 80: 1}), "by_name": {"1": [1, (2.5, None)], 1: True}}
    result = moved(value, {"milestones": collections.Counter({7: 1})})
    assert result == value
    assert type(result["milestones"]) is collections.Counter
    assert sorted(result["milestones"].elements()) == [30, 30, 80]


def test_numbers_that_json_lacks_and_tensors_arrive():
    result = moved({"best": math.inf, "average": torch.arange(3, dtype=torch.int8)})
    assert result["best"] == math.inf
    assert torch.equal(result["average"], torch.arange(3, dtype=torch.int8))


@pytest.mark.parametrize(
    ("value", "told"),
    [({"step": {1, 2}}, "'it.step' is a set"), ({"step": {(1, 2): 3}}, r"'it.step' has the key \(1, 2\)")],
)
def test_what_cannot_move_is_named(value, told):
    with pytest.raises(InvalidRequest, match=told):
        pack(value, "it", {})
