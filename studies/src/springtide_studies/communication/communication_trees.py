"""Gradient-boosted trees on features made by hand: the strongest plain predictor of communication time.

The one module that needs scikit-learn; without it `TreeModel` says what to install.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.perf.communication.baselines import kind_of
from springtide.perf.communication.fabric import Subgraph
from springtide.perf.communication.query import DTYPES, Query

FEATURES = (
    "log_bytes",
    "log_bytes_over_bandwidth",
    "log_narrowest",
    "dtype",
    "kind",
    "num_devices",
    "num_servers",
    "num_leaf_switches",
    "most_on_a_server",
    "fewest_on_a_server",
    "num_cpus",
    "servers_with_a_device_at_the_card",
    "servers_joined_by_nvlink",
    "fewest_nvlinks_of_a_device",
    "nvlinks_per_device",
    "servers_under_the_fullest_switch",
)


def features_of(queries: Sequence[Query], kinds: Sequence[str]) -> NDArray[np.float64]:
    """What an engineer would compute by hand from a query: one row for each, columns `FEATURES`."""
    known: dict[int, tuple[float, ...]] = {}
    rows = np.zeros((len(queries), len(FEATURES)))
    for index, query in enumerate(queries):
        if id(query.subgraph) not in known:
            known[id(query.subgraph)] = _shape_features(query.subgraph, kinds)
        shape = known[id(query.subgraph)]
        log_bytes = float(np.log2(max(query.num_bytes, 1)))
        dtype = float(DTYPES.index(query.dtype)) if query.dtype in DTYPES else -1.0
        rows[index] = (log_bytes, log_bytes - shape[0], shape[0], dtype, *shape[1:])
    return rows


def _shape_features(subgraph: Subgraph, kinds: Sequence[str]) -> tuple[float, ...]:
    sizes = [len(part.slots) for part in subgraph.servers]
    near, joined, fewest, total = 0, 0, 99, 0
    for part in subgraph.servers:
        links = subgraph.links_of(part)
        near += links.has_device_at_card(part)
        degrees = links.nvlink_degrees(part.slots)
        joined += links.is_nvlink_joined(part.slots)
        fewest = min(fewest, min(degrees))
        total += sum(degrees)
    leaves = [part.switches[:1] for part in subgraph.servers]
    kind = float(kinds.index(kind_of(subgraph))) if kind_of(subgraph) in kinds else -1.0
    return (
        float(np.log2(subgraph.narrowest_bytes_per_s)) if subgraph.num_devices > 1 else 40.0,
        kind,
        float(subgraph.num_devices),
        float(subgraph.num_servers),
        float(subgraph.num_leaf_switches),
        float(max(sizes)),
        float(min(sizes)),
        float(subgraph.edges.num_cpus),
        near / subgraph.num_servers,
        joined / subgraph.num_servers,
        float(fewest),
        total / subgraph.num_devices,
        float(max(leaves.count(leaf) for leaf in set(leaves))),
    )


class TreeModel:
    """Histogram gradient boosting on the logarithm of the time, or of its ratio to bytes over bandwidth: whichever is
    better on placements of the training set that are left out for that question.
    """

    name = "boosted trees"

    def __init__(
        self, queries: Sequence[Query], measured_s: NDArray[np.float64], *, seed: int = 0, num_trees: int = 600
    ) -> None:
        self._kinds = sorted({kind_of(query.subgraph) for query in queries})
        rows = features_of(queries, self._kinds)
        log_s = np.log(np.maximum(measured_s, 1e-12))
        placement = _placement_numbers(queries)
        rng = np.random.default_rng(seed)
        left_out = rng.permutation(placement.max() + 1)[: max(1, (placement.max() + 1) // 5)]
        is_left_out = np.isin(placement, left_out)
        errors = {}
        for is_ratio in (False, True):
            model = _fit(rows[~is_left_out], _target(rows, log_s, is_ratio)[~is_left_out], seed, num_trees)
            said = _undo(rows[is_left_out], model.predict(rows[is_left_out]), is_ratio)
            errors[is_ratio] = float(np.mean(np.abs(np.exp(said - log_s[is_left_out]) - 1.0)))
        self._is_ratio = errors[True] < errors[False]
        self._model = _fit(rows, _target(rows, log_s, self._is_ratio), seed, num_trees)

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        """Seconds for each query."""
        if not queries:
            return np.zeros(0)
        rows = features_of(queries, self._kinds)
        answer: NDArray[np.float64] = np.exp(_undo(rows, self._model.predict(rows), self._is_ratio))
        answer[[query.subgraph.num_devices < 2 for query in queries]] = 0.0
        return answer


def _fit(rows: NDArray[np.float64], target: NDArray[np.float64], seed: int, num_trees: int) -> Any:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        raise InvalidRequest("boosted trees need scikit-learn; pip install scikit-learn") from None
    model = HistGradientBoostingRegressor(
        loss="absolute_error",
        max_iter=num_trees,
        learning_rate=0.06,
        max_leaf_nodes=31,
        min_samples_leaf=10,
        categorical_features=[FEATURES.index("dtype"), FEATURES.index("kind")],
        random_state=seed,
    )
    return model.fit(rows, target)


def _target(rows: NDArray[np.float64], log_s: NDArray[np.float64], is_ratio: bool) -> NDArray[np.float64]:
    return log_s - np.log(2.0) * rows[:, 1] if is_ratio else log_s


def _undo(rows: NDArray[np.float64], said: NDArray[np.float64], is_ratio: bool) -> NDArray[np.float64]:
    return said + np.log(2.0) * rows[:, 1] if is_ratio else said


def _placement_numbers(queries: Sequence[Query]) -> NDArray[np.int64]:
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(id(query.subgraph), len(numbers)) for query in queries])
