"""When nodes fail and when they come back: exponential times, drawn from one seed with a stream for each node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.resources import NodeId


class NodeFaults:
    """Draws how long each node lives and how long its repair takes; a node's draws do not depend on other nodes."""

    def __init__(self, nodes: Iterable[NodeId], *, seed: int, mtbf_hours: float, repair_hours: float = 1.0) -> None:
        """`mtbf_hours` is the mean time between a node's return and its next failure. Raises InvalidRequest."""
        for hours, what in ((mtbf_hours, "between failures"), (repair_hours, "to repair a node")):
            if not (math.isfinite(hours) and hours > 0.0):
                raise InvalidRequest(f"{hours} hours {what} cannot be; give a number above 0, such as 1000")
        self._mtbf_s, self._repair_s = mtbf_hours * 3600.0, repair_hours * 3600.0
        self._rngs = {
            node_id: np.random.default_rng(np.random.SeedSequence([seed, 2, index]))
            for index, node_id in enumerate(nodes)
        }

    def first_failures_s(self, nodes: Iterable[NodeId]) -> Iterator[tuple[NodeId, float]]:
        """For each node the moment of its first failure, counted from the start of the run."""
        for node_id in nodes:
            yield node_id, self.draw_life_s(node_id)

    def draw_life_s(self, node_id: NodeId) -> float:
        return float(self._rngs[node_id].exponential(self._mtbf_s))

    def draw_repair_s(self, node_id: NodeId) -> float:
        return float(self._rngs[node_id].exponential(self._repair_s))
