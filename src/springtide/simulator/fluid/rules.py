"""Overheads and true speeds in long traces: the rules of overhead, of scattered groups and of prediction error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from springtide.core.decision import EMPTY, Overheads
from springtide.core.errors import InvalidRequest
from springtide.core.events import ProgressReported
from springtide.core.workload import TrainingJob
from springtide.perf.curve import interpolate
from springtide.simulator.fluid.runs import FluidRun

# From this many devices on the published simulator charges more for every change (ElasticFlow artifact).
_LARGE_CLUSTER = 256
# What our own platform measured (docs/results, first light). A switch: the first step after a planned change of a
# 548 MB model took up to 113 ms more than a usual one. A start: the first touch of that model's memory, at 10 s a GB.
_MEASURED_SWITCH_S = 0.12
_MEASURED_START_S = 5.6
# ElasticFlow, Figure 2(b): ResNet50 on 8 devices of 8 machines runs at 1/2.17 of its speed on the 8 of one machine.
_SCATTERED_SLOWDOWN = 2.17
_SCATTERED_DOUBLINGS = 3

# Pollux's artifact: every change of the devices of a job, and every start, costs half a minute (OSDI'21, simulator).
_POLLUX_CHANGE_S = 30.0
# Where true speeds differ from the profiles, running jobs report this often, and once soon after each change.
_REPORT_EVERY_S = 300.0
_FIRST_REPORT_S = 30.0

# A deadline counts as met within this: sums of floats in another order than a policy's differ by less.
DEADLINE_TOLERANCE_S = 1e-6


class OverheadRule(msgspec.Struct, frozen=True, kw_only=True):
    """How long a job stands still at a change, charged to every policy alike.

    `pause` is what forming a group costs; `cold_start_s` is how long a new worker warms up before it can join one
    (the others train on meanwhile). `announced` is what the Snapshot tells policies: never less than the truth.
    """

    name: str
    pause: Overheads = Overheads()
    cold_start_s: float = 0.0

    def pause_s(self, run: FluidRun, num_members: int, *, is_fresh: bool) -> float:
        """How long a group stands still when it forms; functions take the time of their menu's entry."""
        entry = run.entry
        return self.pause.cost_s(num_members, is_fresh=is_fresh) if entry is None else entry.start_s

    @property
    def announced(self) -> Overheads:
        """What a policy is to expect at every start, resize or move."""
        return msgspec.structs.replace(self.pause, change_s=self.pause.change_s + self.cold_start_s)


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes, beside a change of a job, to start and to drain a serving replica and to save a job.

    `preempt_s` is how long a job writes its checkpoint before its devices are free, `family_preempt_s` the same for the
    families named. The grace cuts off what takes longer: a job then keeps only its last periodic checkpoint.
    """

    service_start_s: float = 0.0
    service_stop_s: float = 0.0
    preempt_s: float = 0.0
    family_preempt_s: Mapping[str, float] = EMPTY

    def save_s(self, job: TrainingJob) -> float:
        """How long the job's checkpoint takes when it is preempted."""
        return self.family_preempt_s.get(job.family, self.preempt_s)


OVERHEAD_NAMES: tuple[str, ...] = ("elasticflow", "measured", "pollux", "none")


def overhead_rule(name: str, num_devices: int) -> OverheadRule:
    """The rule of that name on a cluster of `num_devices`. Raises InvalidRequest naming the known ones.

    `elasticflow`: 2 s (7 s from 256 devices up), and on a set of devices that no job has used before another
    2 (log2 n + 1) s (the published simulator's formula). `measured`: what our own platform takes. `pollux`: 30 s at
    every start and change of devices, as in the published runs of Pollux. `none`: nothing.
    """
    if name == "none":
        return OverheadRule(name=name)
    if name == "measured":
        return OverheadRule(name=name, pause=Overheads(change_s=_MEASURED_SWITCH_S), cold_start_s=_MEASURED_START_S)
    if name == "pollux":
        return OverheadRule(name=name, pause=Overheads(change_s=_POLLUX_CHANGE_S))
    if name == "elasticflow":
        change_s = 7.0 if num_devices >= _LARGE_CLUSTER else 2.0
        return OverheadRule(name=name, pause=Overheads(change_s=change_s, fresh_s=2.0, fresh_per_doubling_s=2.0))
    raise InvalidRequest(f"there is no overhead rule {name!r}; choose one of {', '.join(OVERHEAD_NAMES)}")


