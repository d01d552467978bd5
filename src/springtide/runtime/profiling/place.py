"""Helpers for profiles: memory of this process and machine, background transfers, the fixed part of a pass."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

Clock = Callable[[], float]
Transfer = Callable[[], contextlib.AbstractContextManager[None]]
# The default bandwidth of a function's link (FuncPipe, section 3.3).
BYTES_PER_S = 70e6
_CHUNK_BYTES = 1 << 18


def fixed_part_s(small: int, small_s: float, large: int, large_s: float) -> float:
    """The seconds of a pass that do not grow with its samples: a straight line through the times of two sizes.

    Limited to [0, small_s].
    """
    if large <= small:
        return 0.0
    sample_s = (large_s - small_s) / (large - small)
    return min(max(0.0, small_s - small * sample_s), small_s)


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def reset_peak() -> None:
    """Reset VmHWM, this process's peak memory, to its present memory, if the system allows it (Linux, proc(5))."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 if it does not exist."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def loopback_transfer(bytes_per_s: float = BYTES_PER_S) -> Iterator[None]:
    """Send and receive data in the background at `bytes_per_s` each way while the context is open.

    The data passes through a pair of sockets within this process, so each byte is copied as often as for a real store.
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
