"""The common part of policies that decide in rounds: they decide at each boundary, and the plan is kept in between.

Between two boundaries, jobs that end leave the plan, jobs that arrive wait, dead devices are taken out, and services
take idle devices; nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from springtide.core.decision import EMPTY, JobView, Plan, PoolAllocation, Schedule, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.replicas import next_idle_at_s, wanted_replicas

# The version of the memory's format. Memory of another version is ignored, like that of another policy.
_FORMAT = 1
# A call so many seconds before a boundary counts as at the boundary, since times are rounded.
_EARLY_S = 1e-6

Devices = tuple[DeviceId, ...]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decides from at a boundary: the `number` of the round that begins, and the devices to share out.

    `devices` are those that no service takes, in the cluster's order. `held` are the devices that each job was given in
    the round that ends, in rank order, without dead ones and those that a service takes; a job that gets exactly these
    again is not moved. `state` is that of the last decision, None at first. `is_boundary` is False where the policy
    asked to decide between two boundaries (`is_due`).
    """

    snapshot: Snapshot
    number: int
    devices: Devices
    held: Mapping[WorkloadId, Devices]
    state: Any = None
    is_boundary: bool = True


class RoundDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision until the next boundary: the jobs' devices in rank order, with their batches.

    Only devices of the round, each at most once, within every job's bounds. `reasons` may leave out jobs for which the
    default sentence is enough. `state` is kept for the next decision, in plain values.
    """

    allocations: Mapping[WorkloadId, PoolAllocation] = EMPTY
    reasons: Mapping[WorkloadId, str] = EMPTY
    state: Any = None


Decide = Callable[[Round], RoundDecision]
Foresee = Callable[[Snapshot, Any], Mapping[WorkloadId, Schedule]]
IsDue = Callable[[Snapshot, Any], bool]


def decide_in_rounds(
    rule: str,
    round_s: float,
    snapshot: Snapshot,
    decide: Decide,
    *,
    foresee: Foresee | None = None,
    is_due: IsDue | None = None,
) -> Plan:
    """Return the plan of the present round; at a multiple of `round_s` on the platform's clock, a new one by `decide`.

    `rule` names the policy with its parameters: a policy ignores the memory of another. Without memory, each workload
    keeps what it holds until the first boundary. `foresee` turns the state into the plan's future. `is_due` lets a
    policy decide between boundaries, too: it gets the snapshot and the state, and must be False once its decision is
    being carried out.

    The memory is {"rule", "round": the last one decided, "next_s": the next boundary, None while there is no job to
    decide on, "wanted": devices by workload, services too, "batch", "why", "state", "suspended": the jobs that give up
    all their devices before they get new ones, see `stuck_moves`}.
    """
    rule = f"{_FORMAT} {rule}"
    memory = snapshot.memory
    if not isinstance(memory, dict) or memory.get("rule") != rule:
        memory = _first_memory(rule, snapshot)
    next_s = memory["next_s"]
    if next_s is None:
        next_s = _boundary_s(snapshot.now_s, round_s)
    ledger = _Ledger(snapshot, memory)
    is_boundary = snapshot.now_s >= next_s - _EARLY_S
    if snapshot.jobs and (is_boundary or (is_due is not None and is_due(snapshot, memory["state"]))):
        number = math.floor((snapshot.now_s + _EARLY_S) / round_s)
        ledger.serve_at_boundary()
        decision = decide(
            Round(
                snapshot=snapshot,
                number=number,
                devices=ledger.devices(),
                held={view.job.job_id: ledger.job_devices(view) for view in snapshot.jobs},
                state=memory["state"],
                is_boundary=is_boundary,
            )
        )
        ledger.take(decision)
        memory = {**memory, "round": number, "state": decision.state}
        next_s = (number + 1) * round_s
    else:
        ledger.serve_between_rounds()
    memory = ledger.remember(memory, next_s if snapshot.jobs else None)
    moments = [next_s] if snapshot.jobs else []
    idle_at_s = next_idle_at_s(snapshot.services, snapshot.now_s)
    return Plan(
        allocations=ledger.allocations(),
        reasons=ledger.reasons(round_s),
        future=foresee(snapshot, memory["state"]) if foresee is not None else EMPTY,
        revisit_at_s=min(moments if idle_at_s is None else [*moments, idle_at_s], default=None),
        memory=memory,
    )


def _boundary_s(now_s: float, round_s: float) -> float:
    """The first boundary that has not passed."""
    return math.ceil((now_s - _EARLY_S) / round_s) * round_s


def _first_memory(rule: str, snapshot: Snapshot) -> dict[str, Any]:
    """The first memory: each workload wants what it holds."""
    return {
        "rule": rule,
        "round": None,
        "next_s": None,
        "wanted": {workload_id: list(held.device_ids) for workload_id, held in snapshot.allocations.items()},
        "batch": {},
        "why": {},
        "state": None,
        "suspended": [],
    }


class _Ledger:
    """Which workload is to hold which devices: the last decision, changed only where that is necessary now."""

    def __init__(self, snapshot: Snapshot, memory: Mapping[str, Any]) -> None:
        self.snapshot = snapshot
        self.order = snapshot.cluster.device_ids()
        self.views = {view.job.job_id: view for view in snapshot.jobs}
        self.services = {view.service.service_id: view for view in snapshot.services}
        alive = snapshot.cluster.device_set
        self.wanted: dict[WorkloadId, Devices] = {}
        for name, devices in memory["wanted"].items():
            workload_id = WorkloadId(name)
            if workload_id in self.views or workload_id in self.services:
                self.wanted[workload_id] = tuple(device for device in devices if device in alive)
        self.batch: dict[WorkloadId, int] = {
            WorkloadId(name): size for name, size in memory["batch"].items() if name in self.views
        }
        self.why: dict[WorkloadId, str] = {
            WorkloadId(name): why for name, why in memory["why"].items() if name in self.views or name in self.services
        }
        held = snapshot.allocations
        self.suspended = [WorkloadId(name) for name in memory["suspended"] if name in self.views and name in held]
        for job_id, view in self.views.items():
            self._clip_to_bounds(view, self.wanted.get(job_id, ()))

    def _clip_to_bounds(self, view: JobView, devices: Devices) -> None:
        """Keep the devices that the job's bounds allow, or none if they are too few to run on."""
        job_id = view.job.job_id
        kept = devices[: most_workers(view)]
        is_cut_down = len(kept) < view.bounds.min_workers or (not view.job.elastic and len(kept) < len(devices))
        # A running job whose owner has raised its minimum above what it has keeps that until the next round.
        if is_cut_down and not (view.job.elastic and kept and view.state is JobState.RUNNING):
            kept = ()
        if kept:
            self.wanted[job_id] = kept
        else:
            self.wanted.pop(job_id, None)

    def serve_at_boundary(self) -> None:
        """Give the services what their load asks for, before any job."""
        self._serve({workload_id: wanted_replicas(view) for workload_id, view in self.services.items()}, self.order)

    def serve_between_rounds(self) -> None:
        """Give the services idle devices; for its guaranteed minimum and its first replica, a service also gets devices
        of jobs."""
        idle = self._without_jobs()
        wants = {workload_id: wanted_replicas(view) for workload_id, view in self.services.items()}
        self._serve(wants, idle)
        for workload_id, view in self.services.items():
            num_guaranteed = max(view.min_replicas, 1 if wants[workload_id] else 0)
            missing = num_guaranteed - len(self.wanted.get(workload_id, ()))
            for _ in range(missing):
                if not self._take_one(workload_id):
                    break

    def _without_jobs(self) -> Devices:
        taken = {device for job_id in self.views for device in self.wanted.get(job_id, ())}
        return tuple(device for device in self.order if device not in taken)

    def _serve(self, wants: Mapping[WorkloadId, int], devices: Iterable[DeviceId]) -> None:
        """Cut or extend the services' devices to what they want, out of `devices`; those that are free now first."""
        for workload_id, want in wants.items():
            self.wanted[workload_id] = self.wanted.get(workload_id, ())[:want]
        taken = {device for workload_id in wants for device in self.wanted[workload_id]}
        held = {device for given in self.snapshot.allocations.values() for device in given.device_ids}
        free = [device for device in devices if device not in taken]
        free.sort(key=held.__contains__)
        for workload_id, want in wants.items():
            missing = want - len(self.wanted[workload_id])
            self.wanted[workload_id] += tuple(free[:missing])
            del free[:missing]
            self.why[workload_id] = "its load asks for it" if self.wanted[workload_id] else "it has no requests"

    def _take_one(self, service_id: WorkloadId) -> bool:
        """Take a device for a service from the job that holds most beyond its minimum, else from the newest job."""
        elastic = [v for v in self.views.values() if v.job.elastic and self.wanted.get(v.job.job_id)]
        able = [v for v in elastic if len(self.wanted[v.job.job_id]) > v.bounds.min_workers]
        name = self.services[service_id].service.name
        if able:
            donor = max(able, key=lambda view: len(self.wanted[view.job.job_id]) - view.bounds.min_workers).job.job_id
        else:
            holders = [job_id for job_id in self.views if self.wanted.get(job_id)]
            if not holders:
                return False
            donor = holders[-1]
        *kept, last = self.wanted[donor]
        self.wanted[service_id] += (last,)
        self.wanted[donor] = tuple(kept)
        self.why[donor] = f"'{name}' needs the devices"
        if not able:
            self.wanted.pop(donor)
        return True

    def devices(self) -> Devices:
        """The devices that no service takes, in the cluster's order."""
        taken = {device for workload_id in self.services for device in self.wanted.get(workload_id, ())}
        return tuple(device for device in self.order if device not in taken)

    def job_devices(self, view: JobView) -> Devices:
        """The devices of the job in the round that ends, without those that a service takes now."""
        taken = {device for workload_id in self.services for device in self.wanted.get(workload_id, ())}
        return tuple(device for device in self.wanted.get(view.job.job_id, ()) if device not in taken)

    def take(self, decision: RoundDecision) -> None:
        """Replace the decision for all jobs."""
        for job_id in self.views:
            self.wanted.pop(job_id, None)
            self.batch.pop(job_id, None)
            self.why.pop(job_id, None)
        for job_id, given in decision.allocations.items():
            if given.device_ids and not self._is_cut(job_id, given.device_ids):
                self.wanted[job_id] = given.device_ids
            if given.global_batch_size is not None:
                self.batch[job_id] = given.global_batch_size
        held = self.snapshot.allocations
        for job_id, view in self.views.items():
            wanted = self.wanted.get(job_id, ())
            before = held[job_id].device_ids if job_id in held else ()
            if job_id in decision.reasons:
                self.why[job_id] = decision.reasons[job_id]
            elif wanted != before or not wanted:
                self.why[job_id] = _plain_reason(view, wanted, before)
            elif self.batch.get(job_id) not in (None, held[job_id].global_batch_size):
                self.why[job_id] = "this batch suits it better now"

        moves: dict[WorkloadId, tuple[Devices, Devices]] = {}
        for job_id, wanted in self.wanted.items():
            if job_id in self.views and job_id in held and wanted and held[job_id].device_ids:
                moves[job_id] = (held[job_id].device_ids, wanted)
        self.suspended = stuck_moves(moves)

    def _is_cut(self, job_id: WorkloadId, devices: Devices) -> bool:
        """Whether these are fewer than a running job has that cannot be resized: it stops, or it would hold them all
        for as long as it runs."""
        view, held = self.views[job_id], self.snapshot.allocations.get(job_id)
        if held is None or view.job.elastic or view.state is not JobState.RUNNING:
            return False
        return len(devices) < held.num_devices

    def remember(self, memory: dict[str, Any], next_s: float | None) -> dict[str, Any]:
        """The memory with the present decision; the same object if nothing has changed."""
        changed = {
            **memory,
            "next_s": next_s,
            "wanted": {workload_id: list(devices) for workload_id, devices in self.wanted.items() if devices},
            "batch": dict(self.batch),
            "why": dict(self.why),
            "suspended": list(self.suspended),
        }
        return memory if changed == memory else changed

    def allocations(self) -> dict[WorkloadId, PoolAllocation]:
        """The plan's allocations; where nothing changes, the same objects as in the snapshot."""
        given: dict[WorkloadId, PoolAllocation] = {}
        for workload_id, devices in self.wanted.items():
            if not devices or workload_id in self.suspended:
                continue
            view, held = self.views.get(workload_id), self.snapshot.allocations.get(workload_id)
            size = None
            if view is not None:
                size = self.batch.get(workload_id) or view.global_batch_size or view.job.global_batch_size
            if held is not None and held.device_ids == devices and held.global_batch_size == size:
                given[workload_id] = held
            else:
                given[workload_id] = PoolAllocation(device_ids=devices, global_batch_size=size)
        return given

    def reasons(self, round_s: float) -> dict[WorkloadId, str]:
        """A reason for each workload whose allocation changes or has changed in this round, and for each that waits."""
        reasons: dict[WorkloadId, str] = {}
        for workload_id in (*self.views, *self.services):
            if workload_id in self.suspended:
                reasons[workload_id] = "jobs change places: it starts again at once"
            elif workload_id in self.why:
                reasons[workload_id] = self.why[workload_id]
            elif workload_id in self.views and not self.wanted.get(workload_id):
                reasons[workload_id] = f"waits for the next round: there is one every {round_s:g} s"
            else:
                held = self.snapshot.allocations.get(workload_id)
                before = held.device_ids if held is not None else ()
                if len(self.wanted.get(workload_id, ())) < len(before):
                    reasons[workload_id] = "fewer devices are left for it, or its owner allows fewer"
        return reasons


