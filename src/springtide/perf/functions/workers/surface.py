"""Predicts time and cost of a step for every number of workers and every memory size at once.

The same as `sync_time_s` and `step_usd` for single plans, as arrays over workers (rows) and sizes (columns).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import SearchSpace, WorkerModel
from springtide.core.functions import (
    MIB,
    FunctionOption,
    FunctionPlan,
    FunctionService,
    FunctionStage,
    MemorySize,
)
from springtide.perf.functions.bill import BYTES_PER_GB, MB_PER_GB, SECONDS_PER_HOUR, SECONDS_PER_MONTH, StepHabits
from springtide.perf.functions.collective_choice import SyncChoice, SyncStore, choose_collectives, sync_store_of
from springtide.perf.functions.scale import SERIAL_FRACTION
from springtide.perf.functions.workers.model import worker_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The size of a saved state over that of its parameters: Adam adds two moments.
SAVED_FACTOR = 3.0
# A function hands over to its successor while its remaining lifetime covers this many steps, saving the state, and a
# spare time.
_STEPS_LEFT = 1.5
_SPARE_S = 2.0
NUM_IN_FLIGHT = 4
# Up to this number of workers every number is considered; beyond it, this many per doubling and those that divide the
# batch.
ALL_WORKERS_TO = 16
_WORKERS_PER_DOUBLING = 8
_COLUMN_GROWTH = 1.25
_LOOP_S, _LEAST_REQUEST_S = 0.02, 0.0005
# The time of impossible configurations.
_NEVER_S = 1e9


class WorkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a surface: the batch, the present size of the model, and the store of exchanges.

    `size_factor` is the present size of the exchanged gradient over the model's parameters; memory, computation and
    exchange grow in proportion. `second_worth` is the value of a second over its cost in the choice of the collective:
    above 1 if time counts more than money. `workers` are the numbers of workers to consider, ascending (empty:
    `worker_numbers`).
    """

    global_batch_size: int
    num_layers: int = 1
    size_factor: float = 1.0
    has_parameter_store: bool = False
    second_worth: float = 1.0
    habits: StepHabits | None = None
    workers: tuple[int, ...] = ()


