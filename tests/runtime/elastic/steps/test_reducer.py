"""How parameters are cut into buckets."""

from __future__ import annotations

import torch

from springtide.runtime.elastic.steps.reducer import buckets_of

MIB = 1 << 20


def parameter(mib, dtype=torch.float32):
    return torch.empty(mib * MIB // 4, dtype=dtype, device="meta")


def test_small_parameters_share_buckets_from_the_models_end_and_large_ones_have_their_own():
    first, large, second, third, last = (parameter(size) for size in (7, 9, 7, 7, 1))
    fourth = [parameter(7) for _ in range(2)]
    cut = buckets_of([first, large, *fourth, second, third, last])
    # The first bucket is full with the last parameter, so that it is sent early. Three times 7 MiB fit the next one.
    assert cut[0].parameters[0] is last
    assert [len(bucket.parameters) for bucket in cut] == [1, 3, 1, 2]
    assert [bucket.is_in_place for bucket in cut] == [False, False, True, False]
    assert sum(bucket.num_bytes for bucket in cut) == 45 * MIB


def test_halves_travel_as_floats_and_doubles_for_themselves():
    halves, doubles = parameter(4, torch.bfloat16), parameter(1, torch.float64)
    cut = buckets_of([halves, doubles, parameter(1)])
    assert [bucket.dtype for bucket in cut] == [torch.float32, torch.float64, torch.float32]
    assert not any(bucket.is_in_place for bucket in cut)


def test_parameters_on_different_devices_do_not_share_a_bucket():
    here = [torch.empty(4) for _ in range(2)]
    cut = buckets_of([*here, *[torch.empty(4, device="meta") for _ in range(2)]])
    assert [[each.device.type for each in bucket.parameters] for bucket in cut] == [["meta"] * 2, ["cpu"] * 2]
