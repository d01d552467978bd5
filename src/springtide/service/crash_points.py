"""Named points at which tests end the control plane: around every append to the journal and every effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from springtide.control.journal.journal import DurableJournal
from springtide.core.actions import Action, StartReplica
from springtide.core.events import Event, ReplicaLost
from springtide.core.ports import Executor, Standing, Step
from springtide.core.resources import DeviceId
from springtide.service.decision_watch import DecisionWatch

# So many times as often the journal is cut, and what has ended leaves the state.
UPKEEP_PACE = "SPRINGTIDE_UPKEEP_PACE"


class EventExecutor(Executor, Protocol):
    """An executor that also takes events from outside: requests of users, load that the gateway observed."""

    def post(self, event: Event) -> None:
        """Hand an event to the loop and wake it. Thread-safe."""
        ...


class CrashingJournal:
    """The journal, with a named crash point before and after every append."""

    def __init__(self, journal: DurableJournal, crash_point: Callable[[str], None]) -> None:
        self._journal = journal
        self._crash_point = crash_point

    def append(self, step: Step) -> int:
        self._crash_point("journal.append.before")
        seq = self._journal.append(step)
        self._crash_point("journal.append.after")
        return seq

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        return self._journal.read(after_seq)


class CrashPoints:
    """The executor, with a named crash point before and after every effect that the loop starts.

    After a restart only replicas on one of `devices` are adopted: if the machine had others before, or was divided into
    other nodes, the replicas on those end and are reported as lost. With None the executor itself knows its devices.
    `before_recovery` is called before the executor recovers.
    """

    def __init__(
        self,
        executor: EventExecutor,
        crash_point: Callable[[str], None],
        draining: Callable[[], float | None],
        devices: Collection[DeviceId] | None,
        watch: DecisionWatch,
        before_recovery: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._watch = watch
        self._crash_point = crash_point
        self._draining = draining
        self._devices = devices
        self._before_recovery = before_recovery

    def recover(self, standing: Standing) -> None:
        self._before_recovery()
        if self._devices is None:
            self._executor.recover(standing)
            return
        for start in standing.replicas:
            gone = [device_id for device_id in start.device_ids if device_id not in self._devices]
            if gone:
                reason = f"{gone[0]} is no device of this platform any more"
                self._executor.post(
                    ReplicaLost(
                        workload_id=start.workload_id, replica_id=start.replica_id, reason=reason, is_fault=False
                    )
                )
        self._executor.recover(
            replace(
                standing,
                replicas=tuple(start for start in standing.replicas if self._has(start)),
                actions=tuple(
                    action for action in standing.actions if not isinstance(action, StartReplica) or self._has(action)
                ),
            )
        )

    def _has(self, start: StartReplica) -> bool:
        return self._devices is None or all(device_id in self._devices for device_id in start.device_ids)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        # During a shutdown the loop must wake when the time for the workers is over, even without events.
        end_s = self._draining()
        moments = [moment for moment in (deadline_s, end_s) if moment is not None]
        self._watch.note_waiting()
        events = self._executor.wait(min(moments, default=None))
        self._watch.note_begun()
        return events

    def acknowledge(self, events: Sequence[Event]) -> None:
        self._crash_point("loop.acknowledge.before")
        self._executor.acknowledge(events)
        self._crash_point("loop.acknowledge.after")

    def start(self, action: Action) -> None:
        name = type(action).__name__
        self._crash_point(f"loop.start.{name}.before")
        self._executor.start(action)
        self._crash_point(f"loop.start.{name}.after")
