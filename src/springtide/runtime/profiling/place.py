"""The place where a profile is taken: its memory, its link, and what of a pass does not grow with its samples."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

Clock = Callable[[], float]
Transfer = Callable[[], contextlib.AbstractContextManager[None]]
# The bandwidth of a function's link where the caller names none (FuncPipe, section 3.3).
BYTES_PER_S = 70e6
_CHUNK_BYTES = 1 << 18


def fixed_part_s(small: int, small_s: float, large: int, large_s: float) -> float:
    """Seconds of a pass of `small` samples that do not grow with them, from the times of two sizes: a straight line.

    Never more than the pass itself, and 0 where the larger one shows none.
    """
    if large <= small:
        return 0.0
    sample_s = (large_s - small_s) / (large - small)
    return min(max(0.0, small_s - small * sample_s), small_s)


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def reset_peak() -> None:
    """From now on VmHWM is the most that is held from now on, where the system lets it be reset (Linux, proc(5))."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def status_bytes(field: str) -> int:
    """A figure of /proc/self/status in bytes; 0 where there is none."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def loopback_transfer(bytes_per_s: float = BYTES_PER_S) -> Iterator[None]:
    """While it is open, data goes out of this process and comes into it at that many bytes per second each way.

    It goes over a pair of sockets to this process itself, so each byte is copied as often as on its way to a store and
    back.
    """
    left, right = socket.socketpair()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_send, args=(left, bytes_per_s, stop), name="springtide-upload", daemon=True),
        threading.Thread(target=_receive, args=(right,), name="springtide-download", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            left.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        left.close()
        right.close()


def _send(end: socket.socket, bytes_per_s: float, stop: threading.Event) -> None:
    chunk = bytes(_CHUNK_BYTES)
    began_s, num_sent = time.monotonic(), 0
    with contextlib.suppress(OSError):
        while not stop.wait(max(0.0, began_s + num_sent / bytes_per_s - time.monotonic())):
            end.sendall(chunk)
            num_sent += len(chunk)


def _receive(end: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while end.recv_into(buffer):
            pass


def machine_memory_mb() -> int:
    """The memory of this machine, in MB of 2^20 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
