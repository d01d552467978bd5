"""Training of the graph network: Adam over batches of placements, an ensemble, its spread on placements left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.perf.communication.fabric import EDGE_KINDS, Subgraph
from springtide.perf.communication.gnn import GraphModel, PredictionSpread, region_of
from springtide.perf.communication.gnn_graph import (
    Compiled,
    Floats,
    Ints,
    Vocabulary,
    batch_of,
    compile_subgraph,
)
from springtide.perf.communication.gnn_layers import Parameters, Sizes, answer, embed, size_features
from springtide.perf.communication.query import DTYPES, Query
from springtide_studies.communication.gnn_gradients import QueryBatch, fresh_parameters, gradients

# Errors of the logarithm beyond this count linearly: traffic of others makes outliers, and the aim is relative error.
_HUBER = 0.05


def vocabulary_of(subgraphs: Sequence[Subgraph]) -> Vocabulary:
    fastest = np.zeros(len(EDGE_KINDS))
    for subgraph in subgraphs:
        edges = subgraph.edges
        np.maximum.at(fastest, edges.kind, edges.bytes_per_s)
    types = sorted({links.device_type for subgraph in subgraphs for links in subgraph.links})
    return Vocabulary(device_types=tuple(types), fastest_bytes_per_s=tuple(float(max(x, 1.0)) for x in fastest))


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how fast to train. Steps are batches of `batch_placements` placements with all their sizes.

    The decay is strong because the samples are few and noisy: without it the network learns their noise.
    """

    num_steps: int = 1200
    batch_placements: int = 64
    learning_rate: float = 1e-2
    weight_decay: float = 0.5
    num_members: int = 3


class _Samples:
    """Samples sorted by placement, with the arrays that every step takes from."""

    def __init__(
        self, queries: Sequence[Query], measured_s: NDArray[np.float64], vocabulary: Vocabulary, sizes: Sizes
    ) -> None:
        kept = [index for index, query in enumerate(queries) if query.subgraph.num_devices > 1 and query.num_bytes > 0]
        if not kept:
            raise InvalidRequest("there are no samples of two or more devices; measure some collectives first")
        placements: dict[int, list[int]] = {}
        self.subgraphs: list[Subgraph] = []
        for index in kept:
            subgraph = queries[index].subgraph
            if id(subgraph) not in placements:
                placements[id(subgraph)] = []
                self.subgraphs.append(subgraph)
            placements[id(subgraph)].append(index)
        order = [index for members in placements.values() for index in members]
        num_bytes = np.array([queries[index].num_bytes for index in order], np.float64)
        dtypes = np.array([_type_number(queries[index].dtype) for index in order], np.int64)
        self.starts = np.concatenate([[0], np.cumsum([len(members) for members in placements.values()])])
        self.log_s = np.log(np.maximum(measured_s[order], 1e-9)).astype(np.float32)
        self.log_bytes = np.log(num_bytes).astype(np.float32)
        num_devices = np.array([queries[index].subgraph.num_devices for index in order], np.int64)
        self.size_features = size_features(num_bytes, num_devices, dtypes)
        self.compiled: list[Compiled] = [
            compile_subgraph(subgraph, vocabulary, sizes.num_layers) for subgraph in self.subgraphs
        ]
        self.regions = np.array([region_of(subgraph) for subgraph in self.subgraphs], np.int64)

    def take(self, placements: Ints) -> tuple[QueryBatch, Floats]:
        """What is asked of these placements, and the logarithms of what was measured."""
        rows = np.concatenate([np.arange(self.starts[p], self.starts[p + 1]) for p in placements])
        graph = np.repeat(np.arange(len(placements)), self.starts[placements + 1] - self.starts[placements])
        return (
            QueryBatch(graph=graph, log_bytes=self.log_bytes[rows], size_features=self.size_features[rows]),
            self.log_s[rows],
        )


def train(
    queries: Sequence[Query],
    measured_s: NDArray[np.float64],
    *,
    seed: int = 0,
    sizes: Sizes | None = None,
    training: Training | None = None,
) -> GraphModel:
    """An ensemble fitted to samples (s). Each member leaves out its own part of the placements; the errors there are
    the model's usual spread. Same samples and seed, same model. Raises InvalidRequest without usable samples.
    """
    sizes, training = sizes or Sizes(), training or Training()
    vocabulary = vocabulary_of([query.subgraph for query in queries])
    samples = _Samples(queries, measured_s, vocabulary, sizes)
    streams = np.random.SeedSequence([seed, 11]).spawn(training.num_members + 1)
    folds = _folds(len(samples.subgraphs), training.num_members, np.random.default_rng(streams[-1]))
    members = []
    for index in range(training.num_members):
        rng = np.random.default_rng(streams[index])
        start = fresh_parameters(sizes, vocabulary, rng)
        members.append(_descend(start, samples, np.flatnonzero(folds != index), sizes, training, rng, anchor=0.0))
    return GraphModel(members, vocabulary, sizes, _spread(members, samples, folds, sizes))


