"""What the platform under faults has to do: seeded small jobs that are resized, paused and cancelled, and requests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from springtide.client.api import Client
from springtide.client.sources.source import SourceFile
from springtide.core.errors import CapacityError, Conflict, InvalidRequest, NotFound, SpringtideError
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState
from springtide_studies.chaos.checks import contradiction
from springtide_studies.chaos.faults import SERVICE

TRAINING = '''
"""A linear model on 96 seeded samples; every four samples can take a while, to leave time for trouble."""
import time
import torch

def fit(ctx):
    torch.manual_seed(7)
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1) + 0.1 * torch.randn(96, 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model, optimizer = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    for batch in ctx.batches((x, y)):
        time.sleep(float(ctx.params.get("shard_s", "0")) * len(batch.x) / 4)
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
'''
ECHO = """
class Echo:
    def predict(self, numbers: list[float]) -> list[float]:
        return [2 * number for number in numbers]
"""
NUM_SAMPLES, BATCH = 96, 16
EPOCHS = (6, 12, 24)
MOST_OPEN = 2
REQUESTS_PER_S = 10.0
_LOOK_S = 0.1
_REQUEST_TIMEOUT_S = 30.0


@dataclass
class ChaosJob:
    """A job of the load: its options, what its owner will ask for and when (seconds after its start), how it went."""

    name: str
    options: dict[str, Any]
    asks: list[tuple[float, str, tuple[int, ...]]]
    job_id: str = ""
    accepted_at: float = 0.0
    may_be_cancelled: bool = False
    is_cancelled: bool = False
    status: JobStatus | None = None
    seen_at: float = 0.0

    @property
    def num_epochs(self) -> int:
        """Passes over the dataset, by which its artifact is known."""
        return int(self.options["num_epochs"])

    def goes_on(self, since: float, steps: dict[str, int]) -> bool:
        """Whether it has made a step since then, has ended, or was paused. `steps` keeps the step seen first."""
        if self.has_ended:
            return True
        if self.status is None or self.seen_at < since:
            return False
        return self.status.state == JobState.PAUSED or self.status.step > steps.setdefault(self.name, self.status.step)

    @property
    def has_ended(self) -> bool:
        """Whether it was last seen in a terminal state."""
        return self.status is not None and JobState(self.status.state).is_terminal


def draw_job(number: int, rng: random.Random) -> ChaosJob:
    """The next job of the seeded load."""
    options: dict[str, Any] = {
        "global_batch_size": BATCH,
        "num_epochs": rng.choice(EPOCHS),
        "min_workers": rng.choice((1, 1, 2)),
        "max_workers": rng.choice((2, 3, 4)),
        # So that its model can be compared with that of an undisturbed run.
        "num_virtual_shards": 4,
        "max_restarts": 1000,
        "params": {"shard_s": str(rng.choice((0.0, 0.02, 0.04)))},
    }
    if rng.random() < 0.3:
        options |= {"deadline_s": rng.choice((300.0, 900.0)), "is_soft": True}
    at_s, kind = rng.uniform(0.1, 4.0), rng.random()
    asks: list[tuple[float, str, tuple[int, ...]]] = []
    if kind < 0.25:
        asks = [(at_s + 0.4 * index, "scale", (1, rng.randint(1, 4))) for index in range(3)]
    elif kind < 0.45:
        asks = [(at_s, "pause", ()), (at_s + rng.uniform(0.2, 3.0), "resume", ())]
    elif kind < 0.6:
        asks = [(at_s, "cancel", ())]
    return ChaosJob(name=f"job-{number}", options=options, asks=asks)


def submit(client: Client, job: ChaosJob) -> None:
    """Submit under the job's own key, so that any number of attempts is one job."""
    source = SourceFile(filename="job.py", text=TRAINING, object_name="fit", kind="function")
    job.status = client.submit_job(job.name, source, job.options, idempotency_key=job.name)
    job.job_id, job.accepted_at = job.status.job_id, time.monotonic()


