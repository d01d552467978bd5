"""A kubelet without containers: pods that are bound to its nodes come up as threads that speak as workers do.

What the API server is shown of them is what a kubelet shows. Nothing is started and no image is needed, so that the
executor can be driven into every corner against a real API server within seconds.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kits.kubernetes.kube_http import Kube, Refused
from springtide.backends.kubernetes.pods.spec import SPEC_VARIABLE
from springtide.backends.kubernetes.settings import NODE_LABEL, REPLICA_ANNOTATION
from springtide.core.decoding import decode_json
from springtide.core.tokens import replica_token, workload_key
from springtide.core.wire import workers as wire
from springtide.core.wire.workers import FrameDecoder, WorkerSpec, encode_frame

MASTER_KEY = b"m" * 32
_LOOK_S = 0.05


def spec_of(pod: Mapping[str, Any]) -> WorkerSpec | None:
    """The spec that a pod's worker was started with; None if it has none."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env", ()):
            if variable["name"] == SPEC_VARIABLE:
                return decode_json(variable["value"].replace("$$", "$"), WorkerSpec)
    return None


class PlayedWorker:
    """One worker: connects and connects again, repeats what was not acknowledged, obeys. `orders` are all it was given.

    `is_mute`: it says nothing any more, though its pod lives. `is_stuck`: it does not do what it is asked, either.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.orders: list[wire.Order] = []
        self.exit_code: int | None = None
        self.generation = 0
        self.is_mute = False
        self.is_stuck = False
        self.is_asked_to_end = False
        self._unacknowledged: list[msgspec.Struct] = []
        self._seq = 0
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"worker {spec.replica_id}", daemon=True)

    def begin(self) -> None:
        """Connect and report to be ready."""
        self.report(wire.Ready)
        self._thread.start()

    def report(self, kind: type[Any], **fields: Any) -> None:
        """Say something that has to reach the journal."""
        with self._lock:
            self._seq += 1
            report = kind(seq=self._seq, **fields)
            self._unacknowledged.append(report)
            self._send(report)

    def end(self, exit_code: int) -> None:
        """The process is gone."""
        self.exit_code = exit_code
        with self._lock:
            self._drop()

    def leave(self) -> None:
        """Save and go, as one that was asked to; one that is stuck is killed."""
        if self.is_stuck:
            self.end(137)
        elif self.spec.workload_id and self.exit_code is None:
            self.report(wire.Left, generation=self.generation)
            time.sleep(0.05)
            self.end(0)

    def _run(self) -> None:
        while self.exit_code is None:
            with contextlib.suppress(OSError):
                self._converse()
            with self._lock:
                self._drop()
            time.sleep(0.1)

    def _converse(self) -> None:
        host, _, port = self.spec.control_address.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host, int(port)), 1.0)
        connection.settimeout(0.2)
        decoder: FrameDecoder[wire.Order] = FrameDecoder(wire.Order)
        key = workload_key(MASTER_KEY, self.spec.workload_id)
        hello = wire.Hello(
            workload_id=self.spec.workload_id,
            replica_id=self.spec.replica_id,
            token=replica_token(key, self.spec.replica_id),
            pid=7,
            generation=self.generation,
            is_ready=True,
            proves_keys=True,
        )
        with self._lock:
            self._connection = connection
            self._send(hello)
            for report in self._unacknowledged:
                self._send(report)
        while self.exit_code is None:
            with self._lock:
                self._send(wire.Heartbeat())
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            for order in decoder.feed(data):
                self._obey(order)

    def _obey(self, order: wire.Order) -> None:
        self.orders.append(order)
        if self.is_stuck:
            return
        if isinstance(order, wire.Acknowledge):
            with self._lock:
                self._unacknowledged = [each for each in self._unacknowledged if each.seq > order.seq]  # type: ignore[attr-defined]
        elif isinstance(order, wire.FenceOrder):
            self.end(3)
        elif isinstance(order, wire.FormGroup) and self.spec.replica_id in order.members:
            self.generation = order.generation
            rank = order.members.index(self.spec.replica_id)
            self.report(
                wire.Switched,
                generation=order.generation,
                rank=rank,
                world_size=len(order.members),
                step=1,
                pause_s=0.0,
                direction="start",
            )
        elif isinstance(order, wire.FormGroup | wire.Stop | wire.Preempt):
            self.leave()

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None and not self.is_mute:
            try:
                self._connection.sendall(encode_frame(message))
            except OSError:
                self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class KubeletPlayer:
    """Plays the kubelets of `nodes` for the pods of one namespace. Use as a context manager.

    `is_stopped`: the kubelets do nothing; their workers run on. `waiting` keeps new pods from coming up, for a reason,
    and `refusing` turns them away.
    """

    def __init__(self, api: Kube, namespace: str, *nodes: str, num_devices: int, resource: str) -> None:
        self._api = api
        self._pods_path = f"api/v1/namespaces/{namespace}/pods"
        self.nodes = nodes
        self._num_devices = num_devices
        self._resource = resource
        self.workers: dict[str, PlayedWorker] = {}
        self.uids: dict[str, set[str]] = {}
        self.is_stopped = False
        self.waiting = ""
        self.refusing = ""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def __enter__(self) -> KubeletPlayer:
        for node in self.nodes:
            self.add_node(node)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join(20.0)
        for worker in self.workers.values():
            if worker.exit_code is None:
                worker.end(137)
        for node in self.nodes:
            self._api.delete(f"api/v1/nodes/{node}")

    def add_node(self, node: str) -> None:
        """Register a machine."""
        labels = {NODE_LABEL: "true"}
        self._api.post(
            "api/v1/nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": node, "labels": labels}}
        )
        amounts = {self._resource: str(self._num_devices), "cpu": "64", "memory": "64Gi", "pods": "100"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        self._api.patch(f"api/v1/nodes/{node}/status", {"status": status})

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods of replicas that are there, by replica id."""
        found = {}
        for pod in self._api.items(self._pods_path):
            replica_id = (pod["metadata"].get("annotations") or {}).get(REPLICA_ANNOTATION)
            if replica_id:
                self.uids.setdefault(replica_id, set()).add(pod["metadata"]["uid"])
                found[replica_id] = pod
        return found

    def die(self, replica_id: str, exit_code: int = 137) -> None:
        """The worker's process ends."""
        self.workers[replica_id].end(exit_code)

    def _run(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            with contextlib.suppress(OSError, Refused, ValueError):
                pods = self.pods()
                if not self.is_stopped:
                    for replica_id, pod in pods.items():
                        with contextlib.suppress(Refused):
                            self._tend(replica_id, pod)

    def _tend(self, replica_id: str, pod: dict[str, Any]) -> None:
        if pod["spec"].get("nodeName") not in self.nodes or pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        uid = pod["metadata"]["uid"]
        worker = self.workers.get(uid)
        if worker is None:
            if "deletionTimestamp" in pod["metadata"]:
                self._forget(pod)
            elif self.refusing:
                refused = {
                    "phase": "Failed",
                    "reason": self.refusing,
                    "message": "Pod was rejected",
                    "startTime": _now(),
                }
                self._api.patch(f"{self._pods_path}/{pod['metadata']['name']}/status", {"status": refused})
            elif self.waiting:
                self._show(pod, "Pending", {"waiting": {"reason": self.waiting, "message": "because"}})
            else:
                spec = spec_of(pod)
                assert spec is not None
                worker = self.workers[uid] = self.workers[replica_id] = PlayedWorker(spec)
                worker.begin()
                self._show(pod, "Running", {"running": {"startedAt": _now()}})
        elif worker.exit_code is not None:
            ended = {"exitCode": worker.exit_code, "reason": "Completed" if worker.exit_code == 0 else "Error"}
            self._show(pod, "Failed" if worker.exit_code else "Succeeded", {"terminated": ended})
            if "deletionTimestamp" in pod["metadata"]:
                self._forget(pod)
        elif "deletionTimestamp" in pod["metadata"] and not worker.is_asked_to_end:
            worker.is_asked_to_end = True
            threading.Thread(target=worker.leave, daemon=True).start()

    def _forget(self, pod: dict[str, Any]) -> None:
        self._api.delete(f"{self._pods_path}/{pod['metadata']['name']}", gracePeriodSeconds=0)

    def _show(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        status = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "containerStatuses": [
                {
                    "name": "worker",
                    "state": state,
                    "ready": "running" in state,
                    "image": "x",
                    "imageID": "x",
                    "restartCount": 0,
                }
            ],
        }
        self._api.patch(f"{self._pods_path}/{pod['metadata']['name']}/status", {"status": status})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
