"""FaPES: every job has a plan over the rounds to come, priced by how full servers will be (primal-dual).

Zhao et al., "FaPES: Enabling Efficient Elastic Scaling for Serverless Machine Learning Platforms", SoCC 2024, sections
3.3, 4 and 5, without the loans between pools. Each round: filter running jobs (5.1), order the cohort (5.2), plan it
(5.3); the Board is Plan.future. docs/policies/fapes.md says what is followed and every deliberate difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from springtide.core.decision import JobView, Plan, PlannedRun, PoolAllocation, Schedule, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import nodes_fingerprint
from springtide.scheduling.decisions.rounds import Round, RoundDecision, decide_in_rounds
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.policies.fapes import board as boards
from springtide.scheduling.policies.fapes.filter import Candidate, Running, in_priority, select_running
from springtide.scheduling.policies.fapes.performance import Expectations, Settings, SpeedTable
from springtide.scheduling.policies.fapes.reasons import Words
from springtide.solvers.schedule_planning import Board, Placed, RoundDemand, Shapes, plan_job, unit_prices

# How many waiting jobs are tried between rounds when devices become free, by priority.
_MOST_TRIED = 8
# Goodput is flat around its best batch: a batch off by this factor loses a percent or two, less than a change costs.
_BATCH_TOLERANCE = 1.2


class Fapes(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of `round_s` with event-driven starts in between (`starts=no`: at rounds only).

    `filtering`, `topology` and `batch` switch parts off: with no filter every running job is planned anew, without
    topology every placement of a size counts as equally fast, without batch adaptation jobs keep theirs. `unit` is how
    many GPUs of one PCIe switch are taken at a time (of CPU slots it is one). `links` names the servers' kind
    (perf.fabric.SERVERS), `communication` a file with a trained predictor; without one it is bytes over bandwidth.
    `literal_prices` charges the paper's bounds as they are written.
    """

    round_s: float = 600.0
    filtering: bool = True
    topology: bool = True
    batch: bool = True
    starts: bool = True
    unit: int = 2
    pop_up_rounds: int = 3
    literal_prices: bool = False
    links: str = "v100"
    communication: str = ""

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(
            repr(self),
            self.round_s,
            snapshot,
            lambda this_round: _RoundPlanner(self, this_round).run(),
            foresee=self._foresee,
            is_due=_is_due if self.starts else None,
        )

    def _foresee(self, snapshot: Snapshot, state: Any) -> Mapping[WorkloadId, Schedule]:
        """The Board: every job's stretches with their devices, the last one to its planned end."""
        jobs: Mapping[str, Any] = {} if state is None else state["jobs"]
        found: dict[WorkloadId, Schedule] = {}
        for view in snapshot.jobs:
            if view.job.job_id in jobs:
                plan, _, finish_s = jobs[view.job.job_id]
                found[view.job.job_id] = tuple(
                    PlannedRun(
                        start_s=first * self.round_s,
                        end_s=min((last + 1) * self.round_s, max(finish_s, first * self.round_s)),
                        num_devices=sum(count for _, count in placed),
                    )
                    for first, last, placed, _ in plan
                )
        return found


def _is_due(snapshot: Snapshot, state: Any) -> bool:
    """Whether a job has come or gone since the last decision."""
    if state is None:
        return True
    known = state["jobs"]
    return len(known) != len(snapshot.jobs) or any(view.job.job_id not in known for view in snapshot.jobs)