def refit(
    model: GraphModel,
    queries: Sequence[Query],
    measured_s: NDArray[np.float64],
    *,
    seed: int = 0,
    num_steps: int = 150,
    anchor: float = 0.02,
) -> GraphModel:
    """The model moved towards further samples, held back to where it was by `anchor` (the share of the way back each
    step for a learning rate of 1), so that what the samples say nothing of stays. Hand in remembered samples too where
    there are any.
    """
    samples = _Samples(queries, measured_s, model.vocabulary, model.sizes)
    training = Training(num_steps=num_steps, learning_rate=5e-4, num_members=len(model.members))
    streams = np.random.SeedSequence([seed, 12]).spawn(len(model.members) + 1)
    folds = _folds(len(samples.subgraphs), len(model.members), np.random.default_rng(streams[-1]))
    members = []
    for index, member in enumerate(model.members):
        chosen = np.flatnonzero(folds != index)
        rng = np.random.default_rng(streams[index])
        members.append(
            _descend(member, samples, chosen, model.sizes, training, rng, anchor=anchor) if len(chosen) else member
        )
    return GraphModel(members, model.vocabulary, model.sizes, _spread(members, samples, folds, model.sizes))


def _descend(
    start: Parameters,
    samples: _Samples,
    placements: Ints,
    sizes: Sizes,
    training: Training,
    rng: np.random.Generator,
    *,
    anchor: float,
) -> Parameters:
    """Adam with decoupled decay and a learning rate that falls to nothing along a cosine."""
    parameters = {name: value.copy() for name, value in start.items()}
    first = {name: np.zeros_like(value) for name, value in parameters.items()}
    second = {name: np.zeros_like(value) for name, value in parameters.items()}
    waiting = np.zeros(0, np.int64)
    for step in range(training.num_steps):
        if len(waiting) < min(training.batch_placements, len(placements)):
            waiting = np.concatenate([waiting, rng.permutation(placements)])
        chosen, waiting = waiting[: training.batch_placements], waiting[training.batch_placements :]
        asked, log_s = samples.take(chosen)
        batch = batch_of([samples.compiled[placement] for placement in chosen])
        _, slopes = gradients(parameters, batch, asked, sizes, partial(_pseudo_huber, log_s))
        norm = np.sqrt(sum(float(np.sum(slope**2)) for slope in slopes.values()))
        warm = min(1.0, (step + 1) / 50)
        rate = training.learning_rate * warm * 0.5 * (1.0 + np.cos(np.pi * step / training.num_steps))
        for name, slope in slopes.items():
            slope = slope / max(norm, 1.0)
            first[name] += 0.1 * (slope - first[name])
            second[name] += 0.01 * (slope**2 - second[name])
            moved = (first[name] / (1 - 0.9 ** (step + 1))) / (np.sqrt(second[name] / (1 - 0.99 ** (step + 1))) + 1e-8)
            pull = anchor * (parameters[name] - start[name]) if anchor else training.weight_decay * parameters[name]
            parameters[name] = (parameters[name] - rate * (moved + pull)).astype(parameters[name].dtype)
    return parameters


def _pseudo_huber(goal: Floats, said: Floats) -> tuple[float, Floats]:
    """Mean loss of errors of the logarithm, quadratic near 0 and linear far from it, and its slope."""
    error = (said - goal) / _HUBER
    root = np.sqrt(1.0 + error**2)
    return float(np.mean(root - 1.0)) * _HUBER, (error / root / len(error)).astype(said.dtype)


def _folds(num_placements: int, num_members: int, rng: np.random.Generator) -> Ints:
    """The member that leaves out each placement. A single member, or few placements, leave nothing out."""
    if num_members < 2 or num_placements < 4 * num_members:
        return np.full(num_placements, -1)
    # A member sees nine tenths of the placements: what it leaves out shows the spread, what it sees makes it good.
    return np.where(rng.random(num_placements) < 0.1 * num_members, rng.integers(0, num_members, num_placements), -1)


def _spread(members: Sequence[Parameters], samples: _Samples, folds: Ints, sizes: Sizes) -> PredictionSpread:
    """Standard deviations of the logarithm's error on left-out placements, by region; robust against outliers."""
    errors: list[list[Floats]] = [[], [], []]
    for index, member in enumerate(members):
        # Where nothing was left out, the fit's own errors have to do.
        left_out = np.flatnonzero(folds == index) if (folds >= 0).any() else np.arange(len(folds))
        for region in range(3):
            chosen = left_out[samples.regions[left_out] == region]
            if len(chosen):
                asked, log_s = samples.take(chosen)
                embedding, _ = embed(member, batch_of([samples.compiled[p] for p in chosen]), sizes)
                said, _ = answer(member, embedding, asked.graph, asked.log_bytes, asked.size_features)
                errors[region].append(said - log_s)
    everything = np.concatenate([error for region in errors for error in region] or [np.zeros(1)])
    widths = [float(1.4826 * np.median(np.abs(np.concatenate(region) if region else everything))) for region in errors]
    return PredictionSpread(one_server=widths[0], one_switch=widths[1], several_switches=widths[2])


def _type_number(dtype: str) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else -1
