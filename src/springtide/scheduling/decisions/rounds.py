"""What is common to policies that decide in rounds: they are asked at each boundary, and in between what they decided
stands.

Between two boundaries jobs that end drop out, jobs that arrive wait, devices that die are missing, and services take
what is idle; no other workload moves.
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

# Counts the shapes of what is remembered: a journal of an older shape is not taken up, like that of another policy.
_FORMAT = 1
# A call so many seconds before a boundary counts as at it: a clock that was set to it is rounded.
_EARLY_S = 1e-6

Devices = tuple[DeviceId, ...]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at a boundary: the `number` of the round that begins now, and what there is to share out.

    `devices` are those that no service takes, in the cluster's order. `held` is what each job was given in the round
    that ends, in rank order, as far as it is alive and no service takes it: a job that gets exactly this again is not
    moved. `state` is what was remembered the last time, None at first. `is_boundary` is False where the policy asked to
    decide between two boundaries.
    """

    snapshot: Snapshot
    number: int
    devices: Devices
    held: Mapping[WorkloadId, Devices]
    state: Any = None
    is_boundary: bool = True


class RoundDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What stands until the next boundary: the jobs' devices in rank order, with their batches.

    Devices are of the round's only, none of them twice, within every job's bounds. `reasons` may leave out jobs
    for which the default sentence is enough. `state` is what to remember, in plain values.
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
    """Return the plan that stands; at a multiple of `round_s` on the platform's clock ask `decide` for a new one.

    `rule` names the policy with its parameters: a policy does not take up the memory of another. Where there is
    no memory each workload keeps what it holds until the first boundary. Memory is {"rule", "round": the last one
    decided, "next_s": the next boundary, None while there is no job to decide on, "wanted": devices by workload,
    services too, "batch", "why", "state", "suspended": the jobs that give up all they hold before they get what
    they want, see `stuck_moves`}. `foresee` turns the state into what is planned for the time to come. `is_due` lets a
    policy decide between boundaries too: it sees the snapshot and the state, and must be False for what its decision
    leads to.
    """
    rule = f"{_FORMAT} {rule}"
    memory = snapshot.memory
    if not isinstance(memory, dict) or memory.get("rule") != rule:
        memory = _fresh(rule, snapshot)
    next_s = memory["next_s"]
    if next_s is None:
        next_s = _boundary_s(snapshot.now_s, round_s)
    ledger = _Ledger(snapshot, memory)
    is_boundary = snapshot.now_s >= next_s - _EARLY_S
    if snapshot.jobs and (is_boundary or (is_due is not None and is_due(snapshot, memory["state"]))):
        number = math.floor((snapshot.now_s + _EARLY_S) / round_s)
        ledger.begin_round()
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
        ledger.go_on()
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


def _fresh(rule: str, snapshot: Snapshot) -> dict[str, Any]:
    """What to remember where nothing is: each workload wants what it holds."""
    return {
        "rule": rule,
        "round": None,
        "next_s": None,
        "wanted": {who: list(held.device_ids) for who, held in snapshot.allocations.items()},
        "batch": {},
        "why": {},
        "state": None,
        "suspended": [],
    }


