"""Subgraphs as arrays: merging changes nothing that the network computes."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, small_fabric, subgraph_of
from springtide.perf.communication import gnn_graph
from springtide.perf.communication.gnn_graph import batch_of, compile_subgraph
from springtide.perf.communication.gnn_layers import Sizes, embed
from springtide_studies.communication.gnn_gradients import fresh_parameters
from springtide_studies.communication.gnn_training import vocabulary_of


def test_equal_servers_are_merged() -> None:
    fabric = small_fabric()
    two = subgraph_of(fabric, n0=range(8), n1=range(8))
    four = subgraph_of(fabric, n0=range(8), n1=range(8), n4=range(8), n5=range(8))
    vocabulary = vocabulary_of([two])
    merged = [compile_subgraph(shape, vocabulary, 3) for shape in (two, four)]
    assert all(item.num_gpus <= 8 and item.num_cpus <= 4 for item in merged)
    assert merged[1].num_switches == 2, "one for both leaves, and the core"
    assert merged[1].messages.row.max() < len(merged[1].features) * 4


def test_merged_and_plain_graphs_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    subgraphs = [
        *drawn_subgraphs(12, 3),
        subgraph_of(small_fabric(), **{f"n{i}": range(8) for i in range(8)}),
        subgraph_of(small_fabric(), n0=range(2), n1=range(2), n4=range(2), n5=range(2), n6=(0,)),
    ]
    vocabulary, sizes = vocabulary_of(subgraphs), Sizes()
    parameters = fresh_parameters(sizes, vocabulary, np.random.default_rng(0), np.float64)
    merged = batch_of([compile_subgraph(shape, vocabulary, sizes.num_layers) for shape in subgraphs], np.float64)
    monkeypatch.setattr(
        gnn_graph, "_merge", lambda features, *rest: (np.arange(len(features)), np.arange(len(features)))
    )
    plain = batch_of([compile_subgraph(shape, vocabulary, sizes.num_layers) for shape in subgraphs], np.float64)
    assert len(merged.features) < len(plain.features)
    ours, whole = (embed(parameters, batch, sizes)[0] for batch in (merged, plain))
    assert np.allclose(ours.latency, whole.latency, rtol=1e-9)
    assert np.allclose(ours.head, whole.head, rtol=1e-9)


def test_a_batch_answers_as_its_members_do() -> None:
    subgraphs = drawn_subgraphs(9, 4)
    vocabulary, sizes = vocabulary_of(subgraphs), Sizes()
    parameters = fresh_parameters(sizes, vocabulary, np.random.default_rng(1), np.float64)
    compiled = [compile_subgraph(shape, vocabulary, sizes.num_layers) for shape in subgraphs]
    together = embed(parameters, batch_of(compiled, np.float64), sizes)[0]
    alone = [embed(parameters, batch_of([item], np.float64), sizes)[0] for item in compiled]
    assert np.allclose(together.per_byte, np.concatenate([one.per_byte for one in alone]), rtol=1e-9)


def test_types_never_seen_have_a_place() -> None:
    known = subgraph_of(small_fabric(), n0=range(4))
    vocabulary = vocabulary_of([known])
    from springtide.perf.communication.fabric import A100_SERVER

    other = compile_subgraph(subgraph_of(small_fabric(A100_SERVER), n0=range(4)), vocabulary, 3)
    assert (other.features[: other.num_gpus, 1] == 1.0).all()
