"""Every gradient of the network against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, lawful_samples
from springtide.perf.communication.gnn_graph import Floats, batch_of, compile_subgraph
from springtide.perf.communication.gnn_layers import Sizes, answer, embed, size_features
from springtide_studies.communication.gnn_gradients import QueryBatch, fresh_parameters, gradients
from springtide_studies.communication.gnn_training import vocabulary_of


@pytest.mark.parametrize("num_layers", [0, 2])
def test_gradients_agree_with_finite_differences(num_layers: int) -> None:
    sizes = Sizes(num_layers=num_layers, width=5, num_regimes=3, regime_width=6, head_width=7)
    subgraphs = drawn_subgraphs(6, 0)
    queries, measured_s = lawful_samples(subgraphs, 0, sizes_each=2)
    vocabulary = vocabulary_of(subgraphs)
    batch = batch_of([compile_subgraph(shape, vocabulary, sizes.num_layers) for shape in subgraphs], np.float64)
    num_bytes = np.array([query.num_bytes for query in queries], np.float64)
    num_devices = np.array([query.subgraph.num_devices for query in queries])
    asked = QueryBatch(
        graph=np.repeat(np.arange(len(subgraphs)), 2),
        log_bytes=np.log(num_bytes),
        size_features=size_features(num_bytes, num_devices, np.arange(len(queries)) % 4, np.float64),
    )
    goal = np.log(measured_s)
    rng = np.random.default_rng(5)
    parameters = fresh_parameters(sizes, vocabulary, rng, np.float64)
    for name in parameters:
        # Away from 0, where a rectifier has no slope.
        parameters[name] += 0.1 * rng.standard_normal(parameters[name].shape)

    def slope_of(said: Floats) -> tuple[float, Floats]:
        return float(np.sum((said - goal) ** 2)), 2 * (said - goal)

    def loss() -> float:
        embedding, _ = embed(parameters, batch, sizes)
        return slope_of(answer(parameters, embedding, asked.graph, asked.log_bytes, asked.size_features)[0])[0]

    stated, found = gradients(parameters, batch, asked, sizes, slope_of)
    assert stated == pytest.approx(loss())
    assert set(found) == set(parameters)
    step = 1e-6
    for name, value in parameters.items():
        assert np.any(found[name]), f"{name} has no part in the answer"
        for place in rng.permutation(value.size)[:12]:
            kept = value.flat[place]
            value.flat[place] = kept + step
            above = loss()
            value.flat[place] = kept - step
            below = loss()
            value.flat[place] = kept
            assert found[name].flat[place] == pytest.approx((above - below) / (2 * step), rel=2e-4, abs=1e-5), name
