"""Plans shares of devices: sharers keep their places, then those that lack some are packed."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from springtide.core.decision import Allocation, JobView, PoolAllocation, Refusal, ServiceView, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.shares import MAX_LIMIT, TOLERANCE, Share, has_room
from springtide.core.workload import JobState, WorkloadId
from springtide.perf.curve import curve_of
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.replicas import wanted_replicas
from springtide.scheduling.sharing.demand import demand_of
from springtide.scheduling.sharing.ledger import ShareLedger, parts_of
from springtide.scheduling.sharing.packing import Packer, PlacementRequest

# Devices of the inner policy that a service gets as soon as they are free, each with that service.
Claims = Mapping[DeviceId, WorkloadId]
# Whose claim on a whole device gives way to promises: the strongest first.
WEAK_CLAIMS = ("first", "promise", "growth", "job")
WeakClaim = tuple[str, WorkloadId]


class SharePlan:
    """The plan for all workloads with a share, at one instant.

    The order: promised jobs, services up to their guaranteed minimum, their first replica, running jobs, services
    beyond that, waiting jobs; each in order of arrival. Running jobs that lost workers get successors. If no shared
    device has room, an idle one is opened. For a guaranteed minimum or a first replica, a device is also claimed from
    an elastic job of the inner policy, or the newest job with a share makes room. Claims below these open none that a
    running job lacks to its minimum. Jobs are placed by their requests alone; their limits are what the devices have
    left in the end. `taken` are the devices that the inner policy must not use.

    `opened` are the claims other than guaranteed minimums that take a whole device now. Those in `barred` take none;
    `waiting` are the services that are left without a replica by that.
    """

    def __init__(
        self, snapshot: Snapshot, packer: Packer, claims: Claims, barred: frozenset[WeakClaim] = frozenset()
    ) -> None:
        self._snapshot = snapshot
        self._packer = packer
        self.services = tuple([view for view in snapshot.services if view.service.share is not None])
        self.jobs = tuple([v for v in snapshot.jobs if v.job.share is not None and not v.job.is_on_functions])
        self.sharers = {view.service.service_id for view in self.services} | {view.job.job_id for view in self.jobs}
        self.allocations: dict[WorkloadId, PoolAllocation] = {}
        self.admitted: dict[WorkloadId, float] = {}
        self.rejected: dict[WorkloadId, Refusal] = {}
        self.reasons: dict[WorkloadId, str] = {}
        self.claims: dict[DeviceId, WorkloadId] = {}
        self.displaced: dict[WorkloadId, str] = {}
        # The share that a packer reserves and enforces may differ from the declared one.
        declared = {v.service.service_id: v.service.share for v in self.services}
        declared |= {v.job.job_id: v.job.share for v in self.jobs}
        self._declared = {who: packer.booked(share) for who, share in declared.items() if share is not None}
        jobs = {view.job.job_id for view in self.jobs}
        self._share = {
            who: replace(share, limit=share.request) if who in jobs else share for who, share in self._declared.items()
        }
        self._names = {view.service.service_id: view.service.name for view in self.services}
        self._names |= {view.job.job_id: view.job.name for view in self.jobs}
        self._whole = self._held_whole()
        self._ledger = self._open_ledger(claims)
        self._chosen: dict[WorkloadId, list[DeviceId]] = {}
        self._claimed: dict[WorkloadId, list[DeviceId]] = {}
        self._evicted: dict[WorkloadId, str] = {}
        self._started: list[WorkloadId] = []
        self._barred = barred
        self.opened: dict[WeakClaim, None] = {}
        self.waiting: list[WorkloadId] = []
        self._kept: frozenset[DeviceId] = frozenset()
        self._allocate()
        self.taken = self._taken()

    # --- the ledger -------------------------------------------------------------------------------------------------

    def _held_whole(self) -> dict[DeviceId, WorkloadId]:
        """The holder of each device that is held whole."""
        return {
            device_id: who
            for who, held in self._snapshot.allocations.items()
            if held.share is None
            for device_id in held.device_ids
        }

    def _open_ledger(self, claims: Claims) -> ShareLedger:
        """The ledger of all machines; devices that are not for sharers are blocked."""
        cluster = self._snapshot.cluster
        ledger = ShareLedger(cluster)
        drains = self._snapshot.drains
        closed = [node for node in cluster.nodes if node.functions is not None or node.node_id in drains]
        whole = [at for at in self._whole if claims.get(at) not in self.sharers] if claims else self._whole
        ledger.block_all([*whole, *(device.device_id for node in closed for device in node.devices)])
        return ledger

    def _taken(self) -> frozenset[DeviceId]:
        held = [a.device_ids for who, a in self._snapshot.allocations.items() if a.share is not None]
        planned = [allocation.device_ids for allocation in self.allocations.values()]
        return frozenset().union(*held, *planned)

    # --- allocation ------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        wanted = {view.service.service_id: wanted_replicas(view) for view in self.services}
        is_promised = [view.promise.admitted_at_s is not None for view in self.jobs]
        for job in itertools.compress(self.jobs, is_promised):
            self._keep_workers(job)
        for view in self.services:
            self._keep_replicas(view, wanted[view.service.service_id])
        for job in itertools.compress(self.jobs, map(operator.not_, is_promised)):
            self._keep_workers(job)
        for job in itertools.compress(self.jobs, is_promised):
            self._replace_lost(job)
        for view in self.services:
            self._raise_service(view, view.min_replicas, "least")
        for view in self.services:
            self._raise_service(view, min(1, wanted[view.service.service_id]), "first")
        self._kept = self._keep_for_survivors()
        for job in itertools.compress(self.jobs, map(operator.not_, is_promised)):
            self._replace_lost(job)
        for view in self.services:
            self._raise_service(view, wanted[view.service.service_id], "growth")
        for job in self.jobs:
            self._place_job(job)
        self._set_job_limits()
        for view in self.services:
            self._explain_service(view, wanted[view.service.service_id])

    def _keep_replicas(self, view: ServiceView, wanted: int) -> None:
        service_id, share = view.service.service_id, self._share[view.service.service_id]
        held = self._snapshot.allocations.get(service_id)
        live = held.device_ids[: view.num_ready + view.num_starting] if held is not None else ()
        kept = [device_id for device_id in live if device_id in self._snapshot.cluster.device_set]
        while len(kept) > wanted:
            # Drop the one with the fewest others on its device; of equals the newest.
            beside = [self._num_beside(device_id) for device_id in kept]
            kept.pop(max(range(len(kept)), key=lambda at: (-beside[at], at)))
        self._put(service_id, view.service.name, share, kept)

    def _keep_workers(self, view: JobView) -> None:
        job = view.job
        held = self._snapshot.allocations.get(job.job_id)
        if held is None:
            return
        alive = [device_id for device_id in held.device_ids if device_id in self._snapshot.cluster.device_set]
        self._put(job.job_id, job.family or job.name, self._share[job.job_id], alive[: most_workers(view)])

    def _replace_lost(self, view: JobView) -> None:
        """Devices for the successors of workers that a running job has lost; the others go on meanwhile."""
        job, mine, share = view.job, self._chosen.get(view.job.job_id), self._share[view.job.job_id]
        if not mine or not job.elastic:
            return
        claim = "promise" if view.promise.admitted_at_s is not None else "job"
        may_open = (claim, job.job_id) not in self._barred
        wanted = _most_wished(view) if view.restarts.losses_at_s else view.bounds.min_workers
        while len(mine) < wanted:
            family, avoid = job.family or job.name, self._kept.union(mine)
            request = PlacementRequest(workload_id=job.job_id, family=family, share=share, avoid=avoid)
            found = self._choose(request, may_open=may_open)
            if found is None:
                return
            self._note_opened(claim, job.job_id, found)
            mine = [*mine, *found]
            self._hold(job.job_id, family, share, mine)

    def _keep_for_survivors(self) -> frozenset[DeviceId]:
        """An idle device for each worker that a running job of the inner policy lacks to its minimum: one was lost, and
        the others go on until its successor may start."""
        node_of, ledger, kept = self._snapshot.cluster.node_of, self._ledger, set[DeviceId]()
        for view in self._snapshot.jobs:
            held = self._snapshot.allocations.get(view.job.job_id)
            if held is None or held.share is not None or not view.job.elastic or view.state is JobState.PREEMPTING:
                continue
            num_lacking = view.bounds.min_workers - held.num_devices
            if num_lacking > 0:
                nodes = {node_of.get(device_id) for device_id in held.device_ids}
                idle = [ledger.device_ids[at] for at in np.flatnonzero(ledger.is_usable & ~ledger.is_open).tolist()]
                near = sorted(set(idle) - kept, key=lambda at: (node_of[at] not in nodes, ledger.at[at]))
                kept.update(near[:num_lacking])
        return frozenset(kept)

    def _put(self, who: WorkloadId, family: str, share: Share, devices: Sequence[DeviceId]) -> None:
        # A share that was made larger may not fit there any more: the workload moves.
        self._hold(who, family, share, [at for at in devices if self._fits(at, share)])

    def _fits(self, device_id: DeviceId, share: Share) -> bool:
        return self._ledger.has_room(device_id, demand_of(share))

    def _hold(self, who: WorkloadId, family: str, share: Share, devices: Sequence[DeviceId]) -> None:
        """Enter this share of exactly these devices, which have room."""
        if self._chosen.get(who):
            self._ledger.release(who)
        self._chosen[who] = list(devices)
        if devices:
            self._ledger.hold(who, family, parts_of(devices, share))

    def _num_beside(self, device_id: DeviceId) -> int:
        return sum(device_id in held.device_ids for held in self._snapshot.allocations.values())

    def _raise_service(self, view: ServiceView, count: int, claim: str) -> None:
        service_id, share = view.service.service_id, self._share[view.service.service_id]
        may_open = (claim, service_id) not in self._barred
        count -= len(self._claimed.get(service_id, ()))
        while len(mine := self._chosen[service_id]) < count:
            request = PlacementRequest(
                workload_id=service_id,
                family=view.service.name,
                share=share,
                avoid=self._kept.union(mine),
            )
            found = self._choose(request, may_open=may_open)
            if found is not None:
                self._note_opened(claim, service_id, found)
                self._hold(service_id, view.service.name, share, [*mine, found[0]])
                if found[0] in self._whole:
                    self.claims[found[0]] = service_id
                continue
            if claim == "growth":
                return
            claimed = self._claim(service_id, frozenset(mine)) if may_open else None
            if claimed is None:
                found = self._displace(service_id, request)
                if found is None:
                    return
                self._hold(service_id, view.service.name, share, [*mine, *found])
                continue
            if claim != "least":
                self.opened[(claim, service_id)] = None
            # The device is not in the ledger before it is free.
            self._claimed.setdefault(service_id, []).append(claimed)
            count -= 1

    def _note_opened(self, claim: str, who: WorkloadId, devices: Sequence[DeviceId]) -> None:
        if claim != "least" and not all(self._ledger.is_open[self._ledger.at[device_id]] for device_id in devices):
            self.opened[(claim, who)] = None

    def _claim(self, service_id: WorkloadId, closed: frozenset[DeviceId]) -> DeviceId | None:
        """The last device of the elastic job that holds most beyond its minimum, one without a promise if there is one;
        None if there is none."""
        best: tuple[tuple[bool, int], JobView, Allocation] | None = None
        for view in self._snapshot.jobs:
            held = self._snapshot.allocations.get(view.job.job_id)
            if held is None or held.share is not None or not view.job.elastic or view.job.is_on_functions:
                continue
            spare = view.promise.admitted_at_s is None, held.num_devices - view.bounds.min_workers
            if (best is None or spare > best[0]) and any(self._may_claim(at, closed) for at in held.device_ids):
                best = (spare, view, held)
        if best is None:
            return None
        device_id = next(at for at in reversed(best[2].device_ids) if self._may_claim(at, closed))
        self.claims[device_id] = service_id
        self.displaced[best[1].job.job_id] = self._names[service_id]
        return device_id

    def _displace(self, service_id: WorkloadId, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Room for a service by evicting the newest job that has a share and no promise."""
        for view in reversed(self.jobs):
            job = view.job
            mine = self._chosen.get(job.job_id)
            if not mine or view.promise.admitted_at_s is not None:
                continue
            self._hold(job.job_id, job.family or job.name, self._share[job.job_id], ())
            others = frozenset(self._ledger.at).difference(mine)
            found = self._choose(replace(request, avoid=request.avoid | others))
            if found is not None:
                self._evicted[job.job_id] = self._names[service_id]
                return found
            self._hold(job.job_id, job.family or job.name, self._share[job.job_id], mine)
        return None

    def _may_claim(self, device_id: DeviceId, closed: frozenset[DeviceId]) -> bool:
        cluster = self._snapshot.cluster
        return device_id not in closed and device_id not in self.claims and device_id in cluster.device_set

    def _place_job(self, view: JobView) -> None:
        job, share = view.job, self._share[view.job.job_id]
        if self._chosen.get(job.job_id):
            return
        if job.job_id in self._evicted:
            self.reasons[job.job_id] = f"makes room for '{self._evicted[job.job_id]}'"
            return
        if self._snapshot.allocations.get(job.job_id) is not None:
            # All its devices are lost or too full: it has to stop before it can start anew.
            self.reasons[job.job_id] = "its devices have no room for it any more"
            return
        claim = "promise" if self._can_promise(view) else "job"
        avoid = frozenset[DeviceId]() if claim == "promise" else self._kept
        found = self._find(view, avoid, may_open=(claim, job.job_id) not in self._barred)
        refusal = self._refusal(view, found)
        if refusal is not None:
            self.rejected[job.job_id] = refusal
            return
        if found is None:
            self.reasons[job.job_id] = f"waits for room: {self._lacks_of(view)}"
            return
        self._note_opened(claim, job.job_id, found)
        self._hold(job.job_id, job.family or job.name, share, found)
        self._started.append(job.job_id)

    def _set_job_limits(self) -> None:
        """Set the limits of jobs: their requests, and in equal proportion what the limits of others leave."""
        on: dict[DeviceId, list[WorkloadId]] = {}
        for view in self.jobs:
            for device_id in self._chosen.get(view.job.job_id) or ():
                on.setdefault(device_id, []).append(view.job.job_id)
        parts: dict[WorkloadId, float] = {}
        for device_id, jobs in on.items():
            wished = sum(self._declared[job_id].limit - self._share[job_id].limit for job_id in jobs)
            left = max(0.0, MAX_LIMIT - self._ledger.load(device_id).limit)
            for job_id in jobs:
                parts[job_id] = min(parts.get(job_id, 1.0), left / wished if wished > 0 else 1.0)
        for view in self.jobs:
            job_id = view.job.job_id
            if job_id not in parts:
                continue
            share, wish = self._share[job_id], self._declared[job_id]
            # Rounded down to a thousandth: users read limits, too.
            more = math.floor(parts[job_id] * (wish.limit - share.limit) * 1000 + TOLERANCE) / 1000
            given = wish if parts[job_id] >= 1.0 else replace(wish, limit=share.limit + more)
            self._give(job_id, self._chosen[job_id], given, view.global_batch_size)
            if job_id in self._started:
                self.reasons[job_id] = self._describe_places(job_id, self._chosen[job_id], given)

    def _find(self, view: JobView, avoid: frozenset[DeviceId], *, may_open: bool) -> tuple[DeviceId, ...] | None:
        """Devices for a job that is to start: as many as it can use, on one node if possible."""
        job = view.job
        most = _most_wished(view)
        may_open = may_open and not any(self._waits_before(view))
        for count in range(max(most, view.bounds.min_workers), view.bounds.min_workers - 1, -1):
            for same_node in (True, False) if count > 1 else (False,):
                request = PlacementRequest(
                    workload_id=job.job_id,
                    family=job.family or job.name,
                    share=self._share[job.job_id],
                    num_devices=count,
                    same_node=same_node,
                    avoid=avoid,
                )
                found = self._choose(request, may_open=may_open)
                if found is not None:
                    return found
        return None

    def _choose(self, request: PlacementRequest, *, may_open: bool = True) -> tuple[DeviceId, ...] | None:
        """A place on shared devices, else on a new one: an unopened device can be used by a workload as a whole."""
        found = self._packer.choose(self._ledger, replace(request, may_open=False))
        return self._packer.choose(self._ledger, request) if found is None and may_open else found

    def _waits_before(self, view: JobView) -> Iterator[WorkloadId]:
        """The jobs that came earlier and wait for whole devices."""
        for other in self._snapshot.jobs:
            if other is view:
                return
            is_whole = other.job.share is None and not other.job.is_on_functions
            if is_whole and other.job.job_id not in self._snapshot.allocations:
                yield other.job.job_id

    def _can_promise(self, view: JobView) -> bool:
        """Whether its hard deadline is to be promised or refused: its length and its speed are known."""
        curve = curve_of(view)
        is_known = curve.source != "guess" and bool(curve.sizes) and view.total_equivalent_steps is not None
        return view.job.goal.is_hard and view.promise.admitted_at_s is None and is_known

    def _refusal(self, view: JobView, found: Sequence[DeviceId] | None) -> Refusal | None:
        """Promise a job its hard deadline if it can be met on the devices found for it; a refusal if it cannot, None in
        all other cases.

        Each of these devices has its request left from now on to its end: no sharer of one gets more of it."""
        job, goal, share = view.job, view.job.goal, self._share[view.job.job_id]
        if not self._can_promise(view):
            return None
        assert goal.deadline_s is not None
        assert view.total_equivalent_steps is not None
        now_s, others = self._snapshot.now_s, ("leave --share out", "--soft")
        # A job that has run before is not ended for want of room.
        is_final = not goal.waits and not view.restarts.num_restarts
        if found is None:
            reason = f"its deadline cannot be promised: {self._lacks_of(view)}"
            return Refusal(reason=reason, alternatives=others) if is_final else None
        rate = curve_of(view).rate(len(found)) * share.request
        left_s = max(0.0, view.total_equivalent_steps - view.equivalent_steps) / rate
        left_s += self._snapshot.overheads.cost_s(len(found))
        if now_s + left_s <= goal.deadline_s:
            self.admitted[job.job_id] = now_s + left_s
            return None
        where = "a device" if len(found) == 1 else f"each of the {len(found)} devices that have room for it"
        reason = f"with {share.request:g} of {where}, which is all it can count on, it takes {left_s:.0f} s"
        return Refusal(reason=reason, alternatives=(f"--deadline {left_s:.0f}s", *others)) if is_final else None

    def _lacks_of(self, view: JobView) -> str:
        num = view.bounds.min_workers
        return self._lacks(self._share[view.job.job_id], "a worker needs" if num == 1 else f"{num} workers need")

    def _give(self, who: WorkloadId, devices: Sequence[DeviceId], share: Share, batch: int | None) -> None:
        held = self._snapshot.allocations.get(who)
        if held is not None and held.device_ids == tuple(devices) and held.share == share:
            self.allocations[who] = held
            return
        self.allocations[who] = PoolAllocation(device_ids=tuple(devices), global_batch_size=batch, share=share)

    # --- why --------------------------------------------------------------------------------------------------------

    def _explain_service(self, view: ServiceView, wanted: int) -> None:
        service_id, share = view.service.service_id, self._share[view.service.service_id]
        mine = [*self._chosen[service_id], *self._claimed.get(service_id, ())]
        if mine:
            self._give(service_id, mine, share, None)
        before = view.num_ready + view.num_starting
        if len(mine) < wanted:
            num = wanted - len(mine)
            who = "a replica needs" if num == 1 else f"{num} replicas need"
            self.reasons[service_id] = f"waits for room: {self._lacks(share, who, beside=mine)}"
            if not mine and ("first", service_id) in self._barred:
                self.waiting.append(service_id)
                self.reasons[service_id] += ", and promised deadlines need the whole ones"
        elif len(mine) > before:
            self.reasons[service_id] = self._describe_places(service_id, mine, share)
        elif len(mine) < before:
            is_idle = view.in_flight + view.queued == 0
            self.reasons[service_id] = (
                f"nobody has asked for {view.idle_s:.0f} s" if is_idle else f"its load asks for {wanted}"
            )

    def _lacks(self, share: Share, who: str, *, beside: Sequence[DeviceId] = ()) -> str:
        """What a waiting workload lacks: request, memory, or what the limits on a device may add up to."""
        ledger = self._ledger
        usable = [d for d, at in ledger.at.items() if ledger.is_usable[at] and d not in beside]
        memory = f" and {share.memory_mb} MB" if share.memory_mb else ""
        asks = f"{who} {share.request:g}{memory} of a device"
        if not usable:
            num = len(ledger.at)
            return f"{asks}, and none of the {num} is open to it: others hold them as a whole, or it is on them already"
        loads = {device_id: ledger.load(device_id) for device_id in usable}
        fits = [d for d in usable if has_room(loads[d], replace(share, limit=share.request), self._memory_mb(d))]
        if fits:
            best = min(fits, key=lambda d: loads[d].limit)
            left = MAX_LIMIT - loads[best].limit
            return (
                f"{asks} and up to {share.limit:g}, and on {best} there is a limit of {left:.2g} left: a lower one fits"
            )
        most = max(max(0.0, 1.0 - loads[d].request) for d in usable)
        if most + TOLERANCE >= share.request:
            return f"{asks}, and what is left of the devices has too little memory"
        return f"{asks}, and the most that is left of one is {most:.2g}"

    def _memory_mb(self, device_id: DeviceId) -> int:
        return self._snapshot.cluster.memory_of.get(device_id, 0)

    def _describe_places(self, who: WorkloadId, devices: Sequence[DeviceId], share: Share) -> str:
        others = dict.fromkeys(
            self._names[other]
            for other, mine in [*self._chosen.items(), *[(w, a.device_ids) for w, a in self.allocations.items()]]
            if other != who
            for device_id in mine
            if device_id in devices
        )
        part = f"{share.request:g}..{share.limit:g} of {len(devices)} device{'s' if len(devices) > 1 else ''}"
        if not others:
            return f"{part}, which nobody else shares"
        named = ", ".join(f"'{name}'" for name in list(others)[:4])
        return f"{part}, beside {named}"


def _most_wished(view: JobView) -> int:
    """How many workers the job can use, and at most what its owner asked for."""
    most, asked = most_workers(view), view.job.requested_workers
    return min(most, asked) if view.job.elastic and asked is not None else most
