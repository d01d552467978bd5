"""The seams between deciding and doing. Whatever does the work, machines or models of them, stands behind these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from springtide.core.actions import Action, StartReplica
from springtide.core.events import Event
from springtide.core.resources import NodeId, Pool
from springtide.core.workload import WorkloadId


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the loop: what happened, what was decided, what the policy remembers. The unit of the journal."""

    now_s: float
    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    reasons: dict[str, str] = {}
    revisit_at_s: float | None = None
    memory: Any = None


class Clock(Protocol):
    """The platform's clock: seconds since the platform was created, never going back, across restarts too."""

    def now_s(self) -> float:
        """The present instant."""
        ...


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What should be running, according to the journal after a restart.

    Executors adopt the replicas they find alive under these ids, fence every other one, and report as lost what is
    named here and gone. `labels` are those of all nodes, lost ones too. `actions` are the effects that may have been
    cut off by the crash; all are idempotent.
    """

    replicas: tuple[StartReplica, ...] = ()
    generations: Mapping[WorkloadId, int] = {}
    labels: Mapping[NodeId, Pool] = {}
    actions: tuple[Action, ...] = ()


class Executor(Protocol):
    """Does what actions say and reports what happened. None of its methods decides anything."""

    def recover(self, standing: Standing) -> None:
        """Called once, before anything else, on a restart: adopt what still runs, fence what should not."""
        ...

    def start(self, action: Action) -> None:
        """Begin an action; never blocks. What became of it comes back as an event."""
        ...

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return as soon as something happened, or nothing at the deadline (platform clock; None: no deadline)."""
        ...

    def acknowledge(self, events: Sequence[Event]) -> None:
        """The events are durable in the journal: their senders may be acknowledged, and need not repeat them."""
        ...


class Journal(Protocol):
    """The append-only record of steps. What `append` returned from survives any crash."""

    def append(self, step: Step) -> int:
        """Make a step durable and return its sequence number. Raises JournalError; then nothing was recorded."""
        ...

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Every step with a higher sequence number, in order."""
        ...


class Store(Protocol):
    """Where bytes live under keys: an object store, or a parameter store that also wakes waiting readers.

    Keys are slash-separated names of at most 512 characters (letters, digits, `.`, `_`, `-`). A put is atomic: a reader
    sees all of it or nothing. Every method raises StorageError where the store does not do what it was asked, with
    a sentence that says what to mend. Thread-safe. `requests` counts everything asked, hits and misses.
    """

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object; one of that key is replaced."""
        ...

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Write an object unless there is one of that key; whether it was written."""
        ...

    def get(self, key: str) -> bytes:
        """Read an object. Raises ObjectMissing."""
        ...

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Read an object as soon as it is there. Raises ObjectMissing at the timeout.

        Blocks where the store can; otherwise asks for the known key at growing intervals. Never lists.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are none."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, in order. Costs list requests: for cleaning up, never for waiting."""
        ...

    def requests(self) -> StoreRequests:
        """What has been asked so far."""
        ...

    def close(self) -> None:
        """Let go of connections and memory; what was put stays where it outlives the process."""
        ...


class StoreRequests(msgspec.Struct, frozen=True, kw_only=True):
    """How often a store was asked for what, and what went up and down. A missed get is one of `num_gets`, too."""

    num_puts: int = 0
    num_gets: int = 0
    num_misses: int = 0
    num_lists: int = 0
    num_deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
