"""A parameter store in a Redis: waiting blocks in the server, and any number of readers are woken by one put."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.pacing import Intervals, PollInterval, real_pace
from springtide.storage.stores.request_count import RequestCount

Answer = TypeVar("Answer")

# Redis's default limit of one value (proto-max-bulk-len).
MAX_VALUE_BYTES = 512 << 20
# A blocking request is repeated after this long, so that a server that hangs is detected.
BLOCK_S = 5.0
ANSWER_S = 15.0
RETRY_INTERVALS = Intervals(first_s=0.05, cap_s=1.0, growth=2.0, jitter_fraction=0.5)
MAX_ATTEMPTS = 7
MAX_CONNECTIONS = 10_000


class RedisStore:
    """The raw store of the objects under one name in one database of a Redis (6.2 or newer).

    Each object has a companion list with one element. A waiting reader moves this element from the list to the same
    list, which blocks in the server until the element exists and leaves it there for other readers. So a put wakes all
    readers, and later readers do not miss it.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "springtide",
        pace: PollInterval | None = None,
        retry_intervals: Intervals = RETRY_INTERVALS,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError:
            raise InvalidRequest("redis:// needs the redis package: pip install 'springtide[functions]'") from None
        if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name, re.ASCII) is None:
            raise InvalidRequest(f"name={name!r} must be at most 64 letters, digits, '.', '_' or '-'")
        try:
            parts = urlsplit(url)
            # The URL may contain a password, so messages show only host and port.
            where = f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
        except ValueError as error:
            raise InvalidRequest(f"a Redis's URL must look like redis://:PASSWORD@HOST:PORT/0: {error}") from None
        self.title = f"the Redis at {where}"
        self.max_object_bytes = MAX_VALUE_BYTES
        self.intervals = retry_intervals
        self.pace = pace or real_pace()
        self.counts = RequestCount()
        self._name = name
        self._max_attempts = max_attempts
        self._client: Any = redis.Redis.from_url(
            url,
            socket_connect_timeout=5.0,
            socket_timeout=ANSWER_S,
            # Every wait in flight occupies a connection; the client's default limit is a hundred.
            max_connections=MAX_CONNECTIONS,
            # This module retries by itself, so that retries are counted and their pauses bounded.
            retry=Retry(NoBackoff(), 0),
            # The client's packer copies large values, with hiredis several times.
            command_packer=_Packer(),
        )

    def _object(self, key: str) -> str:
        # The braces keep an object and its list on the same shard of a cluster.
        return f"{self._name}:{{{key}}}"

    def _wake_list(self, key: str) -> str:
        return f"{self._object(key)}:bell"

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        def write() -> bool:
            with self._client.pipeline(transaction=True) as pipeline:
                pipeline.set(self._object(key), data, nx=only_if_absent)
                pipeline.delete(self._wake_list(key))
                pipeline.rpush(self._wake_list(key), b"!")
                return bool(pipeline.execute()[0])

        return self._retried(write, f"write {key}", is_repeatable=not only_if_absent)

    def read(self, key: str) -> bytes | None:
        answer: bytes | None = self._retried(lambda: self._client.get(self._object(key)), f"read {key}")
        return answer

    def wait(self, key: str, timeout_s: float, read: Callable[[str], bytes | None]) -> bytes | None:
        deadline_s = self.pace.now_s() + timeout_s
        while True:
            data = read(key)
            left_s = deadline_s - self.pace.now_s()
            if data is not None or left_s <= 0.0:
                return data
            # Zero would block forever.
            block_s = max(0.001, min(left_s, BLOCK_S))
            self.counts.add(gets=1)
            self._retried(partial(self._listen, key, block_s), f"wait for {key}")

    def _listen(self, key: str, block_s: float) -> None:
        bell = self._wake_list(key)
        self._client.blmove(bell, bell, block_s, "LEFT", "LEFT")

    def remove(self, keys: Sequence[str]) -> None:
        names = [name for key in keys for name in (self._object(key), self._wake_list(key))]
        if names:
            self._retried(lambda: self._client.unlink(*names), f"remove {len(keys)} objects")

    def names(self, prefix: str) -> list[str]:
        start, end = f"{self._name}:{{", "}"

        def names() -> list[str]:
            found = self._client.scan_iter(match=f"{start}{prefix}*", count=1000)
            return [each.decode() for each in found]

        found = set(self._retried(names, f"list {prefix}"))
        return [each.removeprefix(start).removesuffix(end) for each in found if each.endswith(end)]

    def _retried(self, ask: Callable[[], Answer], what: str, *, is_repeatable: bool = True) -> Answer:
        """Send a request, and retry for a few seconds if the connection breaks. Raises StorageError with advice.

        A request that is not repeatable is not retried once it may have been sent: the server may have executed it.
        """
        import redis

        pauses = self.intervals.lengths(self.pace.draw)
        for attempt in range(1, self._max_attempts + 1):
            try:
                return ask()
            except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
                raise StorageError(
                    f"cannot {what}: {self.title} refuses these credentials ({error}); give them as "
                    f"redis://:PASSWORD@HOST:PORT/0"
                ) from None
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
                is_last = attempt == self._max_attempts
                if is_last or not (is_repeatable or _is_before_sending(error)):
                    raise StorageError(
                        f"cannot {what}: {self.title} does not answer ({_short(error)}); what it held may be gone: "
                        f"start it again or name another store"
                    ) from None
            except redis.exceptions.RedisError as error:
                raise StorageError(f"cannot {what}: {self._reason(str(error))}") from None
            self.pace.sleep(next(pauses))
        raise AssertionError("the last attempt returns or raises")

    def _reason(self, text: str) -> str:
        if text.startswith("OOM") or "maxmemory" in text:
            return f"{self.title} is full; raise its maxmemory, or send activations through the object store"
        if text.lower().startswith("unknown command"):
            return f"{self.title} is too old; it must be Redis 6.2 or newer"
        if "READONLY" in text or "read only replica" in text:
            return f"{self.title} is a read-only replica; give the address of the primary"
        if "max number of clients" in text:
            return f"{self.title} has no connection left; raise its maxclients"
        return f"{self.title} answered: {text[:200]}"

    def close(self) -> None:
        self._client.close()


class _Packer:
    """Packs commands in Redis's protocol: buffers are sent without a copy, everything else is joined."""

    def pack(self, *arguments: Any) -> list[bytes | memoryview]:
        """The parts to send, in order."""
        verb = arguments[0].encode() if isinstance(arguments[0], str) else bytes(arguments[0])
        words = [*verb.split(), *arguments[1:]]
        parts: list[bytes | memoryview] = []
        joined = b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, memoryview):
                parts += [joined + b"$%d\r\n" % word.nbytes, word]
                joined = b"\r\n"
            else:
                text = word if isinstance(word, bytes) else str(word).encode()
                joined += b"$%d\r\n%b\r\n" % (len(text), text)
        return [*parts, joined]


def _is_before_sending(error: Exception) -> bool:
    return "onnection refused" in str(error) or "Error 111" in str(error)


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:160].rstrip(".")
