"""The slots in which sharers of a device report their activity: one fixed-size record each in a mapped file.

A worker writes its own slot, without a lock and without a system call; the share daemon reads all slots every few
milliseconds. Writers run user code, so the reader checks and bounds every field.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from springtide.core.errors import BackendError

NUM_SLOTS = 1024
# How many ended iterations a slot keeps; a reader that is too late misses the oldest.
NUM_KEPT = 32
MAX_BATCH_SIZE = 1 << 31
MAX_QUEUED = 1 << 31
MAX_ITERATION_S = 1e6
_MAX_COUNT = 1 << 53
_WORD_BYTES = 8
# Words of a slot: sequence, begun, ended, start of the running iteration, its batch size, queue length, two spare ones;
# then the ring of ended iterations, two words each: duration and batch size.
_SEQUENCE, _BEGUN, _ENDED, _STARTED, _BATCH, _QUEUED = range(6)
_RING = 8
_NUM_WORDS = _RING + 2 * NUM_KEPT
SLOT_BYTES = _NUM_WORDS * _WORD_BYTES
_MAGIC = b"STSLOT01"
_HEADER = struct.Struct("=8sII")
_HEADER_BYTES = 64
_HEAD = struct.Struct("=QQQdQQQQ")
_ENTRY = struct.Struct("=dQ")
_MAX_READS = 3


class EndedIteration(msgspec.Struct, frozen=True, array_like=True):
    """An iteration (a batch served, a training step's computation) that has ended, as its worker measured it."""

    batch_size: int
    duration_s: float


class SlotReading(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a slot. `started_s` is on the machine's monotonic clock; 0: no iteration runs.

    `finished` are the iterations that ended since the previous reading, oldest first, at most NUM_KEPT.
    """

    num_begun: int = 0
    num_ended: int = 0
    started_s: float = 0.0
    batch_size: int = 0
    num_queued: int = 0
    finished: tuple[EndedIteration, ...] = ()


def make_slots(path: Path, num_slots: int = NUM_SLOTS) -> None:
    """Create the file of empty slots (mode 0600), or replace an older one. Raises BackendError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _HEADER_BYTES + num_slots * SLOT_BYTES)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, num_slots, SLOT_BYTES), 0)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        raise BackendError(f"cannot make the file of share slots {path}: {error.strerror}") from error


