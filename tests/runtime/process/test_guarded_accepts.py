"""A thread's calls of accept() return what they may, and only that."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import threading
import time

import pytest

from springtide.runtime.process.guarded_accepts import guard_accepts

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def accept(listener):
    """As gloo does it: a descriptor, or a negative number of the error."""
    result = libc.accept(listener.fileno(), None, None)
    return -ctypes.get_errno() if result < 0 else result


def guarded(listener, admits, build=accept):
    return guard_accepts(lambda: build(listener), admits, pytest.skip)


def test_a_connection_that_is_admitted_is_the_result_of_the_call(listener):
    with socket.create_connection(listener.getsockname()) as link:
        asked = []

        def admits(accepted):
            asked.append(accepted.getpeername())
            return True

        with socket.socket(fileno=guarded(listener, admits)) as accepted:
            accepted.sendall(b"hello")
            assert link.recv(64) == b"hello"
        assert asked == [link.getsockname()]


def test_others_are_reset_and_then_nothing_waits(listener):
    links = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    assert guarded(listener, lambda accepted: False) == -errno.EAGAIN
    for link in links:
        with link, pytest.raises(ConnectionResetError):
            link.recv(64)


def test_where_no_descriptor_is_free_a_connection_waits(listener):
    def accept_without_and_with_descriptors(listener):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            before = accept(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return before, accept(listener)

    with socket.create_connection(listener.getsockname()):
        before, after = guarded(listener, lambda accepted: True, accept_without_and_with_descriptors)
    assert before == -errno.EAGAIN
    os.close(after)


def test_threads_that_go_on_stay_guarded_and_leave_nothing(listener):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before, ends = held(), threading.Event()
    results = []

    def start(listener):
        def go_on():
            ends.wait()
            results.append(accept(listener))

        thread = threading.Thread(target=go_on)
        thread.start()
        return thread

    thread = guarded(listener, lambda accepted: False, start)
    with socket.create_connection(listener.getsockname()):
        ends.set()
        thread.join()
    assert results == [-errno.EAGAIN]
    deadline = time.monotonic() + 30
    # What an earlier test has left behind may go meanwhile.
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_the_kernel_does_not_hand_calls_over_that_is_said_and_they_go_on(listener):
    said = []

    def guard_again(listener):
        # A thread's calls are handed over once.
        return guard_accepts(lambda: "built", lambda accepted: True, said.append)

    assert guarded(listener, lambda accepted: True, guard_again) == "built"
    assert said == [os.strerror(errno.EBUSY)]