@dataclass
class ChaosRequest:
    """A request to the service, in seconds of the monotonic clock, and what became of it."""

    sent_at: float
    ended_at: float = 0.0
    outcome: str = ""
    detail: str = ""


@dataclass
class ChaosLoad:
    """Jobs and requests, each from a thread of its own. Other threads read the lists, which only grow."""

    connect: Callable[[], Client]
    rng: random.Random
    jobs: list[ChaosJob] = field(default_factory=list)
    requests: list[ChaosRequest] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    is_closing: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to submit and to ask."""
        self._threads = [
            threading.Thread(target=work, name=f"chaos-{work.__name__}", daemon=True)
            for work in (self._keep_jobs, self._keep_asking)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> bool:
        """Submit nothing more and wait until all jobs have ended; returns whether they have."""
        self.is_closing.set()
        self._threads[0].join(timeout_s)
        self.has_ended.set()
        self._threads[1].join(_REQUEST_TIMEOUT_S + 5.0)
        return not self._threads[0].is_alive()

    def at_work(self) -> list[ChaosJob]:
        """The jobs that were last seen running."""
        return [job for job in list(self.jobs) if job.status is not None and job.status.state == JobState.RUNNING]

    def _keep_jobs(self) -> None:
        with self.connect() as client:
            while not self.has_ended.is_set():
                open_jobs = [job for job in self.jobs if not job.has_ended]
                if self.is_closing.is_set() and not open_jobs:
                    return
                if len(open_jobs) < MOST_OPEN and not self.is_closing.is_set():
                    self.jobs.append(draw_job(len(self.jobs) + 1, self.rng))
                for job in open_jobs:
                    try:
                        self._tend(client, job)
                    except CapacityError:
                        continue
                    except (InvalidRequest, NotFound) as error:
                        self.contradictions.append(f"{job.name} {job.job_id or 'was refused'}: {error}")
                        self.jobs.remove(job)
                    except SpringtideError:
                        break
                time.sleep(_LOOK_S)

    def _tend(self, client: Client, job: ChaosJob) -> None:
        """Submit the job, ask what its owner asks by now, and look at it."""
        if not job.job_id:
            submit(client, job)
            return
        if job.asks and time.monotonic() >= job.accepted_at + job.asks[0][0]:
            _, verb, numbers = job.asks[0]
            job.may_be_cancelled |= verb == "cancel"
            try:
                if verb == "scale":
                    client.scale(job.job_id, *numbers)
                else:
                    getattr(client, verb)(job.job_id)
                job.is_cancelled |= verb == "cancel"
                job.asks.pop(0)
            except (Conflict, InvalidRequest):
                # It is too late for that, or too early to resume: the pause is still under way.
                if verb != "resume":
                    job.asks.pop(0)
        asked_at = time.monotonic()
        job.status, job.seen_at = client.job(job.job_id), asked_at
        if not job.asks and job.status.state == JobState.PAUSED:
            job.asks.append((0.0, "resume", ()))
        wrong = contradiction(job.status)
        if wrong:
            self.contradictions.append(wrong)

    def _keep_asking(self) -> None:
        number = 0
        with self.connect() as client:
            while not self.has_ended.is_set():
                request, number = ChaosRequest(sent_at=time.monotonic()), number + 1
                try:
                    answer = client.infer(SERVICE, numbers=[float(number)], timeout_s=_REQUEST_TIMEOUT_S)
                    request.outcome = "answered" if answer == [2.0 * number] else "wrong"
                    request.detail = "" if request.outcome == "answered" else f"{answer!r} for {number}"
                except CapacityError:
                    request.outcome = "refused"
                except SpringtideError as error:
                    request.outcome, request.detail = "lost", str(error)
                request.ended_at = time.monotonic()
                self.requests.append(request)
                time.sleep(1.0 / REQUESTS_PER_S)
