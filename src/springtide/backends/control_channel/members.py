"""The state of each replica and of each job's group. Owned by the I/O thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from springtide.backends.control_channel.reactor import FramedConnection, Timer
from springtide.core.actions import StartReplica
from springtide.core.events import JobFinished
from springtide.core.wire.workers import FormGroup, Order, Report, Switched
from springtide.core.workload import ReplicaId, TrainingJob, WorkloadId


class MemberPhase(enum.Enum):
    """Waiting to be spawned, spawned, connected at least once, found after a restart, or gone."""

    QUEUED = "queued"
    SPAWNING = "spawning"
    RUNNING = "running"
    ADOPTING = "adopting"
    GONE = "gone"


class ReplicaHandle(Protocol):
    """The process or pod of a replica."""

    @property
    def exists(self) -> bool:
        """Whether there is a process or pod that can be ended, and whose end will be noticed."""


Handle = TypeVar("Handle", bound=ReplicaHandle)


@dataclass(eq=False)
class Replica(Generic[Handle]):
    """One worker. `token_sha256` authenticates it; `action` is the order that started it; `handle` its process or pod.

    A foreigner, a worker that should not run and is about to be ended, has no `action`. `host` is where the other
    workers of its job reach it (empty: it is on their machine).
    """

    handle: Handle
    replica_id: ReplicaId
    workload_id: WorkloadId
    generation: int
    action: StartReplica | None
    work_dir: Path
    log_path: Path
    token_sha256: str
    phase: MemberPhase = MemberPhase.QUEUED
    born_at_s: float = 0.0
    ordered_at_s: float = 0.0

    connection: FramedConnection[Report] | None = None
    heard_at_s: float = 0.0
    suspect_ticks: int | None = None
    host: str = ""

    # It has said itself what its start waits for.
    is_preparing: bool = False
    is_ready: bool = False
    address: str = ""
    step: int = 0
    group_generation: int = 0
    has_finished: bool = False
    has_failed: bool = False
    has_left: bool = False
    failure: str = ""

    seen_seq: int = 0
    acknowledged_seq: int = 0
    open_seqs: set[int] = field(default_factory=set)

    asked_to_stop: bool = False
    order: Order | None = None
    kill_at_s: float | None = None
    timers: list[Timer] = field(default_factory=list)
    lost_reason: str | None = None
    has_exited: bool = False
    exit_code: int | None = None

    @property
    def is_job(self) -> bool:
        """Whether it trains (else it serves)."""
        return self.action is not None and isinstance(self.action.workload, TrainingJob)

    @property
    def is_script(self) -> bool:
        """Whether it runs a plain script, which reports no switches."""
        return self.action is not None and self.action.workload.entrypoint.is_plain_script

    def cancel_timers(self) -> None:
        """Cancel everything that is scheduled for this worker."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


# One report of one worker: the source of an event, acknowledged once the event is durable.
Source = tuple[Replica[Any], int]


@dataclass(eq=False)
class JobGroup:
    """A job's newest group: its order, the members it was sent to and that switched, and reports waiting for it."""

    order: FormGroup
    audience: frozenset[ReplicaId]
    notified: set[ReplicaId] = field(default_factory=set)
    switched: dict[ReplicaId, Switched] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    is_confirmed: bool = False
    broken: list[Source] = field(default_factory=list)
    broken_detail: str = ""
    broken_at_s: float | None = None
    broke_before: bool = False
    is_break_posted: bool = False


@dataclass(eq=False)
class Job:
    """A job that has or had a worker. `generation` is the highest known, `fenced` that of the storage fence."""

    job_id: WorkloadId
    work_dir: Path
    generation: int = 0
    fenced: int = 0
    group: JobGroup | None = None
    finished: list[Source] = field(default_factory=list)
    finished_step: int = 0
    has_result: bool = False
    diverged_at_step: int | None = None
    artifact_path: str = ""
    finish: JobFinished | None = None
    has_ended: bool = False
