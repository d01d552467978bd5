"""Subgraphs as arrays for the graph network: equivalent nodes are merged, and many subgraphs form a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.perf.communication.fabric import EDGE_KINDS, Links, Subgraph

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
NUM_GLOBALS = 10
# The counts that make up the latency of a collective: the call, steps of a ring, its steps between servers, levels of a
# tree, and steps of a chain within the server with most devices.
NUM_STEPS = 5
# A node's features: the device type (one-hot, with one place for unknown types), cores and memory bandwidth of the
# affinity CPU (FaPES, section 4.1), and which of the three kinds of node it is.
NUM_PLAIN_FEATURES = 6


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The reference of features: the known device types, and the fastest link of each kind (bytes/s)."""

    device_types: tuple[str, ...]
    fastest_bytes_per_s: tuple[float, ...]

    @property
    def num_features(self) -> int:
        return len(self.device_types) + NUM_PLAIN_FEATURES


class Sparse(msgspec.Struct, frozen=True, kw_only=True):
    """A sparse matrix as entries sorted by row; rows without entries stay 0."""

    row: Ints
    column: Ints
    weight: Floats
    num_rows: int

    def starts(self) -> tuple[Ints, Ints]:
        """The start of the entries of each nonempty row, and these rows."""
        if not len(self.row):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        begin = np.flatnonzero(np.r_[True, self.row[1:] != self.row[:-1]])
        return begin, self.row[begin]


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """One subgraph with equivalent nodes merged. Rows of `messages` are target * number of edge kinds + kind. Rows of
    the pooling matrices sum to 1, and merged nodes are weighted by their number.
    """

    features: Floats
    num_gpus: int
    num_cpus: int
    num_switches: int
    messages: Sparse
    to_cpu: Sparse
    to_switch: Sparse
    # The graph's node of each pooling switch; -1 for a single server without a switch.
    switch_node: Ints
    switch_share: Floats
    globals: Floats
    steps: Floats


def compile_subgraph(subgraph: Subgraph, vocabulary: Vocabulary, num_layers: int) -> Compiled:
    """Arrays of a subgraph. Nodes that the layers and the pooling cannot distinguish are merged."""
    edges = subgraph.edges
    num_gpus, num_cpus = edges.num_gpus, edges.num_cpus
    num_nodes = num_gpus + num_cpus + edges.num_switches
    features = _features(subgraph, vocabulary, num_nodes)
    source = np.concatenate([edges.source, edges.target])
    target = np.concatenate([edges.target, edges.source])
    kind = np.concatenate([edges.kind, edges.kind])
    degree = np.maximum(np.bincount(target, minlength=num_nodes), 1)
    speed = np.concatenate([edges.bytes_per_s, edges.bytes_per_s]) / np.array(vocabulary.fastest_bytes_per_s)[kind]
    weight = speed / np.sqrt(degree[source] * degree[target])
    classes, chosen = _merge(features, source, target, kind, weight, num_layers + 4)
    # Only edges to the representative of each class are kept, with the class as source.
    kept = np.flatnonzero(chosen[classes[target]] == target)
    messages = _sparse(
        classes[target[kept]] * len(EDGE_KINDS) + kind[kept],
        classes[source[kept]],
        weight[kept],
        len(chosen) * len(EDGE_KINDS),
    )
    class_gpus = int(np.sum(chosen < num_gpus))
    class_cpus = int(np.sum((chosen >= num_gpus) & (chosen < num_gpus + num_cpus)))
    to_cpu, to_switch, switch_node, share = _pooling(subgraph, classes, chosen, class_gpus, class_cpus)
    return Compiled(
        features=features[chosen],
        num_gpus=class_gpus,
        num_cpus=class_cpus,
        num_switches=len(chosen) - class_gpus - class_cpus,
        messages=messages,
        to_cpu=to_cpu,
        to_switch=to_switch,
        switch_node=switch_node,
        switch_share=share,
        globals=_globals(subgraph),
        steps=_steps(subgraph),
    )


def _pooling(
    subgraph: Subgraph, classes: Ints, chosen: Ints, class_gpus: int, class_cpus: int
) -> tuple[Sparse, Sparse, Ints, Floats]:
    """The pooling matrices: GPUs into their CPU, CPUs into their switch, switches into the cluster."""
    edges = subgraph.edges
    num_gpus, num_cpus = edges.num_gpus, edges.num_cpus
    cpu_class = classes[num_gpus : num_gpus + num_cpus] - class_gpus
    is_chosen = chosen[class_gpus : class_gpus + class_cpus][cpu_class] == np.arange(num_cpus) + num_gpus
    kept = np.flatnonzero(is_chosen[edges.cpu_of_gpu])
    to_cpu = _shares(cpu_class[edges.cpu_of_gpu[kept]], classes[kept], class_cpus)
    leaf = edges.switch_of_server[edges.server_of_cpu]
    leaves = np.unique(leaf)
    if edges.num_switches:
        switch_class = classes[num_gpus + num_cpus + leaves]
        chosen_leaves, first, counts = np.unique(switch_class, return_index=True, return_counts=True)
        kept_leaves = leaves[first]
    else:
        chosen_leaves, kept_leaves, counts = np.array([-1]), leaves[:1], np.array([1])
    rows, columns = [], []
    for row, number in enumerate(kept_leaves):
        members = cpu_class[leaf == number]
        rows += [row] * len(members)
        columns += list(members)
    to_switch = _shares(np.array(rows, np.int64), np.array(columns, np.int64), len(kept_leaves))
    return to_cpu, to_switch, chosen_leaves.astype(np.int64), counts / counts.sum()


