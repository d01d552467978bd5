"""The plain predictors find the laws that they are made for."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import lawful_samples, small_fabric, subgraph_of
from springtide.perf.communication.baselines import AlphaBeta, BytesOverBandwidth
from springtide.perf.communication.query import Query


def test_bytes_over_bandwidth_is_a_ring_on_the_narrowest_link() -> None:
    whole = subgraph_of(small_fabric(), n0=range(8))
    single = subgraph_of(small_fabric(), n0=(0,))
    said = BytesOverBandwidth().predict_s([Query(whole, 150_000_000_000), Query(single, 100)])
    assert said == pytest.approx([2 * 7 / 8, 0.0])


def test_alpha_beta_finds_latency_and_bandwidth_of_a_ring() -> None:
    fabric = small_fabric()
    groups = [subgraph_of(fabric, n0=range(n)) for n in (4, 5, 8)]
    queries = [Query(group, size) for group in groups for size in (1 << 10, 1 << 16, 1 << 22, 1 << 28)]

    def law(query: Query) -> float:
        num = query.subgraph.num_devices
        return 3e-6 + 2e-6 * (num - 1) + query.num_bytes * 2 * (num - 1) / num / 5e10

    model = AlphaBeta(queries, np.array([law(query) for query in queries]))
    unseen = Query(subgraph_of(fabric, n0=range(6)), 1 << 25)
    assert model.predict_s([unseen])[0] == pytest.approx(law(unseen), rel=0.01)


def test_alpha_beta_goes_between_the_numbers_of_servers_that_it_saw() -> None:
    fabric = small_fabric()
    seen = [subgraph_of(fabric, **{f"n{i}": (0,) for i in range(count)}) for count in (2, 4)]
    queries = [Query(group, size) for group in seen for size in (1 << 12, 1 << 20, 1 << 28)]
    measured_s = np.array([(1 + query.subgraph.num_servers) * (1e-5 + query.num_bytes * 1e-10) for query in queries])
    model = AlphaBeta(queries, measured_s)
    three = subgraph_of(fabric, n0=(0,), n1=(0,), n2=(0,))
    two, four = (model.predict_s([Query(group, 1 << 20)])[0] for group in seen)
    assert two < model.predict_s([Query(three, 1 << 20)])[0] < four


def test_a_kind_of_server_never_seen_gets_some_answer() -> None:
    queries, measured_s = lawful_samples([subgraph_of(small_fabric(), n0=range(4))], 0)
    model = AlphaBeta(queries, measured_s)
    elsewhere = Query(subgraph_of(small_fabric(), n0=range(4), n1=range(4)), 1 << 20)
    assert model.predict_s([elsewhere])[0] > 0
