"""The kit for stores: atomic puts, one winner of put-if-absent, waits that end, counted requests.

    def test_my_store():
        check_store(lambda: MyStore(), "a-prefix")

`python -m springtide.testing.store URL` checks a store under a random prefix and deletes all that it wrote.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from springtide.core.errors import ObjectMissing, SpringtideError, StorageError
from springtide.core.ports import Store

BAD_KEYS = ("", "/a", "a/", "a//b", "..", "a/../b", "./a", "a b", "a\\b", "a*", "a\0", "ä", "a\n", "x" * 513, "y" * 300)
LIMIT_S = 30.0


def expect_missing(operation: Callable[[], object]) -> None:
    """Raise AssertionError unless the operation raises ObjectMissing."""
    try:
        answer = operation()
    except ObjectMissing:
        return
    raise AssertionError(f"nothing is there, but the answer was {answer!r:.80}")


def expect_refused(operation: Callable[[], object], what: str) -> None:
    """Raise AssertionError unless the operation raises StorageError other than ObjectMissing."""
    try:
        operation()
    except ObjectMissing as error:
        raise AssertionError(f"{what} was looked for: {error}") from None
    except StorageError:
        return
    raise AssertionError(f"{what} was taken")


def check_objects(store: Store, prefix: str) -> None:
    """A put object can be read in full; a second put replaces it; an object that was never put is missing."""
    key = f"{prefix}/objects/one"
    expect_missing(lambda: store.get(key))
    store.put(key, b"first")
    assert store.get(key) == b"first"
    assert type(store.get(key)) is bytes
    store.put(key, b"the second")
    assert store.get(key) == store.wait(key, 0.0) == b"the second"
    store.put(key, b"")
    assert store.get(key) == b""
    expect_missing(lambda: store.get(f"{key}/below"))
    expect_missing(lambda: store.get(f"{prefix}/objects"))


def check_buffers(store: Store, prefix: str) -> None:
    """Any buffer is stored as its bytes, and later changes of the buffer do not affect the object."""
    key = f"{prefix}/buffers"
    owned = bytearray(b"0123456789" * 1000)
    store.put(key, owned)
    owned[:4] = b"gone"
    assert store.get(key)[:4] == b"0123"
    store.put(key, memoryview(owned)[2:6])
    assert store.get(key) == b"ne45"
    store.put(key, memoryview(bytes(16)).cast("q"))
    assert store.get(key) == bytes(16)
    store.put(key, memoryview(bytes(16)).cast("q")[:0])
    assert store.get(key) == b""
    assert store.put_if_absent(f"{key}.new", memoryview(owned)[:4])
    assert store.get(f"{key}.new") == b"gone"


def check_key_names(store: Store, prefix: str) -> None:
    """Every method rejects an invalid key before it does anything; a key may be a prefix of another one."""
    for bad in BAD_KEYS:
        expect_refused(lambda bad=bad: store.put(bad, b""), f"the key {bad!r:.40}")  # type: ignore[misc]
        expect_refused(lambda bad=bad: store.put_if_absent(bad, b""), f"the key {bad!r:.40}")  # type: ignore[misc]
        expect_refused(lambda bad=bad: store.get(bad), f"the key {bad!r:.40}")  # type: ignore[misc]
        expect_refused(lambda bad=bad: store.wait(bad, 0.0), f"the key {bad!r:.40}")  # type: ignore[misc]
        expect_refused(lambda bad=bad: store.delete([f"{prefix}/x", bad]), f"the key {bad!r:.40}")  # type: ignore[misc]
    expect_refused(lambda: store.keys(f"{prefix}/../"), "a prefix that leads out")
    long = f"{prefix}/{'k' * 200}/{'m' * 200}"
    names = [f"{prefix}/a", f"{prefix}/a/b", f"{prefix}/a/b/c", f"{prefix}/A-1_2.x..y", long]
    for name in names:
        store.put(name, name.encode())
    assert [store.get(name).decode() for name in names] == names


def check_listing(store: Store, prefix: str) -> None:
    """Exactly the keys with the prefix are listed, in order; deleting a missing key is no error."""
    names = [f"{prefix}/list/{name}" for name in ("b", "a/1", "a/2", "ab", "a", "b.meta")]
    for name in names:
        store.put(name, b"x")
    assert store.keys(f"{prefix}/list/") == sorted(names)
    assert store.keys(f"{prefix}/list/a") == sorted(name for name in names if name.startswith(f"{prefix}/list/a"))
    assert store.keys(f"{prefix}/list/a/") == [f"{prefix}/list/a/1", f"{prefix}/list/a/2"]
    assert store.keys(f"{prefix}/list/nothing") == store.keys(f"{prefix}/list/no/thing") == []
    store.delete([names[1], names[4], f"{prefix}/list/never", names[1]])
    assert store.keys(f"{prefix}/list/") == sorted(set(names) - {names[1], names[4]})
    expect_missing(lambda: store.get(names[1]))
    store.delete([])
    store.delete(store.keys(f"{prefix}/list/"))
    assert store.keys(f"{prefix}/list/") == []


def check_one_winner(store: Store, other: Store, prefix: str, num_rounds: int = 5) -> None:
    """Of many concurrent put_if_absent on one key exactly one wins, and its object remains."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(num_rounds):
            key = f"{prefix}/race/{number}"
            together = threading.Barrier(8)

            def attempt(name: int, key: str = key, together: threading.Barrier = together) -> bool:
                together.wait(LIMIT_S)
                return (store, other)[name % 2].put_if_absent(key, b"%d" % name * 1000)

            won = list(pool.map(attempt, range(8)))
            assert sum(won) == 1, f"{sum(won)} of 8 writers were told that they had written {key}"
            assert store.get(key) == other.get(key) == b"%d" % won.index(True) * 1000
            assert not other.put_if_absent(key, b"late")
            store.delete([key])
            assert other.put_if_absent(key, b"again")


