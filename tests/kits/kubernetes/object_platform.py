"""A platform whose workers are played, with its reconciler to the objects of one namespace of a real API server."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kits.kubernetes.kube_http import GROUP, Kube, wait_for
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core import actions
from springtide.core.events import Event, JobResized, ReplicaReady, ReplicaStopped
from springtide.core.resources import make_node
from springtide.core.status.platform import JobStatus
from springtide.service.platform import Platform
from springtide.service.reconciler.controller import ResourceReconciler
from springtide.service.status.status import job_status

TRAIN = "def fit(ctx):\n    pass\n"
SERVE = "class Echo:\n    def predict(self, text: str) -> str:\n        return text\n"


class PlayedExecutor:
    """Workers that do at once whatever they are asked, and train for ever."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self.started: list[actions.StartReplica] = []
        self._of_job: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}

    def recover(self, standing: Any) -> None:
        for start in (*standing.replicas, *standing.actions):
            self.start(start)

    def start(self, action: actions.Action) -> None:
        match action:
            case actions.StartReplica():
                self.started.append(action)
                self._of_job.setdefault(action.workload_id, set()).add(action.replica_id)
                self.post(ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id))
            case actions.StopReplica():
                self._of_job.get(action.workload_id, set()).discard(action.replica_id)
                self.post(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))
            case actions.PreemptJob():
                for replica_id in action.replica_ids:
                    self.post(ReplicaStopped(workload_id=action.job_id, replica_id=replica_id))
            case actions.ResizeJob():
                size, before = len(action.replica_ids), self._sizes.get(action.job_id, 0)
                self._sizes[action.job_id] = size
                direction = "start" if not before else "grow" if size > before else "shrink"
                resized = JobResized(
                    job_id=action.job_id,
                    generation=action.generation,
                    world_size=size,
                    step=1,
                    pause_s=0.1,
                    direction=direction,
                )
                self.post(resized)

    def post(self, event: Event) -> None:
        self._events.put(event)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        try:
            found = [self._events.get(timeout=0.2)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def acknowledge(self, events: Sequence[Event]) -> None:
        pass


class ObjectPlatform:
    """Its state directory outlives it: open another one on it to play a restart."""

    def __init__(
        self,
        folder: Path,
        kube: Kube,
        namespace: str,
        *,
        name: str = "objects",
        connect: Callable[[], KubeApi] | None = None,
        namespaces: tuple[str, ...] | None = None,
        num_devices: int = 4,
        quota_caps: Callable[[], dict[str, int]] = dict,
        finished_ttl_s: float | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kube = kube
        self.namespace = namespace
        self.executor = PlayedExecutor()
        self.platform = Platform(
            folder, "springtide", (make_node("n1", num_devices),), lambda clock: self.executor, usd_per_device_hour=2.5
        )
        self.thread = ApiThread(connect or (lambda: KubeApi.connect(kube.kubeconfig)))
        self.thread.open()
        watched = (namespace,) if namespaces is None else namespaces
        settings = KubernetesSettings(
            name=name,
            namespace=namespace,
            namespaces=watched,
            advertise="127.0.0.1",
            finished_ttl_s=finished_ttl_s,
        )
        self.reconciler = ResourceReconciler(self.platform, self.thread, settings, quota_caps=quota_caps)
        self.submissions = self.reconciler.submissions

    def __enter__(self) -> ObjectPlatform:
        self.platform.start(lambda: None)
        self.reconciler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.reconciler.stop()
        self.platform.request_shutdown(stop_workers=False)
        self.platform.join(10.0)
        self.thread.close()

    # --- what there is -----------------------------------------------------------------------------------------------

    def path(self, plural: str, name: str = "", namespace: str = "") -> str:
        return f"{GROUP}/namespaces/{namespace or self.namespace}/{plural}" + (f"/{name}" if name else "")

    def status(self, name: str, plural: str = "trainingfunctions", namespace: str = "") -> dict[str, Any]:
        found = self.kube.find(self.path(plural, name, namespace)) or {}
        return dict(found.get("status", {}))

    def condition(self, name: str, kind: str, plural: str = "trainingfunctions", namespace: str = "") -> dict[str, Any]:
        conditions = self.status(name, plural, namespace).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_state(self, name: str, state: str, plural: str = "trainingfunctions") -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            status = self.status(name, plural)
            return status if status.get("state") == state else None

        return wait_for(f"{name} {state}", reached, within_s=30.0)

    def jobs(self) -> list[JobStatus]:
        now_s = self.platform.now_s()
        return [job_status(record, now_s) for record in self.platform.view().jobs.values()]


def install_definitions(kube: Kube) -> None:
    """Teach a cluster both kinds, and wait until it serves them."""
    kube.apply(*custom_resource_definitions())
    for definition in custom_resource_definitions():
        plural = definition["spec"]["names"]["plural"]
        wait_for(f"{plural} being served", lambda path=f"{GROUP}/{plural}": kube.find(path) is not None)
    time.sleep(0.2)


def training(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": {"function": "fit", "files": {"train.py": TRAIN}}, "workers": "1..2", **spec},
    }


def inference(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "InferenceFunction",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": {"class": "Echo", "files": {"serve.py": SERVE}}, "scale": "1..2", **spec},
    }
