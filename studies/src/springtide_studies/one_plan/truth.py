"""How fast the jobs of `bench one-plan` are: by profile where they say their speed, else by placement and batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from springtide.core.decision import EMPTY
from springtide.core.events import ProgressReported
from springtide.core.workload import TrainingJob
from springtide.simulator.fluid.rules import ProfiledSpeeds, RunSpeed, Speeds
from springtide.simulator.fluid.runs import FluidRun
from springtide_studies.adaptive.speeds import GoodputSpeeds
from springtide_studies.adaptive.truth import (
    DEVICES_PER_NODE,
    AppTruth,
    Floats,
    compact_placement,
)
from springtide_studies.workloads.pollux_tables import (
    Application,
    MeasuredSteps,
    Placement,
    PolluxTrainingRun,
    canonical,
)

# Stand-ins for measured applications: initial batch, hours on one device at that.
_STAND_INS: Mapping[str, tuple[int, float]] = MappingProxyType(
    {"pictures": (128, 2.0), "speech": (32, 6.0), "text": (32, 12.0), "video": (64, 30.0)}
)
_NUM_EPOCHS, _BATCH_FACTOR = 20, 16
_PACKED, _SPREAD = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64), (2, 4, 16)
# A step of the initial batch on one device: the part that does not grow with the batch, and the one that does.
_FIXED_S, _COMPUTED_S = 0.04, 0.4
# An exchange within eight devices, and how many times as long it takes between servers.
_EXCHANGE_S, _BETWEEN, _TOGETHER = 0.05, 2.5, 8
# Variance of the gradient over its squared norm, at the initial batch, in the first and in the last epoch.
_NOISE = (1.0, 16.0)


def stand_ins(hour_s: float = 3600.0) -> dict[str, AppTruth]:
    """Four applications with batches that pay more the longer they train; their hours have `hour_s` seconds."""
    return {name: AppTruth(_application(name, *known, hour_s)) for name, known in _STAND_INS.items()}


def _application(name: str, initial: int, hours: float, hour_s: float) -> Application:
    """Its measurements: packed rings of up to 64 workers, and rings of one worker on each of up to 16 servers.

    They are few, because what lies between them is searched among all of them."""
    least, most = initial // 8, initial * 2
    sizes = np.array([least, most], dtype=float)

    def times_s(num_workers: int, *, is_wide: bool) -> Floats:
        """For each local batch the seconds of a step and of the exchange in it."""
        sync_s = _EXCHANGE_S * 2.0 * (num_workers - 1) / num_workers * (_BETWEEN if is_wide else 1.0)
        return np.stack([_FIXED_S + _COMPUTED_S * sizes / initial + sync_s, np.full(2, sync_s)], axis=1)

    steps = hours * hour_s / (_FIXED_S + _COMPUTED_S)
    progress = np.linspace(steps / _NUM_EPOCHS, steps, _NUM_EPOCHS)
    run = PolluxTrainingRun(progress, progress, np.ones(_NUM_EPOCHS), np.geomspace(*_NOISE, _NUM_EPOCHS))
    return Application(
        name=name,
        placements={
            canonical(compact_placement(count)): MeasuredSteps(sizes, times_s(count, is_wide=count > _TOGETHER))
            for count in _PACKED
        },
        scalability=np.array(
            [
                [count, count, size, *pair]
                for count in _SPREAD
                for size, pair in zip(sizes, times_s(count, is_wide=True), strict=True)
            ]
        ),
        runs={initial: run, initial * _BATCH_FACTOR: run},
        min_local_size=least,
        max_local_size=most,
    )


class MixedSpeeds:
    """The speeds of jobs that choose batches, by their truth, and of all others, by their profiles.

    A server of eight devices is as fast as two of four side by side: applications were measured on servers of four.
    `model_speeds` are those of devices of models for which jobs do not say their speed.
    """

    rings_by_rank = False

    def __init__(
        self,
        truths: Mapping[str, AppTruth],
        devices_per_node: int,
        *,
        report_every_s: float = 300.0,
        model_speeds: Mapping[str, float] = EMPTY,
    ) -> None:
        self.report_every_s = report_every_s
        self._truths = truths
        self._by_truth = GoodputSpeeds(truths, model_speeds=model_speeds)
        self._by_profile = ProfiledSpeeds(devices_per_node=devices_per_node)

    def _of(self, job: TrainingJob) -> Speeds:
        return self._by_truth if job.family in self._truths else self._by_profile

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        return self._of(job).open_run(job, now_s, done_steps)

    def pace(self, run: FluidRun) -> RunSpeed:
        """How fast a group trains that has just been formed or has just reached the boundary of its pace."""
        if run.job.family in self._truths:
            run.placement = in_fours(run.placement)
        return self._of(run.job).pace(run)

    def boundary_s(self, run: FluidRun) -> float:
        return self._of(run.job).boundary_s(run)

    def observed_s(self, run: FluidRun) -> float:
        return self._of(run.job).observed_s(run)

    def first_report_s(self, run: FluidRun) -> float:
        return self._of(run.job).first_report_s(run)

    def report(self, run: FluidRun) -> ProgressReported:
        return self._of(run.job).report(run)


def in_fours(placement: Placement) -> Placement:
    """The workers of each node on as many servers of four as hold them."""
    found: list[int] = []
    for count in placement:
        found += [DEVICES_PER_NODE] * (count // DEVICES_PER_NODE) + [count % DEVICES_PER_NODE] * (count % 4 > 0)
    return tuple(found)
