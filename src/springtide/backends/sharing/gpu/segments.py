"""The two files of shared memory of each tenant of a GPU: the grant, which the daemon writes, and the usage.

The layout is that of native/include/springtide_share.h. The daemon reads and writes by system call and never through a
mapping: a tenant may truncate its usage, and a mapping of a truncated file ends the process that looks at it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import platform
import resource
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from springtide.core.errors import BackendError

MAGIC = 0x53545348
LAYOUT = 1
SOCKET_VARIABLE = "SPRINGTIDE_GPU_SOCKET"
NUM_PROCESSES = 64
NUM_CYCLES = 16
SEGMENT_BYTES = 8192
_SPARE_FILES = 16
UNLIMITED = 1
CLOSED = 2
OK, UNKNOWN, FULL, BAD = range(4)

Fields = Sequence[tuple[str, str]]
GRANT_FIELDS: Fields = (
    ("magic", "I"),
    ("layout", "I"),
    ("segment_id", "Q"),
    ("device_uuid", "16s"),
    ("tenant", "64s"),
    ("memory_limit_bytes", "Q"),
    ("stale_after_ns", "Q"),
    ("max_wait_ns", "Q"),
    ("unused_0", "Q"),
    ("heartbeat_ns", "Q"),
    ("granted_ns", "Q"),
    ("wake", "I"),
    ("flags", "I"),
    ("rate_ppm", "Q"),
)
PROCESS_FIELDS: Fields = (
    ("pid", "I"),
    ("num_waiting", "I"),
    ("start_ticks", "Q"),
    ("memory_bytes", "Q"),
    ("num_launches", "Q"),
    ("unused", "32s"),
)
USAGE_FIELDS: Fields = (
    ("magic", "I"),
    ("layout", "I"),
    ("segment_id", "Q"),
    ("unused_0", "48s"),
    ("used_ns", "Q"),
    ("throttled_ns", "Q"),
    ("num_open", "Q"),
    ("num_denied", "Q"),
    ("measured_ns", "Q"),
    ("estimated_ns", "Q"),
    ("memory_turn", "Q"),
    ("unused_1", "136s"),
    ("processes", f"{64 * NUM_PROCESSES}s"),
    ("num_cycles_begun", "Q"),
    ("num_cycles_ended", "Q"),
    ("cycle_started_ns", "Q"),
    ("unused_2", "40s"),
    ("cycle_ns", f"{8 * NUM_CYCLES}s"),
)
HELLO_FIELDS: Fields = (("magic", "I"), ("layout", "I"), ("device_uuid", "16s"))
WELCOME_FIELDS: Fields = (
    ("magic", "I"),
    ("layout", "I"),
    ("status", "I"),
    ("process_slot", "I"),
    ("segment_id", "Q"),
    ("retry_ms", "I"),
    ("unused_0", "I"),
)


def offsets_of(fields: Fields) -> dict[str, int]:
    """The offset of each field. Every field is aligned, so that the compiler adds no padding."""
    found, end = {}, 0
    for name, code in fields:
        found[name] = end
        end += struct.calcsize(f"={code}")
    return found


def struct_of(fields: Fields) -> struct.Struct:
    """The record of these fields in the machine's byte order, without padding."""
    return struct.Struct("=" + "".join(code for _, code in fields))


GRANT, USAGE, HELLO, WELCOME, PROCESS = (
    struct_of(fields) for fields in (GRANT_FIELDS, USAGE_FIELDS, HELLO_FIELDS, WELCOME_FIELDS, PROCESS_FIELDS)
)
_GRANT_AT = offsets_of(GRANT_FIELDS)
_USAGE_AT = offsets_of(USAGE_FIELDS)
_PROCESSES_AT = _USAGE_AT["processes"]
_TICK = struct.Struct("=QQIIQ")
_HEAD = struct.Struct("=6Q")
_CYCLES = struct.Struct(f"=3Q40s{NUM_CYCLES}Q")
_PROCESS_HEAD = struct.Struct("=IIQQQ")
_IDENTITY = struct.Struct("=IIQ")
_WORD = struct.Struct("=Q")
_START = struct.Struct("=IIQ")
_MAX_NS = 1 << 62
_FUTEX_WAKE = 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process's slot; written by the tenant, except for the identity, so not to be trusted."""

    num_waiting: int = 0
    memory_bytes: int = 0
    num_launches: int = 0


