"""Shared memory between processes: a put wakes waiters at once, and a killed process delays no other."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading

import pytest

from springtide.core.errors import InvalidRequest, ObjectMissing
from springtide.storage.stores import shared_memory as shared_memory_store
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.shared_memory import SharedMemoryStore
from springtide.storage.stores.wake_sockets import WakeSockets

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this machine has no /dev/shm")
LIMIT_S = 30.0


@pytest.fixture
def name():
    name = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    store = CheckedStore(SharedMemoryStore(name))
    store.delete(store.keys(""))
    store.close()
    assert not os.path.exists(f"/dev/shm/springtide-{os.getuid()}-{name}")


def start(code, *arguments):
    lines = "import sys; from springtide.storage.stores.open import open_store\n"
    lines += "store = open_store('shm://' + sys.argv[1])\n"
    return subprocess.Popen(
        [sys.executable, "-c", lines + code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line_of(process):
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_is_woken_and_asks_no_more_than_it_must(name, monkeypatch):
    monkeypatch.setattr(shared_memory_store, "LOOK_AGAIN_S", LIMIT_S)
    waiter = start(
        "import springtide.storage.stores.shared_memory as s; s.LOOK_AGAIN_S = 30.0; print('up', flush=True)\n"
        "print(store.wait('a/b', 30.0), store.requests().num_gets)",
        name,
    )
    assert line_of(waiter) == "up"
    CheckedStore(SharedMemoryStore(name)).put("a/b", b"hello")
    gets = line_of(waiter)
    assert gets.startswith("b'hello'")
    # Before it listens, when it does, when a store is opened (which looks for the dead), and when the object is there.
    assert int(gets.split()[1]) <= 4
    waiter.communicate()


def test_killed_waiters_leave_nothing_that_holds_up_a_put(name):
    waiters = [start("print('up', flush=True); store.wait('key', 60.0)", name) for _ in range(2)]
    for waiter in waiters:
        assert line_of(waiter) == "up"
    store = CheckedStore(SharedMemoryStore(name))
    folder = f"/dev/shm/springtide-{os.getuid()}-{name}/~wake"
    listening = threading.Event()
    while not (os.path.isdir(folder) and len(os.listdir(folder)) == 2):
        listening.wait(0.01)
    for waiter in waiters:
        os.kill(waiter.pid, signal.SIGKILL)
        waiter.communicate()
    assert len(os.listdir(folder)) == 2
    store.put("key", b"1")
    assert os.listdir(folder) == []
    assert store.wait("key", 0.0) == b"1"


def test_sockets_of_the_dead_go_when_a_store_is_opened(name):
    waiter = start("print('up', flush=True); store.wait('never', 60.0)", name)
    assert line_of(waiter) == "up"
    folder = f"/dev/shm/springtide-{os.getuid()}-{name}/~wake"
    listening = threading.Event()
    while not (os.path.isdir(folder) and os.listdir(folder)):
        listening.wait(0.01)
    CheckedStore(SharedMemoryStore(name))
    assert len(os.listdir(folder)) == 1, "the living keep theirs"
    os.kill(waiter.pid, signal.SIGKILL)
    waiter.communicate()
    CheckedStore(SharedMemoryStore(name))
    assert os.listdir(folder) == []


def test_a_writer_that_dies_before_it_wakes_anybody_is_noticed(name, monkeypatch):
    monkeypatch.setattr(WakeSockets, "wake", lambda self, key: None)
    monkeypatch.setattr(shared_memory_store, "LOOK_AGAIN_S", 0.01)
    store = CheckedStore(SharedMemoryStore(name))
    found = []
    waiter = threading.Thread(target=lambda: found.append(store.wait("key", LIMIT_S)))
    waiter.start()
    CheckedStore(SharedMemoryStore(name)).put("key", b"1")
    waiter.join(LIMIT_S)
    assert found == [b"1"]


def test_a_closed_store_with_objects_keeps_them_and_an_empty_one_goes(name):
    first, second = CheckedStore(SharedMemoryStore(name)), CheckedStore(SharedMemoryStore(name))
    first.put("a", b"1")
    first.close()
    assert second.get("a") == b"1"
    second.delete(["a"])
    second.close()
    assert not os.path.exists(f"/dev/shm/springtide-{os.getuid()}-{name}")
    second.put("b", b"2")
    assert first.wait("b", 0.0) == b"2"


def test_no_shared_memory_is_said_with_what_there_is_instead(tmp_path):
    with pytest.raises(InvalidRequest, match=r"no shared memory at .*; use file:"):
        CheckedStore(SharedMemoryStore("a", parent=tmp_path / "nowhere"))


def test_a_wait_ends_at_its_timeout(name):
    with pytest.raises(ObjectMissing, match=r"after 0\.02 s"):
        CheckedStore(SharedMemoryStore(name)).wait("never", 0.02)


def test_a_waiter_in_a_folder_that_is_taken_away_listens_in_a_new_one(tmp_path):
    sockets = WakeSockets(tmp_path / "wake" / ("x" * 150))
    with sockets.listening("a") as listener, sockets.listening("b") as other:
        sockets.wake("a")
        listener.settimeout(LIMIT_S)
        assert listener.recv(1) == b"!"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        for _ in range(1000):
            sockets.wake("b")
        assert other.recv(1) == b"!"
    assert list((tmp_path / "wake" / ("x" * 150)).iterdir()) == []
    sockets.wake("a")
