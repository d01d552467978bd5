"""A crowd with everything on at once: deadlines, batches that are chosen, parts of devices, services, pools, models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec.structs import replace

from springtide.core.events import Event, LoadObserved, ServiceDeployed
from springtide.core.resources import Node, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, TrainingJob, WorkloadId
from springtide.simulator.fluid.rules import Speeds
from springtide.workloads.trace import TraceJob, make_trace
from springtide_studies.adaptive.jobs import goodput_arrivals
from springtide_studies.decision.crowd import begun, draw_jobs
from springtide_studies.decision.platform import DEVICES_PER_NODE, NUM_BATCHES
from springtide_studies.loans.play import label_nodes
from springtide_studies.one_plan.truth import MixedSpeeds, stand_ins

Case = Literal["together", "pools", "models"]
# The policy of each case, as a platform runs it (with a packer of shares).
CASES: Mapping[Case, str] = MappingProxyType(
    {"together": "springtide", "pools": "tide/springtide", "models": "springtide"}
)
# Profiled jobs with deadlines ask for this part of the devices.
_DEADLINE_PART = 0.25
# One job that may change its batch for so many devices, one sharer, one service on whole devices, one on parts.
_DEVICES_PER_ADAPTIVE, _DEVICES_PER_SHARER, _DEVICES_PER_SERVICE, _DEVICES_PER_SHARED_SERVICE = 16, 64, 64, 128
# Of the jobs without a profile, every so manyth has a deadline, and of these every second one keeps its batch: their
# first runs show whether it can be promised.
_FIRST_RUN_EVERY = 8
_FIRST_RUN_S = (7200.0, 86400.0)
# The part of the nodes that inference owns where nodes have owners, and the speed of the slower model of device.
_SERVING_PART, _SLOWER = 0.25, 0.45
_MODELS = ("fast", "slow")
# Loads are observed so often, one service at a time, until no requests come any more.
_LOAD_EVERY_S, _LOAD_UNTIL_S = 5.0, 7200.0
_JOB_SHARE, _SERVICE_SHARE = Share(request=0.4, limit=0.7), Share(request=0.5, limit=0.75)
_SERVING = Entrypoint(source_path="world", object_name="Serve", kind="class")


class MixedCrowd:
    """Keeps the number of jobs of each kind; everything is drawn from a seed. Job ids begin with their kind."""

    def __init__(self, case: Case, num_devices: int, seed: int) -> None:
        self._case, self._num_devices = case, num_devices
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, num_devices, 31]))
        self._truths = stand_ins()
        self.speeds: Speeds | None = MixedSpeeds(self._truths, DEVICES_PER_NODE)
        self.nodes: Sequence[Node] = self._make_nodes()
        self.timed_events: Sequence[tuple[float, Event]] = self._services()
        self._drawn = draw_jobs(self._rng)
        self._of_kind = {"job": self._deadline_jobs(), "adaptive": self._adaptive_jobs(), "sharer": self._sharers()}
        self._first = self._first_jobs()
        self._gone: list[str] = []
        self.num_jobs = len(self._first)
        self.due_s: float | None = None

    def warm(self) -> list[tuple[float, TrainingJob]]:
        return [
            (float(index * NUM_BATCHES // self.num_jobs), begun(job, 0.0, float(self._rng.uniform(0.05, 1.0))))
            for index, job in enumerate(self._first)
        ]

    def next(self, now_s: float) -> TrainingJob:
        return begun(next(self._of_kind[self._gone.pop(0) if self._gone else "job"]), now_s, 1.0)

    def ended(self, job_id: WorkloadId) -> None:
        self._gone.append(job_id.partition("-")[0])

    def _make_nodes(self) -> list[Node]:
        number = self._num_devices // DEVICES_PER_NODE
        models = [_MODELS[index * 2 // number] if self._case == "models" else "" for index in range(number)]
        nodes = [
            make_node(f"node-{index}", DEVICES_PER_NODE, accelerator=model, memory_mb=80_000)
            for index, model in enumerate(models)
        ]
        return label_nodes(nodes, round(_SERVING_PART * number)) if self._case == "pools" else nodes

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _first_jobs(self) -> list[TrainingJob]:
        """Jobs of all kinds in a drawn order."""
        jobs: list[TrainingJob] = []
        num_asked = 0
        while num_asked < _DEADLINE_PART * self._num_devices:
            jobs.append(next(self._of_kind["job"]))
            num_asked += jobs[-1].requested_workers or 0
        for kind, each in (("adaptive", _DEVICES_PER_ADAPTIVE), ("sharer", _DEVICES_PER_SHARER)):
            jobs += itertools.islice(self._of_kind[kind], max(1, self._num_devices // each))
        return [jobs[index] for index in self._rng.permutation(len(jobs))]

    def _deadline_jobs(self) -> Iterator[TrainingJob]:
        for job, length_s in self._drawn:
            if job.goal.deadline_s is None:
                job = replace(job, goal=Goal(deadline_s=2.0 * length_s))
            yield self._on_models(job)

    def _on_models(self, job: TrainingJob) -> TrainingJob:
        if self._case != "models":
            return job
        slow = {n: rate * _SLOWER for n, rate in job.profile_steps_per_s.items()}
        return replace(job, profiles={_MODELS[0]: job.profile_steps_per_s, _MODELS[1]: slow})

    def _adaptive_jobs(self) -> Iterator[TrainingJob]:
        names = sorted(self._truths)
        for number in itertools.count():
            row = TraceJob(
                job_id=f"adaptive-{number:06d}",
                submit_s=0.0,
                model=names[int(self._rng.integers(len(names)))],
                global_batch_size=self._truths[names[0]].batch_grid()[0],
                num_devices=int(2 ** self._rng.integers(0, 4)),
            )
            ((_, job),) = goodput_arrivals(make_trace("adaptive", [row]), self._truths, max_workers=32)
            if number % _FIRST_RUN_EVERY == 0:
                job = replace(job, goal=Goal(deadline_s=float(self._rng.uniform(*_FIRST_RUN_S))))
                if number % (2 * _FIRST_RUN_EVERY) == 0:
                    job = replace(job, batch=None)
            yield job

    def _sharers(self) -> Iterator[TrainingJob]:
        for number in itertools.count():
            job, length_s = next(self._drawn)
            yield replace(
                self._on_models(job),
                job_id=WorkloadId(f"sharer-{number:06d}"),
                name=f"sharer-{number:06d}",
                max_workers=2,
                requested_workers=1,
                share=_JOB_SHARE,
                goal=Goal(deadline_s=4.0 * length_s if number % 2 else None),
            )

    # --- services -----------------------------------------------------------------------------------------------------

    def _services(self) -> list[tuple[float, Event]]:
        found: list[tuple[float, Event]] = []
        kinds = (("whole", _DEVICES_PER_SERVICE, None, 4), ("shared", _DEVICES_PER_SHARED_SERVICE, _SERVICE_SHARE, 1))
        for kind, each, share, most in kinds:
            for number in range(max(1, self._num_devices // each)):
                least = int(self._rng.integers(0, most + 1))
                service = InferenceService(
                    service_id=WorkloadId(f"{kind}-{number:04d}"),
                    name=f"{kind}-{number:04d}",
                    entrypoint=_SERVING,
                    slo_s=1.0,
                    min_replicas=least,
                    max_replicas=2 * most,
                    share=share,
                )
                found.append((0.0, ServiceDeployed(service=service)))
        services = [event.service for _, event in found if isinstance(event, ServiceDeployed)]
        for at_s in np.arange(NUM_BATCHES + 0.5, _LOAD_UNTIL_S, _LOAD_EVERY_S).tolist():
            service = services[int(self._rng.integers(len(services)))]
            # As many requests as up to all its replicas answer at once, or none.
            queued = int(self._rng.integers(0, service.max_replicas * service.target_in_flight + 1))
            observed = LoadObserved(
                service_id=service.service_id,
                arrivals_per_s=float(queued),
                in_flight=0,
                queued=queued,
                idle_s=0.0 if queued else 2.0 * service.idle_s,
            )
            found.append((at_s, observed))
        return found
