"""Replicas as processes of their own, with a class from a text, for a gateway in the test's process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

import springtide
from kits.runtime.replica_plane import Plane
from kits.service.gateway_replicas import make_service
from springtide.core.tokens import gateway_token, workload_key
from springtide.core.wire.workers import Failed, Ready, Stop, WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId
from springtide.service.gateway.application import ReplicaRoute

RUNNER = """
import sys, msgspec
from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.serving.replica import run_replica
spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
link = ControlLink(spec)
link.start()
code = run_replica(spec, link)
link.close()
sys.exit(code)
"""
POD_RUNNER = """
import sys, msgspec
from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.serving.pod import run_serving_pod
sys.exit(run_serving_pod(msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec), sys.argv[1]))
"""
KEY = workload_key(b"master", "double-1")
_hosts = (f"127.79.{os.getpid() % 250}.{number}" for number in itertools.count(1))


class RealReplica:
    """A replica's process, the control plane's end of its link, and the route to it. `is_pod`: over TCP."""

    def __init__(self, directory: Path, service, name: str, *, is_pod: bool = False) -> None:
        directory.mkdir()
        self.replica_id = ReplicaId(name)
        self.plane = Plane(directory / "c.sock")
        spec = WorkerSpec(
            workload=service,
            replica_id=self.replica_id,
            generation=1,
            control_address=f"unix://{directory / 'c.sock'}",
            token="secret",
            work_dir=str(directory / "w"),
            log_path="",
            listen_host=next(_hosts) if is_pod else "",
        )
        self.token = gateway_token(KEY) if is_pod else ""
        runner = [POD_RUNNER, KEY] if is_pod else [RUNNER]
        environment = {**os.environ, "PYTHONPATH": str(Path(springtide.__file__).parents[1])}
        self.process = subprocess.Popen([sys.executable, "-c", *runner], stdin=subprocess.PIPE, env=environment)
        self.process.stdin.write(msgspec.json.encode(spec))
        self.process.stdin.close()
        self.address = ""

    def wait_ready(self) -> None:
        report = self.plane.next(Ready | Failed)
        assert isinstance(report, Ready), report
        self.address = report.address

    def route(self) -> ReplicaRoute:
        return ReplicaRoute(replica_id=self.replica_id, address=self.address, is_ready=True, token=self.token)

    def stop(self, grace_s: float) -> None:
        self.plane.order(Stop(grace_s=grace_s))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.wait(30)
        self.plane.close()


@asynccontextmanager
async def served(harness, directory: Path, source: str, *, num_replicas: int = 1, is_pod: bool = False, **changes):
    """Deploy the class `Served` of a text to real replicas behind the harness's gateway, and yield these."""
    file = directory / "served.py"
    file.write_text(source)
    entrypoint = Entrypoint(source_path=str(file), object_name="Served", kind="class")
    service = msgspec.structs.replace(make_service(**changes), entrypoint=entrypoint)
    names = [f"r{number}" for number in range(num_replicas)]
    replicas = [RealReplica(directory / name, service, name, is_pod=is_pod) for name in names]
    try:
        # At a time: one that loads for long gives up a control plane that does not answer it.
        await asyncio.gather(*(asyncio.to_thread(replica.wait_ready) for replica in replicas))
        await harness.serve(*replicas, service=service)
        yield replicas
    finally:
        for replica in replicas:
            replica.close()