class Surface:
    """Predictions for each number of workers (`workers[i]`) of each size (`sizes[j]`), as arrays of shape (i, j).

    `step_s` is `compute_s` + `sync_s`; a step of t seconds costs `step_base_usd` + t x `usd_per_s`, and `step_usd` at
    the predicted time. `start_s` and `start_usd` are time and cost of a start. `fits` says where a step is possible:
    the model fits the memory, each worker has a sample, and a step fits the lifetime.
    """

    def __init__(
        self, service: FunctionService, space: SearchSpace, model: WorkerModel, settings: WorkSettings
    ) -> None:
        if settings.global_batch_size < 1 or settings.size_factor <= 0:
            raise InvalidRequest("a step has at least one sample, and a model some size")
        self.settings = settings
        self.sizes: tuple[MemorySize, ...] = space.sizes
        most = min(space.max_workers, service.concurrency, settings.global_batch_size)
        self.workers: Ints = (
            np.array(settings.workers, dtype=np.int64)
            if settings.workers
            else worker_numbers(most, settings.global_batch_size)
        )
        self._service = service
        self._model = model
        self._habits = settings.habits or StepHabits(
            lifetime_s=service.lifetime_s,
            start_s=service.cold_start_s,
            has_parameter_store=settings.has_parameter_store,
        )
        self.memory_mb: Floats = np.array([size.memory_mb for size in self.sizes], dtype=np.float64)
        self.num_bytes = model.parameter_bytes * settings.size_factor
        self._n: Floats = self.workers[:, None].astype(np.float64)
        self._bytes_per_s: Floats = np.array([size.bytes_per_s for size in self.sizes])[None]
        self.num_passes: Ints = -(-self._share() // model.micro_batch_size)
        self.compute_s: Floats = self._compute_s()
        self._gb: Floats = self._n * self.memory_mb[None] / MB_PER_GB
        self._sync = self._choose_sync()
        self.sync_s: Floats = self._sync.sync_s
        self.step_s: Floats = self.compute_s + self.sync_s
        self.save_s: Floats = np.broadcast_to(
            SAVED_FACTOR * self.num_bytes / self._bytes_per_s + service.latency_s, self.step_s.shape
        )
        self.start_s: Floats = service.cold_start_s + self.save_s
        self.step_base_usd, self.usd_per_s = self._prices()
        self.step_usd: Floats = self.step_base_usd + self.step_s * self.usd_per_s
        self.start_usd: Floats = self._start_usd()
        needed_s = self.start_s + _STEPS_LEFT * self.step_s + self.save_s + _SPARE_S
        holds = worker_bytes(model, settings.size_factor) <= self.memory_mb * MIB
        self.fits: npt.NDArray[np.bool_] = (
            ((self.workers >= space.min_workers) & (self.workers <= most))[:, None]
            & holds[None]
            & self._sync.is_possible
            & (needed_s <= service.lifetime_s)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows (numbers of workers) and columns (sizes)."""
        return len(self.workers), len(self.sizes)

    def place(self, plan: FunctionPlan) -> tuple[int, int] | None:
        """The row and column of a plan; None if it is not on the grid."""
        if len(plan.stages) != 1:
            return None
        row = int(np.searchsorted(self.workers, plan.num_replicas))
        column = int(np.searchsorted(self.memory_mb, plan.stages[0].memory_mb))
        if row == len(self.workers) or column == len(self.sizes):
            return None
        is_there = self.workers[row] == plan.num_replicas and self.memory_mb[column] == plan.stages[0].memory_mb
        return (row, column) if is_there else None

    def plan(self, row: int, column: int) -> FunctionPlan:
        """The plan of a configuration: one stage, with the collective of the lowest predicted cost."""
        sync = self._sync.at(row, column)
        return FunctionPlan(
            stages=(
                FunctionStage(
                    first_layer=0, end_layer=self.settings.num_layers, memory_mb=self.sizes[column].memory_mb
                ),
            ),
            num_replicas=int(self.workers[row]),
            num_micro_batches=int(self.num_passes[row]),
            micro_batch_size=self._model.micro_batch_size,
            collective=sync.collective,
            num_chunks=sync.num_chunks,
            num_in_flight=NUM_IN_FLIGHT,
            num_shards=sync.num_shards,
        )

    def option(self, row: int, column: int) -> FunctionOption:
        return FunctionOption(
            plan=self.plan(row, column),
            step_s=float(self.step_s[row, column]),
            step_usd=float(self.step_usd[row, column]),
            start_s=float(self.start_s[row, column]),
            start_usd=float(self.start_usd[row, column]),
        )

    def _share(self) -> Ints:
        """The largest number of samples of a worker in a step."""
        return np.asarray(-(-self.settings.global_batch_size // self.workers), dtype=np.int64)

    def _choose_sync(self) -> _SyncGrid:
        """Choose the collective with the lowest cost of all workers' time and of requests."""
        model, prices = self._model, self._service.prices
        usd_per_s = self._gb * prices.usd_per_gb_s
        if self.settings.has_parameter_store:
            usd_per_s = usd_per_s + prices.usd_per_parameter_store_hour / SECONDS_PER_HOUR
        # One gradient of the worker's memory is the buffer for the exchange, so it counts as spare.
        held = worker_bytes(model, self.settings.size_factor) - self.num_bytes
        spare = np.broadcast_to(np.maximum(self.memory_mb * MIB - held, 0.0)[None], self._gb.shape)
        store = exchange_store(self._service, self.settings.has_parameter_store)
        return _SyncGrid(self._n, self.num_bytes, self.sizes, usd_per_s * self.settings.second_worth, spare, store)

    def _compute_s(self) -> Floats:
        """Computation of the worker with the largest share, plus the overhead of a step; slower on shared CPUs."""
        vcpus = np.array([size.vcpus for size in self.sizes])[None]
        speed = np.where(
            vcpus <= 1.0, vcpus, 1.0 / (SERIAL_FRACTION + (1.0 - SERIAL_FRACTION) / np.maximum(vcpus, 1.0))
        )
        share = self._share().astype(np.float64)
        work_s = self._model.fixed_s * self.num_passes + share * self._model.sample_s
        contention: Floats = np.ones((len(self.workers), len(self.sizes)))
        if self._service.total_vcpus is not None:
            contention = np.maximum(1.0, self._n * vcpus / self._service.total_vcpus)
        computing_s = work_s[:, None] * self.settings.size_factor / speed * contention
        return np.asarray(computing_s + step_overhead_s(self._service))

    def _prices(self) -> tuple[Floats, Floats]:
        """The fixed cost of a step and its cost per second: the two parts of `step_usd`."""
        habits, prices, n = self._habits, self._service.prices, self._n
        puts, gets = self._sync.num_puts, self._sync.num_gets
        stored_gb = habits.num_states_kept * SAVED_FACTOR * self.num_bytes + np.zeros(self.step_s.shape)
        polls = np.zeros(self.step_s.shape)
        if habits.has_parameter_store:
            puts, gets = np.zeros(self.step_s.shape), np.zeros(self.step_s.shape)
        else:
            stored_gb += np.where(n > 1, n * self.num_bytes, 0.0)
            received = gets / n
            polls = gets * _polls(self.step_s / np.maximum(received, 1.0), habits)
        base_usd = (puts + 2.0 / habits.save_every) * prices.usd_per_put + gets * prices.usd_per_get
        step_s = np.maximum(self.step_s, 1e-9)
        lives_per_s = 1.0 / max(habits.lifetime_s - habits.start_s, 1e-9)
        puts_per_s = n * np.minimum(1.0 / step_s, 1.0 / habits.report_interval_s) + 4.0 * n * lives_per_s
        gets_per_s = n * np.maximum(1.0 / step_s, 1.0 / habits.control_interval_s) + 6.0 * n * lives_per_s
        gets_per_s = gets_per_s + n / habits.read_interval_s + polls / step_s
        usd_per_s = (
            self._gb * (1.0 + lives_per_s * habits.start_s) * prices.usd_per_gb_s
            + n * lives_per_s * prices.usd_per_invocation
            + puts_per_s * prices.usd_per_put
            + gets_per_s * prices.usd_per_get
            + stored_gb / BYTES_PER_GB * prices.usd_per_stored_gb_month / SECONDS_PER_MONTH
        )
        if habits.has_parameter_store:
            # A single worker exchanges nothing, so it has no parameter store.
            usd_per_s = usd_per_s + np.where(n > 1, prices.usd_per_parameter_store_hour / SECONDS_PER_HOUR, 0.0)
        return np.asarray(base_usd), np.asarray(usd_per_s)

    def _start_usd(self) -> Floats:
        prices, n = self._service.prices, self._n
        return np.asarray(
            self._gb * self.start_s * prices.usd_per_gb_s
            + n * prices.usd_per_invocation
            + (3.0 + 2.0 * n) * prices.usd_per_put
            + n * (4.0 + np.ceil(self.start_s)) * prices.usd_per_get
        )


def exchange_store(service: FunctionService, has_parameter_store: bool) -> SyncStore:
    """The store of exchanges, with a least latency per request, so that thousands of requests are not free."""
    store = sync_store_of(service, has_parameter_store)
    return msgspec.structs.replace(store, latency_s=max(store.latency_s, _LEAST_REQUEST_S))


def step_overhead_s(service: FunctionService) -> float:
    """The overhead of a step: reading the control record, reporting, and the loop itself."""
    return service.latency_s + _LOOP_S


def worker_numbers(most: int, global_batch_size: int) -> Ints:
    """The numbers of workers to consider, ascending: all up to ALL_WORKERS_TO, then a selection.

    With many workers one more hardly changes a step, except where the batch is divided evenly.
    """
    chosen = set(range(1, min(most, ALL_WORKERS_TO) + 1)) | {most}
    step, number = ALL_WORKERS_TO // _WORKERS_PER_DOUBLING, ALL_WORKERS_TO
    while number < most:
        for _ in range(_WORKERS_PER_DOUBLING):
            number += step
            if number <= most:
                chosen.add(number)
        step *= 2
    # The fewest workers for each largest share: more workers with the same share would only cost more.
    for share in range(1, -(-global_batch_size // ALL_WORKERS_TO) + 1):
        number = -(-global_batch_size // share)
        if ALL_WORKERS_TO < number <= most and global_batch_size % share == 0:
            chosen.add(number)
    return np.array(sorted(chosen), dtype=np.int64)


def _polls(wait_s: Floats, habits: StepHabits) -> Floats:
    """`expected_polls` for an array of waits."""
    pacing = habits.pacing
    asked_at_s, interval_s = [0.0], pacing.first_s
    while interval_s < pacing.longest_s:
        asked_at_s.append(asked_at_s[-1] + interval_s)
        interval_s = min(interval_s * pacing.growth, pacing.longest_s)
    early = np.searchsorted(np.array(asked_at_s), wait_s, side="left")
    late = len(asked_at_s) - 1 + np.ceil((wait_s - asked_at_s[-1]) / pacing.longest_s)
    return np.asarray(np.where(wait_s > asked_at_s[-1], late, early), dtype=np.float64)


class _SyncGrid:
    """The exchange of each configuration, chosen for some of the sizes and reused for the sizes between.

    Sizes with different links are all computed. Of those with equal links, which differ only in the cost of a second,
    one per factor `_COLUMN_GROWTH` is computed.
    """

    def __init__(
        self,
        n: Floats,
        num_bytes: float,
        sizes: Sequence[MemorySize],
        usd_per_s: Floats,
        spare: Floats,
        store: SyncStore,
    ) -> None:
        columns = [0]
        nearest = []
        for column, size in enumerate(sizes):
            last = sizes[columns[-1]]
            if size.bytes_per_s != last.bytes_per_s or size.memory_mb > _COLUMN_GROWTH * last.memory_mb:
                columns.append(column)
            nearest.append(len(columns) - 1)
        self._nearest: Ints = np.array(nearest, dtype=np.int64)
        rate = np.array([sizes[column].bytes_per_s for column in columns])[None]
        self._table = choose_collectives(
            n.astype(np.int64),
            num_bytes,
            rate,
            usd_per_s[:, columns],
            store,
            in_flight=NUM_IN_FLIGHT,
            spare_bytes=spare[:, columns],
        )
        self.is_possible: npt.NDArray[np.bool_] = np.isfinite(self._table.sync_s)[:, self._nearest]
        self.sync_s: Floats = np.where(self.is_possible, self._table.sync_s[:, self._nearest], _NEVER_S)
        self.num_puts: Floats = self._table.num_puts[:, self._nearest].astype(np.float64)
        self.num_gets: Floats = self._table.num_gets[:, self._nearest].astype(np.float64)

    def at(self, row: int, column: int) -> SyncChoice:
        return self._table.at(row, int(self._nearest[column]))
