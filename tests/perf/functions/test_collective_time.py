"""Closed forms against the walk, the walk against arithmetic, the papers' formulas, and what chunks are worth."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.perf.held_bytes import held_bytes
from springtide.collectives.schedule import (
    COLLECTIVES,
    make_schedule,
    make_served_schedule,
)
from springtide.collectives.steps import Get, Put
from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPrices
from springtide.perf.functions.collective_time import (
    best_chunks,
    sync_requests,
    sync_time_s,
)
from springtide_studies.communication.collective_walk import StoreLink, walk, walk_s
from springtide_studies.exchange.probe import lower_bound_s

MB = 1e6
# What Amazon asks for: functions by the GB-second, objects by the request.
PRICES = FunctionPrices(usd_per_gb_s=1.66667e-5, usd_per_put=5e-6, usd_per_get=4e-7)
FREE = FunctionPrices(usd_per_gb_s=1.66667e-5)


def paper_lambdaml_s(n: int, num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """FuncPipe, equation 1: LambdaML's three-phase scatter-reduce, 3 S/w - 2 S/(n w) + 4 t_lat."""
    return (3.0 - 2.0 / n) * num_bytes / bytes_per_s + 4.0 * latency_s


def paper_funcpipe_s(n: int, num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """FuncPipe, equation 2: the pipelined scatter-reduce, 2 S/w + (2 + n) t_lat."""
    return 2.0 * num_bytes / bytes_per_s + (2.0 + n) * latency_s


def paper_smlt_s(n: int, num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """SMLT's aggregation with as many shards as workers, figure 5: (3 + 1/n) S/w and four phases' latencies."""
    return (3.0 + 1.0 / n) * num_bytes / bytes_per_s + 4.0 * latency_s


def link(rate=70 * MB, latency_s=0.0, **more) -> StoreLink:
    return StoreLink(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=latency_s, **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 13])
def test_the_closed_form_is_what_the_walk_takes(name, n):
    num_elements = 840_000 * n
    for latency_s, in_flight, chunks in itertools.product((0.0, 0.03, 0.2), (1, 2, 4), (1, 2, 5)):
        walked_s = walk_s(make_schedule(name, n, num_elements, chunks), link(latency_s=latency_s), in_flight)
        said_s = sync_time_s(name, n, 4 * num_elements, 70 * MB, latency_s, chunks, in_flight)
        assert said_s == pytest.approx(walked_s, rel=1e-4)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 12, 24])
def test_shards_take_what_the_walk_of_them_takes(n, m):
    num_elements = 120_000 * n * m
    for latency_s, in_flight in itertools.product((0.0, 0.03), (1, 4)):
        walked_s = walk_s(make_schedule("smlt", n, num_elements, shards=m), link(latency_s=latency_s), in_flight)
        said_s = sync_time_s("smlt", n, 4 * num_elements, 70 * MB, latency_s, 1, in_flight, shards=m)
        assert said_s == pytest.approx(walked_s, rel=1e-3)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_workers_share_the_network_card_of_the_store(name, n):
    """One Redis carries 150 MB/s each way, for workers of 70 MB/s: from three on they wait for it."""
    num_elements = 840_000 * n
    for latency_s, chunks in itertools.product((0.0, 0.01), (1, 4)):
        schedule = make_schedule(name, n, num_elements, chunks)
        walked_s = walk_s(schedule, link(latency_s=latency_s), 4, total_bytes_per_s=150 * MB)
        arguments = (name, n, 4 * num_elements, 70 * MB, latency_s, chunks)
        said_s = sync_time_s(*arguments, total_bytes_per_s=150 * MB)
        assert said_s == pytest.approx(walked_s, rel=0.05 if name == "parameter-server" else 1e-4)
        assert sync_time_s(*arguments, total_bytes_per_s=1e12) == pytest.approx(sync_time_s(*arguments))
        if n > 2:
            assert said_s > sync_time_s(*arguments)


@pytest.mark.parametrize("m", [1, 3, 4, 6, 8, 12])
def test_shards_share_it_too(m):
    schedule = make_schedule("smlt", 4, 1_200_000, shards=m)
    said_s = sync_time_s("smlt", 4, 4_800_000, 70 * MB, 0.0, shards=m, total_bytes_per_s=150 * MB)
    assert said_s == pytest.approx(walk_s(schedule, link(), 4, total_bytes_per_s=150 * MB), rel=0.12)


def test_who_has_a_slow_link_leaves_the_others_more_of_the_store():
    schedule = make_schedule("parameter-server", 3, 1_000_000)
    links = [link(rate=1000 * MB), link(rate=10 * MB), link(rate=1000 * MB)]
    # 4 MB up at 10 MB/s and down again; the rest is fast beside that.
    assert walk_s(schedule, links, 4, total_bytes_per_s=500 * MB) == pytest.approx(0.8, rel=0.05)


