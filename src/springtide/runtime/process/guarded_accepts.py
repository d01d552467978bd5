"""The accept() calls of a library's threads, answered by this process: the library gets only what it may have.

The kernel hands such calls over without any privilege (seccomp user notification). The process has one table of
descriptors, so a connection that was accepted here is the result of the call there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# For each machine its name in seccomp's data, and the numbers of seccomp and of accept, which is what glibc calls.
_MACHINES = {"x86_64": (0xC000003E, 317, 43), "aarch64": (0xC00000B7, 277, 202)}
# Earlier kernels do not tell when the last thread whose calls are handed over has ended.
_OLDEST_KERNEL = [5, 9]
# From linux/seccomp.h, linux/prctl.h and linux/bpf_common.h; Python has no names for them.
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
# Also: leave out the slower code that the kernel otherwise imposes on filtered threads against speculation.
_NEW_LISTENER_SPEC_ALLOW = (1 << 3) | (1 << 2)
_LOAD, _UNLESS_EQUAL_SKIP, _RETURN = 0x20, 0x15, 0x06
_HAND_OVER, _ALLOW = 0x7FC00000, 0x7FFF0000
_NUMBER_AT, _MACHINE_AT = 0, 4
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CALL_BYTES, _FIRST_ARGUMENT_AT = 80, 32
_ANSWER = struct.Struct("=QqiI")
# The thread that calls has other things to do as well: to connect, and to read from those that it got.
_MAX_REFUSED_IN_A_CALL = 32
_PAUSE_S = 0.02
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def guard_accepts(build: Callable[[], T], admits: Callable[[socket.socket], bool], say: Callable[[str], None]) -> T:
    """Run `build` on a thread of its own; that thread and those it starts get only connections that `admits` takes.

    All others are reset, and where no descriptor is free, nothing seems to wait. Where the kernel does not hand the
    calls over, `say` is told why, and they go on as ever. A caller that waits for such a thread's end must not hold the
    interpreter's lock: the answers need it.
    """
    with ThreadPoolExecutor(1, "springtide-guarded") as thread:
        try:
            calls = thread.submit(_hand_over_accepts).result()
        except OSError as error:
            say(error.strerror or str(error))
        else:
            # Not from the guarded thread, whose calls it answers.
            answering = threading.Thread(target=_answer, args=(calls, admits), name="springtide-accepts", daemon=True)
            answering.start()
        return thread.submit(build).result()


def _hand_over_accepts() -> int:
    """Have the kernel hand over this thread's calls of accept(). Returns the descriptor that they are read from."""
    system = os.uname()
    if (
        system.machine not in _MACHINES
        or [int(part) for part in re.findall(r"\d+", system.release)[:2]] < _OLDEST_KERNEL
    ):
        raise OSError(errno.ENOSYS, f"not known for Linux {system.release} on {system.machine}")
    machine, seccomp, accept = _MACHINES[system.machine]
    lines = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_UNLESS_EQUAL_SKIP, 0, 3, machine),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_UNLESS_EQUAL_SKIP, 0, 1, accept),
        (_RETURN, 0, 0, _HAND_OVER),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    # This thread and what it starts can gain no rights by running a program; it runs none.
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    calls = libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER_SPEC_ALLOW, program)
    if calls < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(calls)


def _answer(calls: int, admits: Callable[[socket.socket], bool]) -> None:
    """Answer the calls until the last of the threads has ended."""
    # Accepted for a call that a signal interrupted; the thread calls again.
    kept: list[int] = []
    poll = select.poll()
    poll.register(calls, select.POLLIN)
    while not poll.poll()[0][1] & ~select.POLLIN:
        call = bytearray(_CALL_BYTES)
        try:
            fcntl.ioctl(calls, _RECEIVE, call)
        except OSError:
            continue
        (number,) = struct.unpack_from("=Q", call)
        (listener,) = struct.unpack_from("=Q", call, _FIRST_ARGUMENT_AT)
        link = kept.pop() if kept else _accept(listener, admits)
        answer = (link, 0) if link >= 0 else (0, -errno.EAGAIN)
        try:
            fcntl.ioctl(calls, _SEND, _ANSWER.pack(number, *answer, 0))
        except OSError:
            kept += [link] if link >= 0 else []
    # Not on any other way out: the library would take the answer for an error of its socket.
    for descriptor in (calls, *kept):
        os.close(descriptor)


def _accept(descriptor: int, admits: Callable[[socket.socket], bool]) -> int:
    """The descriptor of a connection that is admitted; -1 if none waits, or none of the first."""
    try:
        with _borrowed(descriptor) as listener:
            listener.settimeout(0)
            for _ in range(_MAX_REFUSED_IN_A_CALL):
                link, _ = listener.accept()
                if admits(link):
                    return link.detach()
                # So that the kernel keeps nothing of it.
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                link.close()
    except BlockingIOError:
        pass
    except OSError:
        # No descriptor is free, most likely: the thread asks again at once.
        time.sleep(_PAUSE_S)
    return -1


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    listener = socket.socket(fileno=descriptor)
    try:
        yield listener
    finally:
        listener.detach()