@dataclass(slots=True)
class UsageSegment:
    """The usage file of a tenant; whatever it contains, the numbers are between 0 and 2**64 - 1.

    `cycles` are the newest launch cycles, number k at k % NUM_CYCLES.
    """

    used_ns: int = 0
    throttled_ns: int = 0
    num_open: int = 0
    num_denied: int = 0
    measured_ns: int = 0
    estimated_ns: int = 0
    data: bytes = b""

    def cycles(self) -> tuple[int, int, int, tuple[int, ...]]:
        """Return how many launch cycles began and ended, when the present one began (0: none), and durations in ns."""
        begun, ended, started_ns, _, *durations = _CYCLES.unpack_from(self.data, _USAGE_AT["num_cycles_begun"])
        return begun, ended, started_ns, tuple(durations)

    def process(self, slot: int) -> ProcessUsage:
        _, waiting, _, memory, launches = _PROCESS_HEAD.unpack_from(self.data, _PROCESSES_AT + PROCESS.size * slot)
        return ProcessUsage(waiting, memory, launches)


def segment_directory(directory: Path) -> Path:
    """Return the directory (0700, owned by this user) of this daemon's segments: in memory if possible.

    On a disk, a launch, which counts itself there, could be delayed by the disk. Raises BackendError.
    """
    digest = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    in_memory = _SHARED_MEMORY / f"springtide-{os.getuid()}-{digest}.gpu"
    return private_directory(in_memory if os.access(_SHARED_MEMORY, os.W_OK) else directory / "gpu-segments")


def private_directory(place: Path) -> Path:
    """Return the directory, created (0700) if missing. Raises BackendError if it is another user's."""
    try:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise BackendError(f"{place} belongs to another user; remove it")
        place.chmod(0o700)
    except OSError as error:
        raise BackendError(f"cannot make {place}: {error.strerror}") from error
    return place