@given(
    name=st.sampled_from(COLLECTIVES),
    n=st.integers(2, 16),
    latency_s=st.floats(0, 0.1),
    chunks=st.integers(1, 16),
    in_flight=st.integers(1, 8),
    sizes=st.lists(st.floats(1e3, 1e9), min_size=3, max_size=3),
)
def test_time_grows_convexly_with_size_and_is_never_below_the_bound(name, n, latency_s, chunks, in_flight, sizes):
    low, middle, high = sorted(sizes)
    t_low, t_middle, t_high = (
        sync_time_s(name, n, s, 50 * MB, latency_s, chunks, in_flight) for s in (low, middle, high)
    )
    assert t_low <= t_middle <= t_high
    assert t_middle >= lower_bound_s(n, middle, 50 * MB) * (1 - 1e-9)
    if high > low:
        share = (middle - low) / (high - low)
        assert t_middle <= (t_low + share * (t_high - t_low)) * (1 + 1e-9)


def test_figures_of_the_papers():
    """280 MB among 8 workers at 70 MB/s take 11 s with LambdaML and 8 s pipelined (FuncPipe, section 3.3)."""
    assert paper_lambdaml_s(8, 280 * MB, 70 * MB) == pytest.approx(11.0)
    assert paper_funcpipe_s(8, 280 * MB, 70 * MB) == pytest.approx(8.0)
    assert paper_smlt_s(8, 280 * MB, 70 * MB) == pytest.approx(12.5)
    assert lower_bound_s(8, 280 * MB, 70 * MB) == pytest.approx(7.0)
    assert lower_bound_s(1, 280 * MB, 70 * MB) == 0.0


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_schedules_take_what_the_papers_say(n):
    """With enough requests in flight, latency counts once a phase (1); one at a time, once an object (2)."""
    size, rate, latency_s = 280 * MB, 70 * MB, 0.04
    assert sync_time_s("lambdaml", n, size, rate, latency_s, in_flight=16) == pytest.approx(
        paper_lambdaml_s(n, size, rate, latency_s)
    )
    assert sync_time_s("smlt", n, size, rate, latency_s, in_flight=16) == pytest.approx(
        paper_smlt_s(n, size, rate, latency_s)
    )
    # Its third phase takes a latency an object, too, where the paper counts two in all.
    assert sync_time_s("funcpipe", n, size, rate, latency_s, in_flight=1) == pytest.approx(
        paper_funcpipe_s(n, size, rate, latency_s) + (n - 2) * latency_s
    )
    assert sync_time_s("parameter-server", n, size, rate, 0.0) == pytest.approx((n + 2) * size / rate)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_ours_comes_as_close_to_the_bound_as_chunks_are_small(n):
    shares = [sync_time_s("duplex", n, 1.0, 1.0, 0.0, chunks) for chunks in (2, 4, 16)]
    assert shares == pytest.approx([2 * (n - 1) / n + 1 / (n * chunks) for chunks in (2, 4, 16)])
    assert sync_time_s("duplex", n, 1.0, 1.0, 0.0, 1) == pytest.approx(2.0)


def test_a_link_each_way_is_what_it_rests_on():
    schedule = make_schedule("duplex", 4, 4_000_000, 4)
    slow_up = StoreLink(up_bytes_per_s=10 * MB, down_bytes_per_s=1000 * MB)
    # All of the gradient leaves each worker, whatever the download: S / w_up and the last sum's way.
    assert walk_s(schedule, slow_up, 4) == pytest.approx(1.6, rel=0.02)


def test_one_slow_worker_holds_up_everyone():
    schedule = make_schedule("duplex", 4, 4_000_000, 4)
    links = [link(), link(), link(), link(rate=7 * MB)]
    assert walk_s(schedule, links, 4) > 4 * walk_s(schedule, link(), 4)
    with pytest.raises(InvalidRequest, match="3 links do not fit 4 ranks"):
        walk_s(schedule, links[:3], 4)


def test_a_polled_store_is_seen_late():
    schedule = make_schedule("duplex", 4, 4_000_000, 4)
    assert walk_s(schedule, link(late_fraction=0.1), 4) > walk_s(schedule, link(), 4)


def test_shards_that_do_not_fit_the_workers_leave_some_idle():
    equal, few, many = (walk_s(make_schedule("smlt", 8, 8_000_000, shards=m), link(), 4) for m in (8, 3, 12))
    assert few > equal
    assert many > equal


