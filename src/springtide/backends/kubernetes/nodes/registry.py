"""The platform's nodes on a cluster: watches Node objects, reports joined and lost nodes, writes labels of pools.

Everything is compared again whenever a Node changes, whenever the devices held by workers change, and every second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from springtide.backends.kubernetes.client.cache import COMPARE_EVERY_S, ObjectChange, trim_metadata
from springtide.backends.kubernetes.client.kinds import NODE, POD, Object
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.nodes.offered import (
    NodeLedger,
    NodeNote,
    counts_resource,
    device_of,
    ensure_labelled,
    facts_of,
)
from springtide.backends.kubernetes.nodes.requests import BOUND_FIELDS, OtherPods
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.actions import LabelNode
from springtide.core.events import NodeJoined, NodeLost
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool

LOOK_EVERY_S = 1.0
# How long a comparison waits for further changes: a cluster that starts changes a thousand nodes at once.
_GATHER_S = 0.02
_KEPT_STATUS = ("allocatable", "capacity", "conditions")
_KEPT_SPEC = ("unschedulable", "taints")


def trim_node(obj: Object) -> Object:
    """A Node without the fields that the platform does not read: images, volumes, addresses, heartbeat times."""
    trim_metadata(obj)
    status, spec = obj.get("status") or {}, obj.get("spec") or {}
    kept: dict[str, Any] = {name: status[name] for name in _KEPT_STATUS if name in status}
    kept["conditions"] = [
        {"type": "Ready", "status": each.get("status"), "reason": each.get("reason"), "message": each.get("message")}
        for each in status.get("conditions") or ()
        if each.get("type") == "Ready"
    ]
    return {
        "metadata": obj["metadata"],
        "spec": {name: spec[name] for name in _KEPT_SPEC if name in spec},
        "status": kept,
    }


class NodeTable:
    """The nodes of one platform. Its methods may be called from any thread; none waits for the API.

    `held` returns the devices that living workers hold on a node; `post` takes events; both are called on the API
    thread. Nothing is posted before `begin`.
    """

    def __init__(
        self,
        api_thread: ApiThread,
        settings: KubernetesSettings,
        *,
        held: Callable[[NodeId], Collection[DeviceId]],
        post: Callable[[NodeJoined | NodeLost], None],
        clock: Callable[[], float] = time.monotonic,
        compare_every_s: float = COMPARE_EVERY_S,
    ) -> None:
        self._thread = api_thread
        self._settings = settings
        self._held = held
        self._post = post
        self._clock = clock
        self._others = OtherPods(settings)
        self._ledger = NodeLedger(settings, self._others.beside)
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_look_due = False
        self._wanted: dict[NodeId, Pool] = {}
        self._labelling: set[NodeId] = set()
        self.cache = api_thread.cache(NODE, trim=trim_node, listener=self._changed, compare_every_s=compare_every_s)
        self._pods = api_thread.cache(
            POD, fields=BOUND_FIELDS, trim=self._others.trim, listener=self._others.note, is_needed=False
        )
        # Nodes change with the pods of others, too, but those are not compared for each one.
        api_thread.every(LOOK_EVERY_S, self._compare)

    # --- for every thread --------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are offered now; events after `begin` are the differences to these."""
        with self._lock:
            if self._has_begun:
                return self._ledger.nodes()
            offered = self._ledger.offered(self.cache.objects(), self._held, self._clock())
            self._ledger.assume(offered)
            return offered

    def begin(self, labels: Mapping[NodeId, Pool] | None = None) -> None:
        """Post changes from now on. `labels` are the labels of nodes according to the journal."""
        with self._lock:
            self._has_begun = True
            for node_id, pool in (labels or {}).items():
                self._want(node_id, pool)
        self._thread.soon(self._compare)

    def compare_soon(self) -> None:
        """The devices held by workers have changed: compare again."""
        self._thread.soon(self._compare_soon)

    def label(self, action: LabelNode) -> None:
        """Keep a node labelled: retried until it is, and repeated whenever another client changes the label."""
        with self._lock:
            self._want(action.node_id, action.pool)
        self._thread.soon(self._write_due_labels)

    def find(self, device_id: DeviceId) -> tuple[Node, Device] | None:
        """A device and its node, offered or not; None if there is no such node."""
        node_id = NodeId(device_id.rpartition("/")[0])
        device = device_of(node_id, device_id, self._settings)
        obj = self.cache.get(node_id)
        node = facts_of(obj, self._settings).node if obj is not None else None
        if node is None:
            with self._lock:
                node = next((each for each in self._ledger.nodes() if each.node_id == node_id), None)
        if node is None or device is None:
            return None
        with self._lock:
            node = self._others.beside(node)
        return node, next((each for each in node.devices if each.device_id == device_id), device)

    def counts_resource(self, node_id: NodeId) -> bool:
        """Whether the node counts its devices by the extended resource."""
        obj = self.cache.get(node_id)
        return obj is not None and counts_resource(obj, self._settings)

    def is_there(self, node_id: NodeId) -> bool:
        """Whether the cluster has a Node object of that name, ready or not."""
        return self.cache.get(node_id) is not None

    def describe(self) -> tuple[NodeNote, ...]:
        """Every node of the cluster, offered or not, and why."""
        with self._lock:
            return self._ledger.describe()

    # --- on the API thread -------------------------------------------------------------------------------------------

    def _changed(self, _: ObjectChange) -> None:
        self._compare_soon()

    def _compare_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._thread.later(_GATHER_S, self._compare)

    def _compare(self) -> None:
        self._is_look_due = False
        if not self.cache.is_synced:
            return
        with self._lock:
            if self._has_begun:
                events = self._ledger.update(self.cache.objects(), self._held, self._clock())
            else:
                self._ledger.offered(self.cache.objects(), self._held, self._clock())
                events = []
        for event in events:
            self._post(event)
        self._write_due_labels()

    def _want(self, node_id: NodeId, pool: Pool) -> None:
        self._wanted[node_id] = pool
        self._ledger.want_label(node_id, pool)

    def _write_due_labels(self) -> None:
        if not self._settings.pools:
            return
        with self._lock:
            due = [each for each in self._ledger.labels_due() if each[0] not in self._labelling]
            self._labelling.update(node_id for node_id, _, _ in due)
        for node_id, pool, home in due:
            self._write_label(node_id, pool, home)

    def _write_label(self, node_id: NodeId, pool: Pool, home: Pool) -> None:
        def written(obj: Object | None) -> None:
            self._labelling.discard(node_id)
            if obj is not None:
                self.cache.put(obj)

        def given_up(_: object) -> None:
            # Refused: a later comparison that finds the label due tries again.
            self._thread.later(LOOK_EVERY_S * 10, lambda: self._labelling.discard(node_id))

        def is_still_wanted() -> bool:
            if self._wanted.get(node_id) == pool:
                return True
            self._labelling.discard(node_id)
            return False

        self._thread.write(
            (NODE, node_id),
            lambda api: ensure_labelled(api, node_id, pool, home),
            done=written,
            failed=given_up,
            is_still_wanted=is_still_wanted,
        )
