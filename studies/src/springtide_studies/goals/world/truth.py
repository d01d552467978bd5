"""What is true of functions in the world of goals, and no policy is told: drawn once for each seed, never fitted.

Its structure is its own: workers that straggle, memory that presses, links that share a card, starts that differ, and
a factor by which everything is off that varies with the number of workers and their memory.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import msgspec
import numpy as np

from springtide.core.function_search import WorkerModel
from springtide.core.functions import MIB, FunctionPlan, FunctionService
from springtide.perf.functions.bill import StepHabits, StepSizes, usage_of_steps
from springtide_studies.goals.world.walks import walked_sync_s

# One in so many functions dies before its lifetime is over.
ONE_IN = 20
# By how much everything is off at most, somewhere: a factor of 1 / 1.4 to 1.4.
MOST_WRONG = 1.4
# All functions share what the store's card carries.
OBJECT_STORE_BYTES_PER_S = 6e9
PARAMETER_STORE_BYTES_PER_S = 10e9 / 8
PARAMETER_STORE_LATENCY_S = 0.002
DETECTION_S = 2.0
MAX_SAVE_FRACTION, MAX_REDO_S, MAX_SAVE_EVERY = 0.07, 60.0, 64
_NUM_QUANTILES = 64
_MANY_STEPS = 1000


class StepTruth(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step of one plan: what the slowest worker computes, how long all exchange, and what is asked of stores.

    Counts are of one step and may be fractions. Saving a state takes `save_s` after every `save_every` steps.
    """

    compute_s: float
    sync_s: float
    num_puts: float
    num_gets: float
    stored_gb: float
    save_every: int
    save_s: float

    @property
    def step_s(self) -> float:
        """Computing and exchanging."""
        return self.compute_s + self.sync_s


