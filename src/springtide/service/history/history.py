"""The history of every workload and device, built in memory from the steps of the journal.

It is bounded: the newest lines of each workload, and the newest intervals and marks of the whole platform.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.control.quotes.budget import goal_parts, money
from springtide.core import actions, events
from springtide.core.decoding import decode_msgpack
from springtide.core.functions import FunctionPlan
from springtide.core.job_parts import GradientNoise
from springtide.core.ports import Step
from springtide.core.quantities import format_duration
from springtide.core.reasons import GroupChange, workers_text
from springtide.core.status.platform import HistoryEntry, Interval, Mark, Timeline
from springtide.core.status.pools import Handover, PoolSize
from springtide.core.workload import JobState, TrainingJob, WorkloadId
from springtide.scheduling.functions.plan_text import words
from springtide.service.histogram import Histogram
from springtide.service.history.keeping import packed, unpack
from springtide.service.history.pools import PoolHistory, PoolTotals
from springtide.service.status.adaptation import adaptation_of

MAX_ENTRIES = 200
MAX_INTERVALS = 10_000
MAX_MARKS = 5_000
MAX_WORKLOADS = 5_000
PAUSE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class _Track:
    """What the index keeps of one workload to write its history."""

    name: str
    kind: str
    deadline_s: float | None = None
    world_size: int = 0
    generation: int = 0
    is_confirmed: bool = True
    change: GroupChange | None = None
    job: TrainingJob | None = None
    batch_size: int = 0
    next_batch_size: int = 0
    noise: GradientNoise | None = None
    has_ended: bool = False
    step: int = 0
    stalled_at_step: int | None = None
    plan: FunctionPlan | None = None
    entries: deque[HistoryEntry] = field(default_factory=lambda: deque(maxlen=MAX_ENTRIES))


_KEPT: Mapping[str, Any] = MappingProxyType(
    {
        "_seq": int,
        "_at_s": float,
        "_tracks": dict[str, _Track],
        "_open": dict[str, Interval],
        "_closed": list[Interval],
        "_marks": list[Mark],
        "_num_resizes": dict[str, int],
        "_num_ended": dict[str, int],
        "_num_lost_replicas": int,
        "_num_preemptions": int,
        "_num_stalls": int,
        "_num_start_timeouts": int,
        "_pauses": dict[str, Histogram],
    }
)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the platform was created. `num_resizes` and `pauses` are by direction, `num_ended` by state."""

    num_resizes: dict[str, int]
    num_lost_replicas: int
    num_preemptions: int
    num_stalls: int
    num_start_timeouts: int
    num_ended: dict[str, int]
    pauses: dict[str, Histogram]
    pools: PoolTotals


