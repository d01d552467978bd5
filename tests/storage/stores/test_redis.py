"""A real Redis: waits block in it, and one that dies, is full, too old or shut is one sentence."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.servers import missing_redis, running_redis
from kits.storage.virtual_pace import VirtualTime
from springtide.core.errors import ObjectMissing, StorageError
from springtide.storage.pacing import Intervals
from springtide.storage.stores import redis as redis_store
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.redis import RedisStore

LIMIT_S = 30.0
SHORT = Intervals(first_s=0.01, cap_s=0.01)


@pytest.fixture
def url(redis_server):
    return redis_server.redis_url


@pytest.fixture
def name():
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Every store that a test makes is closed after it."""
    made = []
    make = RedisStore.__init__

    def remembered(self, *arguments, **named):
        make(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(RedisStore, "__init__", remembered)
    yield
    for store in made:
        store.close()


def wait_until(is_so):
    pause = threading.Event()
    while not is_so():
        pause.wait(0.01)


def test_more_waits_at_once_than_a_client_has_connections_by_itself(url, name):
    store = CheckedStore(RedisStore(url, name=name))
    with ThreadPoolExecutor(120) as pool:
        waits = [pool.submit(store.wait, "key", LIMIT_S) for _ in range(120)]
        wait_until(lambda: store.raw._client.info("clients")["blocked_clients"] >= 120)
        store.put("key", b"hello")
        assert {wait.result(LIMIT_S) for wait in waits} == {b"hello"}


def test_many_readers_in_one_wait_each_ask_three_times_at_most(url, name):
    stores = [CheckedStore(RedisStore(url, name=name)) for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(store.wait, "key", LIMIT_S) for store in stores]
        wait_until(lambda: stores[0].raw._client.info("clients")["blocked_clients"] >= 5)
        CheckedStore(RedisStore(url, name=name)).put("key", b"hello")
        assert [wait.result(LIMIT_S) for wait in waits] == [b"hello"] * 5
    assert [store.requests().num_gets for store in stores] == [3] * 5


def test_names_part_stores_in_one_database_and_deleting_leaves_nothing(url, name):
    first, second = CheckedStore(RedisStore(url, name=name)), CheckedStore(RedisStore(url, name=f"{name}-other"))
    first.put("a/b", b"1")
    assert second.keys("") == []
    with pytest.raises(ObjectMissing):
        second.get("a/b")
    first.put_if_absent("a/c", b"2")
    assert first.keys("a/") == ["a/b", "a/c"]
    first.delete(first.keys(""))
    assert list(first.raw._client.scan_iter(match=f"{name}*")) == []


def test_an_object_over_the_limit_is_refused_before_it_is_sent(url, name, monkeypatch):
    store = CheckedStore(RedisStore(url, name=name))
    monkeypatch.setattr(store.raw, "max_object_bytes", 1000)
    with pytest.raises(
        StorageError, match=r"big has 1,001 bytes and the Redis at .* takes at most 1,000 in one object"
    ):
        store.put("big", bytes(1001))
    assert redis_store.MAX_VALUE_BYTES == 512 << 20
    assert store.requests().num_puts == 0


def test_a_redis_that_dies_in_a_wait_is_one_sentence(name):
    if missing_redis():
        pytest.skip(missing_redis())
    with running_redis() as server:
        store = CheckedStore(RedisStore(server.redis_url, name=name, retry_intervals=SHORT))
        watch = CheckedStore(RedisStore(server.redis_url, name=name))
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(store.wait, "key", LIMIT_S)
            wait_until(lambda: watch.raw._client.info("clients")["blocked_clients"] == 1)
            server.kill()
            with pytest.raises(StorageError) as caught:
                wait.result(LIMIT_S)
        assert not isinstance(caught.value, ObjectMissing)
        sentence = str(caught.value)
        assert f"the Redis at 127.0.0.1:{server.port} does not answer" in sentence
        assert "start it again or name another store" in sentence
        assert server.password not in sentence
        assert "\n" not in sentence
        for ask in (lambda: store.put("a", b""), lambda: store.keys(""), lambda: store.put_if_absent("a", b"")):
            with pytest.raises(StorageError, match="does not answer"):
                ask()


def test_a_redis_that_comes_back_in_time_goes_unnoticed(name):
    if missing_redis():
        pytest.skip(missing_redis())
    with running_redis() as server:
        store = CheckedStore(RedisStore(server.redis_url, name=name, retry_intervals=SHORT))
        store.put("key", b"1")
    with running_redis(port=server.port, password=server.password) as again:
        # The connection in the pool is a dead one; what the server held is gone.
        with pytest.raises(ObjectMissing):
            store.get("key")
        store.put("key", b"2")
        assert store.get("key") == b"2"
        assert again.port == server.port


def test_a_write_with_an_unknown_outcome_is_not_repeated(name, url):
    import redis

    store = CheckedStore(RedisStore(url, name=name, retry_intervals=SHORT))
    attempts = []

    def lost():
        attempts.append(1)
        raise redis.exceptions.ConnectionError("Connection closed by server.")

    with pytest.raises(StorageError, match="does not answer"):
        store.raw._retried(lost, "write key", is_repeatable=False)
    assert len(attempts) == 1
    with pytest.raises(StorageError, match="does not answer"):
        store.raw._retried(lost, "write key")
    assert len(attempts) == 1 + redis_store.MAX_ATTEMPTS


def test_pauses_between_attempts_grow_and_end(name):
    time = VirtualTime()
    store = CheckedStore(RedisStore("redis://127.0.0.1:1/0", name=name, pace=time.pace()))
    with pytest.raises(StorageError, match=r"cannot read key: the Redis at 127\.0\.0\.1:1 does not answer"):
        store.get("key")
    assert time.sleeps == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


def test_a_wrong_password_is_said_without_showing_it(redis_server, name):
    url = redis_server.redis_url.replace(redis_server.password, "wrong-secret")
    with pytest.raises(StorageError, match="refuses these credentials") as caught:
        CheckedStore(RedisStore(url, name=name)).get("key")
    assert "wrong-secret" not in str(caught.value)
    without = redis_server.redis_url.replace(f":{redis_server.password}@", "")
    with pytest.raises(StorageError, match="refuses these credentials"):
        CheckedStore(RedisStore(without, name=name)).put("key", b"")


def test_a_redis_that_is_full_says_what_to_raise(name):
    if missing_redis():
        pytest.skip(missing_redis())
    with running_redis(options={"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
        store = CheckedStore(RedisStore(server.redis_url, name=name))
        with pytest.raises(StorageError, match="is full; raise its maxmemory"), ThreadPoolExecutor(1) as pool:
            list(pool.map(lambda number: store.put(f"key/{number}", bytes(1_000_000)), range(100)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("unknown command 'BLMOVE', with args beginning with:", r"must be Redis 6\.2 or newer"),
        ("READONLY You can't write against a read only replica.", "give the address of the primary"),
        ("max number of clients reached", "raise its maxclients"),
        ("WRONGTYPE Operation against a key", "answered: WRONGTYPE"),
    ],
)
def test_what_a_redis_answers_is_said_with_its_mend(answer, words, name, url):
    import redis

    def refuse():
        raise redis.exceptions.ResponseError(answer)

    with pytest.raises(StorageError, match=words):
        CheckedStore(RedisStore(url, name=name)).raw._retried(refuse, "wait for key")


def test_a_redis_that_hangs_is_not_waited_for_for_ever(name, monkeypatch):
    if missing_redis():
        pytest.skip(missing_redis())
    monkeypatch.setattr(redis_store, "ANSWER_S", 0.1)
    with running_redis() as server:
        store = CheckedStore(RedisStore(server.redis_url, name=name, retry_intervals=SHORT, max_attempts=2))
        store.put("key", b"1")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StorageError, match="does not answer"):
            store.get("key")


def test_a_large_value_is_sent_as_it_lies():
    value = memoryview(bytes(100_000))
    parts = redis_store._Packer().pack("CONFIG SET", b"key", 1, 0.5, value)
    assert [part for part in parts if part is value] == [value]
    assert b"".join(parts) == (
        b"*6\r\n$6\r\nCONFIG\r\n$3\r\nSET\r\n$3\r\nkey\r\n$1\r\n1\r\n$3\r\n0.5\r\n$100000\r\n" + bytes(value) + b"\r\n"
    )
