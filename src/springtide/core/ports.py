"""The protocols between decisions and their execution, which real machines and models of them implement alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from springtide.core.actions import Action, StartReplica
from springtide.core.events import Event
from springtide.core.resources import NodeId, Pool
from springtide.core.workload import WorkloadId


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the loop, and one entry of the journal: the events, the decisions, and the policy's memory.

    `promises` names the jobs whose promised deadline the plan misses from this step on (False), or keeps again (True).
    """

    now_s: float
    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    reasons: dict[str, str] = {}
    revisit_at_s: float | None = None
    memory: Any = None
    promises: dict[str, bool] | msgspec.UnsetType = msgspec.UNSET


class Clock(Protocol):
    """The platform's clock: seconds since the platform was created, monotonic even across restarts."""

    def now_s(self) -> float:
        """The present time."""
        ...


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What should be running, according to the journal after a restart.

    Executors adopt the replicas that they find alive under these ids, fence every other one, and report those as lost
    that are named here but gone. `labels` are those of all nodes, lost ones included. `actions` are the ones whose
    effects the crash may have interrupted; all are idempotent.
    """

    replicas: tuple[StartReplica, ...] = ()
    generations: Mapping[WorkloadId, int] = {}
    labels: Mapping[NodeId, Pool] = {}
    actions: tuple[Action, ...] = ()


class Executor(Protocol):
    """Carries out actions and reports events. None of its methods decides anything."""

    def recover(self, standing: Standing) -> None:
        """Adopt the replicas that still run and fence those that should not. Called once, before any other method."""
        ...

    def start(self, action: Action) -> None:
        """Begin an action without blocking. Its outcome is reported as an event."""
        ...

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return events as soon as there are any, or none at the deadline (platform clock; None: no deadline)."""
        ...

    def acknowledge(self, events: Sequence[Event]) -> None:
        """Called when the events are durable in the journal: from now on their senders need not repeat them."""
        ...


class Journal(Protocol):
    """The append-only record of steps. A step survives any crash once `append` has returned."""

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number. Raises JournalError; then nothing was recorded."""
        ...

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order."""
        ...


class Store(Protocol):
    """Objects (bytes) by key: an object store, or a parameter store that also wakes waiting readers.

    Keys are slash-separated names of at most 512 characters (letters, digits, `.`, `_`, `-`). A put is atomic: a reader
    sees the whole object or none. Every method raises StorageError when the store fails, with a message that says what
    to repair. Thread-safe.
    """

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object; an object with that key is replaced."""
        ...

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Write an object unless one with that key exists. Returns whether it was written."""
        ...

    def get(self, key: str) -> bytes:
        """Read an object. Raises ObjectMissing."""
        ...

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Read an object as soon as it exists. Raises ObjectMissing at the timeout.

        Blocks if the store can; otherwise polls the key at growing intervals. Never lists.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; keys without an object are ignored."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix, sorted. Costs list requests, so it is for cleaning up, never for waiting."""
        ...

    def requests(self) -> StoreRequests:
        """The requests made so far, hits and misses."""
        ...

    def close(self) -> None:
        """Release connections and memory. Objects stay, in stores that outlive the process."""
        ...


class StoreRequests(msgspec.Struct, frozen=True, kw_only=True):
    """How often a store was asked for what, and the bytes sent and received. Missed gets count in `num_gets` too."""

    num_puts: int = 0
    num_gets: int = 0
    num_misses: int = 0
    num_lists: int = 0
    num_deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
