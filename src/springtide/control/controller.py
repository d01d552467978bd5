"""The Controller: events in, actions out. It owns the platform's state, and uses no clock, thread or socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from springtide.control.incremental import HangWatch, WaitingReasons, Worklist, mark_changed
from springtide.control.learnt import learnt_overheads
from springtide.control.pools import graces_over_at_s, misplaced
from springtide.control.reconcile import reconcile
from springtide.control.records import JobRecord, PlatformState, ReplicaRecord, ReplicaState, ServiceRecord, StateReason
from springtide.control.releases.steps import version_of
from springtide.control.runs import apply_actions, apply_events
from springtide.control.snapshot_views import SnapshotViews, view_service
from springtide.core.actions import Action, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.decision import (
    FunctionAllocation,
    Overheads,
    Plan,
    Policy,
    PromiseCondition,
    Schedule,
    Snapshot,
    TimeClaim,
)
from springtide.core.errors import PolicyError
from springtide.core.events import Event
from springtide.core.ports import Standing, Step
from springtide.core.resources import DeviceId, NodeId, Pool
from springtide.core.shares import has_room, load_of
from springtide.core.tide import Tide
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache

# Reconciling a plan takes a few rounds (release, start, form a group). More than this means that it does not converge.
MAX_ROUNDS = 16
# A turn that comes so much later than it was due was not late by load alone.
LATE_S = 30.0


class Controller:
    """Owns the platform's state and asks one policy how it should change. Only `step` and `restore` change it."""

    def __init__(
        self,
        policy: Policy,
        *,
        on_policy_error: Callable[[PolicyError], None] | None = None,
        overheads: Overheads | None = None,
        learns_overheads: bool = False,
        tide: Tide | None = None,
    ) -> None:
        """Without `on_policy_error` a broken policy raises; with it, the error is reported and all workloads keep
        what they hold.

        `overheads` is what changing a job costs on this platform; by default nothing. With `learns_overheads` it is
        only the initial estimate, and the durations of observed changes refine it. `tide` sets the length of a season
        in the recorded demand of services; by default a day.
        """
        # The cache never changes a plan, so a journal replays the same whether it is warm or empty.
        self._decisions = DecisionCache(policy)
        self._prior_overheads = self._overheads = overheads or Overheads()
        self._learns_overheads = learns_overheads
        self._overheads_learnt_from: tuple[float, ...] = ()
        self._on_policy_error = on_policy_error
        self._given_tide = tide
        self.state = PlatformState(tide=tide or Tide())
        self._views = SnapshotViews()
        self._worklist = Worklist()
        self._waiting = WaitingReasons()
        self._watch = HangWatch(self.state)
        self._backing_off: dict[WorkloadId, None] = {}
        # The policy's planned schedules, for status pages. A restarted control plane gets them again with its first
        # step, so they are not part of the state.
        self.future: Mapping[WorkloadId, Schedule] = {}
        # What the policy's reasons claim about time, what deadlines wait for, what a device-second is worth, likewise.
        self.claims: Mapping[WorkloadId, TimeClaim] = {}
        self.conditions: Mapping[WorkloadId, PromiseCondition] = {}
        self.price_s: float | None = None
        self.prices_s: Mapping[str, float] = {}
        self._wakeup_at_s: float | None = None
        self._is_recovered = False

    @property
    def wakeup_at_s(self) -> float | None:
        """When to step again even without an event; None: only on the next event."""
        return self._wakeup_at_s

    def wake(self) -> None:
        """Step at the next opportunity: after a restart it is not known what the last wake-up was for."""
        self._wakeup_at_s = 0.0
        self._is_recovered = True

    def was_away(self, now_s: float) -> bool:
        """Whether, at the begin of a turn, workloads that are watched for hanging could not be seen for some time."""
        is_late = self._wakeup_at_s is not None and now_s - self._wakeup_at_s > LATE_S
        return bool(self._watch.due_s) and (self._is_recovered or is_late)

    @property
    def is_idle(self) -> bool:
        """Whether every job has ended and no replica is left."""
        return not self.state.jobs.live and not any(record.replicas for record in self.state.services.values())

    def step(self, now_s: float, events: Sequence[Event]) -> Step:
        """Apply the events, ask the policy, and return the whole turn as the journal will record it.

        Raises PolicyError if the policy's plan is impossible and there is no `on_policy_error`.
        """
        self._is_recovered = False
        apply_events(events, self.state, now_s)
        if self._watch.due_s and (hung := self._watch.news(now_s)):
            events = (*events, *hung)
            apply_events(hung, self.state, now_s)
        plan = self._decide(self.snapshot(now_s))
        actions: list[Action] = []
        for _ in range(MAX_ROUNDS):
            self._refresh_changed()
            round_actions = reconcile(self.state, plan, now_s, self._worklist)
            apply_actions(round_actions, self.state, now_s)
            actions += round_actions
            if not round_actions:
                break
        else:
            raise AssertionError("reconcile found no fixed point")
        reasons, promises = self._waiting.news(self.state, plan)
        step = Step(
            now_s=now_s,
            events=tuple(events),
            actions=tuple(actions),
            reasons=reasons,
            revisit_at_s=plan.revisit_at_s,
            memory=plan.memory,
            promises=promises or UNSET,
        )
        self._apply_outcome(step)
        self.future, self.claims = plan.future, plan.claims
        self.conditions, self.price_s, self.prices_s = plan.conditions, plan.price_s, plan.prices_s
        return step

    def begin_at(self, state: PlatformState) -> None:
        """Take this state, of a journal's snapshot, instead of the one from before the first step."""
        self.state = state
        self.forget_derived()

    def follow_days(self, now_s: float) -> None:
        """Go on with days of the length that was given, which a snapshot of the journal may have otherwise."""
        if self._given_tide is not None:
            self.state.tide = self.state.tide.as_long_as(self._given_tide, now_s)

    def forget_derived(self) -> None:
        """Drop all that is kept only to save time. `verify` holds the next step to be the same without it."""
        self._decisions.forget()
        self._overheads, self._overheads_learnt_from = self._prior_overheads, ()
        self._views, self._worklist = SnapshotViews(), Worklist()
        self._waiting, self._watch, self._backing_off = WaitingReasons(), HangWatch(self.state), {}
        for table in (self.state.jobs, self.state.services):
            table.changed = dict.fromkeys(table)

    def restore(self, step: Step) -> None:
        """Apply a step of the journal with the actions that were decided then; the policy is not asked."""
        apply_events(step.events, self.state, step.now_s)
        apply_actions(step.actions, self.state, step.now_s)
        self._apply_outcome(step)

    def snapshot(self, now_s: float) -> Snapshot:
        """What a policy may know at this instant."""
        state = self.state
        self._refresh_changed()
        allocations = self._views.allocations(state)
        if state.is_stopping:
            # Without jobs and services in the snapshot, every policy plans an empty platform.
            return Snapshot(now_s=now_s, cluster=state.topology(), allocations=allocations, memory=state.memory)
        return Snapshot(
            now_s=now_s,
            cluster=state.topology(),
            jobs=self._views.jobs(state),
            services=tuple(view_service(record, now_s) for record in state.services.values() if record.is_served),
            allocations=allocations,
            memory=state.memory,
            overheads=self._overheads_now(),
            drains=state.drains,
            tide=state.tide,
        )

    def _overheads_now(self) -> Overheads:
        """What a change of a job costs, estimated from every change recorded so far."""
        seen = self.state.change_times_s
        if self._learns_overheads and seen is not self._overheads_learnt_from:
            self._overheads, self._overheads_learnt_from = learnt_overheads(self._prior_overheads, seen), seen
        return self._overheads

    def standing(self) -> Standing:
        """What should be running now, and the actions whose effects a crash may have interrupted."""
        replicas: list[StartReplica] = []
        actions: list[Action] = []
        for record in self.state.records():
            for replica in record.replicas:
                start = StartReplica(
                    workload=record.job if isinstance(record, JobRecord) else version_of(record, replica.revision),
                    replica_id=replica.replica_id,
                    device_id=replica.device_id,
                    generation=replica.generation,
                    restore=replica.restore,
                    share=replica.share,
                    more_devices=replica.more_devices,
                    cause="recovery",
                )
                replicas.append(start)
                # No event has confirmed this replica yet, so the crash may have come before it was started.
                if replica.state is ReplicaState.STARTING:
                    actions.append(start)
            actions += _unfinished(record)
        return Standing(
            replicas=tuple(replicas),
            generations={record.workload_id: record.group.generation for record in self.state.jobs.values()},
            actions=tuple(actions),
            labels=self._labels(),
        )

    def _labels(self) -> dict[NodeId, Pool]:
        """The label of every node, lost ones included: a crash may have interrupted the last change of a label."""
        return {**self.state.labels, **{node.node_id: node.pool for node in self.state.nodes.values()}}

    def _refresh_changed(self) -> None:
        """Refresh what is derived from the records that have changed since the last call."""
        state = self.state
        for table in (state.jobs, state.services):
            if table.changed:
                changed, table.changed = table.changed, {}
                mark_changed(changed, self._worklist, self._waiting, self._watch)
                for workload_id in changed:
                    self._views.update(state, workload_id)
                    if any(table[workload_id].back_offs_at_s):
                        self._backing_off[workload_id] = None

    def _decide(self, snapshot: Snapshot) -> Plan:
        try:
            plan = self._decisions.decide(snapshot)
            check_plan(snapshot, plan)
        except PolicyError as error:
            if self._on_policy_error is None:
                raise
            self._on_policy_error(error)
            return keep_plan(snapshot)
        except Exception as error:
            # A broken policy must not stop the platform. Its memory is dropped: reading it may be what failed.
            if self._on_policy_error is None:
                raise
            self._on_policy_error(PolicyError(f"the policy raised {type(error).__name__}: {error}"))
            return replace(keep_plan(snapshot), memory=None)
        return plan

    def _records_backing_off(self) -> list[JobRecord | ServiceRecord]:
        """The records that may be waiting out a back-off."""
        self._refresh_changed()
        jobs, services = self.state.jobs.live, self.state.services.live
        found = {name: jobs.get(name) or services.get(name) for name in self._backing_off}
        self._backing_off = {name: None for name, record in found.items() if record is not None}
        return [record for record in found.values() if record is not None]

    def _apply_outcome(self, step: Step) -> None:
        for name, reason in step.reasons.items():
            workload_id = WorkloadId(name)
            job = self.state.jobs.get(workload_id)
            if job is not None:
                self.state.jobs[workload_id] = replace(
                    job, lifecycle=replace(job.lifecycle, reason=StateReason(reason))
                )
            else:
                self.state.services[workload_id] = replace(self.state.services[workload_id], reason=reason)
        for name, is_kept in ({} if step.promises is UNSET else step.promises).items():
            job = self.state.jobs[WorkloadId(name)]
            given_up_at_s = None if is_kept else step.now_s
            self.state.jobs[WorkloadId(name)] = replace(
                job, lifecycle=replace(job.lifecycle, given_up_at_s=given_up_at_s)
            )
        self.state.memory = step.memory
        self.state.revisit_at_s = step.revisit_at_s
        moments = [] if step.revisit_at_s is None else [step.revisit_at_s]
        moments += [
            moment_s
            for record in self._records_backing_off()
            for moment_s in record.back_offs_at_s
            if moment_s > step.now_s and not record.is_over
        ]
        moments += self._watch.due_s.values()
        if self.state.drains:
            moments += graces_over_at_s(self.state, step.now_s)
        self._wakeup_at_s = min(moments, default=None)


