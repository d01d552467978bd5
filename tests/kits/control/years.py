"""The steps of a platform on which so many jobs train at a time, each for so long, without a policy or an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.upkeep import JournalUpkeep
from springtide.core import actions, events
from springtide.core.events import Event
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, JobState, TrainingJob
from springtide.scheduling.policies.fifo import Fifo

SOURCE = Entrypoint(source_path="job.py", object_name="fit")
_PROGRESS_A_JOB = 4


class Years:
    """Makes steps, folds them into a controller and appends them to a journal, with the upkeep between them."""

    def __init__(self, journal: SqliteJournal, upkeep: JournalUpkeep, controller: Controller, num_at_once: int) -> None:
        self.journal, self.upkeep, self.controller = journal, upkeep, controller
        self.num_at_once = num_at_once
        self.num_jobs = 0
        self.now_s = 0.0
        # Written only when it changes, so the steps after a snapshot must not count on those before.
        self._memory = {"turns": [1, 2, 3]}
        self._running: list[tuple[str, str, float]] = []
        node = make_node("n", 2 * num_at_once)
        self._free = [device.device_id for device in node.devices]
        self.append(events.NodeJoined(node=node))

    def append(self, *happened: Event, acted: Sequence[actions.Action] = ()) -> None:
        """One turn."""
        due = tuple(self.upkeep.due_events(self.now_s))
        step = Step(now_s=self.now_s, events=(*due, *happened), actions=tuple(acted), memory=self._memory)
        self.controller.restore(step)
        self.journal.append(step)
        self.upkeep.after_turn(self.now_s)

    def run(self, until_s: float, turn_s: float, job_s: float) -> None:
        """Go on until that time, a turn every `turn_s`. Each job ends after `job_s` and another one comes."""
        while self.now_s < until_s:
            self.now_s += turn_s
            over = [job for job in self._running if job[2] <= self.now_s]
            self._running = [job for job in self._running if job[2] > self.now_s]
            reports = [_progress(job_id, self.now_s) for job_id, _, _ in self._running[:_PROGRESS_A_JOB]]
            ends: list[Event] = [events.JobFinished(job_id=job_id, generation=1, step=99) for job_id, _, _ in over]
            done = [actions.EndJob(job_id=job_id, state=JobState.SUCCEEDED, reason="done") for job_id, _, _ in over]
            self.append(*reports, *ends, acted=done)
            gone = [events.ReplicaStopped(workload_id=job_id, replica_id=f"{job_id}.0") for job_id, _, _ in over]
            self._free += [device_id for _, device_id, _ in over]
            jobs = list(self._new(self.num_at_once - len(self._running)))
            self.append(*gone, *(events.JobSubmitted(job=job) for job in jobs), acted=self._starts(jobs, job_s))

    def report(self, num_turns: int, num_reports: int) -> None:
        """So many turns, half a second apart, that carry nothing but progress."""
        for _ in range(num_turns):
            self.now_s += 0.5
            self.append(*(_progress(job_id, self.now_s) for job_id, _, _ in self._running[:num_reports]))

    def _new(self, number: int) -> Iterator[TrainingJob]:
        for _ in range(number):
            self.num_jobs += 1
            name = f"job-{self.num_jobs}"
            yield TrainingJob(job_id=name, name=name, entrypoint=SOURCE, params={"rate": "0.1"}, submit_key=f"{name}.x")

    def _starts(self, jobs: Sequence[TrainingJob], job_s: float) -> Iterator[actions.Action]:
        for place, job in enumerate(jobs):
            device_id, replica_id = self._free.pop(), f"{job.job_id}.0"
            yield actions.StartReplica(
                workload=job, replica_id=replica_id, device_id=device_id, generation=1, reason="a device is free"
            )
            yield actions.ResizeJob(
                job_id=job.job_id, generation=1, replica_ids=(replica_id,), global_batch_size=32, reason="it starts"
            )
            # Not all at once, also at the beginning.
            first_s = job_s * (place + 1) / len(jobs) if len(jobs) == self.num_at_once else job_s
            self._running.append((job.job_id, device_id, self.now_s + first_s))


def _progress(job_id: str, now_s: float) -> Event:
    return events.ProgressReported(
        job_id=job_id, generation=1, step=int(now_s), total_steps=10**9, world_size=1, loss=0.5, samples_per_s=320.5
    )


def bare_controller() -> Controller:
    """A controller that is only told what was decided."""
    return Controller(Fifo())
