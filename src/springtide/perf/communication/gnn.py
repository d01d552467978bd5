"""The trained graph network: predicts the time of collectives for batches of queries, with its uncertainty.

Source: FaPES, section 4.1. docs/communication.md lists the differences from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.perf.communication.fabric import Subgraph
from springtide.perf.communication.gnn_graph import Floats, Ints, Vocabulary, batch_of, compile_subgraph
from springtide.perf.communication.gnn_layers import Embedding, Parameters, Sizes, answer, embed, size_features
from springtide.perf.communication.query import DTYPES, Query

_FORMAT = 1
_MAX_CACHED = 20000


class PredictionSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The network's error on placements outside its training set, as a standard deviation of the logarithm: for one
    server, for several under one switch, and for several switches.
    """

    one_server: float
    one_switch: float
    several_switches: float

    def of_regions(self, regions: Ints) -> NDArray[np.float64]:
        """The spread of each region (`region_of`)."""
        return np.array([self.one_server, self.one_switch, self.several_switches])[regions]


def region_of(subgraph: Subgraph) -> int:
    """0 for one server, 1 for several under one switch, 2 for several switches."""
    return 0 if subgraph.num_servers == 1 else 1 if subgraph.num_leaf_switches == 1 else 2


class _EmbeddingCache:
    """Embeddings by subgraph, in arrays of one row each, for every member."""

    def __init__(self) -> None:
        # Holds a reference to the subgraph, so that its id() is not reused.
        self.row_of: dict[int, tuple[int, Subgraph]] = {}
        self.tables: list[Embedding] = []
        self.regions = np.zeros(0, np.int64)


class GraphModel:
    """An ensemble of graph networks. `gnn_training.refit` makes a new one from further samples.

    Embeddings, which depend only on the placement, are computed once per subgraph and cached; a query of another size
    only evaluates the head.
    """

    name = "graph network"

    def __init__(
        self, members: Sequence[Mapping[str, Floats]], vocabulary: Vocabulary, sizes: Sizes, spread: PredictionSpread
    ) -> None:
        self.members: tuple[Parameters, ...] = tuple(dict(member) for member in members)
        self.vocabulary, self.sizes, self.spread = vocabulary, sizes, spread
        self._cache = _EmbeddingCache()

    def predict_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        """Seconds for each query; 0 for a single device."""
        predicted: NDArray[np.float64] = np.exp(self._log_s(queries).mean(axis=0)) * _takes_time(queries)
        return predicted

    def predict_with_error(self, queries: Sequence[Query]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of each query, and the standard deviation of their logarithm: from the disagreement of the members
        and the usual error on such placements.
        """
        log_s = self._log_s(queries)
        rows = self._rows(queries)
        usual = self.spread.of_regions(self._cache.regions[rows]) if len(rows) else np.zeros(0)
        return np.exp(log_s.mean(axis=0)) * _takes_time(queries), np.hypot(log_s.std(axis=0), usual)

    def _log_s(self, queries: Sequence[Query]) -> NDArray[np.float64]:
        """Logarithms of seconds, [member, query]."""
        if not queries:
            return np.zeros((len(self.members), 0))
        rows = self._rows(queries)
        num_bytes = np.array([query.num_bytes for query in queries], np.float64)
        dtypes = np.array([_TYPE_NUMBERS.get(query.dtype, -1) for query in queries], np.int64)
        num_devices = np.array([query.subgraph.num_devices for query in queries], np.int64)
        features = size_features(num_bytes, num_devices, dtypes)
        log_bytes = np.log(np.maximum(num_bytes, 1.0)).astype(np.float32)
        return np.stack(
            [
                answer(member, table, rows, log_bytes, features)[0]
                for member, table in zip(self.members, self._cache.tables, strict=True)
            ]
        ).astype(np.float64)

    def _rows(self, queries: Sequence[Query]) -> Ints:
        """The rows of the queries' embeddings; computes missing ones."""
        known = self._cache.row_of
        fresh = {id(query.subgraph): query.subgraph for query in queries if id(query.subgraph) not in known}
        if fresh:
            if len(known) + len(fresh) > _MAX_CACHED:
                self._cache = _EmbeddingCache()
                known = self._cache.row_of
                fresh = {id(query.subgraph): query.subgraph for query in queries}
            self._add_embeddings(list(fresh.values()))
        return np.array([known[id(query.subgraph)][0] for query in queries], np.int64)

    def _add_embeddings(self, subgraphs: list[Subgraph]) -> None:
        """Compute and cache the embeddings of new subgraphs."""
        batch = batch_of([compile_subgraph(subgraph, self.vocabulary, self.sizes.num_layers) for subgraph in subgraphs])
        found = [embed(member, batch, self.sizes)[0] for member in self.members]
        cache = self._cache
        if cache.tables:
            found = [_appended(*pair) for pair in zip(cache.tables, found, strict=True)]
        start = len(cache.row_of)
        cache.tables = found
        cache.regions = np.concatenate([cache.regions, [region_of(subgraph) for subgraph in subgraphs]])
        cache.row_of.update({id(subgraph): (start + index, subgraph) for index, subgraph in enumerate(subgraphs)})


def _appended(before: Embedding, further: Embedding) -> Embedding:
    return Embedding(
        latency=np.concatenate([before.latency, further.latency]),
        per_byte=np.concatenate([before.per_byte, further.per_byte]),
        head=np.concatenate([before.head, further.head]),
    )


_TYPE_NUMBERS = MappingProxyType({name: number for number, name in enumerate(DTYPES)})


def _takes_time(queries: Sequence[Query]) -> NDArray[np.bool_]:
    return np.array([query.subgraph.num_devices > 1 for query in queries], np.bool_)


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    vocabulary: Vocabulary
    sizes: Sizes
    spread: PredictionSpread
    num_members: int


def save_model(model: GraphModel) -> bytes:
    """The model as an npz archive of plain arrays and a JSON header, without any code."""
    header = _Header(
        format=_FORMAT,
        vocabulary=model.vocabulary,
        sizes=model.sizes,
        spread=model.spread,
        num_members=len(model.members),
    )
    arrays = {f"{index}/{name}": array for index, member in enumerate(model.members) for name, array in member.items()}
    target = BytesIO()
    np.savez(target, header=np.frombuffer(msgspec.json.encode(header), np.uint8), **arrays)  # type: ignore[arg-type]
    return target.getvalue()


def load_model(stored: bytes) -> GraphModel:
    """Load a model stored by `save_model`. Raises InvalidRequest for any other bytes or format."""
    try:
        with np.load(BytesIO(stored), allow_pickle=False) as archive:
            header = decode_json(archive["header"].tobytes(), _Header)
            members = [
                {key.split("/", 1)[1]: archive[key] for key in archive.files if key.startswith(f"{index}/")}
                for index in range(header.num_members)
            ]
    except (ValueError, KeyError, OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"these bytes hold no communication model ({error}); train it anew") from None
    if header.format != _FORMAT:
        raise InvalidRequest(f"the communication model is of format {header.format}, not {_FORMAT}; train it anew")
    return GraphModel(members, header.vocabulary, header.sizes, header.spread)
