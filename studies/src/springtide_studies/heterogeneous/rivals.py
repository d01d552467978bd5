"""Rules for clusters of several models of device: Gavel's policies, Sia's, and springtide that knows of no models."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId, Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.decisions.rounds import Round, RoundDecision, decide_in_rounds
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide_studies.bounds import highs

# Added to an objective, so that of equal optima one that leaves no device idle is taken.
_TIE = 1e-4


class _Asked(msgspec.Struct, frozen=True):
    """The jobs of a round: how many devices each takes, and its steps a second by model. Shape of `rates` [J, K]."""

    views: list[JobView]
    scales: Any
    rates: Any
    counts: Any


def _asked(now: Round) -> tuple[list[str], _Asked]:
    model_of = now.snapshot.cluster.accelerator_of
    counts = Counter(model_of[device] for device in now.devices)
    models = list(now.snapshot.cluster.accelerators)
    views = list(now.snapshot.jobs)
    scales = np.array([view.bounds.max_workers for view in views])
    rates = [[view.job.profiles.get(model, {}).get(view.bounds.max_workers, 0.0) for model in models] for view in views]
    return models, _Asked(views, scales, np.array(rates), np.array([counts[model] for model in models]))


class Gavel(msgspec.Struct, frozen=True, kw_only=True):
    """Gavel (OSDI'20): a linear program gives each job its part of the time on each model, rounds follow it.

    `max-min` (section 4.1) raises the least throughput relative to an equal share of all devices, `makespan`
    (section 4.2) the least part of its remaining steps that a job does a second. In each round jobs get devices by what
    their part is over what they have had of that model (section 5).
    """

    objective: Literal["max-min", "makespan"] = "max-min"
    round_s: float = 360.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, self._decide)

    def _decide(self, now: Round) -> RoundDecision:
        models, asked = _asked(now)
        state = now.state or {"jobs": [], "parts": {}, "had": {}, "rounds": {}}
        names = [str(view.job.job_id) for view in asked.views]
        parts = dict(state["parts"])
        if names != state["jobs"]:
            parts = dict(zip(names, self._parts(asked).tolist(), strict=True))
        had: dict[str, list[int]] = {name: list(state["had"].get(name, [0] * len(models))) for name in names}
        rounds = {name: state["rounds"].get(name, 0) for name in names}
        order = sorted(
            (
                (-parts[name][k] / max(had[name][k] / max(rounds[name], 1), 1e-3), index, k)
                for index, name in enumerate(names)
                for k in range(len(models))
                if parts[name][k] > 1e-6
            ),
        )
        left, chosen = asked.counts.copy(), dict[int, int]()
        for _, index, k in order:
            if index not in chosen and asked.scales[index] <= left[k]:
                chosen[index] = k
                left[k] -= asked.scales[index]
        for index, k in chosen.items():
            had[names[index]][k] += 1
        rounds = {name: count + 1 for name, count in rounds.items()}
        given = _place(now, {asked.views[index].job.job_id: models[k] for index, k in chosen.items()})
        return RoundDecision(allocations=given, state={"jobs": names, "parts": parts, "had": had, "rounds": rounds})

    def _parts(self, asked: _Asked) -> Any:
        """The part of the time of each job on each model. Shape [J, K]."""
        optimize: Any = importlib.import_module("scipy.optimize")
        num_jobs, num_models = asked.rates.shape
        if self.objective == "max-min":
            equal = asked.rates @ (asked.counts / asked.counts.sum())
            worth = asked.scales[:, None] * asked.rates / equal[:, None]
        else:
            steps = np.array([(view.total_steps or 0) - view.progress.step for view in asked.views])
            worth = asked.rates / np.maximum(steps, 1.0)[:, None]
            worth /= worth.mean()
        worth = np.where(asked.scales[:, None] <= asked.counts, worth, 0.0)
        # Variables: the parts, row by row, and the least worth.
        rows = np.zeros((2 * num_jobs + num_models, num_jobs * num_models + 1))
        for index in range(num_jobs):
            mine = slice(index * num_models, (index + 1) * num_models)
            rows[index, mine] = 1.0
            rows[num_jobs + index, mine], rows[num_jobs + index, -1] = -worth[index], 1.0
        for k in range(num_models):
            rows[2 * num_jobs + k, k:-1:num_models] = asked.scales
        most = np.concatenate([np.ones(num_jobs), np.zeros(num_jobs), asked.counts])
        found = optimize.linprog(np.append(-_TIE * worth.ravel(), -1.0), A_ub=rows, b_ub=most, method="highs")
        return np.clip(found.x[:-1], 0.0, 1.0).reshape(num_jobs, num_models)


class SiaByModel(msgspec.Struct, frozen=True, kw_only=True):
    """Sia (SOSP'23) for jobs of one size and a fixed batch: an integer program over jobs and models in each round.

    The cost of a choice is its speed over the job's least, less what a restart would waste of its life, to the power
    `power`; a job that gets nothing costs `waiting_cost` (section 3.4). Sizes and batches are not chosen: the jobs of
    Gavel's tables have one of each.
    """

    round_s: float = 360.0
    power: float = -0.5
    waiting_cost: float = 1.1

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, self._decide)

    def _decide(self, now: Round) -> RoundDecision:
        models, asked = _asked(now)
        sparse: Any = importlib.import_module("scipy.sparse")
        num_jobs, num_models = asked.rates.shape
        restarts: Mapping[str, int] = now.state or {}
        model_of = now.snapshot.cluster.accelerator_of
        gains = asked.rates / asked.rates.min(axis=1, keepdims=True)
        for index, view in enumerate(asked.views):
            held = now.held[view.job.job_id]
            if held:
                is_other = np.array([model != model_of[held[0]] for model in models])
                gains[index] *= np.where(is_other, self._kept(now.snapshot, view, restarts), 1.0)
        costs = np.maximum(gains, 1e-6) ** self.power - self.waiting_cost
        job_rows = sparse.kron(sparse.eye(num_jobs), np.ones((1, num_models)))
        model_rows = sparse.kron(asked.scales[None, :].astype(float), sparse.eye(num_models))
        most = np.concatenate([np.ones(num_jobs), asked.counts])
        found = highs.solve(
            costs.ravel(),
            np.ones(costs.size),
            (np.zeros(costs.size), np.ones(costs.size)),
            (sparse.vstack([job_rows, model_rows]).tocsr(), np.full(len(most), -np.inf), most),
            node_limit=1000,
            mip_rel_gap=1e-4,
        )
        taken = np.zeros(costs.shape) if found.x is None else np.round(found.x).reshape(costs.shape)
        chosen = {asked.views[j].job.job_id: models[k] for j, k in zip(*np.nonzero(taken), strict=True)}
        given = _place(now, chosen)
        changed = {who for who, mine in given.items() if sorted(mine.device_ids) != sorted(now.held[who])}
        known = {view.job.job_id for view in asked.views if view.job.job_id in restarts} | changed
        return RoundDecision(
            allocations=given, state={who: restarts.get(who, -1) + (who in changed) for who in sorted(known)}
        )

    def _kept(self, snapshot: Snapshot, view: JobView, restarts: Mapping[str, int]) -> float:
        """The part of its life that a job would have run after one more restart."""
        age_s, cost_s = snapshot.now_s - view.submitted_at_s, snapshot.overheads.cost_s(1)
        wasted_s = restarts.get(view.job.job_id, 0) * cost_s
        return max(age_s - wasted_s, 0.0) / (age_s + cost_s) if age_s >= cost_s else 1.0


def _place(now: Round, models: Mapping[WorkloadId, str]) -> dict[WorkloadId, PoolAllocation]:
    """Devices of the chosen models: those that a job has, else the fullest node that holds it, else the first ones."""
    cluster = now.snapshot.cluster
    size_of = {view.job.job_id: view.bounds.max_workers for view in now.snapshot.jobs}
    given: dict[WorkloadId, Sequence[DeviceId]] = {
        who: now.held[who]
        for who, model in models.items()
        if now.held[who] and all(cluster.accelerator_of[device] == model for device in now.held[who])
    }
    taken = {device for devices in given.values() for device in devices}
    for who in sorted(models.keys() - given.keys(), key=lambda each: (-size_of[each], each)):
        free = [
            [d.device_id for d in node.devices if d.accelerator == models[who] and d.device_id not in taken]
            for node in cluster.nodes
        ]
        whole = min((each for each in free if len(each) >= size_of[who]), key=len, default=None)
        devices = (
            whole if whole is not None else [device for each in sorted(free, key=len, reverse=True) for device in each]
        )
        given[who] = devices[: size_of[who]]
        taken.update(given[who])
    return {who: PoolAllocation(device_ids=tuple(devices)) for who, devices in given.items()}


class _Hidden:
    """What is kept between two decisions of a policy that is shown no models."""

    def __init__(self, inner: Springtide) -> None:
        self.cache = DecisionCache(inner)
        self.whole = self.shown = Topology()
        self.views: dict[WorkloadId, tuple[JobView, JobView]] = {}


class WithoutModels(msgspec.Struct, frozen=True, kw_only=True):
    """Springtide that is shown no models of devices: every job has the mean of its speeds."""

    inner: Springtide = Springtide()

    def make_derived(self) -> _Hidden:
        """An empty object to keep derived values in."""
        return _Hidden(self.inner)

    def decide(self, snapshot: Snapshot, derived: _Hidden | None = None) -> Plan:
        """Return the plan for this snapshot."""
        kept = derived or self.make_derived()
        if kept.whole is not snapshot.cluster:
            nodes = (
                replace(node, devices=tuple(replace(device, accelerator="") for device in node.devices))
                for node in snapshot.cluster.nodes
            )
            kept.whole, kept.shown = snapshot.cluster, Topology(nodes=tuple(nodes))
        views = []
        for view in snapshot.jobs:
            known = kept.views.get(view.job.job_id)
            if known is None or known[0] is not view:
                known = kept.views[view.job.job_id] = (view, _with_mean(view))
            views.append(known[1])
        return kept.cache.decide(replace(snapshot, cluster=kept.shown, jobs=tuple(views)))


def _with_mean(view: JobView) -> JobView:
    told = list(view.job.profiles.values())
    mean = {n: sum(speeds[n] for speeds in told) / len(told) for n in told[0]}
    return replace(view, job=replace(view.job, profile_steps_per_s=mean))