class _Ledger:
    """Which workload is to hold which devices: what was decided, changed only as far as the moment demands."""

    def __init__(self, snapshot: Snapshot, memory: Mapping[str, Any]) -> None:
        self.snapshot = snapshot
        self.order = snapshot.cluster.device_ids()
        self.views = {view.job.job_id: view for view in snapshot.jobs}
        self.services = {view.service.service_id: view for view in snapshot.services}
        alive = snapshot.cluster.device_set
        self.wanted: dict[WorkloadId, Devices] = {}
        for name, devices in memory["wanted"].items():
            who = WorkloadId(name)
            if who in self.views or who in self.services:
                self.wanted[who] = tuple(device for device in devices if device in alive)
        self.batch: dict[WorkloadId, int] = {
            WorkloadId(name): size for name, size in memory["batch"].items() if name in self.views
        }
        self.why: dict[WorkloadId, str] = {
            WorkloadId(name): why for name, why in memory["why"].items() if name in self.views or name in self.services
        }
        held = snapshot.allocations
        self.suspended = [WorkloadId(name) for name in memory["suspended"] if name in self.views and name in held]
        for job_id, view in self.views.items():
            self._fit(view, self.wanted.get(job_id, ()))

    def _fit(self, view: JobView, devices: Devices) -> None:
        """Keep of a job's devices what its bounds allow; nothing where they are fewer than it runs on."""
        job_id = view.job.job_id
        kept = devices[: most_workers(view)]
        is_cut_down = len(kept) < view.bounds.min_workers or (not view.job.elastic and len(kept) < len(devices))
        # A job that runs on fewer than its owner wants now goes on with them until the next round.
        if is_cut_down and not (view.job.elastic and kept and view.state is JobState.RUNNING):
            kept = ()
        if kept:
            self.wanted[job_id] = kept
        else:
            self.wanted.pop(job_id, None)

    def begin_round(self) -> None:
        """The services take what their load asks for, before any job."""
        self._serve({who: wanted_replicas(view) for who, view in self.services.items()}, self.order)

    def go_on(self) -> None:
        """The services take idle devices; for what each is guaranteed, and its first replica, jobs give way."""
        idle = self._without_jobs()
        wants = {who: wanted_replicas(view) for who, view in self.services.items()}
        self._serve(wants, idle)
        for who, view in self.services.items():
            least = max(view.min_replicas, 1 if wants[who] else 0)
            missing = least - len(self.wanted.get(who, ()))
            for _ in range(missing):
                if not self._take_one(who):
                    break

    def _without_jobs(self) -> Devices:
        taken = {device for job_id in self.views for device in self.wanted.get(job_id, ())}
        return tuple(device for device in self.order if device not in taken)

    def _serve(self, wants: Mapping[WorkloadId, int], devices: Iterable[DeviceId]) -> None:
        """Cut or extend the services' devices to what they want, out of `devices`; those that are free now first."""
        for who, want in wants.items():
            self.wanted[who] = self.wanted.get(who, ())[:want]
        taken = {device for who in wants for device in self.wanted[who]}
        held = {device for given in self.snapshot.allocations.values() for device in given.device_ids}
        free = [device for device in devices if device not in taken]
        free.sort(key=held.__contains__)
        for who, want in wants.items():
            missing = want - len(self.wanted[who])
            self.wanted[who] += tuple(free[:missing])
            del free[:missing]
            self.why[who] = "its load asks for it" if self.wanted[who] else "it has no requests"

    def _take_one(self, service_id: WorkloadId) -> bool:
        """Let the job that holds most beyond its minimum, else the last that came, give a device to a service."""
        elastic = [v for v in self.views.values() if v.job.elastic and self.wanted.get(v.job.job_id)]
        able = [v for v in elastic if len(self.wanted[v.job.job_id]) > v.bounds.min_workers]
        name = self.services[service_id].service.name
        if able:
            giver = max(able, key=lambda view: len(self.wanted[view.job.job_id]) - view.bounds.min_workers).job.job_id
        else:
            holders = [job_id for job_id in self.views if self.wanted.get(job_id)]
            if not holders:
                return False
            giver = holders[-1]
        *kept, last = self.wanted[giver]
        self.wanted[service_id] += (last,)
        self.wanted[giver] = tuple(kept)
        self.why[giver] = f"'{name}' needs the devices"
        if not able:
            self.wanted.pop(giver)
        return True

    def devices(self) -> Devices:
        """What the services leave, in the cluster's order."""
        taken = {device for who in self.services for device in self.wanted.get(who, ())}
        return tuple(device for device in self.order if device not in taken)

    def job_devices(self, view: JobView) -> Devices:
        """What the job was given in the round that ends, as far as no service takes it now."""
        taken = {device for who in self.services for device in self.wanted.get(who, ())}
        return tuple(device for device in self.wanted.get(view.job.job_id, ()) if device not in taken)

    def take(self, decision: RoundDecision) -> None:
        """From now on the decision stands for all jobs."""
        for job_id in self.views:
            self.wanted.pop(job_id, None)
            self.batch.pop(job_id, None)
            self.why.pop(job_id, None)
        for job_id, given in decision.allocations.items():
            if given.device_ids:
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

    def remember(self, memory: dict[str, Any], next_s: float | None) -> dict[str, Any]:
        """The memory with what stands now; the same object again where nothing has changed."""
        changed = {
            **memory,
            "next_s": next_s,
            "wanted": {who: list(devices) for who, devices in self.wanted.items() if devices},
            "batch": dict(self.batch),
            "why": dict(self.why),
            "suspended": list(self.suspended),
        }
        return memory if changed == memory else changed

    def allocations(self) -> dict[WorkloadId, PoolAllocation]:
        """What each workload is to hold, the very objects that were shown where nothing changes."""
        given: dict[WorkloadId, PoolAllocation] = {}
        for who, devices in self.wanted.items():
            if not devices or who in self.suspended:
                continue
            view, held = self.views.get(who), self.snapshot.allocations.get(who)
            size = None
            if view is not None:
                size = self.batch.get(who) or view.global_batch_size or view.job.global_batch_size
            if held is not None and held.device_ids == devices and held.global_batch_size == size:
                given[who] = held
            else:
                given[who] = PoolAllocation(device_ids=devices, global_batch_size=size)
        return given

    def reasons(self, round_s: float) -> dict[WorkloadId, str]:
        """One for each workload whose allocation changes or changed in this round, and for each that waits."""
        reasons: dict[WorkloadId, str] = {}
        for who in (*self.views, *self.services):
            if who in self.suspended:
                reasons[who] = "jobs change places: it starts again at once"
            elif who in self.why:
                reasons[who] = self.why[who]
            elif who in self.views and not self.wanted.get(who):
                reasons[who] = f"waits for the next round: there is one every {round_s:g} s"
            else:
                held = self.snapshot.allocations.get(who)
                before = held.device_ids if held is not None else ()
                if len(self.wanted.get(who, ())) < len(before):
                    reasons[who] = "fewer devices are alive, or its owner allows fewer"
        return reasons


