"""A GPU share daemon of one's own with one tenant, for measuring and trying out; no platform is needed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from springtide.backends.gpu.gpu_table import (
    SOCKET_NAME,
    STATUS_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
    GpuTenantEntry,
    read_status,
)
from springtide.backends.gpu.segments import SOCKET_VARIABLE
from springtide.backends.processes import identify
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.wire import encode_frame
from springtide.core.workload import ReplicaId, WorkloadId

_PATIENCE_S = 10.0
_POLL_S = 0.01
# The daemon writes its status this often, at the least.
_SETTLE_S = 0.6


class RunningDaemon:
    """The daemon of `directory`, as a process that ends with this object."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "daemon"
        self._directory.mkdir(mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> RunningDaemon:
        command = [sys.executable, "-m", "springtide.backends.gpu.gpu_daemon", str(self._directory)]
        self._process = subprocess.Popen(command)
        self._until(self._connects, "the GPU share daemon does not answer")
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

    def grant(self, pid: int, device: str, share: Share | None = None) -> None:
        """From now on this process holds a share (all of it by default) of the device with this UUID, and nobody else.

        Raises BackendError if there is no such process.
        """
        process = identify(pid)
        if process is None:
            raise BackendError(f"there is no process {pid}")
        entry = GpuTenantEntry(
            workload_id=WorkloadId("bench"),
            replica_id=ReplicaId("bench-0"),
            device_id=DeviceId("gpu-0"),
            device_uuid=f"GPU-{uuid.UUID(device)}",
            share=share or Share(request=1.0, limit=1.0),
            process=process,
            is_slo=False,
        )
        self._connection.sendall(encode_frame(GpuTable(tenants=(entry,), sent_at_s=time.monotonic())))
        self._until(lambda: bool(self._tenants()), "the GPU share daemon does not take its table")

    def wait_until_held(self, launch: Callable[[], int]) -> None:
        """Have `launch` called now and then until the daemon sees launches counted."""
        self._until(lambda: bool(launch()) and self.num_launches() > 0, "no launch is counted", poll_s=_SETTLE_S)

    def num_launches(self, at_least: int = 0) -> int:
        """How many launches the tenant's processes have counted; waits a while for it to become `at_least`."""
        time.sleep(_SETTLE_S)
        with contextlib.suppress(BackendError):
            self._until(lambda: self._counted() >= at_least, "")
        return self._counted()

    def status(self) -> GpuDaemonStatus | None:
        """What the daemon last said."""
        return read_status(self._directory / STATUS_NAME)

    def _counted(self) -> int:
        return sum(tenant.num_launches for tenant in self._tenants())

    def _tenants(self) -> tuple:
        found = self.status()
        return () if found is None else found.sharing.tenants

    def _connects(self) -> bool:
        try:
            self._connection.connect(str(self._directory / SOCKET_NAME))
        except OSError:
            return False
        return True

    def _until(self, is_so: Callable[[], bool], otherwise: str, poll_s: float = _POLL_S) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > until_s or (self._process is not None and self._process.poll() is not None):
                raise BackendError(f"{otherwise} (its process: {self._process and self._process.poll()})")
            time.sleep(poll_s)
