"""The graph network's arithmetic: the forward pass to logarithms of seconds, and the backward pass to gradients.

Source: FaPES, section 4.1 (graph convolution weighted by bandwidth, pooling in three levels). Backpropagation is
written out by hand; tests compare it with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.perf.communication.fabric import EDGE_KINDS
from springtide.perf.communication.gnn_graph import NUM_GLOBALS, NUM_STEPS, Floats, GraphBatch, Ints, Sparse, Vocabulary
from springtide.perf.communication.query import DTYPES

Parameters = dict[str, Floats]
# Maps predictions to the loss and its derivative at each.
Slope = Callable[[Floats], tuple[float, Floats]]
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


class QueryBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Queries on the subgraphs of a batch, sorted by subgraph."""

    graph: Ints
    log_bytes: Floats
    size_features: Floats


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


def fresh_parameters(
    sizes: Sizes, vocabulary: Vocabulary, rng: np.random.Generator, dtype: type[np.floating] = np.float32
) -> Parameters:
    """Random weights, scaled by the number of inputs (He)."""
    inputs, width = vocabulary.num_features, sizes.width
    last = width if sizes.num_layers else inputs
    graph_features = 2 * width + NUM_GLOBALS
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(sizes.num_layers):
        shapes[f"layer{layer}"] = ((1 + len(EDGE_KINDS)) * (inputs if layer == 0 else width), width)
    shapes |= {
        "cpu": (3 * last, width),
        "switch": (last + 2 * width, width),
        "regime_in": (graph_features, sizes.regime_width),
        "regime_out": (sizes.regime_width, (1 + NUM_STEPS) * sizes.num_regimes),
        "head_graph": (graph_features, sizes.head_width),
        "head_size": (NUM_SIZE_FEATURES, sizes.head_width),
        "head_middle": (sizes.head_width, sizes.head_width),
        "head_out": (sizes.head_width, 1),
    }
    parameters: Parameters = {}
    for name, shape in shapes.items():
        gain = 0.1 if name in ("regime_out", "head_out") else 1.0
        parameters[name] = (gain * np.sqrt(2.0 / shape[0]) * rng.standard_normal(shape)).astype(dtype)
        if name != "head_graph":
            parameters[f"{name}_bias"] = np.zeros(shape[1], dtype)
    # Regimes start spread out, from low latency and low bandwidth to the opposite.
    spread = np.linspace(0.0, 1.5, sizes.num_regimes)
    parameters["regime_out_bias"][:] = np.concatenate([np.tile(spread, NUM_STEPS), 1.5 - spread])
    return parameters


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A subgraph as the head uses it: log latency and log time per byte of each regime, and inputs of the head."""

    latency: Floats
    per_byte: Floats
    head: Floats


class _Trace(msgspec.Struct, kw_only=True):
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


def embed(parameters: Mapping[str, Floats], batch: GraphBatch, sizes: Sizes) -> tuple[Embedding, _Trace]:
    """The graph part of the network: convolutions, pooling GPU -> CPU -> switch -> cluster, regimes."""
    nodes, gathered = [batch.features], []
    for layer in range(sizes.num_layers):
        here = nodes[-1]
        sent = _times(batch.messages, here).reshape(len(here), -1)
        gathered.append(np.concatenate([here, sent], axis=1))
        nodes.append(_relu(gathered[-1] @ parameters[f"layer{layer}"] + parameters[f"layer{layer}_bias"]))
    last = nodes[-1]
    gpus, cpus = last[: batch.num_gpus], last[batch.num_gpus : batch.num_gpus + batch.num_cpus]
    cpu_in = np.concatenate([cpus, _times(batch.to_cpu, gpus), _largest(batch.to_cpu, gpus)], axis=1)
    cpu = _relu(cpu_in @ parameters["cpu"] + parameters["cpu_bias"])
    own = np.where((batch.switch_node >= 0)[:, None], last[batch.switch_node], 0.0).astype(last.dtype)
    switch_in = np.concatenate([own, _times(batch.to_switch, cpu), _largest(batch.to_switch, cpu)], axis=1)
    switch = _relu(switch_in @ parameters["switch"] + parameters["switch_bias"])
    graph_features = np.concatenate(
        [_times(batch.to_cluster, switch), _largest(batch.to_cluster, switch), batch.globals], axis=1
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
    trace = _Trace(
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


class _Answer(msgspec.Struct, kw_only=True):
    """Intermediate values of the head for the backward pass."""

    wait: Floats
    flow: Floats
    share: Floats
    hidden: Floats
    middle: Floats


def answer(
    parameters: Mapping[str, Floats], embedding: Embedding, graph: Ints, log_bytes: Floats, features: Floats
) -> tuple[Floats, _Answer]:
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
    return (fastest + predicted)[:, 0], _Answer(wait=wait, flow=flow, share=share, hidden=hidden, middle=middle)


def gradients(
    parameters: Mapping[str, Floats], batch: GraphBatch, queries: QueryBatch, sizes: Sizes, slope_of: Slope
) -> tuple[float, Parameters]:
    """The loss over the queries of a batch and its gradient for every parameter."""
    embedding, trace = embed(parameters, batch, sizes)
    predicted, head = answer(parameters, embedding, queries.graph, queries.log_bytes, queries.size_features)
    loss, slope = slope_of(predicted)
    found: Parameters = {}
    slope = slope[:, None]
    # The correcting network.
    found["head_out"] = head.middle.T @ slope
    found["head_out_bias"] = slope.sum(axis=0)
    middle = (slope @ parameters["head_out"].T) * (head.middle > 0)
    found["head_middle"] = head.hidden.T @ middle
    found["head_middle_bias"] = middle.sum(axis=0)
    hidden = (middle @ parameters["head_middle"].T) * (head.hidden > 0)
    found["head_size"] = queries.size_features.T @ hidden
    found["head_size_bias"] = hidden.sum(axis=0)
    # The regimes.
    times = slope * head.share
    of_wait = 1.0 / (1.0 + np.exp(np.clip(head.flow - head.wait, -60.0, 60.0)))
    starts = np.flatnonzero(np.r_[True, queries.graph[1:] != queries.graph[:-1]])
    rows = queries.graph[starts]
    num_graphs = len(batch.globals)
    per_graph = np.concatenate([times * of_wait, times * (1.0 - of_wait), hidden], axis=1).astype(slope.dtype)
    summed = np.zeros((num_graphs, per_graph.shape[1]), slope.dtype)
    summed[rows] = np.add.reduceat(per_graph, starts)
    of_latency, of_rate, head_slope = np.split(summed, [sizes.num_regimes, 2 * sizes.num_regimes], axis=1)
    of_steps = (trace.step_share * of_latency[:, None, :]).reshape(num_graphs, -1)
    regime_slope = np.concatenate([of_steps, of_rate], axis=1)
    found["regime_out"] = trace.regime.T @ regime_slope
    found["regime_out_bias"] = regime_slope.sum(axis=0)
    regime = (regime_slope @ parameters["regime_out"].T) * (trace.regime > 0)
    found["regime_in"] = trace.graph_features.T @ regime
    found["regime_in_bias"] = regime.sum(axis=0)
    found["head_graph"] = trace.graph_features.T @ head_slope
    graph_features = regime @ parameters["regime_in"].T + head_slope @ parameters["head_graph"].T
    _pooling_gradients(parameters, batch, sizes, trace, graph_features[:, : 2 * sizes.width], found)
    return loss, found


def _pooling_gradients(
    parameters: Mapping[str, Floats], batch: GraphBatch, sizes: Sizes, trace: _Trace, pooled: Floats, found: Parameters
) -> None:
    """The backward pass through the three levels of pooling and the convolutions."""
    width = sizes.width
    switch = _times(batch.to_cluster_back, pooled[:, :width])
    switch += _largest_back(batch.to_cluster, trace.switch, pooled[:, width:])
    switch *= trace.switch > 0
    found["switch"] = trace.switch_in.T @ switch
    found["switch_bias"] = switch.sum(axis=0)
    own = trace.nodes[-1].shape[1]
    switch_in = switch @ parameters["switch"].T
    cpu = _times(batch.to_switch_back, switch_in[:, own : own + width])
    cpu += _largest_back(batch.to_switch, trace.cpu, switch_in[:, own + width :])
    cpu *= trace.cpu > 0
    found["cpu"] = trace.cpu_in.T @ cpu
    found["cpu_bias"] = cpu.sum(axis=0)
    cpu_in = cpu @ parameters["cpu"].T
    last = trace.nodes[-1]
    nodes = np.zeros_like(last)
    gpus = last[: batch.num_gpus]
    nodes[: batch.num_gpus] = _times(batch.to_cpu_back, cpu_in[:, own : 2 * own])
    nodes[: batch.num_gpus] += _largest_back(batch.to_cpu, gpus, cpu_in[:, 2 * own :])
    nodes[batch.num_gpus : batch.num_gpus + batch.num_cpus] = cpu_in[:, :own]
    known = batch.switch_node >= 0
    np.add.at(nodes, batch.switch_node[known], switch_in[known, :own])
    for layer in reversed(range(sizes.num_layers)):
        nodes = nodes * (trace.nodes[layer + 1] > 0)
        name = f"layer{layer}"
        found[name] = trace.gathered[layer].T @ nodes
        found[f"{name}_bias"] = nodes.sum(axis=0)
        if layer == 0:
            break
        gathered = nodes @ parameters[name].T
        sent = gathered[:, width:].reshape(len(nodes) * len(EDGE_KINDS), width)
        nodes = gathered[:, :width] + _times(batch.messages_back, sent)


def _relu(values: Floats) -> Floats:
    return np.maximum(values, 0.0, out=values)


def _times(matrix: Sparse, values: Floats) -> Floats:
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


def _largest_back(matrix: Sparse, values: Floats, slope: Floats) -> Floats:
    """The gradient of `_largest`: it goes to the largest value, and equal ones share it."""
    back = np.zeros_like(values)
    starts, _ = matrix.starts()
    if not len(starts):
        return back
    entries = values[matrix.column]
    lengths = np.diff(np.r_[starts, len(matrix.row)])
    is_largest = entries == np.repeat(np.maximum.reduceat(entries, starts), lengths, axis=0)
    counts = np.repeat(np.add.reduceat(is_largest.astype(values.dtype), starts), lengths, axis=0)
    np.add.at(back, matrix.column, is_largest * slope[matrix.row] / counts)
    return back