def stuck_moves(moves: Mapping[WorkloadId, tuple[Devices, Devices]]) -> list[WorkloadId]:
    """The jobs that have to let go first so that each gets from the devices that it holds to those that it wants.

    A job that keeps none of its devices holds them until it has all the new ones, since its state moves over within one
    group. Where such jobs wait for each other in a circle, none ever moves: the one that most wait for is named, of
    these the smallest, until there is no circle left. A job that is named is to be stopped and started again.
    """
    waiting = {who: (set(held), set(wanted)) for who, (held, wanted) in moves.items() if set(held).isdisjoint(wanted)}
    holder = {device: who for who, (held, _) in waiting.items() for device in held}
    waits_for = {who: {holder[device] for device in wanted if device in holder} for who, (_, wanted) in waiting.items()}
    named: list[WorkloadId] = []
    while waiting:
        able = [who for who in waiting if not waits_for[who] & waiting.keys()]
        if not able:
            # `waiting` is in order of arrival: among equals the first goes.
            waiters = {who: sum(who in waits_for[other] for other in waiting) for who in waiting}
            able = [min(waiting, key=lambda who: (-waiters[who], len(waiting[who][0])))]
            named += able
        for who in able:
            del waiting[who]
    return named


def _plain_reason(view: JobView, wanted: Devices, before: Devices) -> str:
    if not wanted:
        return "others get the devices in this round" if before else "waits: others get the devices in this round"
    count = "1 device" if len(wanted) == 1 else f"{len(wanted)} devices"
    if not before:
        return f"starting on {count}"
    if len(wanted) == len(before):
        return "this round's plan moves it"
    return f"this round's plan gives it {count}"
