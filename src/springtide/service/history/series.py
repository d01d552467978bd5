"""A time series of each job's training: progress, batch, goodput, gradient noise, and the predicted finish."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.core.decoding import decode_msgpack
from springtide.core.events import JobFinished, JobsArchived, JobSubmitted, ProgressReported
from springtide.core.job_parts import GradientNoise
from springtide.core.ports import Step
from springtide.core.status.platform import Planned, ProgressPoint, ProgressSeries
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.service.history.keeping import packed, unpack
from springtide.service.ports import ViewLike
from springtide.service.status.adaptation import adaptation_of
from springtide.service.status.status import planned_moments, predict_eta_s

# Above this number every second point is dropped, so that a long job needs no more memory than a short one.
MAX_POINTS = 400
MAX_JOBS = 500
LEAST_GAP_S = 0.5
# Of more metrics than these, the first by name have curves.
MAX_METRICS = 12
_KEPT: Mapping[str, Any] = MappingProxyType(
    {
        "_seq": int,
        "_jobs": dict[WorkloadId, TrainingJob],
        "_points": dict[WorkloadId, list[ProgressPoint]],
        "_gap_s": dict[WorkloadId, float],
    }
)


class SeriesIndex:
    """One thread adds the journaled steps in order; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._jobs: dict[WorkloadId, TrainingJob] = {}
        self._points: dict[WorkloadId, list[ProgressPoint]] = {}
        self._gap_s: dict[WorkloadId, float] = {}

    def add(self, seq: int, step: Step, view: ViewLike) -> None:
        """Add the journal's next step. `view` is the platform after it; it is empty while the platform recovers."""
        with self._lock:
            if seq <= self._seq:
                return
            self._seq = seq
            for event in step.events:
                if isinstance(event, JobSubmitted) and event.job.job_id not in self._points:
                    self._open(event.job)
                elif isinstance(event, ProgressReported) and event.job_id in self._points:
                    self._append(_point(self._jobs[event.job_id], event, step.now_s, view), event)
                elif isinstance(event, JobsArchived):
                    for job_id in event.job_ids:
                        self._forget(job_id)
                elif isinstance(event, JobFinished) and event.job_id in self._points:
                    self._close(event, step.now_s)

    def kept(self) -> bytes:
        """What the index keeps, for the journal's next snapshot."""
        with self._lock:
            return packed(self, _KEPT)

    def take(self, data: bytes) -> None:
        """Go on from what `kept` returned. Raises JournalError."""
        with self._lock:
            unpack(self, _KEPT, data)

    def kept_of_job(self, job_id: WorkloadId) -> bytes:
        """The points of a job that leaves the platform's state."""
        with self._lock:
            return msgspec.msgpack.encode(self._points.get(job_id, []))

    def series(self, job_id: WorkloadId, now_s: float) -> ProgressSeries:
        """One job's points, oldest first."""
        with self._lock:
            return ProgressSeries(job_id=job_id, now_s=now_s, points=tuple(self._points.get(job_id, ())))

    def _open(self, job: TrainingJob) -> None:
        if len(self._points) >= MAX_JOBS:
            self._forget(next(iter(self._points)))
        self._points[job.job_id], self._jobs[job.job_id], self._gap_s[job.job_id] = [], job, LEAST_GAP_S

    def _forget(self, job_id: WorkloadId) -> None:
        for table in (self._points, self._jobs, self._gap_s):
            table.pop(job_id, None)

    def _append(self, point: ProgressPoint, event: ProgressReported) -> None:
        points = self._points[event.job_id]
        if points:
            last = points[-1]
            is_same = (last.global_batch_size, last.num_workers) == (point.global_batch_size, point.num_workers)
            if is_same and point.at_s - last.at_s < self._gap_s[event.job_id]:
                return
        points.append(point)
        if len(points) > MAX_POINTS:
            self._gap_s[event.job_id] *= 2.0
            del points[1:-1:2]

    def _close(self, event: JobFinished, now_s: float) -> None:
        """End a job's series with a point at 100 %, because the last report of progress may have been skipped."""
        points = self._points[event.job_id]
        if points and points[-1].progress_fraction != 1.0:
            last = points[-1]
            points.append(
                ProgressPoint(
                    at_s=now_s,
                    step=event.step,
                    progress_fraction=1.0,
                    num_workers=last.num_workers,
                    global_batch_size=last.global_batch_size,
                    noise_scale=last.noise_scale,
                    loss=last.loss,
                    metrics=last.metrics,
                )
            )


def points_of(kept: bytes) -> tuple[ProgressPoint, ...]:
    """The points that `SeriesIndex.kept_of_job` returned."""
    return decode_msgpack(kept, tuple[ProgressPoint, ...])


def planned_of(view: ViewLike, now_s: float) -> tuple[Planned, ...]:
    """The runs of jobs that the policy plans from now on, the next one first."""
    planned = []
    for job_id, runs in view.future.items():
        record = view.jobs.get(job_id)
        if record is None or record.lifecycle.state.is_terminal or planned_moments(record, runs) == (None, None):
            continue
        planned += [
            Planned(
                workload_id=job_id,
                workload_name=record.job.name,
                num_devices=run.num_devices,
                start_s=max(now_s, run.start_s),
                end_s=run.end_s,
            )
            for run in runs
            if run.num_devices and run.end_s > now_s
        ]
    return tuple(sorted(planned, key=lambda run: (run.start_s, run.workload_id)))


def _point(job: TrainingJob, event: ProgressReported, now_s: float, view: ViewLike) -> ProgressPoint:
    noise = None
    if event.grad_sqr is not None and event.grad_var is not None:
        noise = GradientNoise(grad_sqr=event.grad_sqr, grad_var=event.grad_var)
    size = event.global_batch_size or job.global_batch_size
    known = adaptation_of(job, noise, size, event.samples_per_s)
    record = view.jobs.get(event.job_id) if job.is_on_functions else None
    done, total = event.progress, event.total_progress
    if done is None or total is None:
        done, total = float(event.step), float(event.total_steps)
    return ProgressPoint(
        at_s=now_s,
        step=event.step,
        progress_fraction=min(1.0, done / total) if total else None,
        num_workers=event.world_size,
        global_batch_size=size,
        samples_per_s=event.samples_per_s,
        loss=event.loss,
        # With a fixed batch size goodput equals throughput.
        goodput_samples_per_s=event.samples_per_s if job.batch is None else known.goodput_samples_per_s,
        noise_scale=known.noise_scale,
        predicted_finish_at_s=_predicted_finish_s(event, now_s, view),
        memory_mb=record.runs_as.plan.memory_mb if record is not None and record.runs_as.plan is not None else None,
        cost_usd=None if record is None else record.spent.bill.total_usd,
        metrics={name: event.metrics[name] for name in sorted(event.metrics)[:MAX_METRICS]},
    )


def _predicted_finish_s(event: ProgressReported, now_s: float, view: ViewLike) -> float | None:
    record = view.jobs.get(event.job_id)
    if record is None:
        return None
    _, finish_s = planned_moments(record, view.future.get(event.job_id, ()))
    if finish_s is not None:
        return finish_s
    eta_s = predict_eta_s(record)
    return None if eta_s is None else now_s + eta_s