def _features(subgraph: Subgraph, vocabulary: Vocabulary, num_nodes: int) -> Floats:
    edges = subgraph.edges
    num_types = len(vocabulary.device_types)
    rows = np.zeros((num_nodes, vocabulary.num_features))
    at = 0
    for part in subgraph.servers:
        links = subgraph.links_of(part)
        here = slice(at, at + len(part.slots))
        rows[here, _type_column(links, vocabulary)] = 1.0
        rows[here, num_types + 1] = log2(max(links.num_cpu_cores, 1)) / 8.0
        rows[here, num_types + 2] = log2(max(links.memory_bytes_per_s, 1.0) / 1e9) / 8.0
        at += len(part.slots)
    rows[: edges.num_gpus, num_types + 3] = 1.0
    rows[edges.num_gpus : edges.num_gpus + edges.num_cpus, num_types + 4] = 1.0
    rows[edges.num_gpus + edges.num_cpus :, num_types + 5] = 1.0
    return rows


def _type_column(links: Links, vocabulary: Vocabulary) -> int:
    types = vocabulary.device_types
    return types.index(links.device_type) if links.device_type in types else len(types)


def _globals(subgraph: Subgraph) -> Floats:
    """Features of the whole subgraph: the bottleneck, counts on a logarithmic scale, and the fractions of servers whose
    devices NVLink connects, and of those with a device next to a network card.

    The bottleneck comes first, as the logarithm of nanoseconds per byte: predictions start from it.
    """
    sizes = [len(part.slots) for part in subgraph.servers]
    num, servers = subgraph.num_devices, subgraph.num_servers
    joined = np.mean([subgraph.links_of(part).is_nvlink_joined(part.slots) for part in subgraph.servers])
    near = np.mean([subgraph.links_of(part).has_device_at_card(part) for part in subgraph.servers])
    return np.array(
        [
            np.log(2.0 * max(num - 1, 1) / num / subgraph.narrowest_bytes_per_s * 1e9) if num > 1 else 0.0,
            np.log2(num) / 4.0,
            np.log2(servers) / 4.0,
            np.log2(subgraph.num_leaf_switches) / 2.0,
            np.log2(max(sizes)) / 2.0,
            float(num < 2 * servers),
            joined,
            float(joined == 1.0),
            near,
            float(near == 1.0),
        ]
    )


def _steps(subgraph: Subgraph) -> Floats:
    """The logarithms of the counts that make up a latency; a count of 0 is taken as 0.001."""
    servers, most = subgraph.num_servers, max(len(part.slots) for part in subgraph.servers)
    counts = np.array([1.0, subgraph.num_devices - 1.0, servers - 1.0, log2(servers), most - 1.0])
    logs: NDArray[np.float64] = np.log(np.maximum(counts, 1e-3))
    return logs