class HistoryIndex:
    """One thread adds the journaled steps in order; any thread may read. A step that was added before is ignored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._at_s = 0.0
        self._tracks: dict[str, _Track] = {}
        self._open: dict[str, Interval] = {}
        self._closed: deque[Interval] = deque(maxlen=MAX_INTERVALS)
        self._marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        self._num_resizes: dict[str, int] = {}
        self._num_ended: dict[str, int] = {}
        self._num_lost_replicas = 0
        self._num_preemptions = 0
        self._num_stalls = self._num_start_timeouts = 0
        self._pauses: dict[str, Histogram] = {}
        self._pools = PoolHistory()

    def add(self, seq: int, step: Step) -> None:
        with self._lock:
            if seq <= self._seq:
                return
            self._seq, self._at_s = seq, step.now_s
            for event in step.events:
                self._record(event)
            for action in step.actions:
                self._record(action)
            for workload_id, reason in step.reasons.items():
                self._write(workload_id, "waiting", reason)
            for note in self._pools.add(step):
                if note.workload_id:
                    self._write(note.workload_id, note.kind, note.text)
                else:
                    self._marks.append(
                        Mark(at_s=self._at_s, workload_id="", kind=note.kind, text=note.text, node_id=note.node_id)
                    )

    def kept(self) -> bytes:
        """What the index keeps, for the journal's next snapshot."""
        with self._lock:
            return msgspec.msgpack.encode((packed(self, _KEPT), self._pools.kept()))

    def take(self, data: bytes) -> None:
        """Go on from what `kept` returned. Raises JournalError."""
        with self._lock:
            own, pools = decode_msgpack(data, tuple[bytes, bytes])
            unpack(self, _KEPT, own)
            self._pools.take(pools)

    def kept_of_job(self, job_id: WorkloadId) -> bytes:
        """The lines of a workload that leaves the platform's state."""
        return msgspec.msgpack.encode(self.entries(job_id))

    def entries(self, workload_id: str) -> tuple[HistoryEntry, ...]:
        """The newest lines of one workload's history, oldest first."""
        with self._lock:
            track = self._tracks.get(workload_id)
            return tuple(track.entries) if track is not None else ()

    def timeline(self, now_s: float, since_s: float = 0.0) -> Timeline:
        """Which workload held which device since `since_s`, and what happened. Deadlines to come are marks too."""
        with self._lock:
            intervals = [i for i in self._closed if i.end_s is None or i.end_s >= since_s]
            intervals += [each for interval in self._open.values() for each in interval.by_device()]
            marks = [mark for mark in self._marks if mark.at_s >= since_s]
            marks += [
                Mark(at_s=track.deadline_s, workload_id=workload_id, kind="deadline", text=f"deadline of {track.name}")
                for workload_id, track in self._tracks.items()
                if track.deadline_s is not None and track.deadline_s >= since_s
            ]
            loans = self._pools.loans(since_s)
        return Timeline(
            now_s=now_s,
            intervals=tuple(sorted(intervals, key=lambda interval: interval.start_s)),
            marks=tuple(sorted(marks, key=lambda mark: mark.at_s)),
            loans=loans,
        )

    def handovers(self) -> tuple[Handover, ...]:
        """The newest loans and reclaims of nodes, including those under way, in the order of their demand."""
        with self._lock:
            return self._pools.handovers()

    def pool_sizes(self, since_s: float) -> tuple[PoolSize, ...]:
        """How many devices services could hold and how many the inference pool owns, from `since_s` on."""
        with self._lock:
            return self._pools.sizes(since_s)

    def totals(self) -> Totals:
        """The counts since the platform was created."""
        with self._lock:
            return Totals(
                num_resizes=dict(self._num_resizes),
                num_lost_replicas=self._num_lost_replicas,
                num_preemptions=self._num_preemptions,
                num_stalls=self._num_stalls,
                num_start_timeouts=self._num_start_timeouts,
                num_ended=dict(self._num_ended),
                pauses=dict(self._pauses),
                pools=self._pools.totals(),
            )

    # --- one method for each event and action -------------------------------------------------------------------------

    @singledispatchmethod
    def _record(self, item: object) -> None:
        """Record an event or action. Types without a registered method change nothing."""

    @_record.register
    def _(self, event: events.JobSubmitted) -> None:
        job = event.job
        if job.job_id in self._tracks:
            return
        self._track(
            job.job_id,
            _Track(
                name=job.name,
                kind="job",
                deadline_s=job.goal.deadline_s,
                job=job,
                batch_size=job.global_batch_size,
            ),
        )
        workers = (
            str(job.min_workers) if job.min_workers == job.max_workers else f"{job.min_workers}..{job.max_workers}"
        )
        batch = f"{job.global_batch_size}" if job.batch is None else f"{job.batch.min_size}..{job.batch.max_size}"
        plural = "" if workers == "1" else "s"
        how = f"{workers} worker{plural}" if job.menu is None else f"to functions at {job.menu.service}"
        # A script says itself how many samples are a batch, and how many epochs there are.
        passes = "epoch" if job.num_epochs == 1 else "epochs"
        length = f", global batch {batch}, {job.num_epochs} {passes}" if job.entrypoint.kind != "script" else ""
        text = f"submitted: {how}{length}"
        if job.goal.deadline_s is not None:
            text += f", deadline in {format_duration(job.goal.deadline_s - self._at_s)}"
        self._write(job.job_id, "submitted", f"{text}; {job.place_reason}" if job.place_reason else text)

    @_record.register
    def _(self, event: events.ServiceDeployed) -> None:
        service = event.service
        track = self._tracks.get(service.service_id)
        if track is None:
            self._track(service.service_id, _Track(name=service.name, kind="service"))
        bounds = f"{service.min_replicas}..{service.max_replicas} replicas"
        how = "deployed" if track is None else "deployed again"
        if event.is_rollback:
            how = f"its owner asked for revision {service.revision} again"
        self._write(service.service_id, "deployed", f"{how}: {bounds}")

    @_record.register
    def _(self, event: events.RevisionJudged) -> None:
        verdict = "gets all requests" if event.is_good else "gets no requests any more"
        self._write(event.service_id, "judged", f"revision {event.revision} {verdict}: {event.reason}")

    @_record.register
    def _(self, event: events.CancelRequested) -> None:
        track = self._tracks.get(event.workload_id)
        if track is not None and not track.has_ended:
            self._write(event.workload_id, "cancelled", "its owner asked for the end")

    @_record.register
    def _(self, event: events.PauseRequested) -> None:
        self._write(event.job_id, "pause", event.reason or "its owner asked for a pause")

    @_record.register
    def _(self, event: events.ResumeRequested) -> None:
        raised = "" if event.budget_usd is None else f" with a budget of {money(event.budget_usd)}"
        self._write(event.job_id, "resume", f"its owner lets it go on{raised}")

    @_record.register
    def _(self, event: events.JobEdited) -> None:
        track = self._tracks.get(event.job_id)
        if track is None or track.has_ended:
            return
        parts = [] if event.max_restarts is None else [f"retries {event.max_restarts}"]
        if event.goal is not None:
            track.deadline_s = event.goal.deadline_s
            parts = [*goal_parts(event.goal, self._at_s), *parts]
        if parts:
            self._write(event.job_id, "edited", f"its owner wants now: {', '.join(parts)}")

    @_record.register
    def _(self, event: events.MoveRequested) -> None:
        told = f"to functions at {event.menu.service}"
        told = f"the platform moves it {told}: {event.reason}" if event.is_automatic else f"its owner moves it {told}"
        self._write(event.job_id, "move", told)

    @_record.register
    def _(self, event: events.MoveFailed) -> None:
        self._write(event.job_id, "move", f"it goes back to machines: functions cannot start: {event.error}")

    @_record.register
    def _(self, event: events.JobsArchived | events.ServicesArchived) -> None:
        for workload_id in event.job_ids if isinstance(event, events.JobsArchived) else event.service_ids:
            self._tracks.pop(workload_id, None)

    @_record.register
    def _(self, event: events.ScaleRequested) -> None:
        told = f"set new bounds: {event.minimum}..{event.maximum}"
        told = f"the platform {told}: {event.reason}" if event.reason else f"its owner {told}"
        self._write(event.workload_id, "scale", told)

    @_record.register
    def _(self, event: events.NodeLost) -> None:
        for interval in list(self._open.values()):
            if interval.device_id.rpartition("/")[0] == event.node_id:
                self._lose(interval.workload_id, interval.replica_id, f"node {event.node_id} was lost")

    @_record.register
    def _(self, event: events.ReplicaReady) -> None:
        if event.replica_id in self._open:
            self._write(event.workload_id, "ready", f"{event.replica_id} is warm")

    @_record.register
    def _(self, event: events.ReplicaStopped) -> None:
        if self._close(event.replica_id):
            self._write(event.workload_id, "stopped", f"{event.replica_id} left, its device is free")

    @_record.register
    def _(self, event: events.ReplicaLost) -> None:
        self._lose(event.workload_id, event.replica_id, event.reason or "a worker was lost")

    @_record.register
    def _(self, event: events.StartHeldUp) -> None:
        name, reason = event.replica_id, event.reason
        kind, text = ("held-up", f"{name} cannot begin yet: {reason}") if reason else ("begun", f"{name} has begun")
        self._write(event.workload_id, kind, text)

    @_record.register
    def _(self, event: events.StartTimedOut) -> None:
        self._num_start_timeouts += 1
        text = f"{event.replica_id} hangs: it has not started within {format_duration(event.timeout_s)}"
        self._write(event.workload_id, "start-timed-out", text)
        self._mark(event.workload_id, "crash", text)

    @_record.register
    def _(self, event: events.JobResized) -> None:
        track = self._tracks.get(event.job_id)
        if track is None or track.is_confirmed or event.generation != track.generation:
            return
        track.stalled_at_step = None
        before, track.world_size, track.is_confirmed = track.world_size, event.world_size, True
        self._record_batch(event.job_id, track)
        if track.plan is None:
            workers, num_workers = workers_text(event.world_size), event.world_size
        else:
            workers, num_workers = words(track.plan), None
        if event.direction in ("start", "resume"):
            verb = "started" if event.direction == "start" else "resumed"
            self._write(event.job_id, event.direction, f"{verb} on {workers} at step {event.step}", num_workers)
            self._mark(event.job_id, event.direction, f"{verb} on {workers}")
            return
        pause = format_duration(event.pause_s)
        self._num_resizes[event.direction] = self._num_resizes.get(event.direction, 0) + 1
        self._pauses[event.direction] = self._pauses.get(event.direction, Histogram(PAUSE_BOUNDS_S)).plus(event.pause_s)
        change = track.change
        if change is not None and change.code == "batch":
            return
        why = "" if change is None else change.why
        if track.plan is not None:
            # The policy's sentence would repeat the plan, so only its reason is used.
            if change is not None and change.chosen is not None and change.chosen.plan == track.plan:
                why = change.chosen.why or why
            self._write(event.job_id, event.direction, f"goes on as {workers}, pause {pause}: {why}")
            self._mark(event.job_id, "resize", f"goes on as {workers}, pause {pause}")
            return
        verb = "recovered with" if event.direction == "recover" else f"resized {before} ->"
        text = f"{verb} {workers}, pause {pause}, step {event.step} continued"
        if why:
            text += f" ({why})"
        self._write(event.job_id, event.direction, text, num_workers)
        self._mark(event.job_id, "resize", f"{verb} {workers}, pause {pause}")

    @_record.register
    def _(self, event: events.ProgressReported) -> None:
        track = self._tracks.get(event.job_id)
        if track is None:
            return
        if event.grad_sqr is not None and event.grad_var is not None:
            track.noise = GradientNoise(grad_sqr=event.grad_sqr, grad_var=event.grad_var)
        if track.stalled_at_step is not None and event.step > track.stalled_at_step:
            track.stalled_at_step = None
            self._write(event.job_id, "steps-again", f"step {event.step} has come: it was slow, or hung for a while")
        track.step = event.step

    @_record.register
    def _(self, event: events.JobStalled) -> None:
        track = self._tracks.get(event.job_id)
        if track is None or track.has_ended:
            return
        self._num_stalls += 1
        track.stalled_at_step = track.step if track.job is not None and track.job.on_stall == "report" else None
        text = f"no step for {format_duration(self._at_s - event.since_s)}, the last was {track.step}"
        self._write(event.job_id, "stalled", text)
        self._mark(event.job_id, "stalled", text)

    @_record.register
    def _(self, event: events.GroupBroken) -> None:
        self._write(event.job_id, "broken", f"a collective failed, the group forms anew: {event.detail[:300]}")

    @_record.register
    def _(self, event: events.CheckpointCommitted) -> None:
        track = self._tracks.get(event.job_id)
        if track is None:
            return
        # Of several checkpoints in a row only the newest gets a line.
        if track.entries and track.entries[-1].kind == "checkpoint":
            track.entries.pop()
        self._write(event.job_id, "checkpoint", f"checkpoint of step {event.step} is durable")

    @_record.register
    def _(self, event: events.JobFinished) -> None:
        self._write(event.job_id, "finished", f"the training function returned at step {event.step}")

    @_record.register
    def _(self, event: events.JobFailed) -> None:
        told = "cannot be resized" if event.is_fixed_size else "its code raised"
        self._write(event.job_id, "failed", f"{told}: {event.error[:500]}")

    @_record.register
    def _(self, action: actions.StartReplica) -> None:
        workload_id = str(action.workload_id)
        track = self._tracks.get(workload_id)
        if track is None or action.replica_id in self._open:
            return
        self._open[action.replica_id] = Interval(
            device_id=action.device_id,
            more_devices=action.more_devices,
            workload_id=workload_id,
            workload_name=track.name,
            workload_kind="job" if isinstance(action.workload, TrainingJob) else "service",
            replica_id=action.replica_id,
            start_s=self._at_s,
            end_s=None,
        )
        track.generation = max(track.generation, action.generation)
        why = f" ({action.reason})" if action.reason else ""
        self._write(workload_id, "starting", f"starting {action.replica_id} on {', '.join(action.device_ids)}{why}")

    @_record.register
    def _(self, action: actions.StopReplica) -> None:
        why = f" ({action.reason})" if action.reason else ""
        self._write(action.workload_id, "stopping", f"stopping {action.replica_id}{why}")

    @_record.register
    def _(self, action: actions.ResizeJob) -> None:
        track = self._tracks.get(action.job_id)
        if track is not None:
            track.generation, track.is_confirmed, track.change = action.generation, False, action.change
            track.next_batch_size, track.plan = action.global_batch_size, action.functions

    @_record.register
    def _(self, action: actions.PreemptJob) -> None:
        track = self._tracks.get(action.job_id)
        if track is not None:
            track.generation, track.is_confirmed, track.world_size = action.generation, True, 0
        self._num_preemptions += 1
        self._write(action.job_id, "preempt", f"checkpoints and gives its devices back: {action.reason}")
        self._mark(action.job_id, "preempt", action.reason)

    @_record.register
    def _(self, action: actions.AdmitJob) -> None:
        self._write(action.job_id, "admitted", action.reason)

    @_record.register
    def _(self, action: actions.EndJob) -> None:
        track = self._tracks.get(action.job_id)
        if track is not None:
            track.has_ended = True
        self._num_ended[action.state.value] = self._num_ended.get(action.state.value, 0) + 1
        self._write(action.job_id, "ended", f"{action.state.value}: {action.reason}")
        kind = "failed" if action.state is JobState.FAILED else "end"
        self._mark(action.job_id, kind, f"{action.state.value}: {action.reason}")

    def _record_batch(self, workload_id: str, track: _Track) -> None:
        """Record a change of a job's batch size."""
        before, size, job = track.batch_size, track.next_batch_size or track.batch_size, track.job
        if job is None or job.batch is None or size == before:
            return
        track.batch_size = size
        known = adaptation_of(job, track.noise, size, None)
        text = f"batch {before} -> {size}: "
        text += "noise scale not known yet" if known.noise_scale is None else f"noise scale {known.noise_scale:.0f}"
        if known.learning_rate_factor is not None:
            text += f", learning rate x{known.learning_rate_factor:.3g} ({job.batch.learning_rate})"
        if track.change is not None and track.change.code == "batch" and track.change.why:
            text += f" ({track.change.why})"
        self._write(workload_id, "batch", text)
        self._mark(workload_id, "batch", text)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _track(self, workload_id: str, track: _Track) -> None:
        if len(self._tracks) >= MAX_WORKLOADS:
            ended = next((known for known, old in self._tracks.items() if old.has_ended), None)
            if ended is not None:
                del self._tracks[ended]
        self._tracks[workload_id] = track

    def _write(self, workload_id: str, kind: str, text: str, num_workers: int | None = None) -> None:
        track = self._tracks.get(workload_id)
        if track is not None:
            entry = HistoryEntry(seq=self._seq, at_s=self._at_s, kind=kind, text=text, num_workers=num_workers)
            track.entries.append(entry)

    def _mark(self, workload_id: str, kind: str, text: str) -> None:
        self._marks.append(Mark(at_s=self._at_s, workload_id=workload_id, kind=kind, text=text))

    def _close(self, replica_id: str) -> bool:
        interval = self._open.pop(replica_id, None)
        if interval is not None:
            self._closed.extend(interval.by_device(until_s=self._at_s))
        return interval is not None

    def _lose(self, workload_id: str, replica_id: str, reason: str) -> None:
        if not self._close(replica_id):
            return
        self._num_lost_replicas += 1
        self._write(workload_id, "lost", f"{replica_id} was lost: {reason}")
        self._mark(workload_id, "crash", f"{replica_id} was lost: {reason}")


def entries_of(kept: bytes) -> tuple[HistoryEntry, ...]:
    """The lines that `HistoryIndex.kept_of_job` returned."""
    return decode_msgpack(kept, tuple[HistoryEntry, ...])


def pools_part(kept: bytes) -> bytes:
    """Of what `HistoryIndex.kept` returned, what its PoolHistory keeps."""
    return decode_msgpack(kept, tuple[bytes, bytes])[1]