def scattered_fraction(num_nodes: int, fewest_nodes: int) -> float:
    """The share of its compact speed at which a group runs on `num_nodes` where `fewest_nodes` would hold it.

    Every doubling of the nodes costs the same factor; three doublings cost 2.17 (ElasticFlow, Figure 2(b)).
    """
    if num_nodes <= fewest_nodes:
        return 1.0
    return float(_SCATTERED_SLOWDOWN ** (-math.log2(num_nodes / fewest_nodes) / _SCATTERED_DOUBLINGS))


class RunSpeed(NamedTuple):
    """How fast a group trains until `until` of its job's length is done; `efficiency` is relative to one device."""

    rate: float
    efficiency: float
    until: float
    is_scattered: bool = False


class Speeds(Protocol):
    """The true speed of jobs, as the executor of long traces uses it.

    `report_every_s` is how often running jobs report progress, if they report at all. With `rings_by_rank` a group's
    nodes follow each other in the order of its ranks, otherwise in the cluster's order.
    """

    report_every_s: float
    rings_by_rank: bool

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        """The run of a job that arrives now and has done `done_steps`."""

    def pace(self, run: FluidRun) -> RunSpeed:
        """How fast a group trains that has just been formed or has just reached the boundary of its pace."""

    def boundary_s(self, run: FluidRun) -> float:
        """When a run that keeps its pace reaches its boundary."""

    def observed_s(self, run: FluidRun) -> float:
        """When the platform learns that the boundary was reached."""

    def first_report_s(self, run: FluidRun) -> float:
        """How long after a change a group sends its first report."""

    def report(self, run: FluidRun) -> ProgressReported:
        """The report of a running job (call `settle` first)."""


def make_run(
    job: TrainingJob,
    now_s: float,
    *,
    length: float,
    single_steps_per_s: float,
    done_steps: float,
    curve: tuple[float, ...] = (),
    error: float = 1.0,
) -> FluidRun:
    """A run submitted at `now_s`; `curve` is empty where speed depends on more than the number of workers."""
    return FluidRun(
        job=job,
        submitted_s=now_s,
        curve=curve,
        single_steps_per_s=single_steps_per_s,
        total_steps=math.ceil(length),
        length=length,
        boundary=length,
        batch_size=job.global_batch_size,
        error=error,
        done_steps=done_steps,
        saved_steps=done_steps,
    )


def exact_boundary_s(run: FluidRun) -> float:
    """When a run that keeps its pace reaches its boundary."""
    return run.since_s + (run.boundary - run.done_steps) / run.rate


