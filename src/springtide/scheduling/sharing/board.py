"""The devices of sharers while a plan is made: who is on which, and whom a stronger claim takes room from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from msgspec.structs import replace

from springtide.core.decision import Allocation, JobView, Same, ServiceView, Snapshot
from springtide.core.resources import DeviceId, Topology
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.allocation_ledger import most_workers
from springtide.scheduling.sharing.deadlines import is_promised, least_workers, relative_speed, saved_s
from springtide.scheduling.sharing.demand import demand_of
from springtide.scheduling.sharing.ledger import ShareLedger, parts_of
from springtide.scheduling.sharing.packing import Packer, PlacementRequest
from springtide.scheduling.sharing.pool_nodes import PoolNodes

# Devices of the inner policy that a sharer gets as soon as they are free, each with that sharer.
Claims = Mapping[DeviceId, WorkloadId]
# Devices by the job that is to have parts of them.
Places = Mapping[WorkloadId, Sequence[DeviceId]]
Worker = tuple[DeviceId, ...]
# On so many nodes others are asked to make room for the devices of one worker, at most.
MOST_NODES = 16
# How far a claim goes: to workers beyond the least of a job on parts, to devices beyond the least of best effort on
# whole ones, to best effort that can be resized, to all best effort, also to replicas beyond services' minimums.
Reach = Literal["workers", "growth", "elastic", "all", "replicas"]


class ShareBoard:
    """The places of sharers, changed step by step.

    `chosen` are the devices of each sharer so far, `share` what it holds of each. `displaced` and `evicted` name the
    sharer for which a job of the inner policy loses a device, and for which one with a share has to stop; `shrunk` are
    the jobs with a share that lose a worker. On devices in `yielded` no sharer is put. If `spares_promises`,
    all that has a weaker claim makes room before a promised job does. A job is put on devices of its `model_of` alone.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        packer: Packer,
        claims: Claims,
        jobs: Sequence[JobView],
        share: Mapping[WorkloadId, Share],
        yielded: frozenset[DeviceId],
        *,
        spares_promises: bool,
    ) -> None:
        self._snapshot, self._packer, self._spares_promises = snapshot, packer, spares_promises
        self.jobs, self.share, self.yielded = jobs, share, yielded
        self.names = {view.service.service_id: view.service.name for view in snapshot.services}
        self.names |= {view.job.job_id: view.job.name for view in snapshot.jobs}
        self.whole = _holder_of(Same(snapshot.allocations))
        self._services = {view.service.service_id for view in snapshot.services}
        self._pool_nodes = PoolNodes(snapshot)
        self._never = _closed_devices(snapshot)
        self._closed = self._never | yielded
        self.ledger = ShareLedger(snapshot.cluster)
        claimed = {at for at, who in claims.items() if who in share}
        # The devices that each sharer has claimed: it stays with those while others leave them.
        self._claimed = {who: frozenset(at for at, other in claims.items() if other == who) for who in claims.values()}
        self.ledger.block_all(itertools.chain(self._closed, self.whole.keys() - claimed if claimed else self.whole))
        self.chosen: dict[WorkloadId, list[DeviceId]] = {}
        self.displaced: dict[WorkloadId, str] = {}
        self.evicted: dict[WorkloadId, str] = {}
        self.shrunk: dict[WorkloadId, str] = {}
        self.model_of: dict[WorkloadId, str] = {}
        # How to take back each change that was made to make room, the last one at the end.
        self._undo: list[Callable[[], object]] = []

    # --- places -----------------------------------------------------------------------------------------------------

    def put(self, who: WorkloadId, family: str, devices: Sequence[DeviceId], each: int = 1) -> None:
        """Enter a sharer on those of these devices that have room: a share that was made larger may not fit any more,
        and then the workload moves. Of a worker or replica on `each` devices all or none have room."""
        demand = demand_of(self.share[who])
        parts = [part for part in in_parts(devices, each) if all(self.ledger.has_room(at, demand) for at in part)]
        self.hold(who, family, [device_id for part in parts for device_id in part])

    def hold(self, who: WorkloadId, family: str, devices: Sequence[DeviceId]) -> None:
        """Enter a sharer on exactly these devices, which have room."""
        if self.chosen.get(who):
            self.ledger.release(who)
        self.chosen[who] = list(devices)
        if devices:
            self.ledger.hold(who, family, parts_of(devices, self.share[who]))

    def hold_job(self, view: JobView, devices: Sequence[DeviceId]) -> None:
        """Enter a job on exactly these devices, which have room."""
        self.hold(view.job.job_id, view.job.family or view.job.name, devices)

    def has_room(self, view: JobView, devices: Sequence[DeviceId], *, may_open: bool) -> bool:
        """Whether a job could be entered on all of these devices; if not `may_open`, on devices that are shared."""
        demand, ledger = demand_of(self.share[view.job.job_id]), self.ledger
        return all(
            device_id in ledger.at
            and ledger.has_room(device_id, demand)
            and (may_open or bool(ledger.is_open[ledger.at[device_id]]))
            for device_id in devices
        )

    def request(self, view: JobView, *, avoid: frozenset[DeviceId]) -> PlacementRequest:
        """The devices of one worker of a job. One on several is put where no device of a worker that is there is: it
        could not start before that one has left."""
        each, held = view.job.devices_each, self._snapshot.allocations.get(view.job.job_id)
        model = self.model_of.get(view.job.job_id)
        if model is not None:
            devices = self._snapshot.cluster.accelerator_of
            avoid = avoid.union([device_id for device_id, other in devices.items() if other != model])
        return PlacementRequest(
            workload_id=view.job.job_id,
            family=view.job.family or view.job.name,
            share=self.share[view.job.job_id],
            num_devices=each,
            avoid=avoid if each == 1 or held is None else avoid.union(held.device_ids),
            closed=self._pool_nodes.of_others(is_job=True),
        )

    def closed_to(self, *, is_job: bool) -> list[DeviceId]:
        """The idle devices that belong to the other pool, so that a sharer may not open them."""
        ledger, others = self.ledger, self._pool_nodes.of_others(is_job=is_job)
        found = sorted((at, device_id) for device_id in others if (at := ledger.at.get(device_id)) is not None)
        return [device_id for at, device_id in found if ledger.is_usable[at] and not ledger.is_open[at]]

    def request_replica(
        self, view: ServiceView, *, avoid: frozenset[DeviceId], is_guaranteed: bool
    ) -> PlacementRequest:
        """The devices of one replica of a service; a guaranteed one may be on a node of either pool. One on several
        devices cannot start on some of those of a replica that has to leave."""
        service_id, each = view.service.service_id, view.service.devices_each
        held = self._snapshot.allocations.get(service_id)
        return PlacementRequest(
            workload_id=service_id,
            family=view.service.name,
            share=self.share[service_id],
            num_devices=each,
            avoid=avoid if each == 1 or held is None else avoid.union(held.device_ids),
            closed=frozenset() if is_guaranteed else self._pool_nodes.of_others(is_job=False),
        )

    def has_claimed(self, who: WorkloadId) -> bool:
        """Whether others leave a device, or have left it, since this sharer has claimed it."""
        return bool(self._claimed.get(who))

    def find_place(self, request: PlacementRequest, *, may_open: bool = True) -> tuple[DeviceId, ...] | None:
        """A place on shared devices, else on new ones, first of nodes where some are shared: an unopened device can be
        used by a workload as a whole, and an unopened node by a large group. Of new ones, first on nodes that are
        labelled for it."""
        found = self._packer.choose(self.ledger, replace(request, may_open=False))
        if found is not None or not may_open:
            return found
        closed = [request.closed]
        if (own := self._claimed.get(request.workload_id)) and request.only is None:
            found = self._packer.choose(self.ledger, replace(request, only=own))
            if found is not None:
                return found
        if elsewhere := self._pool_nodes.labelled_for_others(is_job=request.workload_id not in self._services):
            closed.insert(0, request.closed | elsewhere)
        for each in closed:
            one = replace(request, closed=each)
            found = self._packer.choose(self.ledger, replace(one, beside_shared=True))
            if found is None and not request.beside_shared:
                found = self._packer.choose(self.ledger, one)
            if found is not None:
                return found
        return None

    def find_workers(self, request: PlacementRequest, count: int, *, may_open: bool) -> tuple[DeviceId, ...] | None:
        """So many devices in workers of `request.num_devices`, each of one node."""
        mine = tuple[DeviceId, ...]()
        while len(mine) < count:
            found = self.find_place(replace(request, avoid=request.avoid.union(mine)), may_open=may_open)
            if found is None:
                return None
            mine += found
        return mine

    # --- room that others make --------------------------------------------------------------------------------------

    def take(
        self, request: PlacementRequest, count: int, reach: Reach, *, may_open: bool
    ) -> tuple[DeviceId, ...] | None:
        """So many devices, as workers or replicas of `request.num_devices` on one node, some of which others make room
        on; None, and nothing is changed, if there are too few."""
        num_undo, mine = len(self._undo), tuple[DeviceId, ...]()
        while len(mine) < count:
            one = replace(request, avoid=request.avoid.union(mine))
            # Where promises would be lost, devices that are idle are left to these.
            is_last = self._spares_promises and reach == "replicas"
            found = self.find_place(one, may_open=may_open and not is_last)
            if found is None and is_last and one.num_devices == 1:
                found = self.make_room(one, reach, may_open=False) or self.find_place(one, may_open=may_open)
            if found is None:
                make = self.make_room if one.num_devices == 1 else self._make_room_on_node
                found = make(one, reach, may_open=may_open)
            if found is None:
                while len(self._undo) > num_undo:
                    self._undo.pop()()
                return None
            mine += found
        return mine

    def _make_room_on_node(
        self, request: PlacementRequest, reach: Reach, *, may_open: bool
    ) -> tuple[DeviceId, ...] | None:
        """The devices of one worker or replica, on the first node that can have so many: of those on which the fewest
        others have to make room."""
        ids, rooms = self.ledger.device_ids, request.room(self.ledger)
        wide = [node for node in self.ledger.nodes if len(node) >= request.num_devices]
        for node in sorted(wide, key=lambda node: (-int(rooms[node].sum()), node.start))[:MOST_NODES]:
            others = frozenset((*ids[: node.start], *ids[node.stop :]))
            on_node = replace(request, num_devices=1, avoid=request.avoid | others)
            found = self.take(on_node, request.num_devices, reach, may_open=may_open)
            if found is not None:
                return found
        return None

    def make_room(self, request: PlacementRequest, reach: Reach, *, may_open: bool) -> tuple[DeviceId, ...] | None:
        """A device on which weaker work makes room: a worker of a job with a share that it can do without, a device of
        a job of the inner policy, or a job with a share that stops, or a replica beyond the minimum of its service."""
        found = self._shrink(request, may_open=may_open)
        if found is not None or reach == "workers":
            return found
        if may_open:
            found = self._claim(request, reach, of_promises=not self._spares_promises)
        if found is None and reach != "growth":
            found = self._displace(request) or (self._evict_replica(request) if reach == "replicas" else None)
        if found is None and may_open and reach == "replicas":
            found = self._claim_replica(request)
        if found is None and may_open and self._spares_promises:
            found = self._claim(request, reach, of_promises=True)
        return found

    def _shrink(self, request: PlacementRequest, *, may_open: bool) -> tuple[DeviceId, ...] | None:
        """A device of a worker that an elastic job has beyond its least, of the job that loses the fewest seconds. If
        not `may_open`, one on which others go on: else it would be idle before the request can have its part."""
        now_s, overheads, demand = self._snapshot.now_s, self._snapshot.overheads, demand_of(request.share)
        best: tuple[float, JobView, DeviceId, list[DeviceId]] | None = None
        for view in reversed(self.jobs):
            mine, each = self.chosen.get(view.job.job_id, []), view.job.devices_each
            # A promised job that has just been placed, to start, has as many workers as there was room for.
            may_shrink = view.job.job_id in self._snapshot.allocations or is_promised(view)
            if not may_shrink or len(mine) - each < least_workers(view, now_s, overheads):
                continue
            own, speed = demand_of(self.share[view.job.job_id]), self.speed(view, mine)
            for worker in reversed(in_parts(mine, each)):
                able = (
                    at
                    for at in worker
                    if at not in request.avoid
                    and self.ledger.has_room_without(at, own, demand)
                    and (may_open or self._is_in_use_without(at, view.job.job_id))
                )
                device_id = next(able, None)
                if device_id is None:
                    continue
                rest = [other for other in mine if other not in worker]
                lost_s = -saved_s(view, len(mine), speed, self.speed(view, rest), now_s)
                if best is None or lost_s < best[0]:
                    best = (lost_s, view, device_id, rest)
        if best is None:
            return None
        _, view, device_id, rest = best
        mine = self.chosen[view.job.job_id]
        self.hold_job(view, rest)
        self._note(self.shrunk, view.job.job_id, request)
        self._undo.append(partial(self.hold_job, view, mine))
        return (device_id,)

    def _is_in_use_without(self, device_id: DeviceId, leaver: WorkloadId) -> bool:
        """Whether a sharer other than this one holds a part of the device, and keeps it."""
        held = self._snapshot.allocations
        others = [who for who in self.ledger.holders(device_id) if who != leaver and who in held]
        return any(device_id in held[who].device_ids for who in others)

    def _claim(self, request: PlacementRequest, reach: Reach, *, of_promises: bool) -> tuple[DeviceId, ...] | None:
        """A device of the elastic job that holds most beyond its minimum, one without a promise if there is one or not
        `of_promises`; on a node where devices are shared already, so that others stay whole, and as late in its order
        as possible. None if there is none. Unless it reaches to elastic ones or to growth, also of a job without a
        promise that cannot be resized."""
        best: tuple[tuple[bool, bool, bool, int, int, int], WorkloadId, DeviceId] | None = None
        num_open = self.ledger.num_open_on_nodes()
        for view in self._snapshot.jobs:
            held = self._snapshot.allocations.get(view.job.job_id)
            if held is None or held.share is not None or view.job.is_on_functions:
                continue
            if (is_promised(view) and not of_promises) or (
                not view.job.elastic and (is_promised(view) or reach in ("elastic", "growth"))
            ):
                continue
            spare = held.num_devices - view.bounds.min_workers
            if reach == "growth" and not self._may_shrink_whole(view, held):
                continue
            weak = not is_promised(view), view.job.elastic, spare > 0
            for rank, device_id in enumerate(held.device_ids):
                if self._may_claim(device_id, request):
                    key = *weak, int(num_open[self.ledger.node_at[self.ledger.at[device_id]]]), spare, rank
                    if best is None or key > best[0]:
                        best = (key, view.job.job_id, device_id)
        return None if best is None else self._take_whole(request, best[1], best[2])

    def _may_shrink_whole(self, view: JobView, held: Allocation) -> bool:
        """Whether a job on whole devices is best effort and has one beyond its least that no sharer has claimed."""
        left = sum(not self.ledger.is_usable[at] for at in map(self.ledger.at.get, held.device_ids) if at is not None)
        return (
            not (view.job.goal.is_hard or is_promised(view)) and left - view.job.devices_each >= view.bounds.min_workers
        )

    def _claim_replica(self, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """The whole device of a replica beyond the minimum of its service, of the service that was deployed last."""
        for view in reversed(self._snapshot.services):
            held = self._snapshot.allocations.get(view.service.service_id)
            if held is None or held.share is not None:
                continue
            beyond = held.device_ids[view.min_replicas * view.service.devices_each :]
            found = next((device_id for device_id in reversed(beyond) if self._may_claim(device_id, request)), None)
            if found is not None:
                return self._take_whole(request, view.service.service_id, found)
        return None

    def _take_whole(self, request: PlacementRequest, loser: WorkloadId, device_id: DeviceId) -> tuple[DeviceId, ...]:
        self._undo.append(partial(self.ledger.block, device_id))
        self.ledger.unblock(device_id)
        self._note(self.displaced, loser, request)
        return (device_id,)

    def _may_claim(self, device_id: DeviceId, request: PlacementRequest) -> bool:
        """Whether the device is there, no sharer has claimed it, and the request fits on it."""
        at = self.ledger.at.get(device_id)
        if at is None or self.ledger.is_usable[at] or device_id in request.avoid or device_id in self._closed:
            return False
        if device_id in request.closed:
            return False
        return request.share.memory_mb <= int(self.ledger.memory_mb[at])

    def _displace(self, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Room that is made by evicting the newest job that holds a share and has no promise."""
        for view in reversed(self.jobs):
            job_id = view.job.job_id
            mine = self.chosen.get(job_id)
            if not mine or is_promised(view) or job_id not in self._snapshot.allocations:
                continue
            self.hold_job(view, ())
            found = self.find_place(replace(request, only=frozenset(mine)))
            if found is not None:
                self._note(self.evicted, job_id, request)
                self._undo.append(partial(self.hold_job, view, mine))
                return found
            self.hold_job(view, mine)
        return None

    def _evict_replica(self, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """Room that a replica beyond the minimum of its service makes, of the service that was deployed last; of its
        replicas the last one that can."""
        for view in reversed(self._snapshot.services):
            who, each = view.service.service_id, view.service.devices_each
            mine = self.chosen.get(who, [])
            if view.service.share is None or len(mine) <= view.min_replicas * each:
                continue
            for start in reversed(range(0, len(mine), each)):
                self.hold(who, view.service.name, [*mine[:start], *mine[start + each :]])
                found = self.find_place(replace(request, only=frozenset(mine[start : start + each])))
                if found is not None:
                    self._note(self.evicted, who, request)
                    self._undo.append(partial(self.hold, who, view.service.name, mine))
                    return found
                self.hold(who, view.service.name, mine)
        return None

    def _note(self, losers: dict[WorkloadId, str], loser: WorkloadId, request: PlacementRequest) -> None:
        """Note for whom a workload makes room, in a way that can be taken back."""
        before = losers.get(loser)
        self._undo.append(partial(losers.pop, loser) if before is None else partial(losers.__setitem__, loser, before))
        losers[loser] = self.names[request.workload_id]

    def close(self, in_use: Collection[DeviceId]) -> None:
        """The inner policy uses these devices. What sharers have yielded of the others, jobs go on using."""
        for device_id in self.yielded - self._never:
            if device_id not in in_use and device_id not in self.whole:
                self.ledger.unblock(device_id)
        self.ledger.block_all(in_use)
        for view in self.jobs:
            held = self._snapshot.allocations.get(view.job.job_id)
            if held is None or self.yielded.isdisjoint(held.device_ids):
                continue
            mine, demand = self.chosen.get(view.job.job_id, []), demand_of(self.share[view.job.job_id])
            kept = list(mine)
            for worker in in_parts(held.device_ids, view.job.devices_each):
                is_free = all(at not in mine and at not in in_use for at in worker)
                if is_free and all(self.ledger.has_room(at, demand) for at in worker):
                    kept += worker
            kept = kept[: most_workers(view)]
            if len(kept) > len(mine) and len(kept) >= fewest_left(view, held):
                self.hold_job(view, kept)

    # --- growth -----------------------------------------------------------------------------------------------------

    def speed(self, view: JobView, devices: Sequence[DeviceId]) -> float:
        """How fast a job is on these devices, relative to one whole device: as fast as its slowest worker. Each gets
        what the requests of the others leave it, between its request and its limit."""
        share = view.job.share
        assert share is not None
        mine = self.chosen.get(view.job.job_id, ())
        parts = [
            min(
                share.limit,
                max(share.request, 1.0 - self.ledger.load(at).request + (share.request if at in mine else 0)),
            )
            for at in devices
        ]
        return relative_speed(view, len(devices)) * min(parts, default=0.0)

    def grow(self, view: JobView, most: int, *, avoid: frozenset[DeviceId]) -> tuple[float, Worker] | None:
        """The devices on which one more worker would save a running job most, and how many seconds for a part of a
        device. None if it would not end earlier by that, although it pays this change and the one back."""
        mine, each = self.chosen.get(view.job.job_id, []), view.job.devices_each
        if not mine or len(mine) + each > most:
            return None
        # Nodes on which no device is shared stay for groups that want them whole.
        found = self.find_place(replace(self.request(view, avoid=avoid.union(mine)), beside_shared=True))
        if found is None:
            return None
        before, after = self.speed(view, mine), self.speed(view, [*mine, *found])
        gain_s = saved_s(view, len(mine), before, after, self._snapshot.now_s) - 2 * self._snapshot.overheads.change_s
        part = self.share[view.job.job_id].request * each
        return (gain_s / part, found) if gain_s > 0.0 and after > before else None

    def shed(self, view: JobView) -> Worker | None:
        """The devices of the worker without which a running job would end earlier although it pays that change and one
        back: others have come there, and the slowest worker sets the pace. None if there is none."""
        now_s, overheads, mine = self._snapshot.now_s, self._snapshot.overheads, self.chosen.get(view.job.job_id, [])
        if len(mine) - view.job.devices_each < least_workers(view, now_s, overheads):
            return None
        speed = self.speed(view, mine)
        for worker in in_parts(mine, view.job.devices_each):
            after = self.speed(view, [other for other in mine if other not in worker])
            if after > speed and saved_s(view, len(mine), speed, after, now_s) > 2 * overheads.change_s:
                return worker
        return None

    def best_effort_devices(self) -> tuple[DeviceId, ...]:
        """The devices that only running best-effort jobs have parts of, those of the job that came last first; then
        those on which others have workers beyond the least of their jobs, too."""
        weak = {view.job.job_id for view in self.jobs if not (view.job.goal.is_hard or is_promised(view))}
        found: dict[DeviceId, None] = {}
        for view in reversed(self.jobs):
            for device_id in self.chosen.get(view.job.job_id, ()):
                if view.job.job_id in self._snapshot.allocations and weak.issuperset(self.ledger.holders(device_id)):
                    found[device_id] = None
        for device_id in self.below_promises(replicas=False) if weak else ():
            if not weak.isdisjoint(self.ledger.holders(device_id)):
                found.setdefault(device_id)
        return tuple(found)

    def below_promises(self, *, replicas: bool = True) -> tuple[DeviceId, ...]:
        """The devices of which nobody has a part but best-effort jobs, workers beyond the least of their jobs and, with
        `replicas`, those beyond the minimums of their services: the devices that the fewest have first."""
        weak = {view.job.job_id for view in self.jobs if not (view.job.goal.is_hard or is_promised(view))}
        beyond: dict[WorkloadId, Sequence[DeviceId]] = {}
        for view in self._snapshot.services:
            who = view.service.service_id
            beyond[who] = self.chosen.get(who, [])[view.min_replicas * view.service.devices_each :] if replicas else ()
        now_s, overheads = self._snapshot.now_s, self._snapshot.overheads
        strong = [view for view in self.jobs if view.job.job_id not in weak and self.chosen.get(view.job.job_id)]
        left = {v.job.job_id: len(self.chosen[v.job.job_id]) - least_workers(v, now_s, overheads) for v in strong}
        each = {view.job.job_id: view.job.devices_each for view in strong}
        found: list[tuple[int, DeviceId]] = []
        for at in np.flatnonzero(self.ledger.is_open).tolist():
            device_id = self.ledger.device_ids[at]
            holders = self.ledger.holders(device_id)
            workers = [who for who in holders if who in each]
            others = [who for who in holders if who not in weak and who not in each]
            if all(left[who] >= each[who] for who in workers) and all(device_id in beyond[who] for who in others):
                found.append((len(holders), device_id))
                left |= {who: left[who] - each[who] for who in workers}
        return tuple(device_id for _, device_id in sorted(found, key=lambda item: item[0]))

    def spare_devices(self) -> frozenset[DeviceId]:
        """The devices on which there are only workers that jobs have beyond their least."""
        now_s, overheads, held = self._snapshot.now_s, self._snapshot.overheads, self._snapshot.allocations
        left: dict[WorkloadId, int] = {}
        # Of the workers that are there: the others of a lost worker are not given for its successor.
        there: dict[WorkloadId, int] = {}
        each = {view.job.job_id: view.job.devices_each for view in self.jobs}
        for view in [view for view in self.jobs if view.job.job_id in held]:
            job_id, least = view.job.job_id, least_workers(view, now_s, overheads)
            mine = self.chosen.get(job_id, ())
            left[job_id] = len(mine) - least
            there[job_id] = len(set(mine).intersection(held[job_id].device_ids)) - least
        spare: list[DeviceId] = []
        for at in np.flatnonzero(self.ledger.is_open).tolist():
            device_id = self.ledger.device_ids[at]
            holders = self.ledger.holders(device_id)
            working = [who for who in holders if who in there and device_id in held[who].device_ids]
            is_spare = all(who in left and left[who] >= each[who] for who in holders)
            if is_spare and all(there[who] >= each[who] for who in working):
                spare.append(device_id)
                left |= {who: left[who] - each[who] for who in holders}
                there |= {who: there[who] - each[who] for who in working}
        return frozenset(spare)


@functools.lru_cache(maxsize=4)
def _holder_of(allocations: Same[Mapping[WorkloadId, Allocation]]) -> Mapping[DeviceId, WorkloadId]:
    """Who holds each device that is held as a whole."""
    held = allocations.value
    return {at: who for who, given in held.items() if given.share is None for at in given.device_ids}


def fewest_left(view: JobView, held: Allocation) -> int:
    """With how many of its devices a job goes on where others need some: all, unless it can be resized."""
    return view.bounds.min_workers if view.job.elastic else held.num_devices


def in_parts(devices: Sequence[DeviceId], each: int) -> list[Worker]:
    """The devices of each worker or replica, `each` in a row."""
    return [tuple(devices[start : start + each]) for start in range(0, len(devices), each)]


def _closed_devices(snapshot: Snapshot) -> frozenset[DeviceId]:
    """The devices of nodes on which no sharer may open any. On a node that changes its label those that have some stay
    open: labels are about whole devices."""
    cluster: Topology = snapshot.cluster
    in_parts = frozenset[DeviceId]()
    if snapshot.drains:
        held = snapshot.allocations.values()
        in_parts = in_parts.union(*[given.device_ids for given in held if given.share is not None])
    return frozenset(
        device.device_id
        for node in cluster.nodes
        if node.functions is not None or node.node_id in snapshot.drains
        for device in node.devices
        if device.device_id not in in_parts
    )
