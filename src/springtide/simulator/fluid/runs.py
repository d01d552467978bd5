"""The state of the jobs of a long trace: progress, devices, changes; and how full the cluster was over time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from springtide.core.actions import ResizeJob
from springtide.core.events import CheckpointCommitted, JobResized
from springtide.core.functions import FunctionOption, FunctionPlan
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, ReplicaId, TrainingJob

STEP_TOLERANCE = 1e-6

Direction = Literal["start", "grow", "shrink", "recover", "resume", "replace"]


@dataclass(slots=True)
class FluidReplica:
    """One worker: it holds its device from `started_s` on."""

    replica_id: ReplicaId
    device_id: DeviceId
    started_s: float


@dataclass(slots=True)
class FluidRun:
    """One job: `done_steps` at `since_s`, which may be ahead of now, and `rate` more each second from then on.

    The group was formed at `formed_s` and stood still until `resumed_s`. Its rate holds until `boundary` steps are done
    (at `boundary_s`): its whole `length`, unless its pace changes before. `placement` is the number of its workers on
    each of its nodes, in the order of the cluster, `accelerators` are the models of their devices; a step takes
    `batch_size` samples. `functions` is the plan of a job on a function service.

    `generation` is that of the last group formed; agenda entries with another `token` are of older groups and ignored.
    `saved_steps` is the progress from which a fresh start at that step resumes, the fraction of a step included.
    `saving` are the workers of a job that is being preempted, until its checkpoint is written. `lost_device_s` is what
    steps took that have to be done again, at the speed of the group that did them (`device_s_per_step`). `device_s`
    are the device-seconds reserved for it; a share of a device counts with its request.
    """

    job: TrainingJob
    submitted_s: float
    curve: tuple[float, ...]
    single_steps_per_s: float
    total_steps: int
    length: float = 0.0
    boundary: float = 0.0
    boundary_s: float = 0.0
    batch_size: int = 0
    functions: FunctionPlan | None = None
    placement: tuple[int, ...] = ()
    accelerators: tuple[str, ...] = ()
    error: float = 1.0
    done_steps: float = 0.0
    saved_steps: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    formed_s: float = -1.0
    resumed_s: float = 0.0
    generation: int = 0
    token: int = 0
    device_bits: int = 0
    members: tuple[ReplicaId, ...] = ()
    replicas: dict[ReplicaId, FluidReplica] = field(default_factory=dict)
    gone: set[ReplicaId] = field(default_factory=set)
    committed_steps: float = 0.0
    committed_s: float = 0.0
    # From here on only for the figures.
    state: JobState = JobState.PENDING
    reason: str = ""
    admitted_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    device_s: float = 0.0
    scattered_device_s: float = 0.0
    is_scattered: bool = False
    num_resizes: int = 0
    num_restarts: int = 0
    num_preemptions: int = 0
    paused_device_s: float = 0.0
    efficiency: float = 0.0
    num_losses: int = 0
    saving: tuple[ReplicaId, ...] = ()
    device_s_per_step: float = 0.0
    lost_device_s: float = 0.0

    @property
    def entry(self) -> FunctionOption | None:
        """The entry of its menu that it runs on; None on machines."""
        options = self.job.menu.options if self.job.menu is not None else ()
        return next((option for option in options if option.plan == self.functions), None)

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None

    @property
    def step(self) -> int:
        """The last whole step; less than STEP_TOLERANCE short of it counts as done."""
        return int(self.done_steps + STEP_TOLERANCE)

    def settle(self, now_s: float) -> None:
        """Bring `done_steps` up to `now_s`."""
        if self.rate and now_s > self.since_s:
            if self.is_scattered:
                self.scattered_device_s += (now_s - self.since_s) * len(self.members)
            self.done_steps = min(self.done_steps + self.rate * (now_s - self.since_s), self.boundary)
            self.since_s = now_s

    def count_change(self, direction: Direction, now_s: float, *, is_paid: bool) -> None:
        """Count a change of its group. Several changes in one instant, as devices come free one by one, count once."""
        if direction != "start" and is_paid and now_s > self.formed_s:
            self.num_resizes += direction in ("grow", "shrink", "replace")
            self.num_restarts += 1
        if self.started_s is None:
            self.started_s = now_s

    def stand_still(self, now_s: float) -> None:
        """Dissolve its group: settle its progress and invalidate the agenda entries about that group."""
        self.settle(now_s)
        if now_s > self.formed_s:
            self.paused_device_s += (min(now_s, self.resumed_s) - self.formed_s) * len(self.members)
        self.commit_checkpoints(now_s)
        if self.rate > 0.0:
            self.device_s_per_step = len(self.members) / self.rate
        self.rate = 0.0
        self.members = ()
        self.token += 1

    def begin_afresh(self, now_s: float, restored: int) -> None:
        """Start afresh from a checkpoint of `restored` steps; progress that was not saved is lost."""
        is_saved = int(self.saved_steps + STEP_TOLERANCE) == restored
        done_steps = self.saved_steps if is_saved else float(restored)
        self.lost_device_s += max(0.0, self.done_steps - done_steps) * self.device_s_per_step
        self.done_steps = done_steps
        self.committed_steps, self.committed_s = float(restored), now_s

    def commit_checkpoints(self, now_s: float) -> None:
        """Take over the last of the periodic checkpoints that fell due by now (call `settle` first)."""
        interval_s = self.job.checkpoint_interval_s
        num_due = int((now_s - self.committed_s) / interval_s) if interval_s > 0 else 0
        if num_due <= 0:
            return
        self.committed_s += num_due * interval_s
        behind_s = max(0.0, self.since_s - self.committed_s) if self.rate else 0.0
        steps = self.done_steps - self.rate * behind_s
        self.committed_steps = max(self.committed_steps, float(int(max(0.0, steps))))

    def lose_unsaved(self) -> CheckpointCommitted:
        """Go back to the last periodic checkpoint, which the returned event reports."""
        self.saved_steps = self.committed_steps
        return self.checkpoint_event(int(self.committed_steps))

    def checkpoint_event(self, step: int) -> CheckpointCommitted:
        """The event that a checkpoint of its first `step` steps is durable."""
        job_id = self.job.job_id
        return CheckpointCommitted(job_id=job_id, generation=self.generation, step=step, path=f"{job_id}/{step}")

    def resized_event(self, pause_s: float, direction: Direction) -> JobResized:
        return JobResized(
            job_id=self.job.job_id,
            generation=self.generation,
            world_size=len(self.members),
            step=self.step,
            pause_s=pause_s,
            direction=direction,
        )

    def met_deadline(self, tolerance_s: float) -> bool:
        deadline_s = self.job.goal.deadline_s
        return (
            deadline_s is not None
            and self.state is JobState.SUCCEEDED
            and self.ended_s is not None
            and self.ended_s <= deadline_s + tolerance_s
        )


class UtilisationTimeline:
    """How full the cluster was: one entry for each moment at which that changed.

    `devices` are those held, `running` the jobs that have a group, `efficiency` the sum over these of their speed
    relative to one device (ElasticFlow, equation 8, before it is divided by the number of devices). `serving` are the
    devices that replicas of services hold, `devices` those of jobs alone.
    """

    def __init__(self) -> None:
        self.time_s = array("d")
        self.devices = array("l")
        self.running = array("l")
        self.efficiency = array("d")
        self.serving = array("l")

    def note(self, now_s: float, num_devices: int, num_running: int, efficiency: float, num_serving: int = 0) -> None:
        """Record the numbers from `now_s` on; of several records in one instant the last counts."""
        if self.time_s and self.time_s[-1] == now_s:
            self.devices[-1], self.running[-1], self.efficiency[-1] = num_devices, num_running, efficiency
            self.serving[-1] = num_serving
            return
        self.time_s.append(now_s)
        self.devices.append(num_devices)
        self.running.append(num_running)
        self.efficiency.append(efficiency)
        self.serving.append(num_serving)

    def occupied_s(self, until_s: float) -> tuple[float, float]:
        """Device-seconds held by jobs and by services from the start to `until_s`."""
        times_s = [min(at_s, until_s) for at_s in self.time_s]
        spans_s = [end_s - begin_s for begin_s, end_s in zip(times_s, [*times_s[1:], until_s], strict=True)]
        jobs_s = math.fsum(span_s * held for span_s, held in zip(spans_s, self.devices, strict=True))
        return jobs_s, math.fsum(span_s * held for span_s, held in zip(spans_s, self.serving, strict=True))


def direction_of(run: FluidRun, before: Sequence[ReplicaId], action: ResizeJob) -> Direction:
    """The direction of a change of the group `before`, as JobResized names it."""
    if action.forced:
        return "recover"
    if not before:
        return "start" if run.started_s is None else "resume"
    if len(action.replica_ids) == len(before):
        return "replace"
    return "grow" if len(action.replica_ids) > len(before) else "shrink"