def stuck_moves(moves: Mapping[WorkloadId, tuple[Devices, Devices]]) -> list[WorkloadId]:
    """The jobs to stop and start again, so that every job gets from the devices that it holds to those that it wants.

    A job that keeps none of its devices holds them until it has all the new ones, since its state moves over within one
    group. Where such jobs wait for each other in a cycle, none would ever move. The job that most others wait for, of
    these the smallest, is stopped, until no cycle is left.
    """
    waiting = {
        workload_id: (set(held), set(wanted))
        for workload_id, (held, wanted) in moves.items()
        if set(held).isdisjoint(wanted)
    }
    holder = {device: workload_id for workload_id, (held, _) in waiting.items() for device in held}
    waits_for = {
        workload_id: {holder[device] for device in wanted if device in holder}
        for workload_id, (_, wanted) in waiting.items()
    }
    stopped: list[WorkloadId] = []
    while waiting:
        able = [workload_id for workload_id in waiting if not waits_for[workload_id] & waiting.keys()]
        if not able:
            # `waiting` is in order of arrival: among equals the first one is stopped.
            waiters = {
                workload_id: sum(workload_id in waits_for[other] for other in waiting) for workload_id in waiting
            }
            able = [min(waiting, key=lambda workload_id: (-waiters[workload_id], len(waiting[workload_id][0])))]
            stopped += able
        for workload_id in able:
            del waiting[workload_id]
    return stopped


def _plain_reason(view: JobView, wanted: Devices, before: Devices) -> str:
    if not wanted:
        return "others get the devices in this round" if before else "waits: others get the devices in this round"
    count = "1 device" if len(wanted) == 1 else f"{len(wanted)} devices"
    if not before:
        return f"starting on {count}"
    if len(wanted) == len(before):
        return "this round's plan moves it"
    return f"this round's plan gives it {count}"
