"""A platform whose jobs may run on functions, on a real API server: what surrounds it, and its control planes.

Everything that outlives a control plane is real and a process of its own: the object store's API, PostgreSQL, a Redis
with a password, and an emulator for the cloud that functions are in.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from kits.kubernetes.kube_http import PATIENCE_S, wait_for
from kits.kubernetes.lab.lab import Cluster, free_ports
from kits.kubernetes.service_account import RIGHTS, install_definitions, installed, kubeconfig_of
from kits.servers import RunningServer, running_postgres, running_redis, running_s3
from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.launch import (
    EmulatorAddress,
    emulator_status,
    ensure_emulator,
    stop_emulator,
)
from springtide.backends.kubernetes.install.objects import settings_text
from springtide.backends.kubernetes.install.settings_file import SettingsFile, complete
from springtide.core.workload import WorkloadId
from springtide.perf.functions import services as function_services
from springtide.service.assembly.functions import EMULATOR_TOKEN
from springtide.service.assembly.kubernetes_functions import REDIS_PASSWORD
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.store import WorkloadStore

EXAMPLES = Path(__file__).parents[3] / "examples"
STORE_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
LEASE_S = 4.0
SERVICE = function_services.emulator(
    lifetime_s=300.0, memory_mb=(1024, 2048), cold_start_s=0.5, concurrency=8, latency_s=0.0
)


class Surroundings:
    """What there is beside the cluster, for all tests of a session."""

    def __init__(self, postgres: RunningServer, redis: RunningServer, s3: RunningServer, emulator: EmulatorAddress):
        self.postgres, self.redis, self.s3, self.emulator = postgres, redis, s3, emulator

    def store_url(self, name: str) -> str:
        return f"{self.s3.s3_url('springtide', name)}&allow_http=true"

    def store(self, name: str) -> CheckedStore:
        store = open_store(self.store_url(name))
        assert isinstance(store, CheckedStore)
        return store

    def redis_keys(self) -> list[str]:
        """What is kept in the Redis, of whatever job."""
        with contextlib.closing(open_store(self.redis.redis_url)) as store:
            return store.keys("")

    def num_invoked(self) -> int:
        return int(emulator_status(self.emulator)["counts"]["num_invocations"])


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[Surroundings]:
    """Servers, and the emulator, which knows no key of the store: the control plane gives functions theirs."""
    config = EmulatorConfig(
        service=SERVICE,
        cpu_fraction=4.0,
        warm_template=True,
        preload=("torch", "springtide.runtime.functions.worker"),
    )
    with running_postgres() as postgres, running_redis() as redis, running_s3(buckets=("springtide",)) as s3:
        address = ensure_emulator(folder / "emulator", config)
        try:
            yield Surroundings(postgres, redis, s3, address)
        finally:
            stop_emulator(folder / "emulator")


class FunctionsPlatform:
    """One platform: its settings, and as many control planes as a test begins, each on a directory of its own."""

    def __init__(
        self, cluster: Cluster, around: Surroundings, settings: SettingsFile, kubeconfig: Path, folder: Path
    ) -> None:
        self.cluster, self.around, self.settings = cluster, around, settings
        self.name = settings.name
        self.folder = folder
        self._kubeconfig = kubeconfig
        self._num_begun = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> subprocess.Popen[bytes]:
        """One more control plane, whose directory is empty; it is the one that is asked once it leads."""
        folder = self.folder / f"plane{self._num_begun}"
        folder.mkdir()
        self._num_begun += 1
        port, control_port = free_ports(2)
        self.settings = msgspec.structs.replace(self.settings, port=port, control_port=control_port)
        (folder / "settings.yaml").write_text(settings_text(complete(self.settings)))
        command = [sys.executable, "-m", "springtide", "k8s", "serve", "--settings", str(folder / "settings.yaml")]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [*command, "--state", str(folder / "state"), "--host", "127.0.0.1"],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": "/tmp",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    "KUBECONFIG": str(self._kubeconfig),
                    "PGPASSWORD": self.around.postgres.password,
                    REDIS_PASSWORD: self.around.redis.password,
                    EMULATOR_TOKEN: self.around.emulator.token,
                    **STORE_KEYS,
                },
            )
        self.processes.append(process)
        wait_for("a control plane that leads", self._leads, 60.0)
        return process

    def _leads(self) -> bool:
        assert self.processes[-1].poll() is None, self.said()
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            return bool(self.ask("GET", "/readyz").get("status") == "leading")
        return False

    def end(self) -> None:
        for process in self.processes:
            # One that is stopped is killed all the same.
            process.kill()
            process.wait(30.0)

    def said(self) -> str:
        """The end of the newest control plane's log."""
        return (self.folder / f"plane{self._num_begun - 1}" / "log").read_text(errors="replace")[-4000:]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def token(self) -> str:
        secret = self.cluster.api.find(f"api/v1/namespaces/{self.name}/secrets/{self.name}-token")
        return "" if secret is None else base64.b64decode(secret["data"]["token"]).decode()

    def ask(self, verb: str, path: str, body: object = None) -> dict[str, Any]:
        """The answer to a request. Raises HTTPError, OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=verb)
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=15.0) as answer:
            return dict(json.loads(answer.read() or b"{}"))

    def job(self, job_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/jobs/{job_id}")

    def wait_job(self, job_id: str, what: str, is_so: Callable[[dict[str, Any]], bool], within_s: float) -> Any:
        """The job once that is so."""

        def look() -> dict[str, Any] | None:
            assert self.processes[-1].poll() is None, self.said()
            job = self.job(job_id)
            assert job["state"] not in ("FAILED", "REJECTED", "CANCELLED"), (job, self.said())
            return job if is_so(job) else None

        return wait_for(f"{job_id} {what}", look, within_s)

    def command(self, *arguments: str, within_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """`springtide` as its user runs it, who has the platform's address and token."""
        return subprocess.run(
            [sys.executable, "-m", "springtide", *arguments],
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "OMP_NUM_THREADS": "1",
                "SPRINGTIDE_URL": self.url,
                "SPRINGTIDE_TOKEN": self.token,
            },
        )

    def workload(self, job_id: str) -> WorkloadStore:
        return WorkloadStore(self.around.store(self.name), WorkloadId(job_id))

    def losses(self, job_id: str) -> list[list[float]]:
        """The losses by step, as the store has them."""
        data = self.around.store(self.name).get(f"workloads/{job_id}/functions/losses.jsonl")
        return [msgspec.json.decode(line) for line in data.splitlines()]


