"""What a Redis says of itself, and what of it would keep a job on functions from its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kits.servers import missing_redis, running_redis
from springtide.backends.functions.parameter_store.redis_check import examine_redis
from springtide.backends.functions.parameter_store.redis_ping import RedisRefusal, answers, ask

GOOD = {"redis_version": "7.2.4", "redis_mode": "standalone", "role": "master", "maxmemory": "0"}


class Double:
    """A server that answers every command alike, whoever asks."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(4096):
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def doubles() -> Iterator[list[Double]]:
    begun: list[Double] = []
    yield begun
    for double in begun:
        double.close()


def info(**facts: str) -> bytes:
    text = "# Server\r\n" + "".join(f"{name}:{value}\r\n" for name, value in {**GOOD, **facts}.items())
    return b"$%d\r\n%s\r\n" % (len(text), text.encode())


def saying(doubles: list[Double], answer: bytes) -> str:
    doubles.append(Double(answer))
    return doubles[-1].url


def test_one_that_will_do_says_what_it_is(doubles: list[Double]) -> None:
    (seen,) = examine_redis(saying(doubles, info(maxmemory=str(1 << 30), maxmemory_policy="noeviction")))
    assert seen.verdict == "ok"
    assert seen.text.endswith(": version 7.2.4, holds 1024 MB (noeviction)")


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"redis_version": "6.0.16"}, "is of version 6.0.16"),
        ({"redis_version": "?"}, "does not say its version"),
        ({"redis_mode": "cluster"}, "is one of a cluster's"),
        ({"role": "slave", "master_host": "10.0.0.1"}, "is a replica, which takes no writes"),
        ({"maxmemory": "1000000", "maxmemory_policy": "allkeys-lru"}, "(maxmemory-policy allkeys-lru)"),
    ],
)
def test_each_fault_is_told_with_its_mend(doubles: list[Double], facts: dict[str, str], sentence: str) -> None:
    (seen,) = examine_redis(saying(doubles, info(**facts)))
    assert seen.verdict == "fail"
    assert sentence in seen.text
    assert seen.mend


def test_a_policy_that_has_nothing_to_do_is_no_fault(doubles: list[Double]) -> None:
    (seen,) = examine_redis(saying(doubles, info(maxmemory_policy="allkeys-lru")))
    assert seen.verdict == "ok"


@pytest.mark.parametrize(
    ("answer", "verdict", "sentence"),
    [
        (b"-NOPERM this user has no permissions\r\n", "warn", "does not say who it is"),
        (b"-LOADING Redis is loading\r\n", "fail", "refuses: LOADING"),
        (b"HTTP/1.1 400 Bad Request\r\n", "warn", "what answers is no Redis"),
        (b"$100\r\nshort\r\n", "warn", "the connection ended within an answer"),
    ],
)
def test_what_else_may_answer(doubles: list[Double], answer: bytes, verdict: str, sentence: str) -> None:
    (seen,) = examine_redis(saying(doubles, answer))
    assert seen.verdict == verdict
    assert sentence in seen.text


def test_one_that_is_not_there_is_a_warning() -> None:
    (seen,) = examine_redis("redis://127.0.0.1:1/0")
    assert seen.verdict == "warn"
    assert "the Redis at 127.0.0.1:1 does not answer from here" in seen.text


@pytest.mark.skipif(bool(missing_redis()), reason=missing_redis() or "none")
def test_a_real_one_is_asked_with_and_without_its_password() -> None:
    with running_redis() as server:
        (seen,) = examine_redis(server.redis_url)
        assert seen.verdict == "ok", seen
        plain = f"redis://{server.host}:{server.port}/0"
        for url, sentence in (
            (plain, "wants a password (NOAUTH)"),
            (plain.replace("redis://", "redis://:wrong@"), "does not take the password (WRONGPASS)"),
        ):
            (refused,) = examine_redis(url)
            assert (refused.verdict, sentence in refused.text) == ("fail", True), refused
            assert "REDIS_PASSWORD" in refused.mend
            assert not answers(url, 5.0)
        assert answers(server.redis_url, 5.0)
        with pytest.raises(RedisRefusal, match="ERR unknown command"):
            ask(server.redis_url, ["NONSENSE"], 5.0)