def keep_plan(snapshot: Snapshot) -> Plan:
    """The plan used when the policy fails: every workload that wants to run keeps its devices, and none gets more."""
    alive = set(snapshot.cluster.device_ids())
    bounds = _bounds(snapshot)
    return Plan(
        allocations={
            workload_id: replace(
                held, device_ids=tuple(device for device in held.device_ids if device in alive)[: bounds[workload_id]]
            )
            for workload_id, held in snapshot.allocations.items()
            if workload_id in bounds
        },
        memory=snapshot.memory,
    )


def _bounds(snapshot: Snapshot) -> dict[WorkloadId, int]:
    """The most devices that each workload may hold."""
    jobs = {view.job.job_id: min(view.bounds.max_workers, view.job.num_virtual_shards) for view in snapshot.jobs}
    return jobs | {view.service.service_id: view.max_replicas * view.service.devices_each for view in snapshot.services}


def _check_workers(snapshot: Snapshot, plan: Plan) -> None:
    node_of = snapshot.cluster.node_of
    wide = {view.job.job_id: view.job.devices_each for view in snapshot.jobs if view.job.devices_each > 1}
    wide |= {
        view.service.service_id: view.service.devices_each
        for view in snapshot.services
        if view.service.devices_each > 1
    }
    for who, each in wide.items():
        given = plan.allocations.get(who)
        nodes = [] if given is None else [node_of.get(device_id) for device_id in given.device_ids]
        workers = [nodes[start : start + each] for start in range(0, len(nodes), each)]
        if given is not None and any(len(worker) < each or len(set(worker)) > 1 for worker in workers):
            raise PolicyError(
                f"the plan gives {who!r} {', '.join(given.device_ids)}, and each of its workers or replicas needs "
                f"{each} devices of one node"
            )


