"""The model of device of each job: of those that it may run on, by one choice over all jobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import Allocation, JobView, ServiceView, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.accelerators.speeds import KnownSpeeds
from springtide.scheduling.policies.springtide.market import COMPANY, HORIZON_S, LEAST_LEFT_S
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.replicas import wanted_replicas
from springtide.solvers.model_choice import ModelChoice
from springtide.solvers.share_dp import work_weights_of_many

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ModelRow(NamedTuple):
    """One job on devices of one model: its row, and the speed (steps a second) on each of its sizes."""

    row: PromiseRow
    sizes: Ints
    speeds: Floats


def model_row(view: JobView) -> ModelRow:
    """The row of a job as it is on devices of one model."""
    row = PromiseRow(view)
    speeds = np.array([row.rates[n] * row.scale for n in row.sizes])
    return ModelRow(row, np.array(row.sizes, dtype=np.int64), speeds)


RowOf = Callable[[JobView, str], ModelRow]
HeldOn = Mapping[str, Mapping[WorkloadId, Allocation]]


class Claimed(NamedTuple):
    """One job in the choice: its row on each model that it may have, and the devices that it holds of `home`."""

    view: JobView
    rows: Mapping[str, ModelRow]
    held: int
    home: str | None

    @property
    def first(self) -> ModelRow:
        """Its row on the model that it has, else on the first that it may have."""
        return next(iter(self.rows.values())) if self.home is None else self.rows[self.home]


def has_hard_goal(view: JobView) -> bool:
    """Whether the job's deadline is to be promised, and is not yet."""
    return view.job.goal.is_hard and view.promise.admitted_at_s is None


