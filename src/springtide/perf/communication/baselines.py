"""Simple predictors of communication time: bytes over bandwidth, and fitted latency and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springtide.perf.communication.fabric import Subgraph
from springtide.perf.communication.query import Query


class BytesOverBandwidth:
    """2 (n - 1) / n times the bytes, over the narrowest link that the group must cross. Without fitted parameters."""

    name = "bytes/bandwidth"

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        return np.array([_ring_bytes(query) / query.subgraph.narrowest_bytes_per_s for query in queries])


class AlphaBeta:
    """Latency per step of a ring and time per byte, fitted for each kind and number of servers (Hockney's model).

    Interpolates between fitted numbers of servers, and uses the nearest one beyond them.
    """

    name = "alpha-beta"

    def __init__(self, queries: Sequence[Query], measured_s: NDArray[np.float64]) -> None:
        groups = grouped(queries, lambda query: (kind_of(query.subgraph), query.subgraph.num_servers))
        self._fits = fit_groups(groups, queries, measured_s, self._row)

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        answer = np.zeros(len(queries))
        for index, query in enumerate(queries):
            if query.subgraph.num_devices < 2:
                continue
            row = np.array(self._row(query))
            kind, wanted = kind_of(query.subgraph), query.subgraph.num_servers
            # One server and several are different regimes: nothing is interpolated between them.
            known = sorted(number for name, number in self._fits if name == kind and (number > 1) == (wanted > 1))
            if known:
                times = [float(row @ self._fits[kind, number]) for number in known]
                answer[index] = float(np.interp(wanted, known, times))
            else:
                answer[index] = nearest_fit(self._fits, row)
        return answer

    @staticmethod
    def _row(query: Query) -> tuple[float, ...]:
        return (1.0, query.subgraph.num_devices - 1.0, _ring_bytes(query))


def kind_of(subgraph: Subgraph) -> str:
    """The kinds of server that a group spans, as text."""
    return "+".join(links.name for links in subgraph.links)


def _ring_bytes(query: Query) -> float:
    """The bytes that each member of a ring sends: 2 (n - 1) / n of the tensor."""
    num = query.subgraph.num_devices
    return 2.0 * (num - 1) / num * query.num_bytes


def grouped(queries: Sequence[Query], key: Callable[[Query], Any]) -> dict[Any, list[int]]:
    """The indexes of the queries of several devices, by key."""
    groups: dict[Any, list[int]] = {}
    for index, query in enumerate(queries):
        if query.subgraph.num_devices > 1:
            groups.setdefault(key(query), []).append(index)
    return groups


def fit_groups(
    groups: Mapping[tuple[str, int], list[int]],
    queries: Sequence[Query],
    measured_s: NDArray[np.float64],
    row: Callable[[Query], tuple[float, ...]],
) -> dict[tuple[str, int], NDArray[np.float64]]:
    """The parameters of each group, fitted to the measurements of its members."""
    return {
        key: _fit_relative(np.array([row(queries[index]) for index in members]), measured_s[members])
        for key, members in groups.items()
    }


def nearest_fit(fits: Mapping[tuple[str, int], NDArray[np.float64]], row: NDArray[np.float64]) -> float:
    """For a kind of server or a regime without samples: the median of all fits; 0 if there are none."""
    return float(np.median([row @ fit for fit in fits.values()])) if fits else 0.0


def _fit_relative(rows: NDArray[np.float64], measured_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients >= 0 with the least squared relative error, iteratively reweighted towards the least absolute error.

    There are few columns, so all subsets of nonzero columns are tried, and the best one without a negative coefficient
    wins.
    """
    weights = 1.0 / np.maximum(measured_s, 1e-12)
    best = np.zeros(rows.shape[1])
    for _ in range(10):
        scaled, target = rows * weights[:, None], measured_s * weights
        least, best = np.inf, np.zeros(rows.shape[1])
        for count in range(1, rows.shape[1] + 1):
            for columns in combinations(range(rows.shape[1]), count):
                chosen = scaled[:, columns]
                norms = np.maximum(np.linalg.norm(chosen, axis=0), 1e-300)
                found = np.linalg.lstsq(chosen / norms, target, rcond=None)[0] / norms
                loss = float(np.sum((chosen @ found - target) ** 2))
                if (found >= 0).all() and loss < least:
                    least, best = loss, np.zeros(rows.shape[1])
                    best[list(columns)] = found
        error = np.abs(rows @ best / np.maximum(measured_s, 1e-12) - 1.0)
        weights = 1.0 / np.maximum(measured_s, 1e-12) / np.sqrt(np.maximum(error, 0.02))
    return best
