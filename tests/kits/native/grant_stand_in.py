"""A stand-in for the daemon of GPU shares: gives out the two files as it is told, right or wrong, alive or frozen.

For tests of the library alone, in which every turn of the daemon has to be chosen. The daemon itself is tested with
real clients elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from springtide.backends.sharing.gpu.segments import BAD, CLOSED, LAYOUT, MAGIC, OK, SEGMENT_BYTES, UNKNOWN

# Segments begin with bounds that no busy machine reaches, so that only those tests see launches let through without
# tokens that are about it.
_PATIENT_NS = 5_000_000_000
TURN_S = 0.005

_HELLO = struct.Struct("<II16s")
_WELCOME = struct.Struct("<IIIIQII")
_FUTEX_WAKE = 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Segment:
    """Both files of one tenant on one device, mapped."""

    def __init__(self, directory: Path, device_uuid: bytes, segment_id: int) -> None:
        self.segment_id = segment_id
        self.device_uuid = device_uuid
        self.paths = (directory / f"grant-{segment_id}", directory / f"usage-{segment_id}")
        for path in self.paths:
            path.write_bytes(bytes(SEGMENT_BYTES))
        self._maps = tuple(self._map(path) for path in self.paths)
        struct.pack_into("<IIQ16s", self._maps[0], 0, MAGIC, LAYOUT, segment_id, device_uuid)
        struct.pack_into("<QQQ", self._maps[0], 96, 0, _PATIENT_NS, 2 * _PATIENT_NS)
        struct.pack_into("<IIQ", self._maps[1], 0, MAGIC, LAYOUT, segment_id)
        self.beat()

    def remove(self) -> None:
        for path in self.paths:
            path.unlink()

    @staticmethod
    def _map(path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), SEGMENT_BYTES)

    # One store for each number, as a daemon that runs beside the reader must have it: struct writes byte by byte.

    def read_grant(self, offset: int) -> int:
        return int(ctypes.c_uint64.from_buffer(self._maps[0], offset).value)

    def write_grant(
        self, offset: int, value: int, kind: type[ctypes.c_uint32] | type[ctypes.c_uint64] = ctypes.c_uint64
    ) -> None:
        kind.from_buffer(self._maps[0], offset).value = value

    def read_usage(self, offset: int) -> int:
        return int(ctypes.c_uint64.from_buffer(self._maps[1], offset).value)

    def write_usage(
        self, offset: int, value: int, kind: type[ctypes.c_uint32] | type[ctypes.c_uint64] = ctypes.c_uint64
    ) -> None:
        kind.from_buffer(self._maps[1], offset).value = value

    def bound(self, stale_after_ns: int = _PATIENT_NS, max_wait_ns: int = 2 * _PATIENT_NS) -> None:
        """How long launches may be held without a heartbeat, and at all."""
        self.write_grant(104, stale_after_ns)
        self.write_grant(112, max_wait_ns)

    def beat(self) -> None:
        self.write_grant(128, now_ns())

    @property
    def granted_ns(self) -> int:
        return self.read_grant(136)

    @granted_ns.setter
    def granted_ns(self, value: int) -> None:
        self.write_grant(136, value)

    @property
    def flags(self) -> int:
        return int(ctypes.c_uint32.from_buffer(self._maps[0], 148).value)

    @flags.setter
    def flags(self, value: int) -> None:
        self.write_grant(148, value, ctypes.c_uint32)

    @property
    def used_ns(self) -> int:
        return self.read_usage(64)

    @property
    def throttled_ns(self) -> int:
        return self.read_usage(72)

    @property
    def num_open(self) -> int:
        return self.read_usage(80)

    def process(self, slot: int) -> tuple[int, int, int, int]:
        """pid, threads that wait, bytes held, launches."""
        pid, num_waiting, _ticks, held, num_launches = struct.unpack_from("<IIQQQ", self._maps[1], 256 + 64 * slot)
        return pid, num_waiting, held, num_launches

    def wake(self) -> None:
        """Raise the futex word and wake whoever sleeps on it, in whatever process."""
        word = ctypes.c_uint32.from_buffer(self._maps[0], 144)
        word.value += 1
        place = (ctypes.c_char * SEGMENT_BYTES).from_buffer(self._maps[0])
        try:
            _libc.syscall(_FUTEX_CALL, ctypes.byref(place, 144), _FUTEX_WAKE, 2**31 - 1, None, None, 0)
        finally:
            del place


class GrantStandIn:
    """The socket, and a thread that answers on it; a second thread makes the turns while it is not frozen."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "gpu.sock"
        self.segments: dict[bytes, Segment] = {}
        self._beating: list[Segment] = []
        self.answers: Callable[[socket.socket, bytes], None] = self.answer
        self.slots: dict[int, int] = {}
        self.num_questions = 0
        self.rate = 0.0  # device time granted per time; 0: nothing but what the test grants itself
        self.burst_ns = 10_000_000
        self.is_frozen = False
        self._ends = threading.Event()
        self._listener = self._listen()
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._turn)]

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path.unlink(missing_ok=True)
        listener.bind(str(self.path))
        listener.listen(64)
        listener.settimeout(0.05)
        return listener

    def __enter__(self) -> GrantStandIn:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def add(self, device_uuid: bytes, segment_id: int) -> Segment:
        segment = Segment(self.directory, device_uuid, segment_id)
        self.segments[device_uuid] = segment
        self._beating.append(segment)
        return segment

    def drop(self, segment: Segment) -> None:
        """Give the files up and look after them no more."""
        segment.flags = CLOSED
        self._beating.remove(segment)
        segment.remove()

    def stop_answering(self) -> None:
        """As when the daemon is killed: nobody listens any longer."""
        self.path.unlink(missing_ok=True)

    def listen_again(self) -> None:
        self._listener.close()
        self._listener = self._listen()

    def _serve(self) -> None:
        while not self._ends.is_set():
            try:
                client, _ = self._listener.accept()
            except (TimeoutError, OSError):
                continue
            with client:
                client.settimeout(1.0)
                try:
                    self.num_questions += 1
                    self.answers(client, client.recv(64))
                except OSError:
                    continue

    def _turn(self) -> None:
        last_ns = now_ns()
        while not self._ends.wait(TURN_S):
            turn_ns, last_ns = now_ns() - last_ns, now_ns()
            if self.is_frozen:
                continue
            for segment in list(self._beating):
                segment.beat()
                if self.rate > 0.0:
                    most_ns = segment.used_ns + self.burst_ns
                    raised_ns = min(segment.granted_ns + int(self.rate * turn_ns), most_ns)
                    segment.granted_ns = max(segment.granted_ns, raised_ns)
                    segment.wake()

    def answer(self, client: socket.socket, question: bytes) -> None:
        """What the daemon answers: the two files of the process's share of this device, or that it has none."""
        magic, layout, device_uuid = _HELLO.unpack(question)
        segment = self.segments.get(device_uuid)
        if magic != MAGIC or layout != LAYOUT or segment is None:
            self.say_no(client, UNKNOWN if magic == MAGIC else BAD)
            return
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = int(struct.unpack("3i", credentials)[0])
        slot = self.slots.setdefault(pid, len(self.slots) % 64)
        segment.write_usage(256 + 64 * slot, pid, ctypes.c_uint32)
        self.send_files(client, segment, slot)

    def say_no(self, client: socket.socket, status: int, retry_ms: int = 100) -> None:
        client.send(_WELCOME.pack(MAGIC, LAYOUT, status, 0, 0, retry_ms, 0))

    def send_files(
        self, client: socket.socket, segment: Segment, slot: int, paths: tuple[Path, ...] | None = None
    ) -> None:
        paths = segment.paths if paths is None else paths
        modes = [os.O_RDONLY, *[os.O_RDWR] * len(paths)][: len(paths)]
        descriptors = [os.open(path, mode) for path, mode in zip(paths, modes, strict=True)]
        try:
            answer = _WELCOME.pack(MAGIC, LAYOUT, OK, slot, segment.segment_id, 100, 0)
            socket.send_fds(client, [answer], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