def _merge(
    features: Floats, source: Ints, target: Ints, kind: Ints, weight: Floats, num_rounds: int
) -> tuple[Ints, Ints]:
    """Classes of nodes that `num_rounds` rounds of message passing cannot distinguish, and a representative of each.

    Colour refinement (Weisfeiler and Leman) with 64-bit hashes. Classes are numbered in the order of representatives.
    """
    # Equal rows have bitwise equal sums, because each is added in the same order. The factors distinguish columns.
    row_hash = (features * np.sqrt(np.arange(2.0, 2.0 + features.shape[1]))).sum(axis=1)
    colour = _scatter(row_hash.view(np.uint64))
    edge_colour = _scatter(weight.view(np.uint64) + kind.astype(np.uint64))
    for _ in range(num_rounds):
        # Integer sums wrap around, so they do not depend on the order of neighbours.
        mixed = _scatter(colour)
        np.add.at(mixed, target, _scatter(colour[source] ^ edge_colour))
        colour = mixed
    _, first, inverse = np.unique(colour, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[inverse.reshape(-1)], first[order]


def _scatter(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads numbers over 64 bits (a round of the finalizer of splitmix64)."""
    mixed: NDArray[np.uint64] = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed


def _sparse(row: Ints, column: Ints, weight: Floats, num_rows: int) -> Sparse:
    """Sort entries by row and column, and add up duplicates."""
    order = np.lexsort((column, row))
    row, column, weight = row[order], column[order], weight[order]
    if len(row):
        begin = np.flatnonzero(np.r_[True, (row[1:] != row[:-1]) | (column[1:] != column[:-1])])
        row, column, weight = row[begin], column[begin], np.add.reduceat(weight, begin)
    return Sparse(row=row, column=column, weight=weight, num_rows=num_rows)


def _shares(row: Ints, column: Ints, num_rows: int) -> Sparse:
    """Like `_sparse`, with each entry weighted by 1 / the number of entries in its row."""
    counts = np.maximum(np.bincount(row, minlength=num_rows), 1) if len(row) else np.ones(max(num_rows, 1))
    return _sparse(row, column, 1.0 / counts[row] if len(row) else np.zeros(0), num_rows)


class GraphBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Several compiled subgraphs side by side: all GPUs first, then all CPUs, then all switches."""

    features: Floats
    num_gpus: int
    num_cpus: int
    messages: Sparse
    messages_back: Sparse
    to_cpu: Sparse
    to_cpu_back: Sparse
    to_switch: Sparse
    to_switch_back: Sparse
    switch_node: Ints
    to_cluster: Sparse
    to_cluster_back: Sparse
    globals: Floats
    steps: Floats


def batch_of(compiled: Sequence[Compiled], dtype: type[np.floating] = np.float32) -> GraphBatch:
    """Put compiled subgraphs side by side."""
    gpus = _offsets([item.num_gpus for item in compiled])
    cpus = _offsets([item.num_cpus for item in compiled])
    nodes = _offsets([item.num_switches for item in compiled])
    pools = _offsets([len(item.switch_node) for item in compiled])
    total_gpus, total_cpus = int(gpus[-1]), int(cpus[-1])
    num_kinds = len(EDGE_KINDS)
    features = np.zeros((total_gpus + total_cpus + int(nodes[-1]), compiled[0].features.shape[1]), dtype)
    rows, columns, weights, switch_nodes = [], [], [], []
    for index, item in enumerate(compiled):
        # The position of each node of this subgraph in the batch.
        place = np.concatenate(
            [
                np.arange(gpus[index], gpus[index + 1]),
                np.arange(cpus[index], cpus[index + 1]) + total_gpus,
                np.arange(nodes[index], nodes[index + 1]) + total_gpus + total_cpus,
            ]
        )
        features[place] = item.features
        rows.append(place[item.messages.row // num_kinds] * num_kinds + item.messages.row % num_kinds)
        columns.append(place[item.messages.column])
        weights.append(item.messages.weight)
        switch_nodes.append(np.where(item.switch_node >= 0, place[item.switch_node], -1))
    row, column, weight = np.concatenate(rows), np.concatenate(columns), np.concatenate(weights).astype(dtype)
    messages = _ordered(row, column, weight, len(features) * num_kinds)
    to_cpu = _stacked([item.to_cpu for item in compiled], cpus, gpus, dtype)
    to_switch = _stacked([item.to_switch for item in compiled], pools, cpus, dtype)
    cluster = np.repeat(np.arange(len(compiled)), np.diff(pools))
    share = np.concatenate([item.switch_share for item in compiled]).astype(dtype)
    to_cluster = _ordered(cluster, np.arange(int(pools[-1])), share, len(compiled))
    return GraphBatch(
        features=features,
        num_gpus=total_gpus,
        num_cpus=total_cpus,
        messages=messages,
        messages_back=_transposed(messages, len(features)),
        to_cpu=to_cpu,
        to_cpu_back=_transposed(to_cpu, total_gpus),
        to_switch=to_switch,
        to_switch_back=_transposed(to_switch, total_cpus),
        switch_node=np.concatenate(switch_nodes),
        to_cluster=to_cluster,
        to_cluster_back=_transposed(to_cluster, int(pools[-1])),
        globals=np.stack([item.globals for item in compiled]).astype(dtype),
        steps=np.stack([item.steps for item in compiled]).astype(dtype),
    )


def _offsets(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _ordered(row: Ints, column: Ints, weight: Floats, num_rows: int) -> Sparse:
    order = np.argsort(row, kind="stable")
    return Sparse(row=row[order], column=column[order], weight=weight[order], num_rows=num_rows)


def _transposed(sparse: Sparse, num_columns: int) -> Sparse:
    return _ordered(sparse.column, sparse.row, sparse.weight, num_columns)


def _stacked(parts: Sequence[Sparse], row_at: Ints, column_at: Ints, dtype: type[np.floating]) -> Sparse:
    """Matrices along the diagonal of a larger one."""
    return Sparse(
        row=np.concatenate([part.row + row_at[index] for index, part in enumerate(parts)]),
        column=np.concatenate([part.column + column_at[index] for index, part in enumerate(parts)]),
        weight=np.concatenate([part.weight for part in parts]).astype(dtype),
        num_rows=int(row_at[-1]),
    )
