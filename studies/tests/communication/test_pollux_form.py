"""Pollux's form finds the law that it is made for."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, lawful_samples, small_fabric, subgraph_of
from springtide.perf.communication.query import Query
from springtide_studies.communication.pollux_form import PolluxForm


def test_pollux_form_tells_one_server_from_several() -> None:
    subgraphs = drawn_subgraphs(20, 0)
    queries, _ = lawful_samples(subgraphs, 0)

    def law(query: Query) -> float:
        alpha, beta = (2e-5, 3e-6) if query.subgraph.num_servers == 1 else (9e-5, 1e-5)
        return alpha + beta * (query.subgraph.num_devices - 2) + query.num_bytes * 1e-10

    model = PolluxForm(queries, np.array([law(query) for query in queries]))
    assert model.predict_s(queries) == pytest.approx([law(query) for query in queries], rel=0.05)


def test_a_kind_of_server_never_seen_gets_some_answer() -> None:
    queries, measured_s = lawful_samples([subgraph_of(small_fabric(), n0=range(4))], 0)
    model = PolluxForm(queries, measured_s)
    elsewhere = Query(subgraph_of(small_fabric(), n0=range(4), n1=range(4)), 1 << 20)
    assert model.predict_s([elsewhere])[0] > 0
