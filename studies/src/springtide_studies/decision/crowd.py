"""Jobs for the time of decisions, drawn without end: a number of them is kept alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from springtide.core.events import Event
from springtide.core.resources import Node, make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob, WorkloadId
from springtide.simulator.fluid.rules import Speeds
from springtide_studies.decision.platform import DEVICES_PER_NODE, NUM_BATCHES

# Most jobs ask for a single device, few for many: the shares in the published traces of ElasticFlow, rounded.
_REQUESTED = (1, 2, 4, 8, 16, 32)
_SHARES = (0.50, 0.20, 0.15, 0.12, 0.02, 0.01)
_BEST_EFFORT_FRACTION = 0.1


def draw_jobs(rng: np.random.Generator) -> Iterator[tuple[TrainingJob, float]]:
    """Jobs without end, each with its length on what it asks for (s); deadlines are relative to submission.

    Speeds: the first device drawn log-uniformly from 0.5 to 50 steps/s, n devices n^a times that with a drawn from
    0.6 to 0.95, up to a drawn peak past which every doubling loses a tenth. Lengths are log-uniform from 10 min to
    24 h, deadlines 0.5 to 1.5 times the length (ElasticFlow, section 6.1); a tenth is best effort.
    """
    index = 0
    while True:
        single = float(np.exp(rng.uniform(np.log(0.5), np.log(50.0))))
        power, peak = float(rng.uniform(0.6, 0.95)), int(2 ** rng.integers(2, 7))
        profile = {
            n: single * min(n, peak) ** power * 0.9 ** max(0.0, float(np.log2(n / peak)))
            for n in (1, 2, 4, 8, 16, 32, 64)
        }
        requested = min(int(rng.choice(_REQUESTED, p=_SHARES)), peak)
        length_s = float(np.exp(rng.uniform(np.log(600.0), np.log(86400.0))))
        slack = float(rng.uniform(0.5, 1.5))
        is_best_effort = bool(rng.random() < _BEST_EFFORT_FRACTION)
        yield (
            TrainingJob(
                job_id=WorkloadId(f"job-{index:06d}"),
                name=f"job-{index:06d}",
                entrypoint=Entrypoint(source_path="", object_name="train"),
                max_workers=64,
                num_virtual_shards=64,
                goal=Goal(deadline_s=None if is_best_effort else slack * length_s),
                total_steps=max(1, round(length_s * profile[requested])),
                profile_steps_per_s=profile,
                requested_workers=requested,
            ),
            length_s,
        )
        index += 1


class DeadlineCrowd:
    """Jobs with profiles, most of them with a deadline."""

    speeds: Speeds | None = None
    timed_events: Sequence[tuple[float, Event]] = ()

    def __init__(self, num_devices: int, num_jobs: int, seed: int) -> None:
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, num_jobs]))
        self._drawn = draw_jobs(self._rng)
        self.nodes: Sequence[Node] = [
            make_node(f"node-{index}", DEVICES_PER_NODE) for index in range(num_devices // DEVICES_PER_NODE)
        ]
        self.num_jobs = num_jobs
        self.due_s: float | None = None

    def warm(self) -> list[tuple[float, TrainingJob]]:
        return [
            (float(index * NUM_BATCHES // self.num_jobs), self._job(0.0, float(self._rng.uniform(0.05, 1.0))))
            for index in range(self.num_jobs)
        ]

    def next(self, now_s: float) -> TrainingJob:
        return self._job(now_s, 1.0)

    def ended(self, job_id: WorkloadId) -> None:
        """All jobs are drawn alike, whichever has ended."""

    def _job(self, now_s: float, left: float) -> TrainingJob:
        job, _ = next(self._drawn)
        return begun(job, now_s, left)


def begun(job: TrainingJob, now_s: float, left: float) -> TrainingJob:
    """A drawn job as it arrives now with this part of its work left."""
    deadline_s = None if job.goal.deadline_s is None else now_s + job.goal.deadline_s * left
    steps = max(1, round((job.total_steps or 1) * left))
    return msgspec.structs.replace(job, goal=Goal(deadline_s=deadline_s), total_steps=steps)
