"""Training: it learns, it is the same for a seed, it says how far off it is, and it goes on from further samples."""

from __future__ import annotations

import numpy as np
import pytest

from kits.perf.communication_data import drawn_subgraphs, lawful_samples, small_fabric, subgraph_of
from springtide.core.errors import InvalidRequest
from springtide.perf.communication.baselines import BytesOverBandwidth
from springtide.perf.communication.gnn_layers import Sizes
from springtide.perf.communication.query import Query
from springtide_studies.communication.gnn_training import Training, refit, train

SIZES = Sizes(num_layers=2, width=12, regime_width=16, head_width=16)
QUICK = Training(num_steps=160, num_members=2, batch_placements=32)


def mean_error(said_s: np.ndarray, measured_s: np.ndarray) -> float:
    return float(np.abs(said_s / measured_s - 1.0).mean())


@pytest.mark.slow
def test_a_law_is_learned_and_holds_on_placements_never_seen() -> None:
    subgraphs = drawn_subgraphs(90, 7)
    seen, unseen = lawful_samples(subgraphs[:70], 1), lawful_samples(subgraphs[70:], 2)
    model = train(*seen, sizes=SIZES, training=QUICK)
    error = mean_error(model.predict_s(unseen[0]), unseen[1])
    assert error < 0.15
    assert error < 0.3 * mean_error(BytesOverBandwidth().predict_s(unseen[0]), unseen[1])
    assert 0.0 < model.spread.one_switch < 0.5


def test_same_seed_same_model() -> None:
    samples = lawful_samples(drawn_subgraphs(12, 8), 3)
    training = Training(num_steps=8, num_members=2, batch_placements=8)
    first, again, other = (train(*samples, seed=seed, sizes=SIZES, training=training) for seed in (1, 1, 2))
    assert np.array_equal(first.predict_s(samples[0]), again.predict_s(samples[0]))
    assert not np.array_equal(first.predict_s(samples[0]), other.predict_s(samples[0]))


@pytest.mark.slow
def test_further_samples_move_what_they_speak_of() -> None:
    """A cluster whose servers turn out half as fast between each other: the model follows, and keeps the rest."""
    subgraphs = drawn_subgraphs(24, 9)
    queries, measured_s = lawful_samples(subgraphs, 4)
    model = train(queries, measured_s, sizes=SIZES, training=QUICK)
    is_slow = np.array([query.subgraph.num_servers > 1 for query in queries])
    slowed_s = np.where(is_slow, 2.0, 1.0) * measured_s
    moved = refit(model, queries, slowed_s)
    assert mean_error(moved.predict_s(queries), slowed_s) < 0.5 * mean_error(model.predict_s(queries), slowed_s)
    assert mean_error(model.predict_s(queries), measured_s) < 0.15, "the old model is as it was"


def test_samples_of_single_devices_teach_nothing() -> None:
    with pytest.raises(InvalidRequest, match="two or more"):
        train([Query(subgraph_of(small_fabric(), n0=(0,)), 1024)], np.array([1e-6]))
