"""Messages between executor and GPU share daemon: the whole table of tenants, and the status in a file."""

from __future__ import annotations

import uuid

import msgspec

from springtide.backends.processes import ProcessIdentity
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import ReplicaId, WorkloadId

# Files in the daemon's directory. The executor connects to the first (SOCK_STREAM, frames of core/wire/workers.py),
# tenants to the second (SOCK_SEQPACKET, springtide_share.h).
SOCKET_NAME = "gpu.sock"
TENANT_SOCKET_NAME = "gpu-tenants.sock"
STATUS_NAME = "gpu.json"
# The newest table, for a daemon that starts before a platform connects.
TABLE_NAME = "gpu.table"
LOCK_NAME = "gpu.lock"
# Exit code of a daemon whose directory is served by another one.
EXIT_TAKEN = 3
_UUID_PREFIXES = ("GPU-", "MIG-")


class GpuTenantEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One replica or worker that holds a share of one GPU, and its processes: those of a leader, or of a pod.

    `process` is the leader; processes that it started belong to it. Without one, `pod_uid` is the pod in whose
    containers the processes run (pods.py). `device_uuid` is as in nvidia-smi ("GPU-..."). `slot` is its slot in the
    slots' file (-1: none), `is_slo` whether its latency matters (a service's). A worker on two devices has two entries.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    device_id: DeviceId
    device_uuid: str
    share: Share
    process: ProcessIdentity | None = None
    pod_uid: str = ""
    is_slo: bool
    slot: int = -1


class GpuTable(msgspec.Struct, frozen=True, kw_only=True):
    """All tenants that hold a share of a GPU; one that is missing no longer holds one.

    `slots_path` is empty if no tenant reports its activity. `sent_at_s` is on the machine's monotonic clock.
    """

    tenants: tuple[GpuTenantEntry, ...]
    slots_path: str = ""
    sent_at_s: float = 0.0


class GpuDaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's status as of `written_at_s` on the machine's monotonic clock.

    `cpu_fraction` is the fraction of a core that it has used lately. `num_processes` have a slot, `num_unknown` have
    asked lately without belonging to a tenant, `num_answers` counts answered requests, `num_refused` invalid or late
    ones. `num_files` counts open descriptors, `num_made` and `num_adopted` the tenants with new and with adopted files.
    """

    pid: int
    written_at_s: float
    sharing: SharingStatus
    cpu_fraction: float = 0.0
    num_ticks: int = 0
    num_processes: int = 0
    num_unknown: int = 0
    num_answers: int = 0
    num_refused: int = 0
    num_deaths: int = 0
    num_files: int = 0
    num_made: int = 0
    num_adopted: int = 0


def uuid_bytes(text: str) -> bytes:
    """Return the 16 bytes of a device's UUID as in the driver. Raises BackendError for other texts."""
    for prefix in _UUID_PREFIXES:
        text = text.removeprefix(prefix)
    try:
        return uuid.UUID(text).bytes
    except ValueError as error:
        raise BackendError(f"{text!r} is no UUID of a GPU") from error
