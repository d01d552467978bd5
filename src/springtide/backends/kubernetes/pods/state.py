"""One pod of the table: its lifecycle, its last reading, and what its removal waits for."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.pods.reading import NO_MORE_KNOWN, Making, Reading
from springtide.core.resources import DeviceId, HostResources, NodeId
from springtide.core.status.pods import PodPhase
from springtide.core.workload import ReplicaId, WorkloadId


class PodLifecycle(enum.Enum):
    """Until OVER a pod holds its devices. ENDING: its deletion was requested, by the platform or from outside.

    OVER: none of its containers runs, but its object exists. GONE: the API server has no such object any more.
    REMOVING: the deletion of its object was requested. FORGOTTEN: it has left the table.
    """

    CREATING = "creating"
    BINDING = "binding"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"
    GONE = "gone"
    REMOVING = "removing"
    FORGOTTEN = "forgotten"


class Acknowledgement(enum.Enum):
    """What must happen before the object of an ended pod is removed."""

    JOURNAL = "the journal has its end"
    LOGS = "its output was read"


_ENDS = frozenset({PodLifecycle.OVER, PodLifecycle.GONE, PodLifecycle.REMOVING, PodLifecycle.FORGOTTEN})
_STARTS = frozenset({PodLifecycle.BINDING, PodLifecycle.STARTING, PodLifecycle.RUNNING})
_LEAVES = frozenset({PodLifecycle.ENDING, PodLifecycle.OVER, PodLifecycle.GONE})
# A container that ends before its pod is shown as starting: RUNNING may go back to STARTING.
EDGES: Mapping[PodLifecycle, frozenset[PodLifecycle]] = MappingProxyType(
    {
        # A refused creation leaves no object.
        PodLifecycle.CREATING: _STARTS | _LEAVES | {PodLifecycle.FORGOTTEN},
        PodLifecycle.BINDING: (_STARTS - {PodLifecycle.BINDING}) | _LEAVES,
        PodLifecycle.STARTING: (_STARTS - {PodLifecycle.STARTING}) | _LEAVES,
        PodLifecycle.RUNNING: (_STARTS - {PodLifecycle.RUNNING}) | _LEAVES,
        PodLifecycle.ENDING: frozenset({PodLifecycle.OVER, PodLifecycle.GONE, PodLifecycle.FORGOTTEN}),
        # A pod without a uid has no object to remove.
        PodLifecycle.OVER: frozenset({PodLifecycle.REMOVING, PodLifecycle.GONE, PodLifecycle.FORGOTTEN}),
        PodLifecycle.REMOVING: frozenset({PodLifecycle.GONE}),
        PodLifecycle.GONE: frozenset({PodLifecycle.FORGOTTEN}),
        PodLifecycle.FORGOTTEN: frozenset(),
    }
)
_PHASES: Mapping[PodLifecycle, PodPhase] = MappingProxyType(
    {
        PodLifecycle.CREATING: "creating",
        PodLifecycle.BINDING: "binding",
        PodLifecycle.STARTING: "starting",
        PodLifecycle.RUNNING: "running",
    }
)


@dataclass(eq=False)
class PodState:
    """One pod, wanted or found. `uid` is empty until the API server has shown it; `seen` is what it last showed.

    `requests` is what it takes of its node (None: not known). `making` is what its kubelet was at when its events were
    last read, at `asked_at_s`.

    `awaiting` is what the removal of its object waits for once it is over. `requested_grace_s` is the grace period that
    the platform gave it, None where it did not ask it to end. `written_term` is the term that was written onto it here,
    `is_being_confirmed` says that the API server is being asked whether it exists, and `absent` what it means if it
    does not. `was_refused`: its node did not take it, so that its container never ran.
    """

    replica_id: ReplicaId
    workload_id: WorkloadId
    key: Key
    device_ids: tuple[DeviceId, ...]
    node_id: NodeId
    requests: HostResources | None = None
    is_sharer: bool = False
    uid: str = ""
    state: PodLifecycle = PodLifecycle.CREATING
    reason: str = ""
    since_s: float = 0.0
    seen: Reading | None = None
    making: Making = NO_MORE_KNOWN
    asked_at_s: float = float("-inf")
    awaiting: frozenset[Acknowledgement] = frozenset({Acknowledgement.JOURNAL})
    requested_grace_s: int | None = None
    written_term: int = 0
    is_being_confirmed: bool = False
    exit_code: int | None = None
    end: str = ""
    was_refused: bool = False
    absent: str = "its pod is gone: it was deleted"

    def move(self, state: PodLifecycle, reason: str = "") -> None:
        """Enter another state, or change the reason of the present one. `since_s` is when the phase last changed."""
        if state is not self.state:
            assert state in EDGES[self.state], f"pod {self.key.name} cannot go from {self.state} to {state}"
            before, self.state = self.phase, state
            if self.phase != before:
                self.since_s = time.monotonic()
        self.reason = reason

    @property
    def phase(self) -> PodPhase:
        """The state as shown to users."""
        return _PHASES.get(self.state, "ending")

    @property
    def is_over(self) -> bool:
        """Whether none of its containers runs or ever will."""
        return self.state in _ENDS

    @property
    def is_gone(self) -> bool:
        """Whether its object no longer exists."""
        return self.state in (PodLifecycle.GONE, PodLifecycle.FORGOTTEN)

    @property
    def is_wanted(self) -> bool:
        """Whether it is still to be created."""
        return not self.is_over and self.requested_grace_s is None

    @property
    def address(self) -> str:
        """Its IP address as last seen; empty before it has one."""
        return "" if self.seen is None else self.seen.address

    @property
    def is_making(self) -> bool:
        """Whether its kubelet is making its container."""
        return self.seen is not None and self.seen.is_making

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for something that only a person can fix."""
        return self.seen is not None and self.seen.is_stuck
