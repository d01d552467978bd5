"""The speed that FaPES expects of a job on every number of devices and every shape, with its best batch (section 4)."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from springtide.core.decision import JobView, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import GradientNoise, StepTime
from springtide.core.resources import Topology
from springtide.core.workload import AdaptiveBatch, JobState, LengthUnit, StepProfile
from springtide.perf.communication.baselines import BytesOverBandwidth
from springtide.perf.communication.fabric import SERVERS, Fabric
from springtide.perf.communication.gnn import load_model
from springtide.perf.communication.query import CommunicationModel, Query
from springtide.perf.curve import curve_of
from springtide.perf.goodput import BestBatches, StepModel, best_batches
from springtide.perf.step_estimate import fit_throughput, merge_step_times
from springtide.perf.timeline import bucket_bytes, iteration_s
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.gangs import fixed_size
from springtide.solvers.schedule_planning import Floats, Ints, Servers

# A group on one device of each of eight machines runs at 1/2.17 of its speed on one machine (ElasticFlow, Figure 2(b),
# ResNet50): assumed for jobs of which only a speed curve is known.
_SPREAD_SLOWDOWN, _SPREAD_DOUBLINGS = 2.17, 3.0
# Noise is rounded to so many steps a doubling: a step changes the gain of a batch by less than 3 percent.
_NOISE_STEPS = 8


class Shape(NamedTuple):
    """A representative placement: `num_servers` below a common switch of `level`, `size` devices in all."""

    size: int
    num_servers: int
    level: int


class SpeedTable(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The speeds expected of one job. `rates` and `batches` are (sizes x shapes): see schedule_planning.RoundDemand.

    `work` is left of its whole length `total_work`, in steps of the initial batch size; `is_known` is False if the
    length is a guess. `best_rate` is the highest on any size of the empty cluster.
    """

    sizes: Ints
    unit: int
    rates: Floats
    batches: Ints
    work: float
    total_work: float
    is_known: bool

    @cached_property
    def compact_rates(self) -> Floats:
        """Work a second on each size on its best shape."""
        return np.asarray(self.rates.max(axis=1))

    @cached_property
    def best_rate(self) -> float:
        """The highest rate of all."""
        return float(self.rates.max(initial=0.0))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of the model are used: see `Fapes`."""

    unit: int
    topology: bool
    batch: bool
    links: str
    communication: str
    round_s: float


class Expectations:
    """The expected speeds of every job of a snapshot on the given servers."""

    def __init__(self, snapshot: Snapshot, servers: Servers, settings: Settings) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._cluster = _Cluster(snapshot.cluster, servers, settings.links)
        self._num_devices = int(servers.capacity.sum())
        self._family_steps = _family_steps(snapshot)

    def of(self, view: JobView, num_held: int) -> SpeedTable:
        """The speeds of a job that holds `num_held` devices now; without sizes if it can never run here."""
        sizes, unit = self._sizes(view)
        work, total, is_known = self._work(view, num_held)
        if not sizes:
            empty = np.zeros((0, 1 + 2 * self._cluster.servers.num_levels))
            sizes_array = np.zeros(0, dtype=np.int64)
            return SpeedTable(
                sizes=sizes_array,
                unit=unit,
                rates=empty,
                batches=empty.astype(np.int64),
                work=work,
                total_work=total,
                is_known=is_known,
            )
        rates, batches = self._table(view, sizes, unit)
        if math.isinf(work):
            # If the length is not known, as much work is assumed to be left as has been done, and at least a round on
            # the smallest size.
            at_least = float(rates.max(axis=1)[0]) * self._settings.round_s
            work = total = max(view.equivalent_steps, float(view.progress.step), at_least)
        return SpeedTable(
            sizes=np.array(sizes, dtype=np.int64),
            unit=unit,
            rates=rates,
            batches=batches,
            work=work,
            total_work=total,
            is_known=is_known,
        )

    def _sizes(self, view: JobView) -> tuple[tuple[int, ...], int]:
        """The numbers of devices that are considered: unit by unit up to two servers, then whole servers."""
        total, unit = self._num_devices, self._settings.unit
        if not view.job.elastic:
            size = fixed_size(view, total)
            in_units = int((self._cluster.servers.capacity // unit * unit).sum())
            return ((size,) if size else ()), (unit if size % unit == 0 and size <= in_units else 1)
        least, most = max(1, view.bounds.min_workers), min(most_workers(view), total)
        if least > most:
            return (), unit
        widest = max(1, int(self._cluster.servers.capacity.max(initial=1)))
        first = -(-least // unit) * unit
        in_units = int((self._cluster.servers.capacity // unit * unit).sum())
        if first > min(most, in_units):
            unit, first = 1, least
        else:
            most = min(most, in_units)
        sizes = list(range(first, min(most, 2 * widest) + 1, unit))
        sizes += [n for n in range(3 * widest, min(most, 8 * widest) + 1, widest) if n >= first and n % unit == 0]
        doubled = 16 * widest
        while doubled <= most:
            sizes += [doubled] if doubled >= first and doubled % unit == 0 else []
            doubled *= 2
        # Its minimum and its maximum are considered in any case.
        return tuple(sorted({first, *sizes, most // unit * unit})), unit

    def _work(self, view: JobView, num_held: int) -> tuple[float, float, bool]:
        """Work left, the whole work, and whether that is known; infinite if not."""
        total = view.total_equivalent_steps
        if total is None and view.total_steps is not None:
            total = float(view.total_steps)
        if total is None:
            return math.inf, math.inf, False
        done = (
            view.equivalent_steps
            if view.job.batch is not None
            else max(view.equivalent_steps, float(view.progress.step))
        )
        left = max(total - done, 1e-6 * total)
        if num_held and view.state is JobState.RUNNING:
            # Less the work done since its last report.
            since_s = max(
                0.0, self._snapshot.now_s - max(view.progress.progress_at_s, view.changes.resized_at_s or 0.0)
            )
            rate = self._present_rate(view, num_held)
            left = max(left - since_s * rate, 1e-6 * total)
        return left, max(total, 1e-9), True

    def _present_rate(self, view: JobView, num_held: int) -> float:
        sizes, unit = self._sizes(view)
        if not sizes:
            return 0.0
        rates, _ = self._table(view, sizes, unit)
        index = min(int(np.searchsorted(sizes, num_held)), len(sizes) - 1)
        return float(rates[index].max())

    def _table(self, view: JobView, sizes: tuple[int, ...], unit: int) -> tuple[Floats, Ints]:
        """Work a second and the best batch for every size and shape."""
        job, settings, cluster = view.job, self._settings, self._cluster
        initial = job.global_batch_size
        bounds = job.batch
        if bounds is not None and not settings.batch:
            bounds = msgspec.structs.replace(bounds, min_size=initial, max_size=initial)
        steps = self._family_steps.get(job.family or job.job_id, ())
        if job.step_profile is not None or steps:
            noise = _rounded(view.learnt.noise)
            least = None if bounds is None else bounds.min_local_size
            table_key = _TableKey(sizes, unit, bounds, initial, noise, job.length_unit, least)
            if job.step_profile is not None:
                table = cluster.profiled(job.step_profile, table_key, settings.communication)
            else:
                table = cluster.fitted(steps, table_key)
        else:
            table = self._curve_table(view, sizes, unit)
        return table if settings.topology else _without_topology(table)

    def _curve_table(self, view: JobView, sizes: tuple[int, ...], unit: int) -> tuple[Floats, Ints]:
        curve = curve_of(view)
        alone = np.array([curve.rate(size) for size in sizes])
        if not view.job.elastic and not alone.any():
            alone = np.ones(len(sizes))
        shapes = self._cluster.shapes(sizes, unit)
        fewest = -(-np.array(sizes) // max(1, int(self._cluster.servers.capacity.max(initial=1))))
        num_servers = np.array([[shape.num_servers for shape in row] for row in shapes], dtype=float)
        doublings = np.log2(np.maximum(num_servers / fewest[:, None], 1.0))
        rates = alone[:, None] * _SPREAD_SLOWDOWN ** (-doublings / _SPREAD_DOUBLINGS)
        batches = np.full(rates.shape, view.job.global_batch_size, dtype=np.int64)
        return rates, batches


class _TableKey(NamedTuple):
    """Everything that a table of goodput depends on besides the cluster and the steps."""

    sizes: tuple[int, ...]
    unit: int
    bounds: AdaptiveBatch | None
    initial: int
    noise: tuple[float, float] | None
    length_unit: LengthUnit
    least_local: int | None


def _rounded(noise: GradientNoise | None) -> tuple[float, float] | None:
    if noise is None or not noise.grad_sqr > 0.0 or not noise.grad_var > 0.0:
        return None if noise is None else (noise.grad_sqr, noise.grad_var)
    ratio = 2.0 ** (round(math.log2(noise.grad_var / noise.grad_sqr) * _NOISE_STEPS) / _NOISE_STEPS)
    return 1.0, ratio


def _without_topology(table: tuple[Floats, Ints]) -> tuple[Floats, Ints]:
    """The table with every shape as fast as the best one of its size: placement does not count."""
    rates, batches = table
    best = rates.argmax(axis=1)
    rows = np.arange(len(rates))
    return (
        np.repeat(rates[rows, best][:, None], rates.shape[1], axis=1),
        np.repeat(batches[rows, best][:, None], rates.shape[1], axis=1),
    )


def _family_steps(snapshot: Snapshot) -> dict[str, tuple[StepTime, ...]]:
    """The step times measured by the jobs of each family (a job without a family is its own)."""
    found: dict[str, tuple[StepTime, ...]] = {}
    for view in snapshot.jobs:
        if view.learnt.step_times and view.job.step_profile is None:
            family = view.job.family or view.job.job_id
            known = found.get(family)
            found[family] = view.learnt.step_times if known is None else merge_step_times(known, view.learnt.step_times)
    return found


class _Rows:
    """Step times of a fixed list of placements, as a StepModel: rows in the order in which they are asked for."""

    def __init__(self, profile: StepProfile, bucket_s: Floats) -> None:
        self._profile = profile
        self._bucket_s = bucket_s

    def step_s(
        self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Seconds of a step and of its exchange for local batches [sizes, rows]."""
        return iteration_s(self._profile, local_batch_size, 1, self._bucket_s)


