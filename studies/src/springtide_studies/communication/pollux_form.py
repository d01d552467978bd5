"""Pollux's form of communication time: fitted for one server and for several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from springtide.perf.communication.baselines import fit_groups, grouped, kind_of, nearest_fit
from springtide.perf.communication.query import Query


class PolluxForm:
    """Pollux's sync time, alpha + beta (n - 2), separately for one server and for several (OSDI'21, equation 10).

    Pollux fits it for one model, whose gradient has one size; here both parameters grow linearly with the bytes.
    """

    name = "pollux form"

    def __init__(self, queries: Sequence[Query], measured_s: NDArray[np.float64]) -> None:
        groups = grouped(queries, lambda query: (kind_of(query.subgraph), min(query.subgraph.num_servers, 2)))
        self._fits = fit_groups(groups, queries, measured_s, self._row)

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        answer = np.zeros(len(queries))
        for index, query in enumerate(queries):
            if query.subgraph.num_devices < 2:
                continue
            row = np.array(self._row(query))
            fit = self._fits.get((kind_of(query.subgraph), min(query.subgraph.num_servers, 2)))
            answer[index] = float(row @ fit) if fit is not None else nearest_fit(self._fits, row)
        return answer

    @staticmethod
    def _row(query: Query) -> tuple[float, ...]:
        further = query.subgraph.num_devices - 2.0
        return (1.0, further, float(query.num_bytes), further * query.num_bytes)
