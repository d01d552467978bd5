"""A platform at the wire for studies: jobs that cost money and end as they are told, answers that get lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2
import msgspec

from springtide.client.api import Client
from springtide.core.status.platform import JobStatus, PlatformStatus, ProgressPoint, ProgressSeries

NUM_STEPS = 40
Fate = Literal["done", "fails", "refused", "no such thing"]

EMPTY = JobStatus(
    job_id="",
    name="",
    kind="function",
    state="RUNNING",
    reason="",
    submitted_at_s=0.0,
    started_at_s=1.0,
    ended_at_s=None,
    deadline_at_s=None,
    budget_usd=None,
    min_workers=1,
    max_workers=1,
    num_workers=1,
    global_batch_size=8,
    generation=1,
    step=0,
    total_steps=NUM_STEPS,
    progress_fraction=0.0,
    epoch=0,
    num_epochs=1,
    loss=None,
    metrics={},
    samples_per_s=None,
    eta_s=None,
    slack_s=None,
    num_resizes=0,
    num_restarts=0,
    num_preemptions=0,
    last_pause_s=None,
    resize_pause_s={},
    checkpoint_step=None,
    artifact_path="",
    device_seconds=0.0,
    alternatives=(),
    replicas=(),
    cost_usd=0.0,
)


@dataclass
class Course:
    """How a job would go: what a step costs, the loss that it ends at, and what becomes of it."""

    step_usd: float = 0.001
    end_loss: float = 1.0
    fate: Fate = "done"
    steps_a_look: int = 5
    num_lost_answers: int = 0


@dataclass
class _Job:
    status: JobStatus
    course: Course
    key: str
    body: bytes
    spent_usd: float = 0.0
    losses: list[ProgressPoint] = field(default_factory=list)


class Platform:
    """Takes submissions, and moves every job on whenever one of them is looked at. A budget is a hard cap here:
    no step begins that would break it."""

    def __init__(self, course_of: Any) -> None:
        self.course_of = course_of
        self.jobs: dict[str, _Job] = {}
        self.num_away = 0
        self.most_running = 0
        self.has_devices = True

    def client(self) -> Client:
        return Client("http://127.0.0.1:1", "token", transport=httpx2.MockTransport(self.answer))

    @property
    def spent_usd(self) -> float:
        return sum(job.spent_usd for job in self.jobs.values())

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if self.num_away > 0:
            self.num_away -= 1
            raise httpx2.ConnectError("away")
        parts = request.url.path.strip("/").split("/")[1:]
        if parts == ["status"]:
            empty = PlatformStatus(
                version="", policy="", seq=0, now_s=0.0, wall_clock_offset_s=0.0, devices=(), jobs=(), services=()
            )
            return _told(empty)
        if request.method == "POST" and parts == ["jobs"]:
            return self._submit(request)
        if parts == ["jobs"]:
            return _told([job.status for job in self.jobs.values()])
        job = self.jobs.get(parts[1])
        if job is None:
            return _refused(404, "there is no such job")
        if parts[2:] == ["series"]:
            return _told(ProgressSeries(job_id=parts[1], now_s=0.0, points=tuple(job.losses)))
        if parts[2:] == ["cancel"]:
            if job.status.state in ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"):
                return _refused(409, "it has ended")
            self._set(job, state="CANCELLED", reason="cancelled by its owner")
            return _told(job.status)
        self.move_on()
        return _told(job.status)

    def _submit(self, request: httpx2.Request) -> httpx2.Response:
        key = request.headers["idempotency-key"]
        for job in self.jobs.values():
            if job.key == key:
                return _told(job.status) if job.body == request.content else _refused(409, "another body")
        body = msgspec.json.decode(request.content)
        course = self.course_of(body["options"]["params"])
        if course.fate == "no such thing":
            return _refused(422, "options.params is no such thing")
        status = msgspec.structs.replace(
            EMPTY,
            job_id=f"{body['name']}-{len(self.jobs):04x}",
            name=body["name"],
            budget_usd=body["options"]["budget_usd"],
        )
        if course.fate == "refused":
            status = msgspec.structs.replace(
                status, state="REJECTED", reason="too dear", started_at_s=None, cost_usd=None
            )
        self.jobs[status.job_id] = _Job(status, course, key, request.content)
        running = sum(job.status.state == "RUNNING" for job in self.jobs.values())
        self.most_running = max(self.most_running, running)
        if course.num_lost_answers > 0:
            course.num_lost_answers -= 1
            raise httpx2.ReadError("reset")
        return _told(status)

    def move_on(self) -> None:
        for job in self.jobs.values():
            for _ in range(job.course.steps_a_look):
                if job.status.state == "RUNNING":
                    self._step(job)

    def _step(self, job: _Job) -> None:
        step, budget_usd = job.status.step + 1, job.status.budget_usd
        if budget_usd is not None and job.spent_usd + job.course.step_usd > budget_usd:
            self._set(job, state="PAUSED", reason=f"its budget of ${budget_usd:.4g} is nearly spent")
            return
        job.spent_usd += job.course.step_usd
        loss = job.course.end_loss + 2.0 * (1.0 - step / NUM_STEPS)
        job.losses.append(ProgressPoint(at_s=float(step), step=step, loss=loss))
        state, reason = "RUNNING", ""
        if job.course.fate == "fails" and step == NUM_STEPS // 2:
            state, reason = "FAILED", "its code raised ValueError"
        elif step == NUM_STEPS:
            state = "SUCCEEDED"
        self._set(job, state=state, reason=reason, step=step, loss=loss, progress_fraction=step / NUM_STEPS)

    def _set(self, job: _Job, **fields: Any) -> None:
        job.status = msgspec.structs.replace(job.status, cost_usd=job.spent_usd, **fields)


def _told(value: Any) -> httpx2.Response:
    return httpx2.Response(200, content=msgspec.json.encode(value))


def _refused(code: int, message: str) -> httpx2.Response:
    return httpx2.Response(code, json={"error": {"message": message}})
