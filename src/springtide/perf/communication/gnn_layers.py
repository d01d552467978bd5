"""The graph network's arithmetic: the forward pass to logarithms of seconds. Its training is in the studies.

Source: FaPES, section 4.1 (graph convolution weighted by bandwidth, pooling in three levels).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.perf.communication.gnn_graph import NUM_STEPS, Floats, GraphBatch, Ints, Sparse
from springtide.perf.communication.query import DTYPES

Parameters = dict[str, Floats]
# Radial basis functions, one per factor of four between 1 KB and 1 GB: they model changes of the library's protocol.
_BUMP_CENTRES = tuple(range(10, 31, 2))
_BUMP_WIDTH = 1.4
# The same for the bytes per member of a ring, by which the library chooses protocols and channels.
_PART_CENTRES = tuple(range(4, 29, 2))
NUM_SIZE_FEATURES = 1 + len(_BUMP_CENTRES) + len(_PART_CENTRES) + 2 * len(DTYPES)
# The sharpness of the soft minimum over the regimes.
_SHARPNESS = 6.0


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The widths of a network. Without layers there is no message passing, only pooling and the other inputs."""

    num_layers: int = 3
    width: int = 32
    num_regimes: int = 4
    regime_width: int = 48
    head_width: int = 48


def size_features(
    num_bytes: NDArray[np.float64], num_devices: Ints, dtypes: Ints, dtype: type[np.floating] = np.float32
) -> Floats:
    """Features of size and element type, [query, NUM_SIZE_FEATURES]; an unknown type is -1."""
    place = np.log2(np.maximum(num_bytes, 1.0))
    part = place - np.log2(num_devices)
    bumps = np.concatenate(
        [
            np.exp(-(((place[:, None] - np.array(_BUMP_CENTRES)) / _BUMP_WIDTH) ** 2)),
            np.exp(-(((part[:, None] - np.array(_PART_CENTRES)) / _BUMP_WIDTH) ** 2)),
        ],
        axis=1,
    )
    types = (dtypes[:, None] == np.arange(len(DTYPES))).astype(np.float64)
    scaled = (place[:, None] - 20.0) / 10.0
    return np.concatenate([scaled, bumps, types, types * scaled], axis=1).astype(dtype)


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A subgraph as the head uses it: log latency and log time per byte of each regime, and inputs of the head."""

    latency: Floats
    per_byte: Floats
    head: Floats


class EmbeddingTrace(msgspec.Struct, kw_only=True):
    """Intermediate values of the forward pass for the backward pass."""

    nodes: list[Floats]
    gathered: list[Floats]
    cpu_in: Floats
    cpu: Floats
    switch_in: Floats
    switch: Floats
    graph_features: Floats
    regime: Floats
    # The share of each kind of step in the latency of each regime, [subgraph, step, regime].
    step_share: Floats


def embed(parameters: Mapping[str, Floats], batch: GraphBatch, sizes: Sizes) -> tuple[Embedding, EmbeddingTrace]:
    """The graph part of the network: convolutions, pooling GPU -> CPU -> switch -> cluster, regimes."""
    nodes, gathered = [batch.features], []
    for layer in range(sizes.num_layers):
        here = nodes[-1]
        sent = multiply(batch.messages, here).reshape(len(here), -1)
        gathered.append(np.concatenate([here, sent], axis=1))
        nodes.append(_relu(gathered[-1] @ parameters[f"layer{layer}"] + parameters[f"layer{layer}_bias"]))
    last = nodes[-1]
    gpus, cpus = last[: batch.num_gpus], last[batch.num_gpus : batch.num_gpus + batch.num_cpus]
    cpu_in = np.concatenate([cpus, multiply(batch.to_cpu, gpus), _largest(batch.to_cpu, gpus)], axis=1)
    cpu = _relu(cpu_in @ parameters["cpu"] + parameters["cpu_bias"])
    own = np.where((batch.switch_node >= 0)[:, None], last[batch.switch_node], 0.0).astype(last.dtype)
    switch_in = np.concatenate([own, multiply(batch.to_switch, cpu), _largest(batch.to_switch, cpu)], axis=1)
    switch = _relu(switch_in @ parameters["switch"] + parameters["switch_bias"])
    graph_features = np.concatenate(
        [multiply(batch.to_cluster, switch), _largest(batch.to_cluster, switch), batch.globals], axis=1
    )
    regime = _relu(graph_features @ parameters["regime_in"] + parameters["regime_in_bias"])
    predicted = regime @ parameters["regime_out"] + parameters["regime_out_bias"]
    num_latencies = NUM_STEPS * sizes.num_regimes
    steps = predicted[:, :num_latencies].reshape(-1, NUM_STEPS, sizes.num_regimes) + batch.steps[:, :, None]
    longest = steps.max(axis=1, keepdims=True)
    step_share = np.exp(steps - longest)
    total = step_share.sum(axis=1, keepdims=True)
    step_share /= total
    embedding = Embedding(
        # Relative to microseconds, and to the time per byte of the bottleneck.
        latency=(longest + np.log(total))[:, 0] + np.float32(np.log(1e-6)),
        per_byte=predicted[:, num_latencies:] + batch.globals[:, :1] + np.float32(np.log(1e-9)),
        head=graph_features @ parameters["head_graph"],
    )
    trace = EmbeddingTrace(
        nodes=nodes,
        gathered=gathered,
        cpu_in=cpu_in,
        cpu=cpu,
        switch_in=switch_in,
        switch=switch,
        graph_features=graph_features,
        regime=regime,
        step_share=step_share,
    )
    return embedding, trace


class HeadTrace(msgspec.Struct, kw_only=True):
    """Intermediate values of the head for the backward pass."""

    wait: Floats
    flow: Floats
    share: Floats
    hidden: Floats
    middle: Floats


def answer(
    parameters: Mapping[str, Floats], embedding: Embedding, graph: Ints, log_bytes: Floats, features: Floats
) -> tuple[Floats, HeadTrace]:
    """Logarithms of seconds: the fastest regime (latency plus time per byte), corrected by a small network."""
    wait = embedding.latency[graph]
    flow = embedding.per_byte[graph] + log_bytes[:, None]
    times = np.logaddexp(wait, flow)
    lowest = times.min(axis=1, keepdims=True)
    share = np.exp(-_SHARPNESS * (times - lowest))
    total = share.sum(axis=1, keepdims=True)
    fastest = lowest - np.log(total) / _SHARPNESS
    share /= total
    hidden = _relu(embedding.head[graph] + features @ parameters["head_size"] + parameters["head_size_bias"])
    middle = _relu(hidden @ parameters["head_middle"] + parameters["head_middle_bias"])
    predicted = middle @ parameters["head_out"] + parameters["head_out_bias"]
    return (fastest + predicted)[:, 0], HeadTrace(wait=wait, flow=flow, share=share, hidden=hidden, middle=middle)


def _relu(values: Floats) -> Floats:
    return np.maximum(values, 0.0, out=values)


def multiply(matrix: Sparse, values: Floats) -> Floats:
    """A sparse matrix times a dense one."""
    product = np.zeros((matrix.num_rows, values.shape[1]), values.dtype)
    starts, rows = matrix.starts()
    if len(starts):
        product[rows] = np.add.reduceat(values[matrix.column] * matrix.weight[:, None], starts)
    return product


def _largest(matrix: Sparse, values: Floats) -> Floats:
    """The largest value among the entries of each row; 0 for an empty row (values are >= 0)."""
    found = np.zeros((matrix.num_rows, values.shape[1]), values.dtype)
    starts, rows = matrix.starts()
    if len(starts):
        found[rows] = np.maximum.reduceat(values[matrix.column], starts)
    return found
