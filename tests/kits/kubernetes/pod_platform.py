"""A KubernetesExecutor over played kubelets, driven by hand as the control loop drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import PATIENCE_S, Kube
from kits.kubernetes.kubelet_player import MASTER_KEY, KubeletPlayer
from kits.kubernetes.lab.lab import free_ports
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.executor import KubernetesExecutor
from springtide.backends.kubernetes.settings import KubernetesSettings, PodSettings
from springtide.core.actions import ResizeJob, StartReplica, StopReplica
from springtide.core.events import Event, JobResized, ReplicaReady
from springtide.core.ports import Standing
from springtide.core.workload import Entrypoint, TrainingJob
from springtide.storage.stores.open import memory_store
from springtide.storage.workloads.store import WorkloadStore

E = TypeVar("E")
RESOURCE = "springtide.dev/played"


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class PodPlatform:
    """One platform with a name of its own. `restart` puts a fresh executor in the place of one that crashed."""

    def __init__(self, folder: Path, api: Kube, proxy: ApiProxy, namespace: str, **settings: Any) -> None:
        self.folder = folder
        self.api = api
        self.proxy = proxy
        self.namespace = namespace
        self.store = memory_store()
        defaults: dict[str, Any] = {
            "name": namespace,
            "namespace": namespace,
            "namespaces": (namespace,),
            "advertise": "127.0.0.1",
            "control_port": free_ports(1)[0],
            "device_resource": RESOURCE,
            "device_kind": "cpu",
            "store_url": "memory://",
            "worker_lost_after_s": 2.0,
            "grace_s": 2.0,
            "share_directory": "",
            "pod": PodSettings(image="x"),
        }
        self.settings = KubernetesSettings(**(defaults | settings))
        self.kubelet = KubeletPlayer(
            api, namespace, f"{namespace}-1", f"{namespace}-2", num_devices=2, resource=RESOURCE
        )
        self.term = 0
        self.events: list[Event] = []
        self.acknowledges = True
        self.superseded: list[int] = []
        self._threads: list[ApiThread] = []

    def open(self, crash_point: Callable[[str], None] | None = None) -> KubernetesExecutor:
        self.term += 1
        self.thread = ApiThread(self.proxy.connect)
        self.thread.open()
        self._threads.append(self.thread)
        self.executor = KubernetesExecutor(
            self.folder,
            MonotonicClock(),
            settings=self.settings,
            api_thread=self.thread,
            store=self.store,
            master_key=MASTER_KEY,
            term=self.term,
            crash_point=crash_point,
            on_superseded=self.superseded.append,
            listen_host="127.0.0.1",
        )
        self.executor.open()
        return self.executor

    def restart(self, standing: Standing | None = None) -> None:
        """Let the executor vanish, workers unharmed, and recover with a fresh one."""
        self.crash()
        self.events.clear()
        self.open().recover(standing or Standing())

    def crash(self) -> None:
        # First the API thread, as it would be with the process: nothing that waits to be written is written.
        self.thread.close()
        self.executor.close()

    def abandon(self) -> None:
        """Free what an executor whose thread stands still for ever holds, as the end of its process would."""
        executor = self.executor
        executor._thread = None
        executor._listener.close()
        for connection in [*executor._reports._owners, *executor._reports.unidentified]:
            connection._stream.close()

    def connected(self) -> list[str]:
        """The replicas whose workers have introduced themselves to this executor."""
        table = self.executor._table
        return [replica.replica_id for replica in list(table.replicas.values()) if replica.connection is not None]

    def close(self) -> None:
        self.executor.close()
        for thread in self._threads:
            thread.close()

    # --- actions and events ------------------------------------------------------------------------------------------

    def device(self, number: int) -> str:
        """The n-th device: two on each node."""
        return f"{self.kubelet.nodes[number // 2]}/{number % 2}"

    def job(self, job_id: str = "job", **changes: Any) -> TrainingJob:
        fields: dict[str, Any] = {"max_workers": 4, "entrypoint": Entrypoint(source_path="a.py", object_name="fit")}
        return TrainingJob(job_id=job_id, name=job_id, **(fields | changes))

    def start(self, number: int = 0, *, generation: int = 1, device: int | None = None, **changes: Any) -> StartReplica:
        """Start the job's n-th replica on the n-th device."""
        job = self.job(**changes)
        action = StartReplica(
            workload=job,
            replica_id=f"{job.job_id}.{number}",
            device_id=self.device(number if device is None else device),
            generation=generation,
        )
        self.executor.start(action)
        return action

    def train(self, *numbers: int, generation: int = 1, **changes: Any) -> list[StartReplica]:
        """Start replicas and form a group of them."""
        starts = [self.start(number, **changes) for number in numbers]
        for start in starts:
            self.until(ReplicaReady, lambda event, start=start: event.replica_id == start.replica_id)
        self.resize(generation, *numbers)
        self.until(JobResized, lambda event: event.generation == generation)
        return starts

    def resize(self, generation: int, *numbers: int, forced: bool = False) -> None:
        members = tuple(f"job.{number}" for number in numbers)
        self.executor.start(
            ResizeJob(job_id="job", generation=generation, replica_ids=members, global_batch_size=32, forced=forced)
        )

    def stop(self, number: int, grace_s: float = 4.0) -> None:
        self.executor.start(StopReplica(workload_id="job", replica_id=f"job.{number}", grace_s=grace_s))

    def until(
        self, kind: type[E], condition: Callable[[E], bool] = lambda event: True, *, timeout_s: float = 30.0
    ) -> E:
        """Return the first event of this kind, seen already or to come."""
        end_s = time.monotonic() + PATIENCE_S + timeout_s
        looked = 0
        while True:
            for event in self.events[looked:]:
                if isinstance(event, kind) and condition(event):
                    return event
            looked = len(self.events)
            assert time.monotonic() < end_s, f"no {kind.__name__} among {self.events}, {self.executor.status()}"
            self.take(0.2)

    def take(self, duration_s: float = 0.0) -> None:
        """Wait once and take what there is."""
        events = list(self.executor.wait(time.monotonic() + duration_s))
        self.events += events
        if self.acknowledges:
            self.executor.acknowledge(events)

    def settle(self, duration_s: float = 1.0) -> None:
        """Take whatever comes for a while."""
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.take(0.1)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, what: str, condition: Callable[[], object], limit_s: float = 30.0) -> Any:
        """Go on taking events until the condition holds."""
        end_s = time.monotonic() + PATIENCE_S + limit_s
        while not (found := condition()):
            assert time.monotonic() < end_s, f"{what} did not come: {self.events}, {self.executor.status()}"
            self.take(0.1)
        return found

    def reason_of(self, number: int) -> str:
        pods = [pod for pod in self.executor.status().pods if pod.replica_id == f"job.{number}"]
        return pods[0].reason if pods else ""

    def fence(self) -> int:
        return WorkloadStore(self.store, "job").head().generation

    def path_of(self, number: int) -> str:
        return f"api/v1/namespaces/{self.namespace}/pods/job-{number}"
