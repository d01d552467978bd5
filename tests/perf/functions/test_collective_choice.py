"""The choice of a collective against walking all of them, on stores that charge and on one that many workers share."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.perf.held_bytes import held_bytes
from springtide.collectives.schedule import COLLECTIVES, make_schedule
from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPrices
from springtide.perf.functions.collective_choice import (
    CHOICES,
    SyncStore,
    choose_collectives,
    object_store_of,
    parameter_store_of,
    shard_choices,
    sync_store_of,
)
from springtide.perf.functions.collective_time import CHUNKED, sync_requests, sync_time_s
from springtide.perf.functions.services import aws_lambda, emulator
from springtide_studies.communication.collective_walk import StoreLink, walk_s

MB = 1e6
PRICES = FunctionPrices(usd_per_gb_s=1.66667e-5, usd_per_put=5e-6, usd_per_get=4e-7)
FREE = FunctionPrices(usd_per_gb_s=1.66667e-5)
BUCKET = SyncStore(latency_s=0.04, prices=PRICES)
REDIS = SyncStore(latency_s=0.001, prices=FREE, total_bytes_per_s=300 * MB)


def ways(n: int, most_chunks: int):
    """Every collective in every number of chunks and shards that is worth a try."""
    for name in COLLECTIVES:
        chunk_counts = [chunks for chunks in (1, 2, 4, 8) if chunks <= most_chunks] if name in CHUNKED else [1]
        shard_counts = shard_choices(n) if name == "smlt" else [0]
        yield from itertools.product([name], chunk_counts, shard_counts)


def walked_usd(way, n, num_bytes, usd_per_s, store):
    name, chunks, shards = way
    schedule = make_schedule(name, n, num_bytes // 4, chunks, shards)
    link = StoreLink(up_bytes_per_s=70 * MB, down_bytes_per_s=70 * MB, latency_s=store.latency_s)
    took_s = walk_s(schedule, link, 4, total_bytes_per_s=store.total_bytes_per_s)
    return took_s * usd_per_s + sync_requests(name, n, chunks, shards).usd(store.prices)


def choose_collective(*arguments, **options):
    return choose_collectives(*arguments, **options).at()


@pytest.mark.parametrize("store", [BUCKET, REDIS], ids=["bucket", "redis"])
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("num_bytes", [40_000, 2_400_000, 240_000_000])
@pytest.mark.parametrize("memory_gb", [0.5, 10.0])
def test_what_is_chosen_is_the_best_of_all_when_they_are_walked(store, n, num_bytes, memory_gb):
    usd_per_s = n * memory_gb * PRICES.usd_per_gb_s
    choice = choose_collective(n, num_bytes, 70 * MB, usd_per_s, store)
    chosen = (choice.collective, choice.num_chunks, choice.num_shards)
    chosen_usd = walked_usd(chosen, n, num_bytes, usd_per_s, store)
    assert choice.usd == pytest.approx(chosen_usd, rel=0.05)
    walked = {way: walked_usd(way, n, num_bytes, usd_per_s, store) for way in ways(n, 8)}
    assert chosen_usd <= min(walked.values()) * 1.02, min(walked, key=walked.__getitem__)


def test_each_store_and_size_has_its_own_best():
    """No schedule is always the best: that is why there is a choice."""
    chosen = {
        choose_collective(n, num_bytes, 70 * MB, n * 3 * PRICES.usd_per_gb_s, store).collective
        for n, num_bytes, store in itertools.product((2, 8, 64), (1e4, 1e6, 1e8), (BUCKET, REDIS))
    }
    assert {"duplex", "all-to-all", "parameter-server"} <= chosen


@settings(max_examples=40)
@given(
    n=st.integers(2, 32),
    size=st.floats(1e5, 1e9),
    usd_per_s=st.floats(1e-6, 1e-1),
    in_flight=st.integers(1, 8),
    store=st.sampled_from([BUCKET, REDIS]),
)
def test_the_choice_is_no_dearer_than_any(n, size, usd_per_s, in_flight, store):
    choice = choose_collective(n, size, 70 * MB, usd_per_s, store, in_flight=in_flight)
    for name, chunks, shards in ways(n, 8):
        took_s = sync_time_s(
            name,
            n,
            size,
            70 * MB,
            store.latency_s,
            chunks,
            in_flight,
            shards=shards,
            total_bytes_per_s=store.total_bytes_per_s,
        )
        usd = took_s * usd_per_s + sync_requests(name, n, chunks, shards).usd(store.prices)
        assert choice.usd <= usd * 1.0011


def test_a_grid_is_what_its_places_are():
    n = np.array([1, 2, 5, 16])[:, np.newaxis]
    rates = np.array([14.0, 70.0]) * MB
    worth = n * np.array([1.0, 8.0]) * PRICES.usd_per_gb_s
    table = choose_collectives(n, 5e7, rates, worth, BUCKET)
    assert table.sync_s.shape == (4, 2)
    for row, column in itertools.product(range(4), range(2)):
        alone = choose_collective(int(n[row, 0]), 5e7, float(rates[column]), float(worth[row, column]), BUCKET)
        assert table.at(row, column) == alone
        if n[row, 0] > 1:
            requests = sync_requests(alone.collective, int(n[row, 0]), alone.num_chunks, alone.num_shards)
            found = (table.num_puts[row, column], table.num_gets[row, column])
            assert found == (requests.num_puts, requests.num_gets)


def test_one_worker_and_no_gradient_take_nothing():
    table = choose_collectives([1, 4], [1e6, 0.0], 70 * MB, 1.0, BUCKET)
    assert table.sync_s.tolist() == table.usd.tolist() == table.num_puts.tolist() == [0.0, 0.0]
    assert table.num_chunks.tolist() == [1, 1]


def test_what_does_not_fit_the_memory_is_not_chosen():
    size, free = 4e6, choose_collective(4, 4e6, 70 * MB, 1e-4, BUCKET)
    tight = choose_collective(4, size, 70 * MB, 1e-4, BUCKET, spare_bytes=size)
    assert free.collective == "all-to-all"
    held = [
        held_bytes(choice.collective, 4, size, choice.num_chunks, shards=choice.num_shards) for choice in (free, tight)
    ]
    assert held[1] <= size < held[0]
    assert choose_collective(4, size, 70 * MB, 1e-4, BUCKET, spare_bytes=10.0).sync_s == math.inf


def test_the_stores_of_a_service():
    service = aws_lambda()
    assert object_store_of(service).prices.usd_per_put > 0.0
    redis = parameter_store_of(service)
    assert (redis.prices.usd_per_put, redis.prices.usd_per_get) == (0.0, 0.0)
    assert redis.total_bytes_per_s < math.inf
    assert parameter_store_of(emulator(total_vcpus=2.0)).total_bytes_per_s == math.inf
    assert sync_store_of(service, True) == redis
    assert sync_store_of(service, False) == object_store_of(service)


def test_one_chunk_of_ours_is_called_ours():
    assert CHOICES[0] == "duplex"
    assert set(CHOICES) == set(COLLECTIVES)
    assert choose_collective(8, 5e7, 70 * MB, 8 * 3 * PRICES.usd_per_gb_s, BUCKET).collective == "duplex"


@pytest.mark.parametrize(
    "arguments", [(0, 1e6, 70 * MB, 1.0, BUCKET), (2, -1.0, 70 * MB, 1.0, BUCKET), (2, 1e6, 0.0, 1.0, BUCKET)]
)
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(InvalidRequest):
        choose_collective(*arguments)
    with pytest.raises(InvalidRequest, match="no collective"):
        choose_collective(2, 1e6, 1e6, 1.0, BUCKET, among=("ring",))