def _check_batches(snapshot: Snapshot, plan: Plan) -> None:
    for job in [view.job for view in snapshot.jobs if view.job.batch is not None]:
        bounds, given = job.batch, plan.allocations.get(job.job_id)
        size = given.global_batch_size if given is not None else None
        if bounds is not None and size is not None and not bounds.min_size <= size <= bounds.max_size:
            raise PolicyError(
                f"the plan gives {job.job_id!r} a batch of {size}, which takes {bounds.min_size} to {bounds.max_size}"
            )


def _check_labels(snapshot: Snapshot, plan: Plan) -> None:
    cluster = snapshot.cluster
    for node_id in plan.pools:
        if node_id not in cluster.by_id:
            raise PolicyError(f"the plan labels {node_id!r}, but no such node is alive")
    if not cluster.has_pools and not plan.pools:
        return
    jobs = frozenset(view.job.job_id for view in snapshot.jobs)
    alive = {who: [d for d in given.device_ids if d in cluster.device_set] for who, given in plan.allocations.items()}
    known = replace(
        plan, allocations={who: replace(plan.allocations[who], device_ids=tuple(given)) for who, given in alive.items()}
    )
    for workload_id, device_id in misplaced(known, cluster.by_id, cluster.node_of, jobs):
        held = snapshot.allocations.get(workload_id)
        if held is None or device_id not in held.device_ids:
            node = cluster.by_id[cluster.node_of[device_id]]
            wish = plan.pools.get(node.node_id)
            pool = wish.pool if wish is not None else node.pool
            raise PolicyError(
                f"the plan gives {device_id!r} to {workload_id!r}, but {node.node_id!r} is labelled for {pool}; "
                "compose the policy with one that loans, as in two-way/fifo"
            )


