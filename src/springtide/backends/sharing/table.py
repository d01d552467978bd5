"""Messages between executor and share daemon: the whole table of sharers, and the status in a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from springtide.backends.processes import ProcessIdentity
from springtide.backends.sharing.gpu.table import GpuTenantEntry
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.core.workload import ReplicaId, WorkloadId

# One mechanism instead of the best: for tests, and for machines whose control groups are not this user's.
MECHANISM_VARIABLE = "SPRINGTIDE_SHARE_MECHANISM"
SOCKET_NAME = "shares.sock"
STATUS_NAME = "shares.json"
SLOTS_NAME = "shares.slots"
_SHARED_MEMORY = Path("/dev/shm")
T = TypeVar("T", bound=msgspec.Struct)


class SharerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One process that holds a share: its slot in the slots' file, and whether its latency matters (a service's).

    One on several devices has an entry for each.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    device_id: DeviceId
    share: Share
    slot: int
    process: ProcessIdentity
    is_slo: bool


class ShareTable(msgspec.Struct, frozen=True, kw_only=True):
    """All sharers; one that is missing no longer holds a share.

    `sent_at_s` is on the machine's monotonic clock. `device_cpus` cores make one device.
    """

    sharers: tuple[SharerEntry, ...]
    slots_path: str
    device_cpus: float
    sent_at_s: float


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's status as of `written_at_s` on the machine's monotonic clock.

    `cpu_fraction` is the fraction of a core that it has used lately, `num_writes` how often a limit was changed.
    """

    pid: int
    written_at_s: float
    sharing: SharingStatus
    cpu_fraction: float = 0.0
    num_ticks: int = 0
    num_writes: int = 0


def slots_path(run_directory: Path) -> Path:
    """The path of the slots of the platform with these sockets: in memory if the machine has such a file system.

    On a disk, a worker that writes its slot could be delayed by the disk.
    """
    digest = hashlib.sha256(os.fsencode(run_directory)).hexdigest()[:16]
    if os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY / f"springtide-{os.getuid()}-{digest}.slots"
    return run_directory / SLOTS_NAME


def group_name(run_directory: Path) -> str:
    return f"springtide-{hashlib.sha256(os.fsencode(run_directory)).hexdigest()[:16]}"


def status_of(entry: SharerEntry | GpuTenantEntry) -> TenantStatus:
    """Return the status of an entry as far as it follows from the table."""
    return TenantStatus(
        workload_id=entry.workload_id,
        replica_id=entry.replica_id,
        device_id=entry.device_id,
        request=entry.share.request,
        limit=entry.share.limit,
        memory_mb=entry.share.memory_mb,
    )


def write_whole(path: Path, message: msgspec.Struct) -> None:
    """Replace a file atomically. Raises BackendError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(message))
        os.replace(temporary, path)
    except OSError as error:
        raise BackendError(f"cannot write {path}: {error.strerror}") from error


def read_whole(path: Path, kind: type[T]) -> T | None:
    """Return what `write_whole` last wrote there; None if it is missing or unreadable."""
    try:
        return decode_json(path.read_bytes(), kind)
    except (OSError, ValueError):
        return None