class _Wave(msgspec.Struct, frozen=True):
    amplitude: float
    along_n: float
    along_memory: float
    phase: float


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's world: everything is drawn by `draw_truth`, and holds for a whole run."""

    service: FunctionService
    speed: float
    straggler_sigma: float
    cpu_exponent: float
    pass_fraction: float
    pressure_knee: float
    pressure_height: float
    link_factor: float
    latency_factor: float
    start_factor: float
    build_s: float
    request_factor: float
    noise_sigma: float
    wrong_by: float
    waves: tuple[_Wave, ...]
    death_fraction: float = 1.0 / ONE_IN
    has_parameter_store: bool = False

    def wrong_factor(self, n: int, memory_mb: int) -> float:
        """By how much a step here is off: smooth in both, within 1 / MOST_WRONG and MOST_WRONG."""
        across, up = math.log2(n) / 7.0, math.log2(memory_mb / 128.0) / 6.4
        height = sum(
            wave.amplitude * math.cos(wave.along_n * across + wave.along_memory * up + wave.phase)
            for wave in self.waves
        )
        return math.exp(self.wrong_by * max(-1.0, min(1.0, height)))

    def cpu_speed(self, vcpus: float) -> float:
        """How many times as fast as one core: parts of a core in proportion, more than one less than so."""
        return vcpus if vcpus <= 1.0 else vcpus**self.cpu_exponent

    def pressure(self, model: WorkerModel, samples: int, memory_mb: int) -> float:
        """How much longer computing takes because memory is nearly full (the allocator, the page cache, swapping)."""
        held = model.base_bytes + model.state_factor * model.parameter_bytes
        held += min(samples, model.micro_batch_size) * model.sample_bytes
        over = (held / (memory_mb * MIB) - self.pressure_knee) / (1.0 - self.pressure_knee)
        return 1.0 + self.pressure_height * min(1.0, max(0.0, over)) ** 2

    def step(self, model: WorkerModel, plan: FunctionPlan, global_batch_size: int, gradient_bytes: int) -> StepTruth:
        """The mean step of a plan of one stage: the slowest of its workers, then the exchange."""
        n, memory_mb = plan.num_replicas, plan.stages[0].memory_mb
        size = self.service.size(memory_mb)
        samples = -(-global_batch_size // n)
        passes = -(-samples // model.micro_batch_size)
        alone_s = model.fixed_s + model.sample_s * (samples + passes * self.pass_fraction * model.micro_batch_size)
        compute_s = alone_s / self.cpu_speed(size.vcpus) * self.speed * self.pressure(model, samples, memory_mb)
        compute_s *= mean_of_slowest(n, self.straggler_sigma) * self.wrong_factor(n, memory_mb)
        sync_s = self.sync_s(plan, gradient_bytes) * self.wrong_factor(n, memory_mb)
        step_s = compute_s + sync_s
        save_every = self.save_every(model, memory_mb, step_s)
        habits = StepHabits(save_every=save_every, lifetime_s=1e12, has_parameter_store=self.has_parameter_store)
        sizes = StepSizes(parameter_bytes=(gradient_bytes,), state_factor=model.state_factor - 1.0)
        whole = usage_of_steps(plan, step_s, sizes, habits, num_steps=_MANY_STEPS)
        return StepTruth(
            compute_s=compute_s,
            sync_s=sync_s,
            num_puts=(whole.num_puts + whole.num_lists) * self.request_factor / _MANY_STEPS,
            num_gets=whole.num_gets * self.request_factor / _MANY_STEPS,
            stored_gb=whole.stored_gb_s / (_MANY_STEPS * step_s),
            save_every=save_every,
            save_s=self.state_s(model, memory_mb),
        )

    def sync_s(self, plan: FunctionPlan, gradient_bytes: int) -> float:
        """The exchange as walked, over links that share the store's card."""
        n = plan.num_replicas
        link = self.service.size(plan.stages[0].memory_mb).bytes_per_s * self.link_factor
        card = PARAMETER_STORE_BYTES_PER_S if self.has_parameter_store else OBJECT_STORE_BYTES_PER_S
        latency_s = PARAMETER_STORE_LATENCY_S if self.has_parameter_store else self.service.latency_s
        return walked_sync_s(
            plan.collective,
            n,
            float(gradient_bytes),
            min(link, card / n),
            latency_s * self.latency_factor,
            chunks=max(1, plan.num_chunks),
            in_flight=plan.num_in_flight,
            is_polled=not self.has_parameter_store,
        )

    def state_s(self, model: WorkerModel, memory_mb: int) -> float:
        """Seconds in which a worker writes its state, or reads it."""
        num_bytes = (model.state_factor - 1.0) * model.parameter_bytes
        return num_bytes / (self.service.size(memory_mb).bytes_per_s * self.link_factor) + self.service.latency_s

    def save_every(self, model: WorkerModel, memory_mb: int, step_s: float) -> int:
        """After how many steps a state is saved: as the coordinator weighs it, time for saving against work redone."""
        every = 1
        while every < MAX_SAVE_EVERY and 2 * every * step_s <= MAX_REDO_S:
            if self.state_s(model, memory_mb) <= MAX_SAVE_FRACTION * every * step_s:
                break
            every *= 2
        return every

    def start_s(self, num_functions: int, rng: np.random.Generator | None = None) -> float:
        """How long it takes until the last of them is warm: its mean, or drawn."""
        usual_s = self.service.cold_start_s * self.start_factor
        if rng is None:
            return usual_s * mean_of_slowest(num_functions, 0.25) + self.build_s
        return usual_s * math.exp(0.25 * float(rng.standard_normal(num_functions).max())) + self.build_s

    def deaths_per_s(self, num_functions: int) -> float:
        """How many of them die in a second."""
        return num_functions * self.death_fraction / self.service.lifetime_s


def draw_truth(
    seed: int, service: FunctionService, *, has_parameter_store: bool = False, has_deaths: bool = True
) -> Truth:
    """The world of a seed. All ranges were fixed before any result was seen."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 20251122]))
    waves = [
        _Wave(*(float(rng.uniform(*span)) for span in ((0.3, 1.0), (-5.0, 5.0), (-5.0, 5.0), (0.0, 2.0 * math.pi))))
        for _ in range(3)
    ]
    total = sum(wave.amplitude for wave in waves)
    return Truth(
        service=service,
        speed=float(np.exp(0.1 * rng.standard_normal())),
        straggler_sigma=float(rng.uniform(0.03, 0.10)),
        cpu_exponent=float(rng.uniform(0.80, 0.98)),
        pass_fraction=float(rng.uniform(0.0, 0.08)),
        pressure_knee=float(rng.uniform(0.70, 0.85)),
        pressure_height=float(rng.uniform(0.2, 0.6)),
        link_factor=float(rng.uniform(0.85, 1.10)),
        latency_factor=float(rng.uniform(0.8, 1.6)),
        start_factor=float(rng.uniform(0.8, 1.5)),
        build_s=float(rng.uniform(1.0, 4.0)),
        request_factor=float(rng.uniform(0.9, 1.25)),
        noise_sigma=float(rng.uniform(0.02, 0.06)),
        wrong_by=math.log(MOST_WRONG) * float(rng.uniform(0.5, 1.0)),
        waves=tuple(msgspec.structs.replace(wave, amplitude=wave.amplitude / (0.6 * total)) for wave in waves),
        death_fraction=1.0 / ONE_IN if has_deaths else 0.0,
        has_parameter_store=has_parameter_store,
    )


@cache
def mean_of_slowest(n: int, sigma: float) -> float:
    """The mean of the largest of n lognormal values whose usual value is 1."""
    normal = NormalDist()
    quantiles = [((number + 0.5) / _NUM_QUANTILES) ** (1.0 / n) for number in range(_NUM_QUANTILES)]
    return math.fsum(math.exp(sigma * normal.inv_cdf(quantile)) for quantile in quantiles) / _NUM_QUANTILES
