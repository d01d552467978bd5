"""The graph network before and during training: random weights, and the backward pass to the gradients.

Backpropagation is written out by hand; tests compare it with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from springtide.perf.communication.fabric import EDGE_KINDS
from springtide.perf.communication.gnn_graph import NUM_GLOBALS, NUM_STEPS, Floats, GraphBatch, Ints, Sparse, Vocabulary
from springtide.perf.communication.gnn_layers import (
    NUM_SIZE_FEATURES,
    EmbeddingTrace,
    Parameters,
    Sizes,
    answer,
    embed,
    multiply,
)

# Maps predictions to the loss and its derivative at each.
Slope = Callable[[Floats], tuple[float, Floats]]


class QueryBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Queries on the subgraphs of a batch, sorted by subgraph."""

    graph: Ints
    log_bytes: Floats
    size_features: Floats


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
    parameters: Mapping[str, Floats],
    batch: GraphBatch,
    sizes: Sizes,
    trace: EmbeddingTrace,
    pooled: Floats,
    found: Parameters,
) -> None:
    """The backward pass through the three levels of pooling and the convolutions."""
    width = sizes.width
    switch = multiply(batch.to_cluster_back, pooled[:, :width])
    switch += _largest_back(batch.to_cluster, trace.switch, pooled[:, width:])
    switch *= trace.switch > 0
    found["switch"] = trace.switch_in.T @ switch
    found["switch_bias"] = switch.sum(axis=0)
    own = trace.nodes[-1].shape[1]
    switch_in = switch @ parameters["switch"].T
    cpu = multiply(batch.to_switch_back, switch_in[:, own : own + width])
    cpu += _largest_back(batch.to_switch, trace.cpu, switch_in[:, own + width :])
    cpu *= trace.cpu > 0
    found["cpu"] = trace.cpu_in.T @ cpu
    found["cpu_bias"] = cpu.sum(axis=0)
    cpu_in = cpu @ parameters["cpu"].T
    last = trace.nodes[-1]
    nodes = np.zeros_like(last)
    gpus = last[: batch.num_gpus]
    nodes[: batch.num_gpus] = multiply(batch.to_cpu_back, cpu_in[:, own : 2 * own])
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
        nodes = gathered[:, :width] + multiply(batch.messages_back, sent)


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
