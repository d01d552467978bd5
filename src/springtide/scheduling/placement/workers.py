"""Keeps plans to whole workers around every policy: the devices of each lie on one node.

Policies count devices. Those of a job whose workers hold several each come as multiples of that number, and aligned
blocks put them on nodes in such parts, mostly. What does not come out so is put right here: a worker that is there is
kept whole, a new one is completed on its node, and what is left over is taken away. A job that then has fewer devices
than planned is bounded by these, and the policy is asked again, so that others get what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from springtide.core.decision import JobView, Plan, Refusal, Snapshot
from springtide.core.resources import DeviceId, Node, NodeId, admits
from springtide.core.workload import WorkloadId

# How often a policy is asked again in one turn. The plan of the last time is of whole workers as well.
MAX_ROUNDS = 4

Worker = tuple[DeviceId, ...]


def whole_workers(ask: Callable[[Snapshot], Plan], snapshot: Snapshot) -> Plan:
    """The plan of `ask`, with the devices of every worker on one node."""
    wide = {view.job.job_id: view for view in snapshot.jobs if view.job.devices_each > 1}
    widest = max((len(node.devices) for node in snapshot.cluster.machines.nodes), default=0)
    caps = {who: 0 for who, view in wide.items() if view.job.devices_each > widest and who not in snapshot.allocations}
    told = {who: _too_wide(view, widest) for who, view in wide.items() if who in caps}
    refused: dict[WorkloadId, Refusal] = {}
    for _ in range(MAX_ROUNDS):
        fitted = _Fitted(snapshot, wide, ask(_shown(snapshot, wide, caps)))
        lowered = {who: count for who, count in fitted.lowered.items() if count < caps.get(who, count + 1)}
        if not lowered:
            break
        caps |= lowered
        told |= {who: _no_node(wide[who], _free(snapshot)) for who, count in lowered.items() if not count}
    for who, why in told.items():
        goal = wide[who].job.goal
        if goal.is_hard and not goal.waits and wide[who].promise.admitted_at_s is None and who not in fitted.given:
            refused[who] = Refusal(reason=why)
    waiting = {who: why for who, why in told.items() if who not in fitted.given and who not in refused}
    plan = fitted.plan(refused, waiting)
    # What a device is worth to those that were bounded was not asked.
    return replace(plan, price_s=None, prices_s={}) if caps else plan


def _too_wide(view: JobView, widest: int) -> str:
    each = view.job.devices_each
    return f"no node has {each} devices, which each of its workers needs; the largest has {widest}"


def _no_node(view: JobView, free: Sequence[int]) -> str:
    each = view.job.devices_each
    least, room = view.bounds.min_workers // each, sum(num // each for num in free)
    if least > 1:
        return (
            f"its {least} workers need {each} devices each, of one node; there is room for {room} of them beside what "
            "stronger claims hold"
        )
    return (
        f"no node has {each} devices for a worker beside what stronger claims hold; the most that are free is "
        f"{max(free, default=0)}"
    )


def _free(snapshot: Snapshot) -> list[int]:
    """How many devices none holds, on each node that jobs may have."""
    held = {device for given in snapshot.allocations.values() for device in given.device_ids}
    nodes = [node for node in snapshot.cluster.machines.nodes if admits(node.pool, is_job=True)]
    return [sum(device.device_id not in held for device in node.devices) for node in nodes]


def _shown(snapshot: Snapshot, wide: Mapping[WorkloadId, JobView], caps: Mapping[WorkloadId, int]) -> Snapshot:
    """The snapshot as the policy sees it under these bounds: a job that can have no worker is not in it."""
    if not caps:
        return snapshot
    return replace(snapshot, jobs=tuple(_bounded(snapshot, caps)))


def _bounded(snapshot: Snapshot, caps: Mapping[WorkloadId, int]) -> Iterator[JobView]:
    for view in snapshot.jobs:
        who, bounds = view.job.job_id, view.bounds
        cap = caps.get(who, bounds.max_workers)
        if cap >= bounds.max_workers:
            yield view
        elif cap >= bounds.min_workers and view.job.elastic:
            yield replace(view, bounds=replace(bounds, max_workers=cap))
        elif who in snapshot.allocations or view.promise.admitted_at_s is not None:
            # It goes on with what it has, and its promise stands.
            yield view


class _Fitted:
    """One plan of the policy and what becomes of it."""

    def __init__(self, snapshot: Snapshot, wide: Mapping[WorkloadId, JobView], plan: Plan) -> None:
        """`lowered` are the jobs that get fewer devices than planned."""
        self._snapshot, self._wide, self._plan = snapshot, wide, plan
        self._node_of = snapshot.cluster.node_of
        self.given = dict(plan.allocations)
        self.lowered: dict[WorkloadId, int] = {}
        self._held_by = {device: who for who, held in snapshot.allocations.items() for device in held.device_ids}
        broken = [who for who in wide if who in self.given and not self._is_whole(who)]
        if not broken:
            return
        self._user_of = {device: who for who, given in self.given.items() for device in given.device_ids}
        for who in broken:
            self._make_whole(who)

    def plan(self, refused: Mapping[WorkloadId, Refusal], waiting: Mapping[WorkloadId, str]) -> Plan:
        """The plan of whole workers."""
        plan = self._plan
        if self.given != plan.allocations:
            plan = replace(plan, allocations=self.given)
        if refused:
            admitted = {who: at_s for who, at_s in plan.admitted.items() if who not in refused}
            plan = replace(plan, rejected={**plan.rejected, **refused}, admitted=admitted)
        return replace(plan, no_room={**plan.no_room, **waiting}) if waiting else plan

    def _workers_there(self, who: WorkloadId) -> list[Worker]:
        """The workers that the job has now, in rank order, without those on lost nodes."""
        held = self._snapshot.allocations.get(who)
        workers = _parts(() if held is None else held.device_ids, self._wide[who].job.devices_each)
        return [worker for worker in workers if all(device in self._node_of for device in worker)]

    def _is_whole(self, who: WorkloadId) -> bool:
        each, devices = self._wide[who].job.devices_each, self.given[who].device_ids
        there = {device: worker for worker in self._workers_there(who) for device in worker}
        return len(devices) % each == 0 and all(
            worker == there.get(worker[0])
            or (there.keys().isdisjoint(worker) and len({self._node_of.get(device) for device in worker}) == 1)
            for worker in _parts(devices, each)
        )

    def _make_whole(self, who: WorkloadId) -> None:
        view, given = self._wide[who], self.given[who]
        each, left = view.job.devices_each, dict.fromkeys(given.device_ids)
        most = len(left) // each
        kept: dict[Worker, int] = {}
        there = self._workers_there(who)
        for rank, worker in sorted(enumerate(there), key=lambda one: -sum(device in left for device in one[1])):
            if len(kept) < most and any(device in left for device in worker) and self._complete(who, worker, left):
                kept[worker] = rank
        mine = {device for worker in there for device in worker}
        workers = [*sorted(kept, key=kept.__getitem__)]
        workers += self._new_workers(who, [device for device in left if device not in mine], most - len(kept))
        # Those that the plan moves where there is no place for them stay.
        idle = [worker for worker in there if self._user_of.keys().isdisjoint(worker)]
        workers += idle[: most - len(workers)]
        least = view.bounds.min_workers if view.job.elastic else len(given.device_ids)
        if len(workers) * each < least:
            workers = workers if kept and view.job.elastic else []
        self._take(who, [device for worker in workers for device in worker])
        if len(workers) * each < given.num_devices:
            self.lowered[who] = len(workers) * each

    def _complete(self, who: WorkloadId, worker: Worker, left: dict[DeviceId, None]) -> bool:
        """Keep a worker that is there whole, and take it out of `left`. What others are to have of it goes to them only
        if they have it now or hold parts; else they get another device of this job for it, if there is one on a node
        like this one."""
        missing = [device for device in worker if device not in left]
        others = {device: self._user_of[device] for device in missing if device in self._user_of}
        home = self._node_of[worker[0]]
        spare = [device for device in left if device not in worker and self._is_like(home, self._node_of[device])]
        spare.sort(key=lambda device: self._node_of[device] == home)
        if len(spare) < len(others) or any(not self._may_swap(device, user) for device, user in others.items()):
            return False
        for device, user in others.items():
            other = spare.pop()
            del left[other]
            self._take(user, [other if mine == device else mine for mine in self.given[user].device_ids])
        for device in worker:
            left.pop(device, None)
            self._user_of[device] = who
        return True

    def _is_like(self, home: NodeId, other: NodeId) -> bool:
        """Whether a device of the other node does as well for what was to have one of this node."""
        cluster, moving = self._snapshot.cluster, self._snapshot.drains.keys() | self._plan.pools.keys()
        if home == other or not moving.isdisjoint((home, other)):
            return home == other
        one, two = (next(node for node in cluster.nodes if node.node_id == each) for each in (home, other))
        return one.pool == two.pool and one.devices[0].accelerator == two.devices[0].accelerator

    def _may_swap(self, device: DeviceId, user: WorkloadId) -> bool:
        return self._held_by.get(device) != user and user not in self._wide and self.given[user].share is None

    def _new_workers(self, who: WorkloadId, left: Iterable[DeviceId], most: int) -> list[Worker]:
        """Up to `most` workers on devices that the plan gives the job, completed by idle ones of the same node."""
        each, places = self._wide[who].job.devices_each, dict[NodeId, list[DeviceId]]()
        for device in left:
            places.setdefault(self._node_of[device], []).append(device)
        workers: list[Worker] = []
        for devices in places.values():
            while len(devices) >= each and len(workers) < most:
                workers.append(tuple(devices[:each]))
                del devices[:each]
        for node in self._open_nodes(places) if len(workers) < most else ():
            devices = [*places.get(node.node_id, ()), *self._idle(node, who)]
            while len(devices) >= each and len(workers) < most:
                workers.append(tuple(devices[:each]))
                del devices[:each]
        return workers

    def _open_nodes(self, places: Mapping[NodeId, list[DeviceId]]) -> list[Node]:
        """The nodes on which a worker may be completed, those with the most of its devices first.

        Which model is for the job was weighed for the plan alone.
        """
        cluster = self._snapshot.cluster
        moving = self._snapshot.drains.keys() | self._plan.pools.keys()
        models = {node.devices[0].accelerator for node in cluster.nodes if node.node_id in places}
        nodes = [
            node
            for node in cluster.machines.nodes
            if node.node_id in places
            or (
                node.devices
                and node.devices[0].accelerator in models
                and admits(node.pool, is_job=True)
                and node.node_id not in moving
            )
        ]
        return sorted(nodes, key=lambda node: -len(places.get(node.node_id, ())))

    def _idle(self, node: Node, who: WorkloadId) -> list[DeviceId]:
        """The devices that no workload is to have, those that none holds first; without those of the job's workers."""
        found = [device.device_id for device in node.devices if device.device_id not in self._user_of]
        found = [device for device in found if self._held_by.get(device) != who]
        return sorted(found, key=lambda device: device in self._held_by)

    def _take(self, who: WorkloadId, devices: list[DeviceId]) -> None:
        """Give the workload these devices instead of its own."""
        for device in self.given[who].device_ids:
            if self._user_of.get(device) == who:
                del self._user_of[device]
        self._user_of |= dict.fromkeys(devices, who)
        if devices:
            self.given[who] = replace(self.given[who], device_ids=tuple(devices))
        else:
            del self.given[who]


def _parts(devices: tuple[DeviceId, ...], each: int) -> list[Worker]:
    return [devices[start : start + each] for start in range(0, len(devices), each)]