def clear_slot(path: Path, slot: int) -> None:
    """Empty one slot before it is given to another worker. Raises BackendError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, bytes(SLOT_BYTES), _offset_of(descriptor, slot))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot clear slot {slot} of {path}: {error}") from error


class SlotWriter:
    """The worker's side of a slot. One thread calls `begin` and `end`; any thread may call `queued`.

    `clock` is the machine's monotonic clock, in seconds (time.monotonic). With an empty path the calls have no effect,
    so that callers need no special case. A call takes well under a microsecond.
    """

    def __init__(self, path: str, slot: int, clock: Callable[[], float]) -> None:
        memory: mmap.mmap | bytearray = bytearray(SLOT_BYTES)
        offset = 0
        if path:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    offset = _offset_of(descriptor, slot)
                    memory = mmap.mmap(descriptor, offset + SLOT_BYTES)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError) as error:
                raise BackendError(f"cannot open share slot {slot} of {path}: {error}") from error
        view = memoryview(memory)[offset : offset + SLOT_BYTES]
        self._memory, self._view = memory, view
        self._words = view.cast("Q")
        self._seconds = view.cast("d")
        self._clock = clock
        # If the same worker has used the slot before, its counts go on from there.
        self._sequence = (self._words[_SEQUENCE] + 1) & ~1
        self._begun = self._words[_BEGUN]
        self._ended = self._words[_ENDED]
        self._started_s = 0.0
        self._batch_size = 0

    def begin(self, batch_size: int) -> None:
        """An iteration over `batch_size` samples begins now; one that still runs counts as abandoned."""
        words = self._words
        self._begun += 1
        self._batch_size = batch_size
        self._started_s = started_s = self._clock()
        # The sequence is odd during a write: a reader then reads again.
        words[_SEQUENCE] = self._sequence + 1
        words[_BEGUN] = self._begun
        words[_BATCH] = batch_size
        self._seconds[_STARTED] = started_s
        self._sequence += 2
        words[_SEQUENCE] = self._sequence

    def end(self) -> None:
        """The running iteration ends now; does nothing if none runs."""
        started_s = self._started_s
        if not started_s:
            return
        words, seconds = self._words, self._seconds
        place = _RING + 2 * (self._ended % NUM_KEPT)
        self._ended += 1
        self._started_s = 0.0
        words[_SEQUENCE] = self._sequence + 1
        seconds[place] = self._clock() - started_s
        words[place + 1] = self._batch_size
        words[_ENDED] = self._ended
        seconds[_STARTED] = 0.0
        self._sequence += 2
        words[_SEQUENCE] = self._sequence

    def abandon(self) -> None:
        """The running iteration failed or was cancelled: it does not count as a measurement."""
        self._started_s = 0.0
        self._seconds[_STARTED] = 0.0

    def queued(self, num_queued: int) -> None:
        """`num_queued` requests wait for this worker now."""
        self._words[_QUEUED] = num_queued

    def close(self) -> None:
        """Close the file; no other method may be called afterwards."""
        for view in (self._words, self._seconds, self._view):
            view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()


class SlotReader:
    """The daemon's side: reads whole slots. Any content is safe to read, even a truncated file.

    It uses system calls instead of a mapping, because a read from the mapping of a truncated file kills the process
    (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(f"cannot open the share slots {path}: {error.strerror}") from error
        self._seen: dict[tuple[int, str], tuple[bytes, SlotReading]] = {}

    def read(self, slot: int, on: str = "") -> SlotReading | None:
        """Return the slot's present content; None while it is being written, or if there is no such slot.

        `finished` holds the iterations that ended since the last `read` of the slot that did not return None. A worker
        on several devices has one slot, which is read for each: `on` names the device.
        """
        if not 0 <= slot < NUM_SLOTS:
            return None
        offset = _HEADER_BYTES + slot * SLOT_BYTES
        seen = self._seen.get((slot, on))
        for _ in range(_MAX_READS):
            first = self._pread(offset)
            if len(first) < SLOT_BYTES:
                return None
            if seen is not None and first == seen[0]:
                return seen[1]
            # The sequence is odd during a write, and the two reads differ if there was one in between.
            if not first[0] & 1 and self._pread(offset) == first:
                return self._take((slot, on), first, None if seen is None else seen[1])
        return None

    def has_changed(self, slot: int, on: str = "") -> bool:
        """Whether a slot was written since `read` last returned its content. Cheaper than `read`."""
        seen = self._seen.get((slot, on))
        head = os.pread(self._descriptor, _HEAD.size, _HEADER_BYTES + slot * SLOT_BYTES)
        return seen is None or seen[0][: _HEAD.size] != head

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot that another worker uses from now on."""
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] != slot}

    def is_of(self, path: Path) -> bool:
        """Whether the open file is the one at `path`, which may have been replaced."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _pread(self, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, SLOT_BYTES, offset)
        except OSError:
            return b""

    def _take(self, key: tuple[int, str], data: bytes, before: SlotReading | None) -> SlotReading:
        _, begun, ended, started_s, batch_size, num_queued, _, _ = _HEAD.unpack_from(data)
        begun, ended = min(begun, _MAX_COUNT), min(ended, _MAX_COUNT)
        is_running = math.isfinite(started_s) and 0.0 < started_s < MAX_ITERATION_S * 1e6
        # The first reading reports no iterations from before it. Counts that decrease belong to another worker.
        num_fresh = 0 if before is None or ended < before.num_ended else min(NUM_KEPT, ended - before.num_ended)
        reading = SlotReading(
            num_begun=begun,
            num_ended=ended,
            started_s=started_s if is_running else 0.0,
            batch_size=min(batch_size, MAX_BATCH_SIZE) if is_running else 0,
            num_queued=min(num_queued, MAX_QUEUED),
        )
        # Kept without `finished`, so that iterations are not reported again when the same bytes are read once more.
        self._seen[key] = (data, reading)
        if not num_fresh:
            return reading
        finished = tuple(_entries(data, ended, num_fresh))
        return msgspec.structs.replace(reading, finished=finished)


def _entries(data: bytes, ended: int, num_fresh: int) -> list[EndedIteration]:
    found = []
    for number in range(ended - num_fresh, ended):
        duration_s, batch_size = _ENTRY.unpack_from(data, (_RING + 2 * (number % NUM_KEPT)) * _WORD_BYTES)
        if math.isfinite(duration_s) and 0.0 < duration_s <= MAX_ITERATION_S and batch_size <= MAX_BATCH_SIZE:
            found.append(EndedIteration(batch_size, duration_s))
    return found


def _offset_of(descriptor: int, slot: int) -> int:
    """The offset of a slot. Raises ValueError for a file that has no such slot."""
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        raise ValueError("it is no file of share slots")
    magic, num_slots, slot_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or slot_bytes != SLOT_BYTES:
        raise ValueError("it is no file of share slots, or one of another version")
    if not 0 <= slot < num_slots or os.fstat(descriptor).st_size < _HEADER_BYTES + (slot + 1) * SLOT_BYTES:
        raise ValueError(f"it has {num_slots} slots")
    return _HEADER_BYTES + slot * SLOT_BYTES
