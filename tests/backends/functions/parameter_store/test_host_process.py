"""A real redis-server for a job: its password, its limits, its death, and the platform that takes it over."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from kits.servers import missing_redis, running_redis
from springtide.backends.functions.parameter_store.address import make_parameter_host
from springtide.backends.functions.parameter_store.host import HostedParameters
from springtide.backends.functions.parameter_store.host_process import RedisProcesses, find_binary
from springtide.backends.functions.parameter_store.redis_ping import answers, user_words
from springtide.backends.processes import identify
from springtide.collectives.communicator import Communicator
from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.stores.open import open_store

LIMIT_S = 120.0
pytestmark = pytest.mark.skipif(bool(missing_redis()), reason=missing_redis() or "there is one")


def pid_of(folder, job_id="a"):
    note = msgspec.json.decode((folder / f"{job_id}.json").read_bytes())
    return msgspec.json.decode(note["server"]["identity"])["pid"]


def await_gone(pid):
    until_s = time.monotonic() + LIMIT_S
    while identify(pid) is not None:
        assert time.monotonic() < until_s, "it does not end"
        time.sleep(0.02)


def fill(store):
    for number in range(40):
        store.put(f"wire/{number}", b"x" * 1_000_000)


@pytest.fixture
def host(tmp_path):
    host = HostedParameters(RedisProcesses(tmp_path / "servers", memory_mb=32), tmp_path, linger_s=60.0, check_s=0.0)
    yield host
    host.close(ends=True)


@pytest.mark.slow
def test_a_server_with_a_password_and_a_limit(host, tmp_path):
    url = host.acquire("a")
    store = open_store(url)
    store.put("wire/1", b"x" * 1000)
    assert store.get("wire/1") == b"x" * 1000
    assert store.keys("wire") == ["wire/1"]
    assert answers(url, LIMIT_S)
    assert not answers(url.replace(":", ":wrong", 2), LIMIT_S)
    with pytest.raises(StorageError, match="full"):
        fill(store)
    store.close()
    assert "127.0.0.1" in url
    config = (tmp_path / "servers" / "a" / "redis.conf").read_text()
    password = url.split("@")[0].rpartition(":")[2]
    assert password not in config, "what stands on the disk does not open it"
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_users_code_cannot_change_or_end_it(host):
    redis = pytest.importorskip("redis")
    client = redis.Redis.from_url(host.acquire("a"))
    for command in (("CONFIG", "SET", "dir", "/tmp"), ("SHUTDOWN",), ("FLUSHALL",)):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    client.close()


@pytest.mark.slow
def test_one_that_is_killed_comes_back_empty_at_its_address(host, tmp_path):
    url = host.acquire("a")
    store = open_store(url)
    store.put("wire/1", b"x")
    os.kill(pid_of(tmp_path), signal.SIGKILL)
    until_s = time.monotonic() + LIMIT_S
    while host.is_alive("a"):
        assert time.monotonic() < until_s, "it is dead, and nobody sees it"
        time.sleep(0.02)
    assert host.renew("a") == url
    # Who held on to the address goes on: nothing but what it held is gone.
    assert store.keys("") == []
    store.put("wire/2", b"y")
    assert store.get("wire/2") == b"y"
    store.close()


@pytest.mark.slow
def test_a_step_that_was_cut_off_is_redone_and_nothing_is_lost(host, tmp_path):
    """Rank 0 waits for rank 1 when the Redis dies: it hears of it, and the next attempt has the right sum."""
    url = host.acquire("a")
    stores = [open_store(url) for _ in range(2)]
    ends = [
        Communicator(store, rank, 2, now_s=time.monotonic, collective="smlt", num_shards=3)
        for rank, store in enumerate(stores)
    ]
    gradients = [np.arange(90, dtype=np.float32) * (rank + 1) for rank in range(2)]

    def reduce(rank, prefix):
        values = gradients[rank].copy()
        ends[rank].all_reduce(values, prefix, timeout_s=LIMIT_S)
        return values

    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(reduce, range(2), ["wire/1.0/0"] * 2))
        alone = pool.submit(reduce, 0, "wire/1.0/1")
        while not stores[1].keys("wire/1.0/1"):
            time.sleep(0.02)
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        with pytest.raises(StorageError, match="does not answer"):
            alone.result(LIMIT_S)
        assert host.renew("a") == url
        # What the first attempt left is gone with the Redis: its deletes have nothing to do, and do not fail.
        again = list(pool.map(reduce, range(2), ["wire/1.1/1"] * 2))
    for values in (*first, *again):
        assert values.tobytes() == (gradients[0] + gradients[1]).tobytes()
    for end in ends:
        end.flush()
    for store in stores:
        store.close()


@pytest.mark.slow
def test_it_ends_when_it_is_released_and_when_the_platform_ends(host, tmp_path):
    host.acquire("a")
    host.acquire("b")
    pids = [pid_of(tmp_path, job_id) for job_id in "ab"]
    host.release("a", lingers=False)
    await_gone(pids[0])
    assert host.is_alive("b")
    host.close(ends=True)
    await_gone(pids[1])
    assert not list((tmp_path / "servers").iterdir()), "nothing is left of them"


@pytest.mark.slow
def test_the_next_platform_takes_it_over(tmp_path):
    before = make_parameter_host("redis?linger=1m&memory=64MB", tmp_path)
    url = before.acquire("a")
    pid = pid_of(tmp_path)
    before.close(ends=False)
    after = make_parameter_host("redis?linger=1m&memory=64MB", tmp_path)
    try:
        assert after.acquire("a") == url
        assert pid_of(tmp_path) == pid
    finally:
        after.close(ends=True)
    await_gone(pid)


@pytest.mark.slow
def test_a_port_that_another_has_taken_is_left_to_it(tmp_path):
    with running_redis() as other:
        kind = RedisProcesses(tmp_path)
        first = kind.start("a", None)
        kind.end(first)
        taken = msgspec.structs.replace(first, url=f"redis://:{'0' * 48}@127.0.0.1:{other.port}/0")
        second = kind.start("a", taken)
        try:
            assert f":{other.port}/" not in second.url
            assert answers(other.redis_url, LIMIT_S)
        finally:
            kind.end(second)


@pytest.mark.slow
def test_a_fixed_redis_is_pinged_with_its_password():
    with running_redis(password="p@ss:word/1") as server:
        url = f"redis://:p%40ss%3Aword%2F1@127.0.0.1:{server.port}/0"
        assert answers(url, LIMIT_S)
        assert not answers(f"redis://:no@127.0.0.1:{server.port}/0", LIMIT_S)
        server.kill()
        await_gone(server.pid)
        assert not answers(url, LIMIT_S)
    assert answers("shm://wire", 0.1)


def test_a_missing_program_is_one_sentence():
    with pytest.raises(InvalidRequest, match=r"no redis-servr on this machine.*binary=/path") as found:
        find_binary("redis-servr")
    assert "\n" not in str(found.value)


def test_the_rule_holds_no_password():
    assert "secret" not in " ".join(user_words("secret"))
