"""Where sharers may open devices in a cluster with pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from springtide.core.decision import Snapshot
from springtide.core.resources import DeviceId, Node, Pool, admits

_NONE: frozenset[DeviceId] = frozenset()


class PoolNodes:
    """The devices of nodes that belong to jobs or to services alone.

    A sharer opens a device only on a node that its pool owns or has now, first on one that it has now. On devices that
    are shared already jobs and services are beside each other, whatever the node's label. See docs/policies/sharing.md.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        nodes = snapshot.cluster.nodes
        self._has_pools = any(node.pool != "shared" or node.owner != "shared" for node in nodes)

    def of_others(self, *, is_job: bool) -> frozenset[DeviceId]:
        """The devices of nodes that the other pool owns and has now."""
        if not self._has_pools:
            return _NONE
        return self._of_services if is_job else self._of_training

    def labelled_for_others(self, *, is_job: bool) -> frozenset[DeviceId]:
        """The devices of nodes that the other pool has now, or will have once they are free."""
        if not self._has_pools:
            return _NONE
        return self._serving if is_job else self._training

    @cached_property
    def _of_services(self) -> frozenset[DeviceId]:
        return self._where(
            lambda node: not (admits(node.owner, is_job=True) or admits(self._heading(node), is_job=True))
        )

    @cached_property
    def _of_training(self) -> frozenset[DeviceId]:
        return self._where(
            lambda node: not (admits(node.owner, is_job=False) or admits(self._heading(node), is_job=False))
        )

    @cached_property
    def _serving(self) -> frozenset[DeviceId]:
        return self._where(lambda node: not admits(self._heading(node), is_job=True))

    @cached_property
    def _training(self) -> frozenset[DeviceId]:
        return self._where(lambda node: not admits(self._heading(node), is_job=False))

    def _heading(self, node: Node) -> Pool:
        drain = self._snapshot.drains.get(node.node_id)
        return node.pool if drain is None else drain.pool

    def _where(self, is_theirs: Callable[[Node], bool]) -> frozenset[DeviceId]:
        nodes = self._snapshot.cluster.nodes
        return frozenset(device.device_id for node in nodes if is_theirs(node) for device in node.devices)
