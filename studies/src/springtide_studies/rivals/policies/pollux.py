"""Pollux: workers and batch sizes by predicted goodput, searched for genetically as fair speedups of all jobs.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, sections 3 and 4,
with the settings of its published artifact (petuum/adaptdl, branch osdi21-artifact). Every round, for every job: fit
the model of a step, predict goodput by workers and nodes at the best batch for each, and search for the matrix of
workers by job and node with the highest harmonic mean of speedups over the fair share, in which a restart is charged
by a job's age. A job gets at most twice as many workers as it has run on. Jobs' lengths play no part.
The artifact's faults are kept unless `fixes_faults`: see docs/policies/pollux.md, which names every difference.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId, NodeId
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.perf.goodput import best_batches
from springtide.perf.step_estimate import fit_model
from springtide.scheduling.decisions.rounds import Round, RoundDecision, decide_in_rounds
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.placement.gangs import fixed_size
from springtide_studies.rivals.solvers.pollux_search import AllocationProblem, Counts, search

# The widest node that the search's matrices can count.
_WIDEST_NODE = 127


class Pollux(msgspec.Struct, frozen=True, kw_only=True):
    """Services first, by load; then jobs that cannot change their number; then the others, every `round_s`.

    `population` and `generations` are parameters of the search, `restart_s` is the assumed cost of a restart. No job
    gets more than `max_workers` on `max_nodes` nodes. Defaults are the artifact's.
    """

    round_s: float = 60.0
    population: int = 100
    generations: int = 100
    restart_s: float = 30.0
    max_workers: int = 64
    max_nodes: int = 16
    seed: int = 0
    fixes_faults: bool = False

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(repr(self), self.round_s, snapshot, self._decide)

    def _decide(self, now: Round) -> RoundDecision:
        state = now.state or {"jobs": [], "nodes": [], "population": None, "restarts": {}, "ran": {}}
        round_devices = _RoundDevices(now)
        round_devices.give_rigid()
        ran = {v.job.job_id: max(_most_run(v, now.held), state["ran"].get(v.job.job_id, 0)) for v in now.snapshot.jobs}
        restarts: dict[str, int] = state["restarts"]
        jobs = [
            _Job(view, self._most(view, ran[view.job.job_id], len(now.held[view.job.job_id])))
            for view in round_devices.elastic()
        ]
        jobs.sort(key=lambda job: (job.view.attained_service_s(now.snapshot.now_s), job.view.submitted_at_s))
        nodes = round_devices.nodes()
        population: Counts | None = None
        if jobs and nodes:
            problem = self._problem(now, round_devices, jobs, nodes, restarts)
            initial = _adapt(state, [job.job_id for job in jobs], nodes, by_name=self.fixes_faults)
            found = search(
                problem,
                problem.held[None] if initial is None else initial,
                np.random.default_rng(np.random.SeedSequence([self.seed, now.number])),
                population=self.population,
                generations=self.generations,
            )
            round_devices.give(jobs, nodes, found.best)
            population = found.front
        allocations = round_devices.allocations
        return RoundDecision(
            allocations=allocations,
            state={
                "jobs": [job.job_id for job in jobs],
                "nodes": list(nodes),
                "population": _pack(population),
                "restarts": _count_restarts(now, allocations, restarts),
                "ran": {job_id: count for job_id, count in ran.items() if count},
            },
        )

    def _most(self, view: JobView, ran: int, num_held: int) -> int:
        """The most workers for a job: twice the number that it has run on (at first its minimum), within all bounds.

        Never fewer than it holds, since another policy may have given it more than is known here.
        """
        most = min(max(2 * ran, num_held, 1), self.max_workers)
        bounds, job = view.job.batch, view.job
        largest = job.global_batch_size if bounds is None else bounds.max_size // bounds.min_local_size
        return min(max(most, view.bounds.min_workers), most_workers(view), max(largest, 1))

    def _problem(
        self,
        now: Round,
        round_devices: _RoundDevices,
        jobs: Sequence[_Job],
        nodes: Sequence[NodeId],
        restarts: Mapping[str, int],
    ) -> AllocationProblem:
        capacities = np.array([min(len(round_devices.free[node]), _WIDEST_NODE) for node in nodes])
        total = int(capacities.sum())
        # Rows are compared eight entries at a time, so nodes without devices are added up to a multiple of eight.
        num_columns = -(-len(nodes) // 8) * 8
        capacities = np.pad(capacities, (0, num_columns - len(nodes)))
        most = np.array([min(job.most, total) for job in jobs])
        fair = -(-total // len(jobs))
        fair_nodes = -(-fair // int(capacities.max())) if self.fixes_faults else 1
        speedups = np.stack([job.speedups(int(most.max()), fair, fair_nodes) for job in jobs])
        held = np.zeros((len(jobs), num_columns), dtype=np.int8)
        column_of = {node: column for column, node in enumerate(nodes)}
        for row, job in enumerate(jobs):
            for device in round_devices.held(job.job_id):
                held[row, column_of[round_devices.node_of[device]]] += 1
        age_s = np.array([now.snapshot.now_s - job.view.submitted_at_s for job in jobs])
        spent_s = self.restart_s * np.array([restarts.get(job.job_id, 0) for job in jobs])
        return AllocationProblem(
            capacities=capacities,
            num_nodes=len(nodes),
            held=held,
            least=np.array([job.view.bounds.min_workers if job.view.bounds.min_workers > 1 else 0 for job in jobs]),
            most=most,
            max_nodes=self.max_nodes,
            speedups=speedups,
            restart_factors=np.maximum(age_s - spent_s, 0.0) / np.maximum(age_s + self.restart_s, 1e-9),
            spares_single=self.fixes_faults,
        )


class _Job:
    """A job that takes part in the search, with what is known of its speed."""

    def __init__(self, view: JobView, most: int) -> None:
        self.view = view
        self.job_id = view.job.job_id
        self.most = most
        self.model = fit_model(view.learnt.step_times)

    def speedups(self, width: int, fair: int, fair_nodes: int) -> NDArray[np.float64]:
        """Speed over that of the fair share, by one node or several, by 0 .. `width` workers: [2, width + 1].

        A job whose steps were never measured is as fast as its known curve says; without one, in proportion to its
        workers.
        """
        table = np.zeros((2, width + 1))
        workers = np.arange(1, width + 1)
        if self.model is not None:
            counts = np.minimum(workers, self.most)
            pairs = [(1, fair), *((1, count) for count in counts), *((min(2, count), count) for count in counts)]
            pairs[0] = (fair_nodes, min(fair, _largest_share(self.view)))
            goodputs = self._best(pairs).goodput_per_s
            if goodputs[0] > 0.0:
                table[:, 1:] = goodputs[1:].reshape(2, width) / goodputs[0]
                return table
        curve = curve_of(self.view)
        if curve.source == "guess" or not curve.sizes:
            table[:, 1:] = workers / fair
        else:
            table[:, 1:] = [curve.rate(count) for count in workers.tolist()]
            table /= curve.rate(max(fair, curve.sizes[0]))
        return table

    def batch(self, num_nodes: int, num_workers: int) -> int | None:
        """The batch with the highest goodput on so many nodes and workers; None for a job with a fixed batch."""
        bounds, initial = self.view.job.batch, self.view.job.global_batch_size
        if bounds is None:
            return None
        if self.model is None:
            return min(max(initial, bounds.min_local_size * num_workers), bounds.max_size)
        chosen = int(self._best([(num_nodes, num_workers)]).global_batch_size[0])
        return min(max(chosen, bounds.min_size), bounds.max_size)

    def _best(self, pairs: Sequence[tuple[int, int]]) -> Any:
        assert self.model is not None
        job = self.view.job
        return best_batches(self.model, self.view.learnt.noise, pairs, job.batch, job.global_batch_size)


def _largest_share(view: JobView) -> int:
    """The most workers that can share the job's largest batch."""
    bounds = view.job.batch
    return max(1, view.job.global_batch_size if bounds is None else bounds.max_size // bounds.min_local_size)


def _most_run(view: JobView, held: Mapping[WorkloadId, tuple[DeviceId, ...]]) -> int:
    """The largest number of workers that the job is known to have run on."""
    running = len(held[view.job.job_id]) if view.state is JobState.RUNNING else 0
    measured = max((sum(step.placement) for step in view.learnt.step_times), default=0)
    return max(running, measured, *view.learnt.throughput_samples_per_s, 0)


def _count_restarts(
    now: Round, allocations: Mapping[WorkloadId, PoolAllocation], restarts: Mapping[str, int]
) -> dict[str, int]:
    """How often each job that has run got other devices than before."""
    counted: dict[str, int] = {}
    for view in now.snapshot.jobs:
        job_id = view.job.job_id
        given = allocations.get(job_id)
        if given is not None and sorted(given.device_ids) != sorted(now.held[job_id]):
            counted[job_id] = restarts.get(job_id, -1) + 1
        elif job_id in restarts:
            counted[job_id] = restarts[job_id]
    return counted


class _RoundDevices:
    """The devices of a round by node, and the job that gets each of them."""

    def __init__(self, now: Round) -> None:
        self.now = now
        self.node_of = now.snapshot.cluster.node_of
        self.free: dict[NodeId, list[DeviceId]] = {}
        for device in now.devices:
            self.free.setdefault(self.node_of[device], []).append(device)
        self.allocations: dict[WorkloadId, PoolAllocation] = {}

    def nodes(self) -> list[NodeId]:
        """The nodes that still have devices, in the cluster's order."""
        return [node for node, devices in self.free.items() if devices]

    def elastic(self) -> list[JobView]:
        """The jobs that take part in the search."""
        total = sum(map(len, self.free.values()))
        return [view for view in self.now.snapshot.jobs if view.job.elastic and view.bounds.min_workers <= total]

    def held(self, job_id: WorkloadId) -> list[DeviceId]:
        """The devices of the job in the round that ends, without those given to a rigid job since."""
        return [device for device in self.now.held[job_id] if device in self.free[self.node_of[device]]]

    def give_rigid(self) -> None:
        """Let jobs that cannot change their number of workers go on, or start in order of arrival if enough is left."""
        total = len(self.now.devices)
        rigid = [view for view in self.now.snapshot.jobs if not view.job.elastic]
        taken = {device for devices in self.now.held.values() for device in devices}
        for view in rigid:
            held = self.now.held[view.job.job_id]
            if held and len(held) == fixed_size(view, total):
                self._hand_over(view.job.job_id, held)
        for view in rigid:
            size = fixed_size(view, total)
            if size and view.job.job_id not in self.allocations and size <= sum(map(len, self.free.values())):
                fullest = sorted(self.free.values(), key=len, reverse=True)
                devices = [device for on_node in fullest for device in on_node]
                self._hand_over(view.job.job_id, sorted(devices, key=taken.__contains__)[:size])

    def give(self, jobs: Sequence[_Job], nodes: Sequence[NodeId], counts: Counts) -> None:
        """Choose devices by the matrix [J, N]: a job that keeps its number on a node keeps its devices there."""
        kept: list[list[DeviceId]] = []
        wanted = [dict(zip(nodes, row.tolist(), strict=False)) for row in counts]
        for job, on_node in zip(jobs, wanted, strict=True):
            stays = []
            for device in self.held(job.job_id):
                if on_node[self.node_of[device]] > 0:
                    on_node[self.node_of[device]] -= 1
                    self.free[self.node_of[device]].remove(device)
                    stays.append(device)
            kept.append(stays)
        for job, on_node, stays in zip(jobs, wanted, kept, strict=True):
            for node, missing in on_node.items():
                for _ in range(missing):
                    stays.append(self.free[node].pop(0))
            if stays:
                num_nodes = len({self.node_of[device] for device in stays})
                self.allocations[job.job_id] = PoolAllocation(
                    device_ids=tuple(stays), global_batch_size=job.batch(num_nodes, len(stays))
                )

    def _hand_over(self, job_id: WorkloadId, devices: Sequence[DeviceId]) -> None:
        for device in devices:
            self.free[self.node_of[device]].remove(device)
        self.allocations[job_id] = PoolAllocation(device_ids=tuple(devices))


def _pack(population: Counts | None) -> dict[str, Any] | None:
    """Matrices [P, J, N] as plain values."""
    if population is None:
        return None
    text = base64.b85encode(zlib.compress(population.tobytes(), 1)).decode("ascii")
    return {"shape": list(population.shape), "counts": text}


def _adapt(state: Mapping[str, Any], jobs: Sequence[str], nodes: Sequence[str], *, by_name: bool) -> Counts | None:
    """The last round's population for the present jobs and nodes; None without one.

    The artifact pairs the jobs that are still there by their indices in the old order and in the new one, so that after
    a change of the order one job gets the row of another. With `by_name`, each job gets its own row.
    """
    packed = state["population"]
    if packed is None:
        return None
    raw = zlib.decompress(base64.b85decode(packed["counts"]))
    before = np.frombuffer(raw, dtype=np.int8).reshape(packed["shape"])
    known, present = set(state["jobs"]), set(jobs)
    old_rows = [row for row, job_id in enumerate(state["jobs"]) if job_id in present]
    new_rows = [row for row, job_id in enumerate(jobs) if job_id in known]
    if by_name:
        row_of = {job_id: row for row, job_id in enumerate(state["jobs"])}
        old_rows = [row_of[job_id] for job_id in jobs if job_id in known]
    column_of = {node: column for column, node in enumerate(state["nodes"])}
    columns = [(new, column_of[node]) for new, node in enumerate(nodes) if node in column_of]
    adapted = np.zeros((len(before), len(jobs), -(-len(nodes) // 8) * 8), dtype=np.int8)
    for new, old in columns:
        adapted[:, new_rows, new] = before[:, old_rows, old]
    return adapted
