"""Plans shares of devices: sharers keep their places, then those that lack some are packed."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from springtide.core.decision import EMPTY, JobView, PoolAllocation, Refusal, ServiceView, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.shares import MAX_LIMIT, TOLERANCE, Share
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.replicas import wanted_replicas
from springtide.scheduling.sharing.answer import ALL_WEAK
from springtide.scheduling.sharing.board import Claims, Places, Reach, ShareBoard, fewest_left, in_parts
from springtide.scheduling.sharing.deadlines import can_promise, fewest_in_time, is_promised, rescued_by, sure_s
from springtide.scheduling.sharing.models import models_for, view_on
from springtide.scheduling.sharing.packing import Packer
from springtide.scheduling.sharing.words import lacks_text, lacks_together_text, places_text

# Whose claim on a whole device gives way to promises: the strongest first. "more" are the devices that a promised job
# opens beyond those that its deadline needs.
WEAK_CLAIMS = ("first", "promise", "more", "growth", "job")
WeakClaim = tuple[str, WorkloadId]
_NUM_NAMED = 3


class SharePlan:
    """The plan for all workloads with a share, at one instant.

    The order: promised jobs, services up to their guaranteed minimum, jobs whose deadline can be promised now, first
    replicas, running jobs, services beyond that, waiting jobs; each in order of arrival. Running jobs that lost workers
    get successors. If no shared device has room, an idle one is opened. For a guaranteed minimum, a promise or a first
    replica, a device is also claimed from a job of the inner policy, or the newest job with a share and without a
    promise makes room. Claims below these open none that a running job lacks to its minimum. Jobs are placed by their
    requests alone; their limits are what the devices have left in the end. `taken` are the devices that the inner
    policy must not use.

    Call `finish` once the inner policy has decided. `spare` are devices on which there are only workers that jobs have
    beyond their least, `weak` those on which there are only best-effort jobs; no sharer is put on those in `yielded`,
    unless the inner policy leaves them free.

    `opened` are the claims other than guaranteed minimums that take a whole device now. Those in `barred` take none;
    `waiting` are the services that are left without a replica by that. `planned` are the places that the last decision
    had for promised jobs that have not started yet: together they have room there.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        packer: Packer,
        claims: Claims,
        barred: frozenset[WeakClaim] = frozenset(),
        yielded: frozenset[DeviceId] = frozenset(),
        planned: Places = EMPTY,
    ) -> None:
        self._snapshot, self._planned = snapshot, planned
        self._packer = packer
        self.services = tuple([view for view in snapshot.services if view.service.share is not None])
        sharers = [v for v in snapshot.jobs if v.job.share is not None and not v.job.is_on_functions]
        self._models = models = {v.job.job_id: models_for(snapshot, v, planned.get(v.job.job_id, ())) for v in sharers}
        self.jobs = tuple([view_on(v, models[v.job.job_id][0]) if models[v.job.job_id] else v for v in sharers])
        # The same job on each other model that it may be on; for most there is none.
        self._elsewhere = {v.job.job_id: [(m, view_on(v, m)) for m in models[v.job.job_id][1:]] for v in sharers}
        self.sharers = {view.service.service_id for view in self.services} | {view.job.job_id for view in self.jobs}
        self.allocations: dict[WorkloadId, PoolAllocation] = {}
        self.admitted: dict[WorkloadId, float] = {}
        self.rejected: dict[WorkloadId, Refusal] = {}
        self.reasons: dict[WorkloadId, str] = {}
        self.claims: dict[DeviceId, WorkloadId] = {}
        # The share that a packer reserves and enforces may differ from the declared one.
        declared = {v.service.service_id: v.service.share for v in self.services}
        declared |= {v.job.job_id: v.job.share for v in self.jobs}
        self._declared = {who: packer.booked(share) for who, share in declared.items() if share is not None}
        jobs = {view.job.job_id for view in self.jobs}
        share = {
            who: replace(share, limit=share.request) if who in jobs else share for who, share in self._declared.items()
        }
        self._spares = ALL_WEAK in barred
        self._board = ShareBoard(snapshot, packer, claims, self.jobs, share, yielded, spares_promises=self._spares)
        self._share, self._ledger, self._chosen = share, self._board.ledger, self._board.chosen
        self.displaced = self._board.displaced
        self._board.model_of |= {job_id: each[0] for job_id, each in models.items() if each}
        self._promised = {view.job.job_id for view in self.jobs if is_promised(view)}
        self._started: list[WorkloadId] = []
        self._grown: list[WorkloadId] = []
        self._barred = barred
        self.opened: dict[WeakClaim, None] = {}
        self.waiting: list[WorkloadId] = []
        self._kept: frozenset[DeviceId] = frozenset()
        self._wanted = {view.service.service_id: wanted_replicas(view) for view in self.services}
        # What sharers hold that have ended becomes free: see `policy._shown`.
        held = [snapshot.allocations[who].device_ids for who in self.sharers if who in snapshot.allocations]
        self._in_parts = frozenset[DeviceId]().union(*held)
        self._allocate()
        whole = self._board.whole
        for who, device_id in [(who, at) for who, mine in self._chosen.items() for at in mine if at in whole]:
            self.claims.setdefault(device_id, who)
        # Devices on which there are only workers that jobs have beyond their least.
        self.spare = self._board.spare_devices()
        self.weak = self._board.best_effort_devices()
        self.taken = self._taken()
        # The jobs that hold no part and are given none.
        self.num_waiting = sum(not self._chosen.get(view.job.job_id) for view in self.jobs)

    def late(self) -> set[WorkloadId]:
        """The promised jobs that are late on the devices that they have here, and would not be on more of them."""
        now_s, overheads = self._snapshot.now_s, self._snapshot.overheads
        on = {view.job.job_id: len(self._chosen.get(view.job.job_id, ())) for view in self.jobs}
        return {v.job.job_id for v in self.jobs if rescued_by(v, on[v.job.job_id], now_s, overheads) is not None}

    def below_minimum(self) -> set[tuple[WorkloadId, int]]:
        """Each replica that services with a share lack to their guaranteed minimum, with its number."""
        have = [(v, len(self._chosen[v.service.service_id]) // v.service.devices_each) for v in self.services]
        return {(v.service.service_id, number) for v, count in have for number in range(count, v.min_replicas)}

    def below_promises(self) -> tuple[DeviceId, ...]:
        """The devices that sharers leave now, and those of `ShareBoard.below_promises`."""
        left = self._in_parts.difference(*self._chosen.values()).intersection(self._ledger.at)
        return (*sorted(left), *self._board.below_promises())

    def _may_open(self, claim: str, who: WorkloadId) -> bool:
        """Whether this claim may take a whole device."""
        if self._spares and claim != "least":
            return claim == "promise" and who in self._promised
        return (claim, who) not in self._barred

    def why_displaced(self) -> dict[WorkloadId, str]:
        """The reasons of other workloads that lose a device to a share: now, or by a claim of an earlier decision, as
        long as they have not left it."""
        takers = dict(self.displaced)
        names = {view.job.job_id: view.job.name for view in self.jobs}
        names |= {view.service.service_id: view.service.name for view in self.services}
        for who, held in self._snapshot.allocations.items() if self.claims else ():
            claimed = [self.claims[device] for device in held.device_ids if device in self.claims]
            if claimed and who not in self.sharers:
                takers.setdefault(who, names[claimed[0]])
        return {who: f"'{name}' needs a part of one of its devices" for who, name in takers.items()}

    def _taken(self) -> frozenset[DeviceId]:
        return self._in_parts.union(*self._chosen.values()) - self._board.yielded

    # --- allocation ------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        wanted = self._wanted
        promised = [is_promised(view) for view in self.jobs]
        for job in itertools.compress(self.jobs, promised):
            self._keep_workers(job)
        for view in self.services:
            self._keep_replicas(view, wanted[view.service.service_id])
        for job in itertools.compress(self.jobs, map(operator.not_, promised)):
            self._keep_workers(job)
        for job in itertools.compress(self.jobs, promised):
            self._replace_lost(job)
        for view in self.services:
            self._raise_service(view, view.min_replicas, "least")
        for job in sorted(self.jobs, key=is_promised, reverse=True):
            any(map(self._place_due, self._on_each_model(job)))
        for view in self.services:
            self._raise_service(view, min(1, wanted[view.service.service_id]), "first")
        self._kept = self._keep_for_survivors()
        for job in itertools.compress(self.jobs, map(operator.not_, promised)):
            self._replace_lost(job)
        for view in self.services:
            self._raise_service(view, wanted[view.service.service_id], "growth")
        for job in self.jobs:
            self._place_job(job)

    def finish(self, in_use: Mapping[DeviceId, WorkloadId]) -> None:
        """Let running jobs grow into what stays free beside the devices that the inner policy uses, and set limits and
        reasons. `in_use` names who has each."""
        self._board.close(in_use)
        self._grow()
        self._set_job_limits()
        for view in self.services:
            self._explain_service(view, self._wanted[view.service.service_id])
        for job in self.jobs:
            self._explain_loss(job, in_use)
        self.taken = self._taken()

    def _explain_loss(self, view: JobView, in_use: Mapping[DeviceId, WorkloadId]) -> None:
        """Say who needs what a running job gives up, if it goes on with fewer workers."""
        board, job_id = self._board, view.job.job_id
        held = self._snapshot.allocations.get(job_id)
        if held is None:
            return
        lost = set(held.device_ids).difference(self._chosen.get(job_id, ()))
        if lost and job_id in board.shrunk:
            self.reasons.setdefault(job_id, f"'{board.shrunk[job_id]}' needs the part of one of its workers")
        for device_id in sorted(lost & board.yielded & in_use.keys()):
            self.reasons.setdefault(job_id, f"'{board.names[in_use[device_id]]}' needs {device_id} as a whole")

    def _grow(self) -> None:
        """One worker more at a time, for the job that saves the most seconds for the part of a device that it takes."""
        running = [view for view in self.jobs if self._may_grow(view)]
        for view in running:
            while (worker := self._board.shed(view)) is not None:
                self._board.hold_job(view, [at for at in self._chosen[view.job.job_id] if at not in worker])
                where = ", ".join(worker)
                self.reasons[view.job.job_id] = f"it is faster without its worker on {where}, where others are"
        while True:
            found = [(self._board.grow(view, most_workers(view), avoid=self._kept), view) for view in running]
            best = max(
                ((gain, view) for gain, view in found if gain is not None), key=lambda item: item[0][0], default=None
            )
            if best is None:
                return
            (_, devices), view = best
            self._board.hold_job(view, [*self._chosen[view.job.job_id], *devices])
            self._grown.append(view.job.job_id)

    def _may_grow(self, view: JobView) -> bool:
        held = self._snapshot.allocations.get(view.job.job_id)
        if held is None or view.state is not JobState.RUNNING or not view.job.elastic:
            return False
        # One that has just given up a part does not take another one for it: that would be a move.
        present = self._snapshot.cluster.device_set.intersection(held.device_ids)
        is_whole = present.issubset(self._chosen.get(view.job.job_id, ()))
        return is_whole and self._snapshot.now_s >= view.restarts.grows_at_s

    def _keep_replicas(self, view: ServiceView, wanted: int) -> None:
        service_id, each = view.service.service_id, view.service.devices_each
        held, alive = self._snapshot.allocations.get(service_id), self._snapshot.cluster.device_set
        live = held.device_ids[: (view.num_ready + view.num_starting) * each] if held is not None else ()
        kept = [replica for replica in in_parts(live, each) if alive.issuperset(replica)]
        while len(kept) > wanted:
            # Drop the one with the fewest others on its devices; of equals the newest.
            beside = [sum(map(self._num_beside, replica)) for replica in kept]
            kept.pop(max(range(len(kept)), key=lambda at: (-beside[at], at)))
        self._board.put(service_id, view.service.name, list(itertools.chain.from_iterable(kept)), each)

    def _keep_workers(self, view: JobView) -> None:
        job = view.job
        held = self._snapshot.allocations.get(job.job_id)
        if held is None:
            return
        present, each = self._snapshot.cluster.device_set, job.devices_each
        alive = [worker for worker in in_parts(held.device_ids, each) if present.issuperset(worker)]
        left = [worker for worker in alive if self._board.yielded.isdisjoint(worker)]
        if len(left) < len(alive) and len(left) * each < fewest_left(view, held):
            # What it would have left is not enough: it stops, unless the inner policy leaves it enough.
            return
        devices = list(itertools.chain.from_iterable(alive))[: most_workers(view)]
        self._board.put(job.job_id, job.family or job.name, devices, each)
        if not job.elastic and len(self._chosen[job.job_id]) < len(devices):
            # It moves as a whole: with fewer workers it would go on where it has no room any more.
            self._board.hold_job(view, ())

    def _replace_lost(self, view: JobView) -> None:
        """Devices for the successors of workers that a running job has lost; the others go on meanwhile."""
        job, mine = view.job, self._chosen.get(view.job.job_id)
        if not mine or not job.elastic:
            return
        claim = "promise" if is_promised(view) else "job"
        may_open = self._may_open(claim, job.job_id)
        wanted = _most_wished(view) if view.restarts.losses_at_s else view.bounds.min_workers
        least = fewest_in_time(view, self._snapshot.now_s, self._snapshot.overheads) if claim == "promise" else None
        rescue = rescued_by(view, len(mine), self._snapshot.now_s, self._snapshot.overheads)
        if rescue is not None:
            least, wanted = rescue, max(wanted, rescue)
        while len(mine) < wanted:
            request = self._board.request(view, avoid=self._kept.union(mine))
            if len(mine) < (view.bounds.min_workers if least is None else least):
                reach: Reach = "workers" if least is None else "replicas"
                found = self._board.take(request, job.devices_each, reach, may_open=may_open)
            else:
                found = self._board.find_place(request, may_open=may_open)
            if found is None:
                return
            self._note_opened(claim, job.job_id, found)
            mine = [*mine, *found]
            self._board.hold_job(view, mine)

    def _keep_for_survivors(self) -> frozenset[DeviceId]:
        """An idle device for each worker that a running job of the inner policy lacks to its minimum: one was lost, and
        the others go on until its successor may start."""
        node_of, ledger, kept = self._snapshot.cluster.node_of, self._ledger, set[DeviceId]()
        allocations = self._snapshot.allocations
        for view in self._snapshot.jobs:
            held = allocations.get(view.job.job_id)
            if held is None or (num_lacking := view.bounds.min_workers - held.num_devices) <= 0:
                continue
            if held.share is None and view.job.elastic and view.state is not JobState.PREEMPTING:
                nodes = {node_of.get(device_id) for device_id in held.device_ids}
                idle = [ledger.device_ids[at] for at in np.flatnonzero(ledger.is_usable & ~ledger.is_open).tolist()]
                near = sorted(set(idle) - kept, key=lambda at: (node_of[at] not in nodes, ledger.at[at]))
                kept.update(near[:num_lacking])
        return frozenset(kept)

    def _num_beside(self, device_id: DeviceId) -> int:
        return sum(device_id in held.device_ids for held in self._snapshot.allocations.values())

    def _raise_service(self, view: ServiceView, count: int, claim: str) -> None:
        service_id = view.service.service_id
        may_open, each = self._may_open(claim, service_id), view.service.devices_each
        while len(mine := self._chosen[service_id]) < count * each:
            avoid = self._kept.union(mine)
            request = self._board.request_replica(view, avoid=avoid, is_guaranteed=claim == "least")
            reach: Reach = "workers" if claim == "growth" else "elastic"
            if claim == "least" and self._spares:
                reach = "replicas"
            found = self._board.take(request, each, reach, may_open=may_open)
            if found is None:
                return
            self._note_opened(claim, service_id, found)
            self._board.hold(service_id, view.service.name, [*mine, *found])

    def _note_opened(self, claim: str, who: WorkloadId, devices: Sequence[DeviceId]) -> None:
        """Note a claim that takes a device which no sharer has or had until now: one that another gives up is none."""
        is_open = (self._ledger.is_open[self._ledger.at[at]] or at in self._in_parts for at in devices)
        if claim != "least" and not all(is_open):
            self.opened[(claim, who)] = None

    def _on_each_model(self, view: JobView) -> Iterator[JobView]:
        """The job as it is on each model of device that it may be on; while one is given, it is placed on that."""
        yield view
        first = self._board.model_of.get(view.job.job_id)
        for model, there in self._elsewhere[view.job.job_id]:
            if first is not None and not self._chosen.get(view.job.job_id):
                self._board.model_of[view.job.job_id] = model
                yield there
        if first is not None and not self._chosen.get(view.job.job_id):
            self._board.model_of[view.job.job_id] = first

    def _place_due(self, view: JobView) -> bool:
        """Start a job whose deadline is promised, or can be promised on the devices that it gets here. Returns whether
        it is started."""
        job, claim = view.job, ("promise", view.job.job_id)
        if not (is_promised(view) or can_promise(view)) or self._snapshot.allocations.get(job.job_id) is not None:
            return False
        count = fewest_in_time(view, self._snapshot.now_s, self._snapshot.overheads)
        before = self._planned.get(job.job_id, ()) if is_promised(view) else ()
        # Its owner may have changed its bounds since.
        if before and count is not None and count <= len(before) <= most_workers(view):
            may_open = self._may_open(*claim) and (len(before) == count or self._may_open("more", job.job_id))
            if self._board.has_room(view, before, may_open=may_open):
                self._start(view, claim[0], before)
                return True
        most_opened = None if self._may_open("more", job.job_id) else count
        found = self._find(view, frozenset(), may_open=self._may_open(*claim), most_opened=most_opened)
        if found is not None and self._is_in_time(view, sure_s(view, len(found), self._snapshot.overheads)):
            if count is not None and len(found) > count:
                self._note_opened("more", job.job_id, found)
            self._start(view, claim[0], found)
            return True
        if count is not None:
            request = self._board.request(view, avoid=frozenset())
            reach: Reach = "replicas" if is_promised(view) else "all"
            found = self._board.take(request, count, reach, may_open=self._may_open(*claim))
            if found is not None:
                self._start(view, claim[0], found, after_s=self._snapshot.overheads.change_s)
                return True
        return False

    def _start(self, view: JobView, claim: str, devices: Sequence[DeviceId], after_s: float = 0.0) -> None:
        """Start a job on these devices, some of which others leave within `after_s`; promise its deadline if it can be
        promised and is met with its request on each of them.

        Each has its request left from now on to its end: no sharer of one gets more of it."""
        job_id, overheads = view.job.job_id, self._snapshot.overheads
        if can_promise(view):
            left_s = after_s + sure_s(view, len(devices), overheads)
            if self._is_in_time(view, left_s):
                self.admitted[job_id] = self._snapshot.now_s + left_s
        self._note_opened(claim, job_id, devices)
        self._board.hold_job(view, devices)
        self._started.append(job_id)

    def places_of_promised(self) -> Places:
        """Where the jobs are to start whose deadline is promised, or is from now on."""
        held, promised = self._snapshot.allocations, {view.job.job_id for view in self.jobs if is_promised(view)}
        waiting = [who for who in self._started if who not in held and (who in promised or who in self.admitted)]
        return {who: list(self._chosen[who]) for who in waiting}

    def _is_in_time(self, view: JobView, left_s: float) -> bool:
        deadline_s = view.job.goal.deadline_s
        return deadline_s is not None and self._snapshot.now_s + left_s <= deadline_s

    def _place_job(self, view: JobView) -> None:
        job = view.job
        if self._chosen.get(job.job_id):
            return
        if job.job_id in self._board.evicted:
            self.reasons[job.job_id] = f"makes room for '{self._board.evicted[job.job_id]}'"
            return
        held = self._snapshot.allocations.get(job.job_id)
        if held is not None and not self._board.yielded.isdisjoint(held.device_ids):
            # Whether it stops, and for whom, is known once the inner policy has decided.
            return
        if held is not None:
            # All its devices are lost or too full: it has to stop before it can start anew.
            self.reasons[job.job_id] = "its devices have no room for it any more"
            return
        claim = "promise" if is_promised(view) or can_promise(view) else "job"
        # A job that stopped to leave it a device may wait now, and came earlier.
        is_next = self._board.has_claimed(job.job_id) or not any(self._waits_before(view))
        may_open = self._may_open(claim, job.job_id) and is_next
        refusals: list[tuple[bool, Refusal]] = []
        for there in self._on_each_model(view):
            found = self._find(there, self._kept, may_open=may_open)
            if found is None:
                request = self._board.request(there, avoid=self._kept)
                found = self._board.take(request, view.bounds.min_workers, "growth", may_open=may_open)
            refusal = self._refusal(there, found)
            if refusal is not None:
                refusals.append((found is None, refusal))
            elif found is not None:
                self._start(there, claim, found)
                return
        if refusals:
            # One that says how long it takes where there is room tells more.
            self.rejected[job.job_id] = min(refusals, key=operator.itemgetter(0))[1]
        else:
            self.reasons[job.job_id] = f"waits for room: {self._lacks_of(view)}"

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
            if job_id in self._started or job_id in self._grown:
                self.reasons[job_id] = self._describe_places(job_id, self._chosen[job_id], given)

    def _find(
        self, view: JobView, avoid: frozenset[DeviceId], *, may_open: bool, most_opened: int | None = None
    ) -> tuple[DeviceId, ...] | None:
        """Devices for a job that is to start: as many as it can use, on one node if possible. More than `most_opened`
        only where devices are shared already."""
        most, least, each = _most_wished(view), view.bounds.min_workers, view.job.devices_each
        one = self._board.request(view, avoid=avoid)
        for count in range(max(most, least), least - 1, -each):
            may_open_all = may_open and (most_opened is None or count <= most_opened)
            for same_node in (True, False) if count > each else (each > 1,):
                if same_node or each == 1:
                    request = replace(one, num_devices=count, same_node=same_node)
                    found = self._board.find_place(request, may_open=may_open_all)
                else:
                    found = self._board.find_workers(one, count, may_open=may_open_all)
                if found is not None:
                    return found
        return None

    def _waits_before(self, view: JobView) -> Iterator[WorkloadId]:
        """The jobs that came earlier and wait for whole devices."""
        for other in self._snapshot.jobs:
            if other.job.job_id == view.job.job_id:
                return
            is_whole = other.job.share is None and not other.job.is_on_functions
            if is_whole and other.job.job_id not in self._snapshot.allocations:
                yield other.job.job_id

    def _refusal(self, view: JobView, found: Sequence[DeviceId] | None) -> Refusal | None:
        """Why a job whose hard deadline is to be promised now is refused, which cannot be met on the devices found for
        it; None in all other cases."""
        goal, share, others = view.job.goal, self._share[view.job.job_id], ("leave --share out", "--soft")
        # A job that has run before is not ended for want of room.
        if not can_promise(view) or goal.waits or view.restarts.num_restarts:
            return None
        if found is None:
            return Refusal(reason=f"its deadline cannot be promised: {self._lacks_of(view)}", alternatives=others)
        left_s = sure_s(view, len(found), self._snapshot.overheads)
        if self._is_in_time(view, left_s):
            return None
        where = "a device" if len(found) == 1 else f"each of the {len(found)} devices that have room for it"
        reason = f"with {share.request:g} of {where}, which is all it can count on, it takes {left_s:.0f} s"
        return Refusal(reason=reason, alternatives=(f"--deadline {left_s:.0f}s", *others))

    def _lacks_of(self, view: JobView) -> str:
        each = view.job.devices_each
        num = view.bounds.min_workers // each
        who = "a worker needs" if num == 1 else f"{num} workers need"
        models, others = self._models[view.job.job_id], list[DeviceId]()
        if models and len(models) < len(self._snapshot.cluster.accelerators):
            who = f"on {' or '.join(models)} {who}"
            others = [at for at, model in self._snapshot.cluster.accelerator_of.items() if model not in models]
        return self._lacks(self._share[view.job.job_id], who, beside=others, each=each, is_job=True)

    def _give(self, who: WorkloadId, devices: Sequence[DeviceId], share: Share, batch: int | None) -> None:
        held = self._snapshot.allocations.get(who)
        if held is not None and held.device_ids == tuple(devices) and held.share == share:
            self.allocations[who] = held
            return
        self.allocations[who] = PoolAllocation(device_ids=tuple(devices), global_batch_size=batch, share=share)

    # --- why --------------------------------------------------------------------------------------------------------

    def _explain_service(self, view: ServiceView, wanted: int) -> None:
        service_id, share = view.service.service_id, self._share[view.service.service_id]
        mine = self._chosen[service_id]
        if mine:
            self._give(service_id, mine, share, None)
        before, each = view.num_ready + view.num_starting, view.service.devices_each
        given = len(mine) // each
        if given < wanted:
            who = "a replica needs" if wanted - given == 1 else f"{wanted - given} replicas need"
            lacks = self._lacks(share, who, beside=mine, each=each, is_job=False)
            self.reasons[service_id] = f"waits for room: {lacks}"
            if not mine and not self._may_open("first", service_id):
                self.waiting.append(service_id)
                self.reasons[service_id] += f", and promised deadlines need the whole ones{self._holders()}"
        elif given > before:
            self.reasons[service_id] = self._describe_places(service_id, mine, share)
        elif given < before:
            is_idle = view.in_flight + view.queued == 0
            self.reasons[service_id] = (
                f"nobody has asked for {view.idle_s:.0f} s" if is_idle else f"its load asks for {wanted}"
            )

    def _holders(self) -> str:
        """The promised jobs that hold most whole devices, and how many each; empty if none holds any."""
        held = self._snapshot.allocations
        whole = held.keys() - self.sharers
        jobs = [view.job for view in self._snapshot.jobs if is_promised(view) and view.job.job_id in whole]
        counts = sorted((-held[job.job_id].num_devices, job.name) for job in jobs)
        named = ", ".join(f"'{name}' has {-count}" for count, name in counts[:_NUM_NAMED])
        more = f" and {len(counts) - _NUM_NAMED} more" if len(counts) > _NUM_NAMED else ""
        return f" ({named}{more})" if named else ""

    def _lacks(self, share: Share, who: str, *, beside: Sequence[DeviceId], each: int, is_job: bool) -> str:
        closed = self._board.closed_to(is_job=is_job)
        if each > 1:
            return lacks_together_text(self._ledger, share, who, each, beside=[*beside, *closed])
        pool = "services" if is_job else "training"
        return lacks_text(self._ledger, share, who, beside=beside, closed=closed, pool=pool)

    def _describe_places(self, who: WorkloadId, devices: Sequence[DeviceId], share: Share) -> str:
        others = dict.fromkeys(
            self._board.names[other]
            for other, mine in [*self._chosen.items(), *[(w, a.device_ids) for w, a in self.allocations.items()]]
            if other != who
            for device_id in mine
            if device_id in devices
        )
        return places_text(share, len(devices), others)


def _most_wished(view: JobView) -> int:
    """How many workers the job can use, and at most what its owner asked for."""
    most, asked = most_workers(view), view.job.requested_workers
    return min(most, asked) if view.job.elastic and asked is not None else most