class Segments:
    """Both files of one tenant, opened by the daemon."""

    def __init__(self, directory: Path, name: str, grant_bytes: bytes, descriptors: tuple[int, int, int]) -> None:
        self._paths = (directory / f"{name}.grant", directory / f"{name}.usage")
        self._grant, self.grant_descriptor, self.usage_descriptor = descriptors
        self.segment_id: int = _WORD.unpack_from(grant_bytes, _GRANT_AT["segment_id"])[0]
        tick = _TICK.unpack_from(grant_bytes, _GRANT_AT["heartbeat_ns"])
        self.heartbeat_ns, self.granted_ns, self._wake, self.flags, self.rate_ppm = tick
        # Only for the address of the futex word: nothing is ever read or written through it.
        self._mapping = mmap.mmap(self._grant, SEGMENT_BYTES)
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(self._mapping, _GRANT_AT["wake"])
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Change the memory limit (0: none)."""
        os.pwrite(self._grant, _WORD.pack(min(limit_bytes, _MAX_NS)), _GRANT_AT["memory_limit_bytes"])

    def write_tick(self, now_ns: int, granted_ns: int, flags: int, rate_ppm: int) -> None:
        """Write the heartbeat and the total grant, which never decreases."""
        self.heartbeat_ns, self.flags, self.rate_ppm = now_ns, flags, rate_ppm
        if granted_ns > self.granted_ns:
            self.granted_ns = min(granted_ns, _MAX_NS)
            # A new word, so that a process about to wait for the old one does not sleep.
            self._wake = (self._wake + 1) & 0xFFFFFFFF
        data = _TICK.pack(now_ns, self.granted_ns, self._wake, flags, rate_ppm)
        os.pwrite(self._grant, data, _GRANT_AT["heartbeat_ns"])

    def grant_used(self, used_ns: int) -> None:
        """Raise the grant to what was used; written with the next tick."""
        self.granted_ns = max(self.granted_ns, min(used_ns, _MAX_NS))

    def wake(self) -> None:
        _LIBC.syscall(_FUTEX_CALL, self._address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def read(self) -> UsageSegment | None:
        """Return what the tenant's processes have written; None if they truncated the file."""
        data = os.pread(self.usage_descriptor, USAGE.size, 0)
        if len(data) < USAGE.size:
            return None
        used, throttled, opened, denied, measured, estimated = _HEAD.unpack_from(data, _USAGE_AT["used_ns"])
        return UsageSegment(used, throttled, opened, denied, measured, estimated, data)

    def has_used(self, used_ns: int) -> bool:
        """Whether the tenant has launched since `used_ns` was read; the cheapest check."""
        return os.pread(self.usage_descriptor, _WORD.size, _USAGE_AT["used_ns"]) != _WORD.pack(used_ns)

    def occupy(self, slot: int, pid: int, start_ticks: int) -> None:
        """Assign a cleared slot to a process."""
        os.pwrite(self.usage_descriptor, _IDENTITY.pack(pid, 0, start_ticks), _PROCESSES_AT + PROCESS.size * slot)

    def clear(self, slot: int) -> None:
        """Free a slot: its process's memory no longer counts, and if it had the turn to add up memory, release that."""
        os.pwrite(self.usage_descriptor, bytes(PROCESS.size), _PROCESSES_AT + PROCESS.size * slot)
        if os.pread(self.usage_descriptor, _WORD.size, _USAGE_AT["memory_turn"]) == _WORD.pack(slot + 1):
            os.pwrite(self.usage_descriptor, bytes(_WORD.size), _USAGE_AT["memory_turn"])

    def occupants(self) -> dict[int, tuple[int, int]]:
        """Return (pid, start_ticks) of every used slot, as far as the tenant has not changed them."""
        data = os.pread(self.usage_descriptor, USAGE.size, 0)
        found = {}
        for slot in range(NUM_PROCESSES):
            offset = _PROCESSES_AT + PROCESS.size * slot
            if len(data) < offset + PROCESS.size:
                break
            pid, _, start_ticks = _IDENTITY.unpack_from(data, offset)
            if pid:
                found[slot] = (pid, start_ticks)
        return found

    def is_whole(self) -> bool:
        """Whether both files are still at their paths and long enough."""
        try:
            for path, descriptor in zip(self._paths, (self._grant, self.usage_descriptor), strict=True):
                held = os.fstat(descriptor)
                if held.st_size < SEGMENT_BYTES or not os.path.samestat(held, path.stat()):
                    return False
        except OSError:
            return False
        return True

    def give_up(self, now_ns: int) -> None:
        """Tell the tenant's processes to ask again, lift their limits, and remove the files."""
        with contextlib.suppress(OSError):
            self.write_tick(now_ns, _MAX_NS, UNLIMITED | CLOSED, self.rate_ppm)
            self.wake()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the files, which stay as they are."""
        if self._word is None:
            return
        self._word = None
        # The word referenced the mapping; reference counting has just collected it.
        self._mapping.close()
        for descriptor in (self._grant, self.grant_descriptor, self.usage_descriptor):
            os.close(descriptor)


def make_segments(
    directory: Path,
    name: str,
    *,
    device_uuid: bytes,
    tenant: str,
    memory_limit_bytes: int,
    stale_after_ns: int,
    max_wait_ns: int,
    now_ns: int,
) -> Segments:
    """Create both files of a tenant, replacing older ones of that name. Raises BackendError."""
    segment_id = secrets.randbits(64) | 1
    text = tenant.encode()[:63].decode(errors="ignore").encode()
    grant = GRANT.pack(
        *(MAGIC, LAYOUT, segment_id, device_uuid, text, memory_limit_bytes, stale_after_ns, max_wait_ns),
        *(0, now_ns, 0, 0, 0, 0),
    )
    usage = _START.pack(MAGIC, LAYOUT, segment_id)
    try:
        for suffix, data in (("grant", grant), ("usage", usage)):
            temporary = directory / f".{name}.{suffix}"
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
                os.pwrite(descriptor, data, 0)
            finally:
                os.close(descriptor)
            os.replace(temporary, directory / f"{name}.{suffix}")
    except OSError as error:
        raise BackendError(f"cannot make the shared memory of {tenant} in {directory}: {error.strerror}") from error
    made = adopt_segments(directory, name)
    if made is None:
        raise BackendError(f"cannot keep the shared memory of {tenant} in {directory} open")
    return made


def adopt_segments(directory: Path, name: str) -> Segments | None:
    """Open the files that an earlier daemon left; None if they are missing or damaged."""
    grant_path, usage_path = directory / f"{name}.grant", directory / f"{name}.usage"
    opened: list[int] = []
    try:
        for path, mode in ((grant_path, os.O_RDWR), (grant_path, os.O_RDONLY), (usage_path, os.O_RDWR)):
            opened.append(os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW))
        if not may_keep(max(opened)):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        sizes = [os.fstat(descriptor).st_size for descriptor in opened]
        grant, usage = os.pread(opened[0], GRANT.size, 0), os.pread(opened[2], _START.size, 0)
        is_whole = (
            min(sizes) >= SEGMENT_BYTES
            and _START.unpack_from(grant) == _START.unpack_from(usage)
            and _START.unpack_from(grant)[:2] == (MAGIC, LAYOUT)
            and not _TICK.unpack_from(grant, _GRANT_AT["heartbeat_ns"])[3] & CLOSED
        )
        if is_whole:
            return Segments(directory, name, grant, (opened[0], opened[1], opened[2]))
    except (OSError, struct.error):
        pass
    for descriptor in opened:
        os.close(descriptor)
    return None


def allow_many_files() -> None:
    """Raise the soft limit of open descriptors to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def may_keep(descriptor: int) -> bool:
    """Whether enough descriptors are left beyond this one for files that are opened briefly: in /proc, the status.

    The kernel assigns the lowest free number.
    """
    return descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES
