"""The world of `bench one-plan`: deadline jobs, jobs that change their batch, sharers, and services with a tide.

Everything is drawn from a seed, each kind of workload from chances of its own. Deadline jobs are as fast as they say.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.core.events import Event, LoadObserved, ServiceDeployed
from springtide.core.resources import Node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, TrainingJob, WorkloadId
from springtide.simulator.fluid.trace import Arrivals
from springtide.workloads.cluster import cluster_nodes
from springtide.workloads.trace import Trace, TraceJob, make_trace
from springtide_studies.adaptive.jobs import BatchRule, goodput_arrivals
from springtide_studies.adaptive.truth import AppTruth, compact_placement
from springtide_studies.workloads.generators import DAY_S, draw_poisson, draw_sporadic
from springtide_studies.workloads.tidal import TidalSetting, draw_tidal

DEVICES_PER_NODE = 8
# The parts of the cluster that each kind of training would fill alone, on its thriftiest number of devices.
DEADLINE_LOAD, ADAPTIVE_LOAD, SHARER_LOAD = 0.30, 0.35, 0.05
# Nodes that all guaranteed minimums need at the highest tide, as a part of the cluster.
SERVING_PART = 0.25
# Hours on one device.
_DEADLINE_HOURS, _SHARER_HOURS = (1.0, 50.0), (1.0, 12.0)
# A deadline lies so many times the time on half of the most workers after the submission.
_SLACK = (0.9, 3.0)
_SHARER_SLACK = (1.2, 4.0)
# Of the models that were profiled on functions: global batch, samples a second on one device, part that scales.
DEADLINE_MODELS: Mapping[str, tuple[int, float, float]] = MappingProxyType(
    {"resnet101": (256, 220.0, 0.97), "bert-large": (64, 30.0, 0.93)}
)
# Where devices are mixed: the speed of each model, of which half of the servers have one.
MODEL_SPEEDS: Mapping[str, float] = MappingProxyType({"fast": 1.0, "slow": 0.45})
_SOURCE = Entrypoint(source_path="world", object_name="fit")
_SERVING = Entrypoint(source_path="world", object_name="Serve", kind="class")
# A service that sleeps is visited so often on average, for so long.
_VISIT_GAP_HOURS, _VISIT_HOURS = 2.0, (1.0 / 60.0, 1.0 / 6.0)
_SHARED_SERVICE, _SHARED_SLEEPER, _SHARED_JOB = (
    Share(request=0.5, limit=0.75),
    Share(request=0.3, limit=0.5),
    Share(request=0.4, limit=0.7),
)


class WorldSetting(msgspec.Struct, frozen=True, kw_only=True):
    """How large the cluster is, for how many days work arrives, and where chance comes from.

    In a day of `day_s` seconds everything that is drawn takes as much less time: jobs, the tide, visits of services.
    With `is_mixed` every second server has devices of a slower model, and less work comes for as much.
    """

    num_nodes: int = 32
    days: int = 7
    seed: int = 0
    day_s: float = DAY_S
    is_mixed: bool = False

    @property
    def nodes(self) -> list[Node]:
        """The servers, below one switch."""
        if not self.is_mixed:
            return cluster_nodes(f"{self.num_nodes}x{DEVICES_PER_NODE}")
        return cluster_nodes(",".join(f"1x{DEVICES_PER_NODE}:{self._model_of(n)}" for n in range(self.num_nodes)))

    def _model_of(self, number: int) -> str:
        return list(MODEL_SPEEDS)[number % len(MODEL_SPEEDS)]

    @property
    def capacity(self) -> float:
        """How many devices of the fastest model are as fast as all devices together."""
        if not self.is_mixed:
            return float(self.num_devices)
        return DEVICES_PER_NODE * sum(MODEL_SPEEDS[self._model_of(n)] for n in range(self.num_nodes))

    @property
    def num_devices(self) -> int:
        return self.num_nodes * DEVICES_PER_NODE

    @property
    def num_serving(self) -> int:
        """The nodes that inference owns where nodes have owners: those that minimums need at the highest tide."""
        return max(1, round(SERVING_PART * self.num_nodes))

    @property
    def until_s(self) -> float:
        return self.days * self.day_s

    @property
    def hour_s(self) -> float:
        """A twenty-fourth of a day."""
        return self.day_s / 24.0


class DrawnWorld(NamedTuple):
    """What arrives when, with everything that is true about it."""

    arrivals: Arrivals
    timed_events: tuple[tuple[float, Event], ...]
    truths: Mapping[str, AppTruth]


def draw_world(setting: WorldSetting, truths: Mapping[str, AppTruth], batch: BatchRule) -> DrawnWorld:
    """The world of a setting; `batch` says whether policies choose batches or get those that owners tuned."""
    arrivals = [
        *_deadline_jobs(setting),
        *goodput_arrivals(_adaptive_trace(setting, truths), truths, batch=batch, max_workers=_most(setting)),
        *_sharers(setting),
    ]
    services = sorted([*_tide(setting), *_sleepers(setting)], key=lambda entry: entry[0])
    if setting.is_mixed:
        arrivals = [(at_s, _on_models(job)) for at_s, job in arrivals]
    return DrawnWorld(sorted(arrivals, key=lambda entry: entry[0]), tuple(services), truths)


def _on_models(job: TrainingJob) -> TrainingJob:
    """A job that says its speed says it for every model of device."""
    if not job.profile_steps_per_s:
        return job
    rates = job.profile_steps_per_s.items()
    return replace(
        job,
        profiles={model: {n: rate * speed for n, rate in rates} for model, speed in MODEL_SPEEDS.items()},
    )


def _most(setting: WorldSetting) -> int:
    """A job has at most half of the cluster."""
    return min(32, setting.num_devices // 2)


def _moments(setting: WorldSetting, stream: int, load: float, mean_hours: float) -> list[float]:
    """Poisson arrivals of jobs that take `mean_hours` of a device each and fill the part `load` of the cluster."""
    rate_per_s = load * setting.capacity / (mean_hours * setting.hour_s)
    seed = int(np.random.SeedSequence([setting.seed, stream]).generate_state(1)[0])
    return [float(at_s) for at_s in draw_poisson(seed, rate_per_s=rate_per_s, duration_s=setting.until_s)]


def _rng(setting: WorldSetting, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([setting.seed, stream, 1]))


def _log_uniform(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(*np.log(bounds))))


def _mean(bounds: tuple[float, float]) -> float:
    """The mean of a log-uniform draw."""
    return float((bounds[1] - bounds[0]) / np.log(bounds[1] / bounds[0]))


def _deadline_jobs(setting: WorldSetting) -> Arrivals:
    rng, found = _rng(setting, 1), Arrivals()
    names = list(DEADLINE_MODELS)
    for at_s in _moments(setting, 1, DEADLINE_LOAD, _mean(_DEADLINE_HOURS)):
        model = names[int(rng.random() < 0.3)]
        batch, per_s, parallel = DEADLINE_MODELS[model]
        hours, most = _log_uniform(rng, _DEADLINE_HOURS), int(2 ** rng.integers(0, 5))
        most = min(most, _most(setting))
        rates = {n: per_s / batch / (1 - parallel + parallel / n) for n in (1, 2, 4, 8, 16) if n <= most}
        steps = max(1, round(hours * setting.hour_s * rates[1]))
        deadline_s = at_s + float(rng.uniform(*_SLACK)) * steps / rates[max(1, most // 2)]
        found.append(
            (at_s, _job(f"deadline-{len(found):04d}", model, batch, rates, steps, Goal(deadline_s=deadline_s)))
        )
    return found


def _sharers(setting: WorldSetting) -> Arrivals:
    """Jobs on parts of devices, every second one with a deadline that its request alone can make."""
    rng, found, model = _rng(setting, 3), Arrivals(), "bert-large"
    batch, per_s, _ = DEADLINE_MODELS[model]
    for at_s in _moments(setting, 3, SHARER_LOAD, _mean(_SHARER_HOURS)):
        hours, most = _log_uniform(rng, _SHARER_HOURS), int(rng.integers(1, 3))
        rates = {n: per_s / batch * n**0.9 for n in range(1, most + 1)}
        steps, slack = max(1, round(hours * setting.hour_s * rates[1])), float(rng.uniform(*_SHARER_SLACK))
        is_due = len(found) % 2 == 0
        deadline_s = at_s + slack * steps / rates[most] / _SHARED_JOB.request if is_due else None
        job = _job(f"sharer-{len(found):04d}", model, batch, rates, steps, Goal(deadline_s=deadline_s))
        found.append((at_s, replace(job, share=_SHARED_JOB)))
    return found


def _job(name: str, model: str, batch: int, rates: dict[int, float], steps: int, goal: Goal) -> TrainingJob:
    most = max(rates)
    return TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=_SOURCE,
        global_batch_size=batch,
        max_workers=most,
        num_virtual_shards=max(4, most),
        goal=goal,
        max_restarts=1_000_000,
        checkpoint_interval_s=600.0,
        params={"model": model},
        family=model,
        total_steps=steps,
        profile_steps_per_s=rates,
        requested_workers=max(1, most // 2),
    )


def _adaptive_trace(setting: WorldSetting, truths: Mapping[str, AppTruth]) -> Trace:
    """Jobs whose batch may change, in the shape of a Pollux workload: each asks for the batch that is best for it."""
    rng, names = _rng(setting, 2), sorted(truths)
    alone_h = {
        name: truth.time_alone_s((1,), [truth.batch_grid()[0]]) / setting.hour_s for name, truth in truths.items()
    }
    weights = np.array([alone_h[name] ** -0.5 for name in names])
    weights /= weights.sum()
    jobs, best = list[TraceJob](), dict[tuple[str, int], int]()
    mean_hours = float(weights @ np.array([alone_h[name] for name in names]))
    for at_s in _moments(setting, 2, ADAPTIVE_LOAD, mean_hours):
        name = names[int(rng.choice(len(names), p=weights))]
        truth, asked = truths[name], min(int(2 ** rng.integers(0, 4)), _most(setting))
        asked = 1 if truth.app.fixed_batch_size is not None else asked
        if (name, asked) not in best:
            times_s = {size: truth.time_alone_s(compact_placement(asked), [size]) for size in truth.batch_grid(9)}
            best[name, asked] = min(times_s, key=lambda size: times_s[size])
        jobs.append(
            TraceJob(
                job_id=f"adaptive-{len(jobs):04d}",
                submit_s=at_s,
                model=name,
                global_batch_size=best[name, asked],
                num_devices=asked,
            )
        )
    return make_trace("adaptive", jobs)


# --- services ---------------------------------------------------------------------------------------------------------


def _tide(setting: WorldSetting) -> list[tuple[float, Event]]:
    """Functions whose minimums follow the tide; every third one is served on halves of devices."""
    tide = TidalSetting(
        num_servers=setting.num_serving,
        days=setting.days + 1,
        devices_per_server=DEVICES_PER_NODE,
        num_functions=max(4, setting.num_nodes // 2),
        surges_per_day=1.0,
        day_s=setting.day_s,
    )
    found: list[tuple[float, Event]] = []
    for at_s, event in draw_tidal(setting.seed, tide).timed_events:
        if isinstance(event, ServiceDeployed) and int(event.service.name.rpartition("-")[2]) % 3 == 0:
            event = replace(event, service=replace(event.service, share=_SHARED_SERVICE))
        found.append((at_s, event))
    return found


def _sleepers(setting: WorldSetting) -> list[tuple[float, Event]]:
    """Services without a minimum that are visited now and then, every second one on a part of a device."""
    rng, found = _rng(setting, 4), list[tuple[float, Event]]()
    for index in range(max(2, setting.num_nodes // 2)):
        service_id = WorkloadId(f"sleeper-{index:03d}")
        service = InferenceService(
            service_id=service_id,
            name=service_id,
            entrypoint=_SERVING,
            slo_s=1.0,
            max_replicas=2,
            idle_s=setting.hour_s / 60.0,
            share=_SHARED_SLEEPER if index % 2 else None,
        )
        found.append((0.0, ServiceDeployed(service=service)))
        until_s, seed = 0.0, int(rng.integers(2**31))
        moments = draw_sporadic(seed, mean_gap_s=_VISIT_GAP_HOURS * setting.hour_s, duration_s=setting.until_s)
        for begin_s in moments.tolist():
            if begin_s > until_s:
                until_s = begin_s + float(rng.uniform(*_VISIT_HOURS)) * setting.hour_s
                found += [(begin_s, _load(service_id, 4)), (until_s, _load(service_id, 0))]
    return found


def _load(service_id: WorkloadId, waiting: int) -> LoadObserved:
    return LoadObserved(service_id=service_id, arrivals_per_s=10.0 * waiting, in_flight=0, queued=waiting, idle_s=0.0)
