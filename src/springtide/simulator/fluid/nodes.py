"""The nodes of long traces: which are up, how they are labelled, and which sets of devices groups have used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from springtide.core.resources import DeviceId, Node, NodeId, Pool


class FluidNodes:
    """All nodes of a run. A node that comes back has the label that it was given last."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.node_of: dict[DeviceId, NodeId] = {d.device_id: d.node_id for node in nodes for d in node.devices}
        self._nodes = {node.node_id: node for node in nodes}
        self._rank_of = {node.node_id: rank for rank, node in enumerate(nodes)}
        self._bit_of = {device_id: 1 << index for index, device_id in enumerate(self.node_of)}
        models = {d.device_id: d.accelerator for node in nodes for d in node.devices}
        self._model_of = models if any(models.values()) else {}
        self._used_sets: set[int] = set()
        self._down: set[NodeId] = set()

    def __iter__(self) -> Iterator[NodeId]:
        """The ids of all nodes, in the order of the cluster."""
        return iter(self._nodes)

    def pool_of(self, node_id: NodeId) -> Pool:
        """The label of a node, whether it is up or down."""
        return self._nodes[node_id].pool

    @property
    def any_down(self) -> bool:
        return bool(self._down)

    def is_down(self, device_id: DeviceId) -> bool:
        return self.node_of.get(device_id) in self._down

    def lose(self, node_id: NodeId) -> None:
        self._down.add(node_id)

    def bring_back(self, node_id: NodeId) -> Node:
        self._down.discard(node_id)
        return self._nodes[node_id]

    def label(self, node_id: NodeId, pool: Pool) -> None:
        node = self._nodes.get(node_id)
        if node is not None and node.pool != pool:
            self._nodes[node_id] = replace(node, pool=pool, home=node.owner)

    def accelerators_of(self, device_ids: Iterable[DeviceId]) -> tuple[str, ...]:
        """The models of these devices; empty where no device says its model."""
        return tuple(sorted({self._model_of[device_id] for device_id in device_ids})) if self._model_of else ()

    # --- groups ------------------------------------------------------------------------------------------------------

    def group(self, device_ids: Iterable[DeviceId], *, keeps_order: bool) -> tuple[int, tuple[int, ...]]:
        """The set of these devices as bits, and the number of them on each of their nodes.

        Nodes are in the order of `device_ids` with `keeps_order`, otherwise in the cluster's order.
        """
        bits, counts = 0, dict[NodeId, int]()
        for device_id in device_ids:
            bits |= self._bit_of[device_id]
            node_id = self.node_of[device_id]
            counts[node_id] = counts.get(node_id, 0) + 1
        ring = counts if keeps_order else sorted(counts, key=self._rank_of.__getitem__)
        return bits, tuple(counts[node_id] for node_id in ring)

    def is_fresh(self, bits: int) -> bool:
        """Whether no job has used exactly this set of devices."""
        return bits not in self._used_sets

    def use(self, bits: int) -> None:
        """A job has used exactly this set of devices."""
        self._used_sets.add(bits)