class ProfiledSpeeds:
    """Speeds by the jobs' profiles, how scattered a group is, and an error that policies are not told.

    `error_fraction` is the standard deviation of a log-normal factor of mean 1 that is drawn for each job from `seed`
    in order of arrival, so that every policy meets the same truth. `factor` is by how much all are faster beside that.
    On devices whose model is known a job's profile for it counts, or what `true_profile` says of job and model;
    `node_sizes` are the devices of a node by model, where that differs.
    """

    report_every_s = _REPORT_EVERY_S
    rings_by_rank = False

    def __init__(
        self,
        *,
        devices_per_node: int,
        error_fraction: float = 0.0,
        seed: int = 0,
        feels_placement: bool = True,
        factor: float = 1.0,
        true_profile: Callable[[TrainingJob, str], Mapping[int, float]] | None = None,
        node_sizes: Mapping[str, int] = EMPTY,
    ) -> None:
        if not (math.isfinite(error_fraction) and 0.0 <= error_fraction <= 10.0):
            raise InvalidRequest(
                f"an error of {error_fraction} cannot be drawn; give a fraction from 0 to 10, such as 0.2"
            )
        self._devices_per_node = devices_per_node
        self._feels_placement = feels_placement
        self._factor = factor
        self._true_profile = true_profile
        self._node_sizes = node_sizes
        self._sigma = math.sqrt(math.log1p(error_fraction**2))
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._curves: dict[tuple[tuple[int, float], ...], tuple[float, ...]] = {}

    def open_run(self, job: TrainingJob, now_s: float, done_steps: float = 0.0) -> FluidRun:
        """The run of a job that arrives now. Its true speed is drawn here."""
        curve = self.curve(job)
        return make_run(
            job,
            now_s,
            length=float(job.total_steps or 0),
            single_steps_per_s=single_speed(curve),
            done_steps=done_steps,
            curve=curve,
            error=self.draw_error(),
        )

    def pace(self, run: FluidRun) -> RunSpeed:
        """How fast a group trains that has just been formed or has just reached the boundary of its pace."""
        entry = run.entry
        if entry is not None:
            # Functions hold no device of the cluster, so they add nothing to its efficiency.
            return RunSpeed(run.error / entry.step_s, 0.0, run.length)
        size = sum(run.placement)
        per_node = min([self._node_sizes.get(model, self._devices_per_node) for model in run.accelerators], default=0)
        fraction = self.placed_fraction(size, len(run.placement), per_node)
        # Workers on different models wait for the slowest of them.
        curves = [self._curve_on(run.job, model) for model in run.accelerators] or [run.curve]
        steps_per_s = min(curve[min(size, len(curve) - 1)] for curve in curves) * fraction
        efficiency = steps_per_s / run.single_steps_per_s if run.single_steps_per_s else 0.0
        return RunSpeed(steps_per_s * run.error, efficiency, run.length, fraction < 1.0)

    def boundary_s(self, run: FluidRun) -> float:
        """When a run that keeps its pace reaches its boundary."""
        return exact_boundary_s(run)

    def observed_s(self, run: FluidRun) -> float:
        """When the platform learns that the boundary was reached."""
        return run.boundary_s

    def first_report_s(self, run: FluidRun) -> float:
        """How long after a change a group sends its first report."""
        return _FIRST_REPORT_S

    def report(self, run: FluidRun) -> ProgressReported:
        """The report of a running job (call `settle` first)."""
        return ProgressReported(
            job_id=run.job.job_id,
            generation=run.generation,
            step=run.step,
            total_steps=run.total_steps,
            world_size=len(run.members) if run.functions is None else run.functions.num_functions,
            samples_per_s=run.rate * run.job.global_batch_size,
        )

    def draw_error(self) -> float:
        """The factor between the true and the profiled speed of the next job."""
        if self._sigma == 0.0:
            return self._factor
        return self._factor * math.exp(self._sigma * float(self._rng.standard_normal()) - self._sigma**2 / 2)

    def curve(self, job: TrainingJob) -> tuple[float, ...]:
        """Steps a second on 0, 1, 2, .. devices, compactly placed, as profiled; on functions, as recommended."""
        if job.menu is not None:
            return 0.0, 1.0 / job.menu.options[job.menu.recommended].step_s
        return self._interpolated(job.profile_steps_per_s)

    def _curve_on(self, job: TrainingJob, model: str) -> tuple[float, ...]:
        """The same on devices of one model; where nothing is known of that, as on any."""
        told = self._true_profile(job, model) if self._true_profile is not None else job.profiles.get(model)
        return self._interpolated(told or job.profile_steps_per_s)

    def _interpolated(self, profile: Mapping[int, float]) -> tuple[float, ...]:
        key = tuple(profile.items())
        known = self._curves.get(key)
        if known is None:
            known = self._curves[key] = interpolate(dict(key), max(dict(key), default=0))
        return known

    def placed_fraction(self, num_devices: int, num_nodes: int, per_node: int = 0) -> float:
        """The share of its compact speed at which a group of `num_devices` on `num_nodes` runs; `per_node` is how many
        a node holds (0: as in all nodes)."""
        if num_nodes == 1 or not self._feels_placement:
            return 1.0
        return scattered_fraction(num_nodes, -(-num_devices // (per_node or self._devices_per_node)))


def single_speed(curve: tuple[float, ...]) -> float:
    """Steps a second on one device; where one was not profiled, the smallest profiled speed per device."""
    for num_devices, rate in enumerate(curve):
        if rate > 0.0:
            return rate / num_devices
    return 0.0


MISS_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "impossible": "not even alone on the empty cluster from its submission, at its profiled speed",
        "fault": "in the same run without faults it meets its deadline",
        "misprediction": "it meets its deadline in the run in which nothing fails and speeds are as profiled",
        "not_admitted": "refused without having been promised anything",
        "scheduler": "none of these: the policy is late",
    }
)