def _check_functions(snapshot: Snapshot, plan: Plan) -> None:
    services = snapshot.cluster.function_services
    places = {device.device_id for node in services for device in node.devices}
    on_functions = {view.job.job_id for view in snapshot.jobs if view.job.is_on_functions}
    if not places and not on_functions:
        return
    for workload_id, given in plan.allocations.items():
        is_there = [device in places for device in given.device_ids]
        if workload_id not in on_functions and any(is_there):
            raise PolicyError(
                f"the plan gives a place for jobs on functions to {workload_id!r}, which runs on machines"
            )
        if workload_id in on_functions and not all(is_there):
            raise PolicyError(f"the plan gives a machine to {workload_id!r}, which runs on functions")
        if workload_id in on_functions and given.device_ids and not isinstance(given, FunctionAllocation):
            raise PolicyError(f"the plan gives {workload_id!r} a place at a function service, but no functions")


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PolicyError if the plan names an unknown workload or device, gives more of a device than there is, or
    breaks a workload's bounds.
    """
    _check_workers(snapshot, plan)
    _check_batches(snapshot, plan)
    _check_labels(snapshot, plan)
    _check_functions(snapshot, plan)
    existing = snapshot.cluster.device_set
    bounds = _bounds(snapshot)
    sharers = {who: given for who, given in plan.allocations.items() if given.share is not None}
    whole = [allocation for allocation in plan.allocations.values() if allocation.share is None]
    named = frozenset().union(*[allocation.device_ids for allocation in whole])
    is_sound = (
        len(named) == sum([len(allocation.device_ids) for allocation in whole])
        and named <= existing
        and named.isdisjoint(itertools.chain.from_iterable([given.device_ids for given in sharers.values()]))
        and all(len(given.device_ids) <= bounds.get(who, 0) for who, given in plan.allocations.items())
    )
    # Where those on whole devices are sound, only sharers are looked at one by one; else to find what to report.
    given: dict[DeviceId, list[WorkloadId]] = {}
    for workload_id, allocation in (sharers if is_sound else plan.allocations).items():
        if workload_id not in bounds:
            raise PolicyError(f"the plan gives devices to {workload_id!r}, which does not want to run")
        if allocation.num_devices > bounds[workload_id]:
            raise PolicyError(
                f"the plan gives {allocation.num_devices} devices to {workload_id!r}, which takes {bounds[workload_id]}"
            )
        if len(set(allocation.device_ids)) < allocation.num_devices:
            raise PolicyError(f"the plan gives {workload_id!r} a device twice")
        for device_id in allocation.device_ids:
            if device_id not in existing:
                raise PolicyError(f"the plan gives {device_id!r} to {workload_id!r}, but no such device is alive")
            given.setdefault(device_id, []).append(workload_id)
    for device_id, holders in given.items():
        if len(holders) > 1:
            _check_room(plan, device_id, holders, snapshot.cluster.memory_of.get(device_id, 0))


def _check_room(plan: Plan, device_id: DeviceId, holders: Sequence[WorkloadId], memory_mb: int) -> None:
    shares = [plan.allocations[workload_id].share for workload_id in holders]
    for number, share in enumerate(shares[1:], start=1):
        if share is None or shares[0] is None:
            raise PolicyError(f"the plan gives {device_id!r} to both {holders[0]!r} and {holders[number]!r}")
        if not has_room(load_of(shares[:number]), share, memory_mb):
            raise PolicyError(
                f"the plan gives shares of {device_id!r} to {', '.join(map(repr, holders[: number + 1]))} that it has "
                "no room for"
            )


def _unfinished(record: JobRecord | ServiceRecord) -> list[Action]:
    """The actions of one workload whose effects no event has confirmed yet."""
    stopping = [r for r in record.replicas if r.state is ReplicaState.STOPPING]
    if isinstance(record, JobRecord):
        if record.group.members and not record.group.is_confirmed:
            return [
                ResizeJob(
                    job_id=record.workload_id,
                    generation=record.group.generation,
                    replica_ids=record.group.members,
                    global_batch_size=record.batch_size,
                    functions=record.runs_as.plan,
                    forced=record.group.oldest_generation == record.group.generation,
                    cause="recovery",
                    reason=record.lifecycle.reason.text,
                ),
                *_stops(record, stopping, record.job.grace_s),
            ]
        trained = tuple(r.replica_id for r in stopping if r.has_trained)
        if record.lifecycle.state == "PREEMPTING" and trained and record.restarts.starts_at_s == 0.0:
            return [
                PreemptJob(
                    job_id=record.workload_id,
                    generation=record.group.generation,
                    replica_ids=trained,
                    grace_s=record.job.grace_s,
                    cause="recovery",
                    reason=record.lifecycle.reason.text,
                ),
                *_stops(record, [r for r in stopping if not r.has_trained], record.job.grace_s),
            ]
        return list(_stops(record, stopping, record.job.grace_s))
    return list(_stops(record, stopping, record.service.grace_s))


def _stops(record: JobRecord | ServiceRecord, stopping: Sequence[ReplicaRecord], grace_s: float) -> list[StopReplica]:
    return [
        StopReplica(
            workload_id=record.workload_id,
            replica_id=replica.replica_id,
            grace_s=grace_s,
            cause="recovery",
            reason=record.reason,
        )
        for replica in stopping
    ]