def test_a_server_with_a_wide_link_is_as_fast_as_its_workers():
    schedule = make_served_schedule(4, 7_000_000, 8)
    links = [*[link() for _ in range(4)], link(rate=100_000 * MB)]
    assert walk_s(schedule, links, 4) == pytest.approx(28 / 70 * (1 + 1 / 8), rel=0.01)


def test_a_walk_shows_what_was_on_each_link():
    walked = walk(make_schedule("duplex", 4, 4_000_000, 4), link(), 4)
    for rank, is_upload in itertools.product(range(4), (True, False)):
        mine = [t for t in walked.transfers if t.rank == rank and t.is_upload == is_upload]
        assert all(one.end_s <= two.begin_s + 1e-12 for one, two in itertools.pairwise(mine))
    assert walked.took_s == max(t.end_s for t in walked.transfers)


def test_a_schedule_that_never_ends_is_refused():
    schedule = make_schedule("duplex", 2, 4, 1)
    without_puts = tuple(step for step in schedule.ranks[0] if not isinstance(step, Put))
    steps = tuple(msgspec.structs.replace(step, after=()) for step in without_puts)
    with pytest.raises(InvalidRequest, match="waits for itself"):
        walk_s(msgspec.structs.replace(schedule, ranks=(steps, schedule.ranks[1])), link(), 1)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_requests_are_those_of_the_schedule(name, n):
    steps = [step for steps in make_schedule(name, n, 4000, 3).ranks for step in steps]
    said = sync_requests(name, n, 3)
    assert said.num_puts == sum(isinstance(step, Put) for step in steps)
    assert said.num_gets == sum(isinstance(step, Get) for step in steps)
    assert said.usd(PRICES) == pytest.approx(said.num_puts * 5e-6 + said.num_gets * 4e-7)


def test_chunks_are_chosen_by_what_they_cost():
    """A put costs as much as 30 ms of a 10 GB function: on an object store few chunks pay, on a free one many do."""
    ten_gb_x8 = 8 * 10 * PRICES.usd_per_gb_s
    on_s3 = best_chunks("duplex", 8, 280 * MB, 70 * MB, 0.04, 4, ten_gb_x8, PRICES)
    on_redis = best_chunks("duplex", 8, 280 * MB, 70 * MB, 0.001, 4, ten_gb_x8, FREE)
    assert on_s3 <= 2 < 8 <= on_redis
    assert best_chunks("duplex", 8, 100, 70 * MB, 0.04, 4, ten_gb_x8, FREE) <= 3
    assert best_chunks("duplex", 1, 280 * MB, 70 * MB, 0.04, 4, ten_gb_x8, PRICES) == 1
    assert best_chunks("lambdaml", 8, 280 * MB, 70 * MB, 0.04, 4, ten_gb_x8, PRICES) == 1


@pytest.mark.parametrize("m", [1, 3, 5, 8])
def test_requests_of_shards_are_those_of_the_schedule(m):
    steps = [step for steps in make_schedule("smlt", 5, 4000, shards=m).ranks for step in steps]
    said = sync_requests("smlt", 5, shards=m)
    assert said.num_puts == sum(isinstance(step, Put) for step in steps)
    assert said.num_gets == sum(isinstance(step, Get) for step in steps)


def test_memory_held_shrinks_with_chunks():
    whole, parts = (held_bytes("duplex", 8, 280 * MB, chunks) for chunks in (1, 8))
    assert whole == pytest.approx(280 * MB)
    assert parts < whole / 4
    assert held_bytes("parameter-server", 8, 280 * MB) == pytest.approx(8 * 280 * MB)
    assert held_bytes("duplex", 1, 280 * MB) == 0.0
    assert held_bytes("all-to-all", 8, 280 * MB) == pytest.approx(8 * 280 * MB)
    # One of eight merges the only shard: the whole gradient of every worker, and the sum.
    assert held_bytes("smlt", 8, 280 * MB, shards=1) == pytest.approx(9 * 280 * MB)
    assert held_bytes("smlt", 8, 280 * MB, shards=8) == pytest.approx(9 / 8 * 280 * MB)


@pytest.mark.parametrize(
    "arguments", [("ring", 2, 1.0, 1.0, 0.0), ("duplex", 0, 1.0, 1.0, 0.0), ("duplex", 2, 1.0, 1.0, 0.0, 0)]
)
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(InvalidRequest):
        sync_time_s(*arguments)


def test_every_get_of_a_schedule_is_walked():
    schedule = make_schedule("smlt", 3, 999, 2)
    num_gets = sum(isinstance(step, Get) for steps in schedule.ranks for step in steps)
    assert sum(not transfer.is_upload for transfer in walk(schedule, link(), 2).transfers) == num_gets
