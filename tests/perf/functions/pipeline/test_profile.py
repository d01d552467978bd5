"""Layer profiles from files, in every form."""

import msgspec
import pytest

from kits.perf.pipeline_profiles import drawn_profile, plan_pipeline
from springtide.core.errors import InvalidRequest
from springtide.perf.functions.pipeline.profile import decode_profile

PAPER = {
    "s": [10_000_000, 20_000_000],
    "a": [5_000_000, 6_000_000],
    "o": [100_000, 0],
    "g": [0, 100_000],
    "T_fc": [[None, 0.5], [1.0, 0.4]],
    "T_bc": [[None, 1.0], [2.0, 0.8]],
    "M": [512, 1024],
    "W": [40e6, 70e6],
    "s_0": 0,
}


def test_each_form_is_read():
    profile = drawn_profile(1, 4)
    assert decode_profile(msgspec.json.encode(profile), "p.json") == profile
    within = msgspec.json.encode({"profile": profile, "num_samples": 10})
    assert decode_profile(within, "p.json") == profile
    found = decode_profile(msgspec.json.encode(PAPER), "p.json")
    assert found.layers[0].forward_s == (None, 0.5)
    assert found.layers[1].gradient_bytes == 100_000
    assert plan_pipeline(found, 4)[0].plan.stages[-1].end_layer == 2


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"layers": 3}', b"\xff\xfe", b'{"profile": {}}', msgspec.json.encode(PAPER | {"zz": 1})],
)
def test_anything_else_is_refused_in_one_sentence(data):
    with pytest.raises(InvalidRequest, match=r"p.json is no layer profile"):
        decode_profile(data, "p.json")


def test_arrays_of_different_lengths_are_named():
    with pytest.raises(InvalidRequest, match=r"s 1, a 2"):
        decode_profile(msgspec.json.encode(PAPER | {"s": [1]}), "p.json")