@contextlib.contextmanager
def functions_platform(
    cluster: Cluster, namespace: str, around: Surroundings, folder: Path, **changes: Any
) -> Iterator[FunctionsPlatform]:
    """A platform with its journal in PostgreSQL, its objects in S3, its parameters in Redis, and exactly its rights."""
    install_definitions(cluster.api)
    database = namespace.replace("-", "_")
    with psycopg.connect(around.postgres.postgres_url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
    redis = f"redis://{around.redis.host}:{around.redis.port}/0"
    values: dict[str, Any] = {
        "name": namespace,
        "namespace": namespace,
        "namespaces": [namespace],
        "advertise": "127.0.0.1",
        "device_resource": "example.com/device",
        "device_kind": "cpu",
        "node_selector": {"test": namespace},
        "store_url": around.store_url(namespace),
        "journal_url": around.postgres.postgres_url(database).replace(f":{around.postgres.password}@", "@"),
        "lease_s": LEASE_S,
        "functions": {
            "provider": "emulator",
            "endpoint": around.emulator.endpoint,
            "parameter_store": redis,
            "places": 2,
        },
        **changes,
    }
    with installed(cluster, RIGHTS, **values) as settings:
        kubeconfig = kubeconfig_of(cluster, namespace, namespace, folder)
        platform = FunctionsPlatform(cluster, around, settings, kubeconfig, folder)
        try:
            yield platform
        finally:
            platform.end()


def wait_until(what: str, is_so: Callable[[], bool], within_s: float) -> None:
    """Wait for something that is not of the cluster."""
    end_s = time.monotonic() + PATIENCE_S + within_s
    while not is_so():
        assert time.monotonic() < end_s, f"{what}: not within {PATIENCE_S + within_s:g} s"
        time.sleep(0.2)