class HomeChoice:
    """`homes` maps each workload to its model. `options` are the models on which the deadline of a job may be promised
    that is not promised yet, the best one first. `may_move`: whether any job could have another model later."""

    def __init__(
        self, snapshot: Snapshot, before: Mapping[WorkloadId, str], held: HeldOn, known: KnownSpeeds, row_of: RowOf
    ) -> None:
        """`before` are the models that workloads had, `held` what they hold by model."""
        self._snapshot, self._before, self._held, self._known, self._row_of = snapshot, before, held, known, row_of
        cluster = snapshot.cluster
        self._models = cluster.accelerators
        self._index_of = {model: index for index, model in enumerate(self._models)}
        self._num_of = Counter(cluster.accelerator_of[device.device_id] for device in cluster.machines.devices())
        self.homes: dict[WorkloadId, str] = {}
        self.options: dict[WorkloadId, tuple[str, ...]] = {}
        self._capacity = [self._num_of[model] for model in self._models]
        for service in snapshot.services:
            self._place_service(service)
        claimed = [self._claimed(view) for view in snapshot.jobs]
        self.may_move = any(len(each.rows) > 1 for each in claimed)
        if claimed:
            self._choose(claimed)

    def _home(self, workload_id: WorkloadId, held: Mapping[str, int]) -> str | None:
        """The model that the workload was given, or of which it holds most devices; None if it has none here."""
        home = self._before.get(workload_id)
        if home in self._index_of:
            return home
        return max(held, key=lambda model: held[model]) if held else None

    def _counts(self, workload_id: WorkloadId) -> dict[str, int]:
        """How many devices of each model the workload holds."""
        return {model: held[workload_id].num_devices for model, held in self._held.items() if workload_id in held}

    def _place_service(self, view: ServiceView) -> None:
        """All replicas of a service are on one model: the one that it has, else the one with most devices left."""
        service_id = view.service.service_id
        home = self._home(service_id, self._counts(service_id)) or self._models[int(np.argmax(self._capacity))]
        self.homes[service_id] = home
        self._capacity[self._index_of[home]] -= wanted_replicas(view)

    def _claimed(self, view: JobView) -> Claimed:
        held = self._counts(view.job.job_id)
        home = self._home(view.job.job_id, held)
        # A job that cannot be resized stays where it runs, and one that is on its way to another model goes there.
        is_bound = held and (not view.job.elastic or any(model != home for model in held))
        models: Sequence[str] = [home] if is_bound and home is not None else self._models
        if view.job.goal.is_hard and not is_bound:
            sure = [model for model in models if self._known.is_sure(view, model)]
            is_promised = view.promise.admitted_at_s is not None
            models = [model for model in models if model in sure or (is_promised and model == home)] or models
        least = view.bounds.min_workers if view.job.elastic else view.num_replicas or view.bounds.max_workers
        able = [model for model in models if least <= self._num_of[model]] or models
        rows = {model: self._row_of(view, model) for model in able}
        return Claimed(view, rows, held.get(home, 0) if home is not None else 0, home if home in rows else None)

    def _choose(self, claimed: Sequence[Claimed]) -> None:
        sizes, values, floors = self._values(claimed)
        only = [self._index_of[next(iter(each.rows))] if len(each.rows) == 1 else -1 for each in claimed]
        before = [
            self._index_of[each.home] if each.home is not None else alone
            for each, alone in zip(claimed, only, strict=True)
        ]
        movable = [len(each.rows) > 1 for each in claimed]
        chosen = ModelChoice(sizes, values, self._capacity, before, movable, floors).run()
        for each, index, worth in zip(claimed, chosen, values.max(axis=2), strict=True):
            job_id, model = each.view.job.job_id, self._models[index]
            self.homes[job_id] = model = model if model in each.rows else next(iter(each.rows))
            if has_hard_goal(each.view):
                others = [name for name in each.rows if name != model and self._known.is_sure(each.view, name)]
                others.sort(key=lambda name: -worth[self._index_of[name]])
                self.options[job_id] = (model, *others)

    def _values(self, claimed: Sequence[Claimed]) -> tuple[Ints, Floats, Ints]:
        """The sizes of each job by model and what each is worth [J, K, S], and the fewest devices that keep it in time
        if its deadline is promised [J, K]."""
        width = max(len(each.sizes) for job in claimed for each in job.rows.values())
        shape = (len(claimed), len(self._models), width)
        sizes, speeds = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        left, held, spans_s = np.ones(shape[0]), np.zeros(shape[0], dtype=np.int64), np.full(shape[0], math.inf)
        is_home, at_mean = np.zeros(shape[:2], dtype=bool), np.zeros((shape[0], width))
        mean_sizes = np.zeros((shape[0], width), dtype=np.int64)
        now_s, total = self._snapshot.now_s, sum(self._num_of.values())
        for index, each in enumerate(claimed):
            for model, found in each.rows.items():
                sizes[index, self._index_of[model], : len(found.sizes)] = found.sizes
                speeds[index, self._index_of[model], : len(found.sizes)] = found.speeds
            first, held[index] = each.first, each.held
            left[index] = first.row.steps_left(now_s, each.held)
            if each.home is not None:
                is_home[index, self._index_of[each.home]] = True
            if each.view.promise.admitted_at_s is not None:
                spans_s[index] = first.row.deadline_s - now_s
            mean = sum(self._num_of[model] * float(found.speeds[0]) for model, found in each.rows.items()) / total
            mean_sizes[index, : len(first.sizes)] = first.sizes
            at_mean[index, : len(first.sizes)] = first.speeds * (mean / max(float(first.speeds[0]), 1e-12))
        is_able = (speeds > 0.0) & (sizes <= np.array([self._num_of[model] for model in self._models])[:, None])
        cost_s = np.array([0.0, *map(self._snapshot.overheads.cost_s, range(1, int(sizes.max()) + 1))])[sizes]
        bare_s = np.divide(left[:, None, None], speeds, out=np.full(shape, math.inf), where=is_able)
        is_held = (held > 0)[:, None, None]
        is_same = is_home[:, :, None] & (sizes == held[:, None, None])
        lost_s = np.where(is_held & ~is_same, cost_s, 0.0)
        needs_s = np.maximum(bare_s + np.where(is_held, 0.0, cost_s), LEAST_LEFT_S)
        reach_s = np.minimum(needs_s, HORIZON_S)
        worth = np.where(is_able, reach_s / (reach_s + lost_s) / needs_s, 0.0)
        # A promised job has a floor on each model, and goes to no other on which it would be late.
        is_promised = np.isfinite(spans_s)[:, None]
        in_time = is_able & (bare_s + np.where(is_home[:, :, None], 0.0, cost_s) <= spans_s[:, None, None])
        least = np.where(in_time, sizes, sizes.max() + 1).min(axis=2)
        floors = np.where(is_promised & in_time.any(axis=2), least, 0)
        is_late = is_promised & ~in_time.any(axis=2) & ~is_home
        worth = np.where(is_late[:, :, None] | (sizes < floors[:, :, None]), 0.0, worth)
        seconds = np.divide(left[:, None], at_mean, out=np.full(at_mean.shape, math.inf), where=at_mean > 0.0)
        return sizes, worth * self._weights(mean_sizes, np.maximum(seconds, LEAST_LEFT_S))[:, None, None], floors

    def _weights(self, sizes: Ints, seconds: Floats) -> Floats:
        """What a unit of each job's work is worth beside all others, at its mean speed over all devices."""
        # The last one to end comes first.
        order = np.argsort(-seconds.min(axis=1), kind="stable")
        weights = np.zeros(len(order))
        capacity = max(1, sum(self._capacity))
        weights[order] = work_weights_of_many(sizes[order], 1.0 / seconds[order], capacity, COMPANY)
        return weights
