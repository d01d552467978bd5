"""The executor on real pods keeps the contract of executors: the same kit that the others pass, on real kubelets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import free_ports
from kits.kubernetes.lab.nodes import DEVICE_RESOURCE, NODES, NodeLab
from kits.kubernetes.lab.pods import pod_settings
from kits.kubernetes.live_cluster import BUCKET, CREDENTIALS
from kits.servers import RunningServer, running_s3
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.executor import KubernetesExecutor
from springtide.backends.kubernetes.pods.shares import share_of
from springtide.backends.kubernetes.settings import NODE_LABEL, KubernetesSettings
from springtide.core.containers import ContainerSettings
from springtide.core.events import ReplicaLost
from springtide.core.resources import NodeId
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, TrainingJob
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.store import WorkloadStore
from springtide.testing.executor import (
    CHECKS,
    SHARE_CHECKS,
    check_drain_leaves_replicas_alone,
    expect,
    start_of,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

TRAINING = """
import time, torch
def fit(ctx):
    torch.manual_seed(1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    for batch in ctx.batches((x, y)):
        time.sleep(0.005)
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
"""
GREEDY = """
def fit(ctx):
    held = [bytearray(1 << 26) for _ in range(64)]
"""
SERVING = """
class Echo:
    def predict(self, numbers: list[float]) -> list[float]:
        return numbers
"""


class WallClock:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began


class PodWorld:
    """Two devices of one real node. Its pods outlive an executor that is dropped."""

    def __init__(self, folder: Path, lab: NodeLab, namespace: str, store: RunningServer) -> None:
        self.folder = folder
        self.lab = lab
        self.namespace = namespace
        self.clock = WallClock()
        self.pooled_node = NodeId(NODES[0])
        self.devices = [f"{NODES[0]}/{number}" for number in range(2)]
        self.settings = msgspec.convert(
            {
                "name": namespace,
                "namespace": namespace,
                "namespaces": [namespace],
                "advertise": lab.host,
                "control_port": free_ports(1)[0],
                "device_resource": DEVICE_RESOURCE,
                "device_kind": "cpu",
                "node_selector": {NODE_LABEL: "true"},
                "store_url": f"{store.s3_url(BUCKET, namespace)}&allow_http=true",
                "share_directory": "",
                "pod": {**pod_settings(), "memory": "900Mi"},
            },
            KubernetesSettings,
        )
        self.store = open_store(self.settings.store_url)
        self.long_job = self._job("long", num_epochs=100_000)
        self.short_job = self._job("short", num_epochs=5)
        self.service = InferenceService(
            service_id="service", name="service", entrypoint=self._source("service", SERVING)
        )
        self.num_terms = 0
        self.executor = self._open()

    def restart(self) -> KubernetesExecutor:
        self.executor.close()
        self.thread.close()
        self.executor = self._open()
        return self.executor

    def close(self) -> None:
        """Nobody is told to save: what is left of the pods is ended by force."""
        self.executor.close()
        self.thread.close()

    def kill(self, replica_id: ReplicaId) -> None:
        pod = self._pod(replica_id)
        assert pod is not None
        os.kill(self.lab.container_pids(pod["metadata"]["uid"])[0], signal.SIGKILL)

    def share_of(self, replica_id: ReplicaId) -> Share | None:
        """What the pod says, once all that was asked is written; nothing where there is no pod."""
        taken_in: list[bool] = []
        self.executor._reactor.call(lambda: taken_in.append(True))
        wait_for("the executor", lambda: taken_in)
        wait_for("what is to be written", lambda: self.thread.num_pending == 0)
        pod = self._pod(replica_id)
        return share_of(pod) if pod is not None else None

    def _pod(self, replica_id: ReplicaId) -> dict | None:
        pods = self.lab.api.pods(self.namespace, f"springtide.dev/replica={replica_id}")
        living = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        return living[0] if living else None

    def _open(self) -> KubernetesExecutor:
        self.num_terms += 1
        self.thread = ApiThread(lambda: KubeApi.connect(self.lab.kubeconfig))
        self.thread.open()
        executor = KubernetesExecutor(
            self.folder,
            self.clock,
            settings=self.settings,
            api_thread=self.thread,
            store=self.store,
            master_key=b"m" * 32,
            term=self.num_terms,
            credentials=CREDENTIALS,
        )
        executor.open()
        return executor

    def _job(self, name: str, *, num_epochs: int) -> TrainingJob:
        return TrainingJob(
            job_id=name,
            name=name,
            entrypoint=self._source(name, TRAINING),
            global_batch_size=16,
            num_epochs=num_epochs,
            max_workers=2,
        )

    def _source(self, name: str, text: str) -> Entrypoint:
        key = WorkloadStore(self.store, name).put_source("job.py", text.encode())
        is_service = text is SERVING
        return Entrypoint(
            source_path=key,
            object_name="Echo" if is_service else "fit",
            kind="class" if is_service else "function",
        )


@pytest.fixture(scope="module")
def object_store(node_lab: NodeLab) -> Iterator[RunningServer]:
    with running_s3(buckets=(BUCKET,), host=node_lab.host) as store:
        yield store


@pytest.fixture
def world(
    node_lab: NodeLab, object_store: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PodWorld]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    namespace = f"kit-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    api = node_lab.api
    node_lab.offer(NODES[0], 2, {NODE_LABEL: "true"})
    api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    wait_for("the account", lambda: api.find(f"api/v1/namespaces/{namespace}/serviceaccounts/default"))
    world = PodWorld(tmp_path / "state", node_lab, namespace, object_store)
    try:
        yield world
    finally:
        world.close()
        for pod in api.pods(namespace):
            node_lab.end_pod(pod)
        api.delete(f"api/v1/namespaces/{namespace}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_executor_of_pods(check, world: PodWorld) -> None:
    check(world)


@pytest.mark.parametrize("check", SHARE_CHECKS, ids=lambda check: check.__name__)
def test_pods_share_devices(check, world: PodWorld) -> None:
    check(world)


def test_who_is_on_a_node_that_drains(world: PodWorld) -> None:
    # Labels are the cluster's; the checks of labels that machines keep by themselves are the book of nodes' tests.
    check_drain_leaves_replicas_alone(world)


def test_a_worker_that_needs_too_much_memory_is_lost_for_that_reason(world: PodWorld) -> None:
    small = ContainerSettings(memory="600Mi")
    job = replace(world.long_job, entrypoint=world._source("long", GREEDY), container=small)
    start = start_of(job, world.devices[0])
    world.executor.start(start)
    (lost,) = expect(world, world.executor, ReplicaLost)
    assert isinstance(lost, ReplicaLost)
    assert lost.reason == "the container ran out of its memory limit (600Mi)"
    assert lost.exit_code == 137