class _RoundPlanner:
    """One decision: the plans that are kept, the cohort that is planned, and the resulting devices of this round."""

    def __init__(self, policy: Fapes, this_round: Round) -> None:
        self.policy, self.round = policy, this_round
        snapshot = this_round.snapshot
        self.now_s = snapshot.now_s
        is_gpus = all(device.kind == "gpu" for device in snapshot.cluster.devices())
        unit = policy.unit if is_gpus else 1
        self.views = {view.job.job_id: view for view in snapshot.jobs}
        self.servers = boards.servers_of(snapshot.cluster, this_round.devices)
        if not policy.topology:
            one_switch = np.zeros((len(self.servers.capacity), 1), dtype=np.int64)
            self.servers = msgspec.structs.replace(self.servers, switches=one_switch)
        others = {device for who, held in snapshot.allocations.items() for device in held.device_ids}
        self.seats = boards.Seats(snapshot.cluster, this_round.devices, others, unit)
        self.grid = boards.Rounds(this_round.number, self.now_s, policy.round_s)
        settings = Settings(
            unit=unit,
            topology=policy.topology,
            batch=policy.batch,
            links=policy.links,
            communication=policy.communication,
            round_s=policy.round_s,
        )
        self._expectations = Expectations(snapshot, self.servers, settings)
        self.held = {job_id: devices for job_id, devices in this_round.held.items() if devices}
        self.placed = {job_id: self.seats.counts(devices) for job_id, devices in self.held.items()}
        self._outlooks: dict[WorkloadId, SpeedTable] = {}
        self.nodes = nodes_fingerprint(snapshot.cluster)
        state = this_round.state
        is_same = state is not None and state["nodes"] == self.nodes
        self.known: Mapping[str, Any] = state["jobs"] if is_same else {}
        self.plans: dict[WorkloadId, boards.Plan] = {}
        self.finish_s: dict[WorkloadId, float] = {}
        self.is_late: set[WorkloadId] = set()
        self.words = Words(self.now_s)
        self._positions = {job_id: position for position, job_id in enumerate(self.views)}
        self._achievement_of: dict[WorkloadId, float] = {}

    def outlook(self, job_id: WorkloadId) -> SpeedTable:
        """The speeds expected of a job, computed on demand: between rounds few are needed."""
        known = self._outlooks.get(job_id)
        if known is None:
            known = self._expectations.of(self.views[job_id], len(self.held.get(job_id, ())))
            self._outlooks[job_id] = known
        return known

    def run(self) -> RoundDecision:
        """Decide."""
        for job_id in self.held:
            self._continue_plan(job_id)
        cohort = self._overcommitted_jobs()
        if self.round.is_boundary:
            cohort |= self._filtered(cohort)
            cohort |= {job_id for job_id in self.views if job_id not in self.held}
        else:
            cohort |= self._jobs_to_try()
        for job_id in cohort:
            if job_id in self.held:
                self._achievement_of[job_id] = self._achievement(job_id)
            self.plans.pop(job_id, None)
        self._plan(cohort)
        return self._decision(cohort)

    # --- plans that are kept -----------------------------------------------------------------------------------------

    def _continue_plan(self, job_id: WorkloadId) -> None:
        """Continue the plan of a running job; one whose plan is over keeps its devices to its end (5.3, late end)."""
        view, number = self.views[job_id], self.round.number
        plan, _, finish_s = self.known.get(job_id, ([], None, 0.0))
        plan = [[max(first, number), last, placed, batch] for first, last, placed, batch in plan if last >= number]
        placed = self.placed[job_id]
        here, batch = boards.now_of(plan, number)
        sizes = [sum(count for _, count in placed) for _, _, placed, _ in plan]
        allows = all(view.bounds.min_workers <= size <= most_workers(view) for size in sizes)
        is_there = here == placed or (self.round.is_boundary and here)
        if plan and allows and is_there and here:
            self.plans[job_id], self.finish_s[job_id] = plan, finish_s
            return
        outlook = self.outlook(job_id)
        rate = self._rate(job_id, placed)
        left_s = outlook.work / rate if rate > 0.0 else self.policy.round_s
        last = min(self._round_at(self.now_s + left_s), number + self.grid.num_rounds)
        self.plans[job_id] = [[number, max(number, last), [list(pair) for pair in placed], batch]]
        self.finish_s[job_id] = self.now_s + left_s
        self.is_late.add(job_id)

    def _round_at(self, at_s: float) -> int:
        return max(self.round.number, math.ceil(at_s / self.policy.round_s - 1e-9) - 1)

    def _rate(self, job_id: WorkloadId, placed: Placed) -> float:
        """Work a second on a placement; if its number of devices is none of the sizes, as on the next smaller one."""
        outlook = self.outlook(job_id)
        if not len(outlook.sizes) or not placed:
            return 0.0
        demand = RoundDemand(work=outlook.work, sizes=outlook.sizes, rates=outlook.rates, unit=outlook.unit)
        shapes = Shapes(self.servers, demand)
        size = sum(count for _, count in placed)
        if size in shapes.size_index:
            return shapes.rate_of(placed)
        index = max(0, int(np.searchsorted(outlook.sizes, size)) - 1)
        return float(outlook.compact_rates[index]) * min(1.0, size / int(outlook.sizes[index]))

    def _overcommitted_jobs(self) -> set[WorkloadId]:
        """Jobs whose plans no longer fit beside those that others keep, because of late jobs or lost devices."""
        capacity = self.servers.capacity
        loads = boards.loads_of(self.plans.values(), self.grid, len(capacity))
        if (loads <= capacity).all():
            return set()
        loads = np.zeros_like(loads)
        out: set[WorkloadId] = set()
        for job_id in sorted(self.plans, key=lambda job_id: job_id not in self.is_late):
            used, more = boards.load_of(self.plans[job_id], self.grid)
            if (loads[:, used] + more <= capacity[used]).all():
                loads[:, used] += more
            else:
                out.add(job_id)
        return out

    # --- jobs to plan ----------------------------------------------------------------------------------------------

    def _filtered(self, out: set[WorkloadId]) -> set[WorkloadId]:
        """Phase 1: the running jobs whose devices are recycled."""
        ids = [job_id for job_id in self.plans if job_id not in out]
        if not self.policy.filtering:
            return {job_id for job_id in ids if self.views[job_id].job.elastic}
        running = []
        for job_id in ids:
            outlook = self.outlook(job_id)
            rate = self._rate(job_id, self.placed[job_id])
            running.append(
                Running(
                    outlook=outlook,
                    num_held=len(self.held[job_id]),
                    achievement=self._achievement(job_id),
                    left_s=outlook.work / rate if rate > 0.0 else math.inf,
                    may_change=self.views[job_id].job.elastic and outlook.best_rate > 0.0,
                )
            )
        waiting = [self.outlook(job_id) for job_id in self.views if job_id not in self.held]
        num_idle = len(self.round.devices) - sum(len(devices) for devices in self.held.values())
        chosen = select_running(
            running,
            waiting,
            num_idle,
            round_s=self.policy.round_s,
            change_s=self.round.snapshot.overheads.change_s,
        )
        return {ids[index] for index in chosen}

    def _achievement(self, job_id: WorkloadId) -> float:
        """The average speed over the rounds of a job's plan, divided by its best speed (5.1)."""
        plan, outlook = self.plans.get(job_id), self.outlook(job_id)
        if not plan or outlook.best_rate <= 0.0:
            return 0.0
        done: float = sum(
            (last + 1 - first) * self._rate(job_id, tuple((server, count) for server, count in placed))
            for first, last, placed, _ in plan
        )
        return float(done) / float(plan[-1][1] + 1 - self.round.number) / outlook.best_rate

    def _jobs_to_try(self) -> set[WorkloadId]:
        """Between rounds: the first waiting jobs, if any devices are idle; the others keep their plans."""
        waiting = [job_id for job_id in self.views if job_id not in self.held]
        for job_id in waiting:
            plan, _, finish_s = self.known.get(job_id, ([], None, 0.0))
            plan = [segment for segment in plan if segment[0] > self.round.number]
            self.plans[job_id], self.finish_s[job_id] = plan, finish_s
        num_idle = len(self.round.devices) - sum(len(devices) for devices in self.held.values())
        if num_idle <= 0:
            return set()
        ids = list(self.views)
        order = in_priority([self._candidate(job_id) for job_id in waiting], pop_up_s=self._pop_up_s)
        return {ids[candidate.position] for candidate in order[:_MOST_TRIED]}

    @property
    def _pop_up_s(self) -> float:
        return self.policy.pop_up_rounds * self.policy.round_s

    def _since_s(self, job_id: WorkloadId) -> float | None:
        """Since when a job has held no devices; None if it runs."""
        if job_id in self.held:
            return None
        _, since_s, _ = self.known.get(job_id, ([], None, 0.0))
        view = self.views[job_id]
        return since_s if since_s is not None else (view.submitted_at_s if view.started_at_s is None else self.now_s)

    def _candidate(self, job_id: WorkloadId) -> Candidate:
        since_s = self._since_s(job_id)
        return Candidate(
            position=self._positions[job_id],
            waited_s=0.0 if since_s is None else self.now_s - since_s,
            is_new=since_s is not None and self.views[job_id].started_at_s is None,
            achievement=self._achievement_of.get(job_id, 0.0),
        )

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan(self, cohort: set[WorkloadId]) -> None:
        """Phase 3: a plan for each of the cohort, in priority order, on what the Board has left."""
        if not cohort:
            return
        low, high = self._bounds()
        board = boards.make_board(self.servers, self.grid, self.plans.values(), low, high)
        ids = list(self.views)
        order = in_priority([self._candidate(job_id) for job_id in cohort], pop_up_s=self._pop_up_s)
        for candidate in order:
            self._plan_one(board, ids[candidate.position])

    def _plan_one(self, board: Board, job_id: WorkloadId) -> None:
        outlook = self.outlook(job_id)
        demand = RoundDemand(
            work=outlook.work,
            sizes=outlook.sizes,
            rates=outlook.rates,
            unit=outlook.unit,
            held=self.placed.get(job_id, ()),
            setup_s=self.round.snapshot.overheads.change_s,
        )
        schedule = plan_job(board, demand)
        if schedule is None:
            self.plans[job_id], self.finish_s[job_id] = [], 0.0
            return
        board.book(schedule)
        shapes = Shapes(self.servers, demand)
        batches = [int(outlook.batches[shapes.cell(stretch.placed)]) for stretch in schedule.stretches]
        self.plans[job_id] = self.grid.plan_of(schedule, batches)
        self.finish_s[job_id] = self.now_s + schedule.finish_s

    def _bounds(self) -> tuple[float, float]:
        """The price of a device for a round on an idle and on a full server: `unit_prices`, or literally the paper's.

        Literally: the shortest completion time of any job on all GPUs, and the longest on the least (5.3).
        """
        if not self.policy.literal_prices:
            return unit_prices(len(self.views), int(self.servers.capacity.sum()), self.policy.round_s)
        known = [outlook for outlook in map(self.outlook, self.views) if outlook.best_rate > 0.0]
        low = min((outlook.total_work / outlook.best_rate for outlook in known), default=1.0)
        least = [(outlook, float(outlook.compact_rates[outlook.compact_rates > 0.0][0])) for outlook in known]
        high = max((outlook.total_work / rate for outlook, rate in least), default=1.0)
        low = max(low, 1e-3)
        return low, max(high, low)

    # --- devices and batches of this round ---------------------------------------------------------------------------

    def _decision(self, cohort: set[WorkloadId]) -> RoundDecision:
        number = self.round.number
        wanted: dict[WorkloadId, Placed] = {}
        batches: dict[WorkloadId, int | None] = {}
        for job_id, view in self.views.items():
            placed, batch = boards.now_of(self.plans.get(job_id, []), number)
            if placed:
                stands = job_id not in cohort and not self.round.is_boundary
                wanted[job_id] = placed
                batches[job_id] = self._batch(view, placed, batch, stands=stands)
                # The batch is kept until the next round, whatever the plan said before.
                boards.set_batch(self.plans[job_id], number, batches[job_id])
        seats = self.seats.assign(wanted, self.held)
        jobs: dict[str, Any] = {}
        reasons: dict[WorkloadId, str] = {}
        for job_id, view in self.views.items():
            plan = self.plans.get(job_id, [])
            devices = seats.get(job_id, ())
            since_s = None if devices else self._since_s(job_id)
            if not devices and since_s is None:
                since_s = self.now_s
            jobs[job_id] = [plan, since_s, self.finish_s.get(job_id, 0.0)]
            reason = self._reason(view, devices, job_id in cohort)
            if reason:
                reasons[job_id] = reason
        return RoundDecision(
            allocations={
                job_id: PoolAllocation(device_ids=devices, global_batch_size=batches[job_id])
                for job_id, devices in seats.items()
            },
            reasons=reasons,
            state={"nodes": self.nodes, "jobs": jobs},
        )

    def _batch(self, view: JobView, placed: Placed, planned: int | None, *, stands: bool) -> int | None:
        """The batch of this round; the present one is kept if it is nearly as good."""
        bounds = view.job.batch
        if bounds is None:
            return None
        present = view.global_batch_size or view.job.global_batch_size
        if stands:
            return min(max(planned or present, bounds.min_size), bounds.max_size)
        outlook = self.outlook(view.job.job_id)
        best = planned
        size = sum(count for _, count in placed)
        if size in outlook.sizes:
            demand = RoundDemand(work=outlook.work, sizes=outlook.sizes, rates=outlook.rates, unit=outlook.unit)
            best = int(outlook.batches[Shapes(self.servers, demand).cell(placed)])
        is_kept = self.placed.get(view.job.job_id) == placed
        if best is None or (is_kept and max(best, present) <= _BATCH_TOLERANCE * min(best, present)):
            best = present
        return min(max(best, bounds.min_size), bounds.max_size)

    def _reason(self, view: JobView, devices: tuple[DeviceId, ...], is_planned: bool) -> str:
        job_id = view.job.job_id
        before = self.held.get(job_id, ())
        plan, finish_s = self.plans.get(job_id, []), self.finish_s.get(job_id, 0.0)
        if devices:
            if devices == before:
                return ""
            return self.words.changed(before, devices, finish_s, is_planned)
        if plan:
            first, _, placed, _ = plan[0]
            size = sum(count for _, count in placed)
            return self.words.waits(bool(before), first * self.policy.round_s, size)
        least, total = view.bounds.min_workers, len(self.round.devices)
        return self.words.no_room(bool(before), least, total)