class _Cluster:
    """The tables of one cluster, each made once."""

    def __init__(self, topology: Topology, servers: Servers, links: str) -> None:
        self.servers = servers
        self._topology = topology
        self._links = links

    def shapes(self, sizes: tuple[int, ...], unit: int) -> list[list[Shape]]:
        """The representative placement of every size and shape."""
        widest = max(1, int(self.servers.capacity.max(initial=1)))
        rows = []
        for size in sizes:
            fewest = -(-size // widest)
            row = [Shape(size, fewest, 0)]
            for level in range(self.servers.num_levels):
                row.append(Shape(size, min(max(fewest, 2), max(1, size // unit)), level))
                row.append(Shape(size, max(fewest, size // unit), level))
            rows.append(row)
        return rows

    def fitted(self, steps: tuple[StepTime, ...], table_key: _TableKey) -> tuple[Floats, Ints]:
        """The table by the fitted model, which distinguishes one node from several."""
        return _fitted_table(steps, table_key, self._key)

    def profiled(self, profile: StepProfile, table_key: _TableKey, communication: str) -> tuple[Floats, Ints]:
        """The table by the profiled timeline with the predicted exchanges inserted."""
        return _profiled_table(self._key, profile, table_key, communication)

    @cached_property
    def _key(self) -> _Key:
        capacity, switches = self.servers.capacity, self.servers.switches
        return _Key(self._topology, tuple(capacity.tolist()), switches.tobytes(), switches.shape[1], self._links)


class _Key:
    """A cluster as a key of caches: by identity of its topology first."""

    __slots__ = ("_hash", "capacity", "levels", "links", "switch_bytes", "topology")

    def __init__(
        self, topology: Topology, capacity: tuple[int, ...], switch_bytes: bytes, levels: int, links: str
    ) -> None:
        self.topology, self.capacity, self.switch_bytes = topology, capacity, switch_bytes
        self.levels, self.links = levels, links
        self._hash = hash((capacity, switch_bytes, levels, links))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self.capacity == other.capacity
            and self.switch_bytes == other.switch_bytes
            and self.links == other.links
            and (self.topology is other.topology or self.topology.nodes == other.topology.nodes)
        )

    def servers(self) -> Servers:
        """The servers that the key was made of."""
        switches = np.frombuffer(self.switch_bytes, dtype=np.int64).reshape(len(self.capacity), self.levels)
        return Servers(capacity=np.array(self.capacity, dtype=np.int64), switches=switches)


def _best(model: StepModel, table_key: _TableKey, shapes: list[list[Shape]]) -> tuple[Floats, Ints]:
    pairs = [(shape.num_servers, shape.size) for row in shapes for shape in row]
    noise = None if table_key.noise is None else GradientNoise(grad_sqr=table_key.noise[0], grad_var=table_key.noise[1])
    found: BestBatches = best_batches(model, noise, pairs, table_key.bounds, table_key.initial, table_key.length_unit)
    form = (len(shapes), len(shapes[0]))
    return found.progress_per_s.reshape(form), found.global_batch_size.reshape(form)


@lru_cache(maxsize=2048)
def _fitted_table(steps: tuple[StepTime, ...], table_key: _TableKey, key: _Key) -> tuple[Floats, Ints]:
    estimate = fit_throughput(steps)
    assert estimate is not None
    shapes = _Cluster(key.topology, key.servers(), key.links).shapes(table_key.sizes, table_key.unit)
    return _best(estimate.model, table_key, shapes)


@lru_cache(maxsize=2048)
def _profiled_table(key: _Key, profile: StepProfile, table_key: _TableKey, communication: str) -> tuple[Floats, Ints]:
    shapes, bucket_s = _exchanges(
        key, tuple(bucket_bytes(profile).tolist()), table_key.sizes, table_key.unit, communication
    )
    return _best(_Rows(profile, bucket_s), table_key, shapes)


@lru_cache(maxsize=64)
def _exchanges(
    key: _Key, num_bytes: tuple[int, ...], sizes: tuple[int, ...], unit: int, communication: str
) -> tuple[list[list[Shape]], Floats]:
    """Seconds of the exchange of every bucket on each representative placement: (sizes * shapes, buckets)."""
    servers = key.servers()
    shapes = _Cluster(key.topology, servers, key.links).shapes(sizes, unit)
    fabric = Fabric(key.topology, SERVERS[key.links])
    queries = []
    for row in shapes:
        for shape in row:
            chosen = _representative(servers, shape, unit)
            devices = [
                device.device_id for server, count in chosen for device in key.topology.nodes[server].devices[:count]
            ]
            subgraph = fabric.subgraph(devices)
            queries += [Query(subgraph, size) for size in num_bytes]
    seconds = _communication(communication).predict_s(queries) if queries else np.zeros(0)
    return shapes, np.asarray(seconds).reshape(sum(map(len, shapes)), len(num_bytes))


def _representative(servers: Servers, shape: Shape, unit: int) -> list[tuple[int, int]]:
    """Servers of the given shape: alternately from the two largest groups below a switch of its level.

    If the cluster has no such place, the nearest one to it.
    """
    order = np.argsort(-servers.capacity, kind="stable")
    if shape.num_servers > 1:
        switches = servers.switches
        common = switches[:, shape.level]
        group = int(np.bincount(common, weights=servers.capacity).argmax())
        inside = [int(server) for server in order if common[server] == group]
        if shape.level > 0:
            below: dict[int, list[int]] = {}
            for server in inside:
                below.setdefault(int(switches[server, shape.level - 1]), []).append(server)
            groups = sorted(below.values(), key=len, reverse=True)
            inside = [
                server
                for number in range(max(map(len, groups)))
                for g in groups
                if number < len(g)
                for server in (g[number],)
            ]
        taken = set(inside)
        order = np.array(inside + [server for server in order.tolist() if server not in taken])
    chosen: list[tuple[int, int]] = []
    left = shape.size
    num_servers = min(shape.num_servers, len(order))
    for position, server in enumerate(order.tolist()):
        if left <= 0:
            break
        spread = max(1, num_servers - position)
        count = min(left, int(servers.capacity[server]), max(unit, -(-left // (spread * unit)) * unit))
        chosen.append((server, count))
        left -= count
    return chosen


@lru_cache(maxsize=8)
def _communication(name: str) -> CommunicationModel:
    """Bytes over bandwidth by default, else the trained graph network of that file. Raises InvalidRequest."""
    if not name:
        return BytesOverBandwidth()
    try:
        stored = Path(name).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read ({error.strerror}); name a trained communication model") from None
    return load_model(stored)
