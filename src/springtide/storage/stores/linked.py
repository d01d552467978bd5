"""A store behind a virtual full-duplex link, which emulates a function's network on a machine with a faster one."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.ports import Store, StoreRequests
from springtide.storage.pacing import PollInterval, real_pace

UP_VARIABLE = "SPRINGTIDE_LINK_UP_BYTES_PER_S"
DOWN_VARIABLE = "SPRINGTIDE_LINK_DOWN_BYTES_PER_S"
LATENCY_VARIABLE = "SPRINGTIDE_LINK_LATENCY_S"
# Objects up to this size do not queue behind large ones, as their packets would not in a network.
SMALL_BYTES = 16 * 1024


class DuplexLink(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of a link in each direction, and the latency of a request. Infinite rates mean no limit."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidRequest for impossible rates or latency."""
        if not (self.up_bytes_per_s > 0.0 and self.down_bytes_per_s > 0.0):
            raise InvalidRequest(
                f"a link's rates must be over 0 bytes/s, not {self.up_bytes_per_s:g} up and "
                f"{self.down_bytes_per_s:g} down"
            )
        if not 0.0 <= self.latency_s < math.inf:
            raise InvalidRequest(f"a link's latency must be 0 s or more, not {self.latency_s:g}")

    def to_environment(self) -> dict[str, str]:
        """As environment variables for a function's process, without those that are not limited."""
        values = {
            UP_VARIABLE: self.up_bytes_per_s,
            DOWN_VARIABLE: self.down_bytes_per_s,
            LATENCY_VARIABLE: self.latency_s,
        }
        return {name: repr(value) for name, value in values.items() if 0.0 < value < math.inf}

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> DuplexLink | None:
        """The link that environment variables describe, or None. Raises InvalidRequest."""
        given = {
            name: environment[name] for name in (UP_VARIABLE, DOWN_VARIABLE, LATENCY_VARIABLE) if environment.get(name)
        }
        if not given:
            return None
        try:
            values = {name: float(text) for name, text in given.items()}
        except ValueError:
            raise InvalidRequest(f"{', '.join(given)} must be numbers, not {', '.join(given.values())}") from None
        return DuplexLink(
            up_bytes_per_s=values.get(UP_VARIABLE, math.inf),
            down_bytes_per_s=values.get(DOWN_VARIABLE, math.inf),
            latency_s=values.get(LATENCY_VARIABLE, 0.0),
        )


class Lane:
    """One direction of a link: transfers proceed in order of arrival, at the link's rate. Thread-safe.

    Small transfers do not queue behind large ones; the time that they take delays later transfers instead.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = -math.inf
        self._small_free_at_s = -math.inf

    def reserve(self, arrival_s: float, num_bytes: int) -> float:
        """Reserve the lane for `num_bytes` from `arrival_s` on. Returns when the last byte is through."""
        took_s = num_bytes / self._bytes_per_s
        with self._lock:
            self._free_at_s = max(self._free_at_s, arrival_s) + took_s
            if num_bytes > SMALL_BYTES:
                return self._free_at_s
            self._small_free_at_s = max(self._small_free_at_s, arrival_s) + took_s
            return self._small_free_at_s


class Lanes:
    """Both directions of one machine's link, shared by all stores that the machine uses."""

    def __init__(self, link: DuplexLink, pace: PollInterval | None = None) -> None:
        self.link = link
        self.pace = pace or real_pace()
        self.up = Lane(link.up_bytes_per_s)
        self.down = Lane(link.down_bytes_per_s)


class LinkedStore:
    """A `Store` whose puts and gets take as long as over a link. Several stores may share one `Lanes`.

    Requests in flight share the rate of their direction, and their latencies overlap. An object becomes visible once
    its last byte is sent. Waiting for an object uses no bandwidth; its transfer does, as for a get.
    """

    def __init__(self, store: Store, link: DuplexLink | Lanes, pace: PollInterval | None = None) -> None:
        self.store = store
        self._lanes = link if isinstance(link, Lanes) else Lanes(link, pace)

    def beside(self, store: Store) -> LinkedStore:
        """Another store on the same lanes."""
        return LinkedStore(store, self._lanes)

    def _now_s(self) -> float:
        return self._lanes.pace.now_s()

    def _sleep_until(self, instant_s: float) -> None:
        left_s = instant_s - self._now_s()
        if left_s > 0.0:
            self._lanes.pace.sleep(left_s)

    def _send(self, num_bytes: int) -> None:
        through_s = self._lanes.up.reserve(self._now_s(), num_bytes)
        self._sleep_until(through_s + self._lanes.link.latency_s)

    def _receive(self, asked_at_s: float, num_bytes: int) -> None:
        self._sleep_until(self._lanes.down.reserve(asked_at_s + self._lanes.link.latency_s, num_bytes))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Send the bytes over the link, then write the object. Raises StorageError."""
        self._send(memoryview(data).nbytes)
        self.store.put(key, data)

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Send the bytes over the link, then write the object unless it exists. Returns whether it was written."""
        self._send(memoryview(data).nbytes)
        return self.store.put_if_absent(key, data)

    def get(self, key: str) -> bytes:
        """Read an object and receive it over the link. Raises ObjectMissing after the latency, or StorageError."""
        asked_at_s = self._now_s()
        num_bytes = 0
        try:
            data = self.store.get(key)
            num_bytes = len(data)
            return data
        finally:
            self._receive(asked_at_s, num_bytes)

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Wait for an object, then receive it over the link. Raises ObjectMissing at the timeout."""
        data = self.store.wait(key, timeout_s)
        self._receive(self._now_s(), len(data))
        return data

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, after the latency."""
        self._sleep_until(self._now_s() + self._lanes.link.latency_s)
        self.store.delete(keys)

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix, after the latency."""
        self._sleep_until(self._now_s() + self._lanes.link.latency_s)
        return self.store.keys(prefix)

    def requests(self) -> StoreRequests:
        """The requests to the store behind the link."""
        return self.store.requests()

    def close(self) -> None:
        """Close the store behind the link."""
        self.store.close()
