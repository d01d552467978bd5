"""A GPU share daemon with tenants of one's own, for measuring and trying out; no platform is needed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from springtide.backends.processes import identify
from springtide.backends.sharing.gpu.segments import SOCKET_VARIABLE
from springtide.backends.sharing.gpu.table import (
    SOCKET_NAME,
    STATUS_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
    GpuTenantEntry,
)
from springtide.backends.sharing.table import read_whole
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.status.shares import TenantStatus
from springtide.core.wire.workers import encode_frame
from springtide.core.workload import ReplicaId, WorkloadId

WHOLE = Share(request=1.0, limit=1.0)
_PATIENCE_S = 10.0
_POLL_S = 0.01
# The daemon writes its status this often, at the least.
_SETTLE_S = 0.6


class BenchTenant(NamedTuple):
    """A process that holds a share of the device with this UUID (32 hexadecimal digits)."""

    pid: int
    device: str
    share: Share = WHOLE
    is_slo: bool = False


class RunningDaemon:
    """The daemon of `directory`, as a process that ends with this object.

    `environment` is added to this process's own for it, for example to turn its control off.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._directory = directory / "daemon"
        self._directory.mkdir(mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> RunningDaemon:
        command = [sys.executable, "-m", "springtide.backends.sharing.gpu.daemon", str(self._directory)]
        self._process = subprocess.Popen(command, env=self._environment)
        self.until(self._connects, "the GPU share daemon does not answer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def environment(self, *, is_there: bool) -> dict[str, str]:
        """What a tenant is told of the daemon, or of one that is not there."""
        name = TENANT_SOCKET_NAME if is_there else f"no-{TENANT_SOCKET_NAME}"
        return {SOCKET_VARIABLE: str(self._directory / name)}

    def grant(self, tenants: Mapping[str, BenchTenant]) -> None:
        """From now on these hold shares, by name, and no others. Raises BackendError if there is no such process."""
        entries = tuple(_entry(name, tenant) for name, tenant in tenants.items())
        self._connection.sendall(encode_frame(GpuTable(tenants=entries, sent_at_s=time.monotonic())))
        self.until(lambda: len(self._tenants()) == len(entries), "the GPU share daemon does not take its table")

    def num_launches(self, name: str, at_least: int = 0) -> int:
        """How many launches the tenant's processes have counted; waits a while for it to become `at_least`."""
        time.sleep(_SETTLE_S)
        with contextlib.suppress(BackendError):
            self.until(lambda: self._counted(name) >= at_least, "")
        return self._counted(name)

    def status(self) -> GpuDaemonStatus | None:
        """What the daemon last said."""
        return read_whole(self._directory / STATUS_NAME, GpuDaemonStatus)

    def _counted(self, name: str) -> int:
        return sum(tenant.num_launches for tenant in self._tenants() if tenant.workload_id == name)

    def _tenants(self) -> tuple[TenantStatus, ...]:
        found = self.status()
        return () if found is None else found.sharing.tenants

    def _connects(self) -> bool:
        try:
            self._connection.connect(str(self._directory / SOCKET_NAME))
        except OSError:
            return False
        return True

    def until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        """Poll until the condition holds. Raises BackendError after a while, or if the daemon ends."""
        until_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            code = None if self._process is None else self._process.poll()
            if code is not None or time.monotonic() > until_s:
                raise BackendError(otherwise if code is None else f"{otherwise}: it ended with code {code}")
            time.sleep(_POLL_S)


def _entry(name: str, tenant: BenchTenant) -> GpuTenantEntry:
    process = identify(tenant.pid)
    if process is None:
        raise BackendError(f"there is no process {tenant.pid}")
    return GpuTenantEntry(
        workload_id=WorkloadId(name),
        replica_id=ReplicaId(f"{name}-0"),
        device_id=DeviceId(f"{name} GPU"),
        device_uuid=f"GPU-{uuid.UUID(tenant.device)}",
        share=tenant.share,
        process=process,
        is_slo=tenant.is_slo,
    )
