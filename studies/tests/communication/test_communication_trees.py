"""Boosted trees over features made by hand; skipped where scikit-learn is not installed."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, lawful_samples, small_fabric, subgraph_of
from springtide.perf.communication.query import Query
from springtide_studies.communication.communication_trees import FEATURES, TreeModel, features_of


def test_features_say_what_they_are_called() -> None:
    fabric = small_fabric()
    query = Query(subgraph_of(fabric, n0=range(8), n1=(6, 7), n4=(0,)), 1 << 20, "float16")
    row = dict(zip(FEATURES, features_of([query], ["v100"])[0], strict=True))
    assert row["log_bytes"] == 20.0
    assert (row["num_devices"], row["num_servers"], row["num_leaf_switches"]) == (11, 3, 2)
    assert (row["most_on_a_server"], row["fewest_on_a_server"]) == (8, 1)
    assert row["servers_with_a_device_at_the_card"] == pytest.approx(2 / 3)
    assert row["servers_joined_by_nvlink"] == 1.0
    assert row["servers_under_the_fullest_switch"] == 2
    assert row["kind"] == 0


def test_trees_fit_what_they_see_and_are_the_same_for_a_seed() -> None:
    pytest.importorskip("sklearn")
    subgraphs = drawn_subgraphs(60, 1)
    queries, measured_s = lawful_samples(subgraphs, 1)
    model, again = (TreeModel(queries, measured_s, seed=3, num_trees=40) for _ in range(2))
    said = model.predict_s(queries)
    assert np.median(np.abs(said / measured_s - 1.0)) < 0.2
    assert np.array_equal(said, again.predict_s(queries))
    single = Query(subgraph_of(small_fabric(), n0=(1,)), 1 << 20)
    assert model.predict_s([single])[0] == 0.0
