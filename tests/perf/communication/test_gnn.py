"""The trained network: batches, uncertainty, what is remembered, and files."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, small_fabric, subgraph_of
from springtide.core.errors import InvalidRequest
from springtide.perf.communication.gnn import GraphModel, PredictionSpread, load_model, region_of, save_model
from springtide.perf.communication.gnn_layers import Sizes
from springtide.perf.communication.query import Query
from springtide_studies.communication.gnn_gradients import fresh_parameters
from springtide_studies.communication.gnn_training import vocabulary_of

SIZES = Sizes(width=8, regime_width=8, head_width=8)


def untrained(num_members: int = 2) -> GraphModel:
    vocabulary = vocabulary_of(drawn_subgraphs(10, 0))
    members = [fresh_parameters(SIZES, vocabulary, np.random.default_rng(seed)) for seed in range(num_members)]
    spread = PredictionSpread(one_server=0.1, one_switch=0.2, several_switches=0.3)
    return GraphModel(members, vocabulary, SIZES, spread)


def test_a_batch_is_answered_as_its_queries_one_by_one() -> None:
    queries = [Query(shape, 1 << size) for size, shape in enumerate(drawn_subgraphs(12, 1), 10)]
    together = untrained().predict_s(queries)
    model = untrained()
    # float32: sums of another order differ in the last digits.
    assert together == pytest.approx([model.predict_s([query])[0] for query in reversed(queries)][::-1], rel=1e-4)
    assert together == pytest.approx(model.predict_s(queries), rel=1e-4)
    assert len(model.predict_s([])) == 0


def test_a_single_device_takes_no_time() -> None:
    single = subgraph_of(small_fabric(), n0=(3,))
    pair = subgraph_of(small_fabric(), n0=(3, 4))
    said = untrained().predict_s([Query(single, 1 << 20), Query(pair, 1 << 20)])
    assert said[0] == 0.0
    assert said[1] > 0.0


def test_uncertainty_is_the_members_disagreement_and_the_usual_spread() -> None:
    fabric = small_fabric()
    shapes = [
        subgraph_of(fabric, n0=range(4)),
        subgraph_of(fabric, n0=range(4), n1=range(4)),
        subgraph_of(fabric, n0=range(4), n5=range(4)),
    ]
    assert [region_of(shape) for shape in shapes] == [0, 1, 2]
    queries = [Query(shape, 1 << 20) for shape in shapes]
    alone, several = untrained(1).predict_with_error(queries)[1], untrained(3).predict_with_error(queries)[1]
    assert alone == pytest.approx([0.1, 0.2, 0.3])
    assert (several > alone).all()


def test_a_model_comes_back_from_its_bytes() -> None:
    model = untrained()
    queries = [Query(shape, 123456, "float16") for shape in drawn_subgraphs(5, 2)]
    again = load_model(save_model(model))
    assert np.array_equal(again.predict_s(queries), model.predict_s(queries))
    assert again.spread == model.spread
    with pytest.raises(InvalidRequest, match="train it anew"):
        load_model(b"something else")


def test_what_is_remembered_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.perf.communication.gnn._MAX_CACHED", 4)
    model = untrained()
    shapes = drawn_subgraphs(9, 3)
    for shape in shapes:
        model.predict_s([Query(shape, 1 << 20)])
    assert model.predict_s([Query(shapes[0], 1 << 20)]) == pytest.approx(
        untrained().predict_s([Query(shapes[0], 1 << 20)]), rel=1e-4
    )