def check_whole_objects(
    store: Store, other: Store, prefix: str, num_bytes: int = 300_000, num_rounds: int = 20
) -> None:
    """While an object is being replaced, a reader sees the old or the new one, never a mix or nothing."""
    key = f"{prefix}/whole"
    values = [bytes([mark]) * num_bytes for mark in (1, 2)]
    store.put(key, values[0])
    is_over = threading.Event()

    def read() -> int:
        num_read = 0
        while not is_over.is_set() or not num_read:
            assert other.get(key) in values, "a reader saw a mix of two puts"
            num_read += 1
        return num_read

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for number in range(num_rounds):
                store.put(key, values[number % 2])
        finally:
            is_over.set()
        assert all(reader.result(LIMIT_S) > 0 for reader in readers)


def check_waiting(store: Store, other: Store, prefix: str) -> None:
    """Readers that wait get the object, whether they began before or after the put; waiting does not list keys."""
    listed = store.requests().num_lists + other.requests().num_lists
    with ThreadPoolExecutor(6) as pool:
        waits = [
            pool.submit((store, other)[reader % 2].wait, f"{prefix}/wait/{reader // 3}", LIMIT_S) for reader in range(6)
        ]
        expect_missing(lambda: store.wait(f"{prefix}/wait/never", 0.05))
        assert not any(wait.done() for wait in waits)
        for number in range(2):
            store.put(f"{prefix}/wait/{number}", b"object %d" % number)
        assert [wait.result(LIMIT_S) for wait in waits] == [b"object 0"] * 3 + [b"object 1"] * 3
        assert other.wait(f"{prefix}/wait/1", LIMIT_S) == b"object 1"
        later = pool.submit(other.wait, f"{prefix}/wait/absent", LIMIT_S)
        assert store.put_if_absent(f"{prefix}/wait/absent", b"new")
        assert later.result(LIMIT_S) == b"new"
        store.delete([f"{prefix}/wait/0"])
        expect_missing(lambda: other.wait(f"{prefix}/wait/0", 0.02))
        again = pool.submit(other.wait, f"{prefix}/wait/0", LIMIT_S)
        store.put(f"{prefix}/wait/0", b"put again")
        assert again.result(LIMIT_S) == b"put again"
    assert store.requests().num_lists + other.requests().num_lists == listed, "a wait has listed"


def check_requests(store: Store, prefix: str) -> None:
    """Every request is counted, including misses, and so are the bytes sent and received."""
    before = store.requests()
    store.put(f"{prefix}/count/a", b"12345")
    store.put_if_absent(f"{prefix}/count/a", b"12345")
    store.get(f"{prefix}/count/a")
    expect_missing(lambda: store.get(f"{prefix}/count/b"))
    expect_missing(lambda: store.wait(f"{prefix}/count/b", 0.03))
    store.keys(f"{prefix}/count/")
    store.delete([f"{prefix}/count/a", f"{prefix}/count/b"])
    after = store.requests()
    assert after.num_puts - before.num_puts == 2
    assert after.num_misses - before.num_misses >= 2
    assert after.num_gets - before.num_gets >= after.num_misses - before.num_misses + 1
    assert after.num_lists - before.num_lists == 1
    assert after.num_deletes - before.num_deletes == 1
    assert after.bytes_up - before.bytes_up >= 5
    assert after.bytes_down - before.bytes_down == 5


def check_closing(open_handle: Callable[[], Store], prefix: str) -> None:
    """Objects remain when the handle that put them is closed."""
    first = open_handle()
    first.put(f"{prefix}/kept", b"kept")
    first.close()
    second = open_handle()
    try:
        assert second.get(f"{prefix}/kept") == b"kept"
    finally:
        second.close()


def check_store(open_handle: Callable[[], Store], prefix: str) -> Sequence[str]:
    """Run all checks on two handles of one store, delete all keys under `prefix`, and return the checks' names.

    `open_handle` opens a new handle of the same store. Raises AssertionError, StorageError.
    """
    store, other = open_handle(), open_handle()
    checks: list[tuple[str, Callable[[], None]]] = [
        ("objects", lambda: check_objects(store, prefix)),
        ("buffers", lambda: check_buffers(store, prefix)),
        ("key names", lambda: check_key_names(store, prefix)),
        ("listing", lambda: check_listing(store, prefix)),
        ("one winner", lambda: check_one_winner(store, other, prefix)),
        ("whole objects", lambda: check_whole_objects(store, other, prefix)),
        ("waiting", lambda: check_waiting(store, other, prefix)),
        ("requests", lambda: check_requests(store, prefix)),
        ("closing", lambda: check_closing(open_handle, prefix)),
    ]
    try:
        for _, check in checks:
            check()
    finally:
        store.delete(store.keys(f"{prefix}/"))
        store.close()
        other.close()
    return [name for name, _ in checks]


def main(arguments: Sequence[str]) -> int:
    """Check the store with the given URL; returns 0 if it keeps the contract, else 1, and 2 for wrong usage."""
    from springtide.storage.stores.open import STORE_FORMS, open_store

    if len(arguments) != 1:
        sys.stderr.write(f"usage: python -m springtide.testing.store URL, with one of {STORE_FORMS}\n")
        return 2
    try:
        checked = check_store(lambda: open_store(arguments[0]), f"springtide-check-{secrets.token_hex(4)}")
    except (SpringtideError, AssertionError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"it keeps the contract: {', '.join(checked)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
