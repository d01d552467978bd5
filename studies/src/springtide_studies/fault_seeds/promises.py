"""Jobs with profiles and tight deadlines, and the invariants of what is promised to them and planned for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from springtide.control.records import JobRecord, PlatformState
from springtide.core.actions import AdmitJob, EndJob
from springtide.core.decision import Overheads, Schedule
from springtide.core.events import CancelRequested, JobSubmitted
from springtide.core.ports import Step
from springtide.core.workload import Goal, JobState, TrainingJob, WorkloadId
from springtide_studies.fault_seeds.models import job_model
from springtide_studies.fault_seeds.workload import Workload

# What a change costs on the modelled machines at most, where nothing goes wrong: start, model, load and switch.
CHANGE = Overheads(change_s=2.0)
# A plan is late by less than this only because of rounding and of the platform's own turns.
_SLACK_S = 0.05
# A job that could have ended so long before its deadline, on an idle platform, is not refused for want of time.
_PLENTY_S = 10.0


def with_promises(workload: Workload, rng: np.random.Generator, num_devices: int) -> Workload:
    """The scenario without owners who change their minds about jobs, whose jobs have profiles and mostly tight
    deadlines, so that promises are given, refused, kept and released.

    Where it has no pools, it has no services either: what is promised depends on nothing but the jobs.
    """
    requests = []
    for request in workload.requests:
        event = request.event
        if isinstance(event, JobSubmitted):
            event = JobSubmitted(job=_promisable(event.job, request.at_s, rng, num_devices))
        elif workload.day_s is None and not isinstance(event, CancelRequested):
            continue
        requests.append(msgspec.structs.replace(request, event=event))
    if workload.day_s is None:
        jobs = {r.event.job.job_id for r in requests if isinstance(r.event, JobSubmitted)}
        requests = [r for r in requests if not isinstance(r.event, CancelRequested) or r.event.workload_id in jobs]
        return Workload(requests=tuple(requests))
    return msgspec.structs.replace(workload, requests=tuple(requests))


def _promisable(job: TrainingJob, at_s: float, rng: np.random.Generator, num_devices: int) -> TrainingJob:
    model = job_model(job)
    slack, has_deadline, waits = float(rng.uniform(1.0, 3.0)), rng.random() < 0.8, bool(rng.random() < 0.3)
    most = min(job.max_workers, num_devices)
    rates = {n: 1.0 / model.step_s(n, job.global_batch_size) for n in range(1, job.max_workers + 1)}
    deadline_s = at_s + slack * (3.0 * CHANGE.change_s + model.total_steps / rates[most])
    return msgspec.structs.replace(
        job,
        batch=None,
        family="",
        elastic=True,
        requested_workers=None,
        total_steps=model.total_steps,
        profile_steps_per_s=rates,
        goal=Goal(deadline_s=deadline_s, waits=waits) if has_deadline else Goal(),
        params={**job.params, "poison": ""},
    )


class PromiseInvariants:
    """Watches what a policy plans and promises.

    `num_devices` is how many the run has when all nodes are up, and one policy never plans for more: it is given None
    for others, whose plans need not fit. With `is_kept` nothing goes wrong in the run, and the policy knows what
    changes cost: every promise must be kept, and no job be refused that has plenty of time.
    """

    def __init__(self, complain: Callable[[str, str], None], num_devices: int | None, *, is_kept: bool) -> None:
        self._complain = complain
        self._num_devices = math.inf if num_devices is None else num_devices
        self._is_kept = is_kept
        self._promised: dict[WorkloadId, float] = {}
        self._ends_s: dict[WorkloadId, float] = {}
        self.num_promised = self.num_refused = 0

    def note_journaled(self, step: Step, state: PlatformState, future: Mapping[WorkloadId, Schedule]) -> None:
        """A step is in the journal, and `future` is planned after it."""
        for action in step.actions:
            if isinstance(action, AdmitJob):
                self._note_promise(action, state.jobs[action.job_id])
            elif isinstance(action, EndJob) and action.state is JobState.REJECTED:
                self.num_refused += 1
                if self._is_kept:
                    self._check_refusal(state.jobs[action.job_id], state, step.now_s)
        self._check_plan(step.now_s, state, future)
        if self._is_kept:
            self._check_promises(step.now_s, state, future)

    def _note_promise(self, action: AdmitJob, record: JobRecord) -> None:
        deadline_s = record.job.goal.deadline_s
        if deadline_s is None:
            return
        self.num_promised += 1
        self._promised[action.job_id] = deadline_s
        if action.finish_s > deadline_s + _SLACK_S:
            detail = f"{action.job_id} is promised {deadline_s:.2f} s and planned to end at {action.finish_s:.2f} s"
            self._complain("promise-planned", detail)

    def _check_plan(self, now_s: float, state: PlatformState, future: Mapping[WorkloadId, Schedule]) -> None:
        """What is planned is for jobs that live, and never for more devices than there are."""
        changes: defaultdict[float, int] = defaultdict(int)
        for job_id, runs in future.items():
            record = state.jobs.get(job_id)
            if record is None or (record.lifecycle.state.is_terminal and record.lifecycle.ended_at_s != now_s):
                self._complain("promise-released", f"devices are planned for {job_id}, which has ended")
            for run in runs:
                changes[max(now_s, run.start_s)] += run.num_devices
                changes[max(now_s, run.end_s)] -= run.num_devices
        used = 0
        for moment_s in sorted(changes):
            used += changes[moment_s]
            if used > self._num_devices:
                self._complain("plan-fits", f"{used} of {self._num_devices} devices are planned for {moment_s:.2f} s")

    def _check_promises(self, now_s: float, state: PlatformState, future: Mapping[WorkloadId, Schedule]) -> None:
        """No promise is broken, and none is given up: as long as the job lives its plan ends by its deadline."""
        for job_id, deadline_s in list(self._promised.items()):
            record = state.jobs[job_id]
            if record.lifecycle.state.is_terminal or record.lifecycle.outcome is not None:
                del self._promised[job_id]
                if record.lifecycle.state is JobState.SUCCEEDED and now_s > deadline_s + _SLACK_S:
                    self._complain("promise-kept", f"{job_id} ended at {now_s:.2f} s, promised was {deadline_s:.2f} s")
                continue
            if future.get(job_id):
                self._ends_s[job_id] = future[job_id][-1].end_s
            # A job may take a moment longer than was planned.
            end_s = self._ends_s.get(job_id, math.inf)
            is_dropped = not future.get(job_id) and end_s > now_s
            if is_dropped or max(now_s, end_s) > deadline_s + _SLACK_S:
                planned = "no end" if is_dropped else f"{max(now_s, end_s):.2f} s"
                self._complain("promise-kept", f"{job_id} is planned for {planned}, promised is {deadline_s:.2f} s")

    def _check_refusal(self, record: JobRecord, state: PlatformState, now_s: float) -> None:
        """A job that is alone on a platform whose nodes are all up is not refused if there is plenty of time for it."""
        job, deadline_s = record.job, record.job.goal.deadline_s
        others = [live for live in state.live_records() if live.workload_id != job.job_id]
        num_devices = len(state.topology().device_ids())
        if deadline_s is None or others or state.drains or num_devices < self._num_devices:
            return
        widest = max(len(node.devices) for node in state.nodes.values())
        num_devices = num_devices // job.devices_each if job.devices_each <= widest else 0
        most = min(record.bounds.max_workers, num_devices)
        if most < record.bounds.min_workers or job.total_steps is None:
            return
        rate = max(job.profile_steps_per_s[n] for n in range(1, most + 1))
        end_s = now_s + CHANGE.cost_s(most) + job.total_steps / rate
        if end_s + _PLENTY_S < deadline_s:
            detail = f"{job.job_id} could end at {end_s:.2f} s, alone, and is refused {deadline_s:.2f} s"
            self._complain("refusal-needed", detail)
