"""Objects in one process: woken waiters, and what is counted in every store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from springtide.core.errors import ObjectMissing, StorageError
from springtide.storage.stores.open import memory_store
from springtide.storage.stores.request_count import RequestCount

LIMIT_S = 30.0


def test_stores_without_a_name_are_their_owners_alone():
    first, second = memory_store(), memory_store()
    first.put("a", b"1")
    assert second.keys("") == []


def test_bytes_are_not_copied_and_what_can_change_is():
    store = memory_store()
    fixed, changing = b"0123", bytearray(b"0123")
    store.put("fixed", fixed)
    store.put("changing", changing)
    store.put("part", memoryview(fixed)[1:])
    changing[0] = 0
    assert store.get("fixed") is fixed
    assert store.get("changing") == fixed
    assert store.get("part") == b"123"


def test_a_wait_is_one_request_and_leaves_no_waiter_behind():
    store = memory_store()
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(store.wait, "key", LIMIT_S) for _ in range(4)]
        pause = threading.Event()
        while len(store.raw._held.waiting.get("key", ())) < 4:
            pause.wait(0.001)
        store.put("key", b"1")
        assert [wait.result(LIMIT_S) for wait in waits] == [b"1"] * 4
    assert store.requests().num_gets == 4
    assert store.requests().num_misses == 0
    with pytest.raises(ObjectMissing):
        store.wait("never", 0.001)
    assert store.raw._held.waiting == {}


def test_lists_and_deletes_count_by_pages_of_a_thousand():
    store = memory_store()
    names = [f"k/{number}" for number in range(2001)]
    for name in names:
        store.put(name, b"")
    assert len(store.keys("k/")) == 2001
    assert store.requests().num_lists == 3
    store.delete(names)
    assert store.requests().num_deletes == 3
    assert store.keys("") == []
    assert store.requests().num_lists == 4


def test_too_large_an_object_is_refused_before_anything_is_asked(monkeypatch):
    store = memory_store("small")
    monkeypatch.setattr(store.raw, "max_object_bytes", 10)
    with pytest.raises(StorageError, match="a has 11 bytes and the memory store small takes at most 10 in one object"):
        store.put_if_absent("a", bytes(11))
    assert store.requests().num_puts == 0


def test_counts_from_many_threads_are_all_there():
    counts = RequestCount()

    def count(_):
        for _ in range(200):
            counts.add(puts=1, gets=2)
            counts.add_bytes(up=3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    total = counts.total()
    assert (total.num_puts, total.num_gets, total.bytes_up) == (1600, 3200, 4800)
