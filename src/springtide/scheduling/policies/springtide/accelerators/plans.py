"""A plan for a cluster of several models of accelerator: one for the devices of each model, with the jobs that it has.

Within one model everything is as in a cluster of that model alone. See docs/policies/springtide.md.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from springtide.core.decision import Allocation, Capacity, JobView, Plan, Refusal, Snapshot, TimeClaim
from springtide.core.resources import DeviceId, Node, Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.fingerprint import (
    BOUNDS,
    LENGTH,
    RESTARTS,
    SERVICES,
    SHAPE,
    Fingerprints,
    Projection,
    Reads,
    of_fields,
)
from springtide.scheduling.policies.springtide.accelerators.choice import HomeChoice, ModelRow, model_row
from springtide.scheduling.policies.springtide.accelerators.speeds import KnownSpeeds
from springtide.scheduling.policies.springtide.memory import RULE_OF_MODELS, is_of_models
from springtide.scheduling.policies.springtide.moves import jobs_to_stop_first

# While jobs run that could have another model, the choice is made anew so often: what is left of them changes.
REVISIT_S = 300.0

Part = TypeVar("Part")


def _measured_on(view: JobView) -> object:
    return sorted((model, len(speeds)) for model, speeds in view.learnt.by_accelerator.items())


# What a new choice of models depends on, beside progress.
READS = Reads(
    jobs=(
        BOUNDS,
        LENGTH,
        RESTARTS,
        of_fields("promise", "promise.admitted_at_s", "bounds.num_edits"),
        Projection("measured", ("learnt.by_accelerator",), _measured_on),
    ),
    services=SERVICES,
    nodes=(SHAPE, Projection("models", ("devices",), lambda node: [device.accelerator for device in node.devices])),
)


class MixedPlans(Generic[Part]):
    """What is kept for the next decision: derived values for each model, views of jobs on their models, parts of the
    cluster. A plan is the same without them."""

    def __init__(self, make_part: Callable[[], Part]) -> None:
        self._make_part = make_part
        self._parts: dict[str, Part] = {}
        self.fingerprints = Fingerprints(READS)
        self._cluster = Topology()
        self._clusters: dict[str, Topology] = {}
        self._known, self._known_from = KnownSpeeds({}), None
        self._shown: dict[tuple[WorkloadId, str], tuple[JobView, int, KnownSpeeds, JobView]] = {}
        self._rows: dict[tuple[WorkloadId, str], tuple[JobView, ModelRow]] = {}
        self._given: dict[WorkloadId, tuple[Allocation, Topology, dict[str, Allocation]]] = {}

    def plan(self, ask: Callable[[Snapshot, Part], Plan], snapshot: Snapshot) -> Plan:
        """The plan for this snapshot; `ask` plans the devices of one model."""
        return _Turn(self, ask, snapshot).plan()

    def part(self, model: str) -> Part:
        """The derived values of one model."""
        if model not in self._parts:
            self._parts[model] = self._make_part()
        return self._parts[model]

    def cluster(self, whole: Topology, model: str) -> Topology:
        """The devices of one model."""
        if self._cluster is not whole:
            self._cluster, self._clusters = whole, {}
        if model not in self._clusters:
            nodes = tuple(node for each in whole.machines.nodes if (node := _of_model(each, model)).devices)
            self._clusters[model] = Topology(nodes=nodes)
        return self._clusters[model]

    def known(self, kept: Any) -> KnownSpeeds:
        """The speeds in these plain values."""
        if self._known_from is not kept:
            self._known, self._known_from = KnownSpeeds.read(kept or {}), kept
        return self._known

    def keep(self, known: KnownSpeeds, kept: Any) -> None:
        """Keep the speeds that these plain values were written from."""
        self._known, self._known_from = known, kept

    def shown(self, view: JobView, model: str, num_held: int, known: KnownSpeeds) -> JobView:
        """The job on devices of this model, of which it holds so many."""
        key = (view.job.job_id, model)
        last = self._shown.get(key)
        if last is None or last[0] is not view or last[1] != num_held or last[2] is not known:
            found = known.view_on(view, model)
            if num_held < view.num_replicas:
                found = replace(found, num_replicas=num_held)
            last = self._shown[key] = (view, num_held, known, found)
        return last[3]

    def row(self, view: JobView, model: str) -> ModelRow:
        """The row of a view that `shown` has returned."""
        key = (view.job.job_id, model)
        last = self._rows.get(key)
        if last is None or last[0] is not view:
            last = self._rows[key] = (view, model_row(view))
        return last[1]

    def held(self, snapshot: Snapshot) -> dict[str, dict[WorkloadId, Allocation]]:
        """What each workload holds, by model."""
        model_of = snapshot.cluster.accelerator_of
        found: dict[str, dict[WorkloadId, Allocation]] = {model: {} for model in snapshot.cluster.accelerators}
        given: dict[WorkloadId, tuple[Allocation, Topology, dict[str, Allocation]]] = {}
        for who, allocation in snapshot.allocations.items():
            known = self._given.get(who)
            if known is None or known[0] is not allocation or known[1] is not snapshot.cluster:
                devices: dict[str, list[DeviceId]] = {}
                for device in allocation.device_ids:
                    if device in model_of:
                        devices.setdefault(model_of[device], []).append(device)
                parts = {
                    model: allocation
                    if len(mine) == allocation.num_devices
                    else replace(allocation, device_ids=tuple(mine))
                    for model, mine in devices.items()
                }
                known = (allocation, snapshot.cluster, parts)
            given[who] = known
            for model, part in known[2].items():
                if model in found:
                    found[model][who] = part
        self._given = given
        return found

    def forget(self, snapshot: Snapshot) -> None:
        """Forget the jobs that are gone."""
        present = {view.job.job_id for view in snapshot.jobs}
        self._shown = {key: kept for key, kept in self._shown.items() if key[0] in present}
        self._rows = {key: kept for key, kept in self._rows.items() if key[0] in present}


class _Turn(Generic[Part]):
    """One decision."""

    def __init__(self, kept: MixedPlans[Part], ask: Callable[[Snapshot, Part], Plan], snapshot: Snapshot) -> None:
        self._kept, self._ask, self._snapshot = kept, ask, snapshot
        self._models = snapshot.cluster.accelerators
        self._held = kept.held(snapshot)
        memory = snapshot.memory
        # A memory for one model is offered to each: it takes from it what is said of its own jobs.
        self._memory: Mapping[str, Any] = (
            memory if is_of_models(memory) else {"plans": dict.fromkeys(self._models, memory)}
        )
        self._known = kept.known(self._memory.get("speeds"))
        self._homes: dict[WorkloadId, str] = {WorkloadId(who): at for who, at in self._memory.get("homes", {}).items()}
        self._stuck: list[str] = list(self._memory.get("stuck", ()))
        # The jobs that change their model since they would be late on the one that they have.
        self._in_danger: set[WorkloadId] = set(self._memory.get("in_danger", ()))
        self._plans: dict[str, Plan] = {}
        self._until_s: float | None = self._memory.get("until_s")
        self._options: Mapping[WorkloadId, tuple[str, ...]] = {}

    def plan(self) -> Plan:
        now_s = self._snapshot.now_s
        if not self._models:
            waiting = {view.job.job_id: "waiting: there is no device" for view in self._snapshot.jobs}
            return Plan(reasons=waiting, memory=self._snapshot.memory)
        fingerprint = self._kept.fingerprints.of(self._snapshot)
        is_valid = fingerprint == self._memory.get("fingerprint") and (self._until_s is None or now_s < self._until_s)
        is_valid = is_valid and all(view.job.job_id in self._homes for view in self._snapshot.jobs)
        if not is_valid:
            self._choose_homes()
        for model in self._models:
            self._plan_part(model)
        refused: dict[WorkloadId, Refusal] = {}
        if not is_valid:
            self._keep_promises()
            refused = self._try_others()
            self._hold_back()
        self._move_late()
        # A job that another model has taken is refused nowhere else.
        rejected = {
            who: refused.get(who, why)
            for model, each in self._plans.items()
            for who, why in each.rejected.items()
            if self._homes[who] == model
        }
        if not is_valid:
            left = [view for view in self._snapshot.jobs if view.job.job_id not in rejected]
            fingerprint = self._kept.fingerprints.of(self._snapshot, left)
        return self._merged(rejected, fingerprint)

    # --- the model of each job ---------------------------------------------------------------------------------------

    def _choose_homes(self) -> None:
        snapshot = self._snapshot
        self._kept.forget(snapshot)
        self._known = self._known.learn(snapshot.jobs)
        choice = HomeChoice(snapshot, self._homes, self._held, self._known, self._row)
        self._in_danger = {who for who in self._in_danger if choice.homes.get(who) == self._homes[who]}
        self._homes, self._options, self._stuck = choice.homes, choice.options, []
        self._until_s = snapshot.now_s + REVISIT_S if choice.may_move else None

    def _row(self, view: JobView, model: str) -> ModelRow:
        return self._kept.row(self._view_on(view, model), model)

    def _view_on(self, view: JobView, model: str) -> JobView:
        mine = self._held[model].get(view.job.job_id)
        return self._kept.shown(view, model, 0 if mine is None else mine.num_devices, self._known)

    # --- plans by model ----------------------------------------------------------------------------------------------

    def _plan_part(self, model: str) -> None:
        """Plan the devices of one model with the jobs that have it now, from what was planned the last time."""
        snapshot = self._snapshot
        part = self._kept.cluster(snapshot.cluster, model)
        shown = replace(
            snapshot,
            cluster=part,
            jobs=tuple([self._view_on(v, model) for v in snapshot.jobs if self._homes[v.job.job_id] == model]),
            services=tuple(v for v in snapshot.services if self._homes[v.service.service_id] == model),
            allocations=self._held[model],
            memory=self._memory["plans"].get(model),
            capacity=_least_capacity(snapshot, len(part.device_ids())),
        )
        self._plans[model] = self._ask(shown, self._kept.part(model))

    def _keep_promises(self) -> None:
        """Leave promised jobs on the model that they had, where any promise is given up beside those that change it."""
        before = self._memory.get("homes", {})
        late = set(self._memory.get("late", ()))
        movers = [
            view.job.job_id
            for view in self._snapshot.jobs
            if view.promise.admitted_at_s is not None
            and before.get(view.job.job_id, self._homes[view.job.job_id]) in self._models
            and before.get(view.job.job_id, self._homes[view.job.job_id]) != self._homes[view.job.job_id]
        ]
        if movers and not self._late() <= late:
            touched = {self._homes[who] for who in movers} | {before[who] for who in movers}
            self._homes.update({who: before[who] for who in movers})
            for model in sorted(touched):
                self._plan_part(model)

    def _hold_back(self) -> None:
        """Leave jobs where they run whose devices a deadline would count on at once: they come free only when the job's
        workers on the other model are there."""
        hard = {view.job.job_id for view in self._snapshot.jobs if view.job.goal.is_hard}
        before = self._memory.get("homes", {})
        while True:
            kept: dict[WorkloadId, str] = {}
            for model, plan in self._plans.items():
                held = self._held[model]
                taken = {
                    device
                    for who, given in plan.allocations.items()
                    if who in hard and given is not held.get(who)
                    for device in given.device_ids
                }
                kept |= {
                    who: model
                    for who, given in held.items()
                    if before.get(who) == model != self._homes.get(who, model)
                    and not taken.isdisjoint(given.device_ids)
                }
            if not kept:
                return
            touched = {self._homes[who] for who in kept} | set(kept.values())
            self._homes.update(kept)
            for model in sorted(touched):
                self._plan_part(model)

    def _late(self) -> set[str]:
        """The jobs whose promises are given up."""
        return {
            str(who) for plan in self._plans.values() for who, claim in plan.claims.items() if claim.code == "given_up"
        }

    def _try_others(self) -> dict[WorkloadId, Refusal]:
        """Plan each job whose deadline its model does not promise on the next one of its options. Returns why those are
        refused that none promises."""
        refused: dict[WorkloadId, Refusal] = {}
        number = dict.fromkeys(self._options, 0)
        while True:
            again: set[str] = set()
            for job_id, options in self._options.items():
                plan = self._plans[self._homes[job_id]]
                if job_id in plan.admitted or number[job_id] >= len(options):
                    continue
                if job_id in plan.rejected:
                    refused.setdefault(job_id, plan.rejected[job_id])
                number[job_id] += 1
                is_last = number[job_id] == len(options)
                if len(options) > 1 and not (is_last and job_id in plan.rejected):
                    # After the last one it waits on the first.
                    after = options[0 if is_last else number[job_id]]
                    again |= {self._homes[job_id], after} if job_id not in plan.rejected else {after}
                    self._homes[job_id] = after
            if not again:
                return {who: why for who, why in refused.items() if who in self._plans[self._homes[who]].rejected}
            for model in sorted(again):
                self._plan_part(model)

    def _move_late(self) -> None:
        """Give promised jobs that are late on their model another one on which they are in time, if there is one."""
        for view in self._snapshot.jobs:
            job_id = view.job.job_id
            home = self._homes[job_id]
            is_late = view.promise.admitted_at_s is not None and _is_given_up(self._plans[home], job_id)
            if not is_late or job_id in self._stuck or not view.job.elastic:
                continue
            before = dict(self._plans)
            for model in [each for each in self._models if each != home and self._known.is_sure(view, each)]:
                late = {who for who, claim in self._plans[model].claims.items() if claim.code == "given_up"}
                self._homes[job_id] = model
                self._plan_part(model)
                if all(not _is_given_up(self._plans[model], who) or who in late for who in self._plans[model].claims):
                    self._plan_part(home)
                    self._in_danger.add(job_id)
                    break
                self._homes[job_id], self._plans = home, dict(before)
            else:
                self._stuck.append(job_id)

    # --- the whole ---------------------------------------------------------------------------------------------------

    def _merged(self, rejected: Mapping[WorkloadId, Refusal], fingerprint: str) -> Plan:
        snapshot, plans = self._snapshot, list(self._plans.values())
        together: dict[WorkloadId, Allocation] = {}
        for plan in plans:
            together.update(plan.allocations)
        order = [view.job.job_id for view in snapshot.jobs] + [view.service.service_id for view in snapshot.services]
        allocations = {who: together[who] for who in order if who in together}
        reasons = {who: why for plan in plans for who, why in plan.reasons.items()}
        # On devices of another model a job may be faster.
        claims = {who: replace(claim, is_certain=False) for plan in plans for who, claim in plan.claims.items()}
        movers = self._movers(allocations)
        self._in_danger &= movers.keys()
        for who in [who for who in movers if self._is_saved(who)]:
            end_s = self._plans[self._homes[who]].future[who][-1].end_s
            claims[who] = TimeClaim(code="kept_in_time", at_s=end_s)
        if movers:
            # Jobs that change places would wait for each other.
            stopped = jobs_to_stop_first(snapshot, allocations)
            allocations = {who: given for who, given in allocations.items() if who not in stopped}
            reasons |= movers
        reasons |= self._too_large(allocations)
        moments = [plan.revisit_at_s for plan in plans if plan.revisit_at_s is not None]
        moments += [] if self._until_s is None else [self._until_s]
        return Plan(
            allocations=allocations,
            admitted={who: at_s for plan in plans for who, at_s in plan.admitted.items()},
            rejected=rejected,
            future=ChainMap(*[plan.future for plan in plans]),  # type: ignore[arg-type]
            reasons=reasons,
            claims=claims,
            conditions={who: known for plan in plans for who, known in plan.conditions.items()},
            trades={who: trade for plan in plans for who, trade in plan.trades.items()},
            prices_s={model: plan.price_s for model, plan in self._plans.items() if plan.price_s is not None},
            revisit_at_s=min(moments, default=None),
            memory=self._written(fingerprint),
        )

    def _too_large(self, allocations: Mapping[WorkloadId, Allocation]) -> dict[WorkloadId, str]:
        """What is said of jobs that need more devices than there are of any model."""
        most = max(len(self._kept.cluster(self._snapshot.cluster, model).device_ids()) for model in self._models)
        return {
            view.job.job_id: f"waiting: it needs {view.bounds.min_workers} devices of one model, and there are {most}"
            for view in self._snapshot.jobs
            if view.bounds.min_workers > most and view.job.job_id not in allocations
        }

    def _movers(self, allocations: Mapping[WorkloadId, Allocation]) -> dict[WorkloadId, str]:
        """The jobs that hold devices of another model than the one they are planned on, and what is said of them."""
        found: dict[WorkloadId, str] = {}
        jobs = {view.job.job_id for view in self._snapshot.jobs} & allocations.keys()
        for model, held in self._held.items():
            for job_id in held:
                home = self._homes.get(job_id, model)
                if job_id in jobs and home != model:
                    gains = "it gains more there than the change costs"
                    why = "it is in time for its deadline there" if self._is_saved(job_id) else gains
                    found[job_id] = f"goes on on {home or 'other devices'}: {why}"
        return found

    def _is_saved(self, job_id: WorkloadId) -> bool:
        """Whether the job has changed its model since it would have been late, and is in time on the new one."""
        return job_id in self._in_danger and not _is_given_up(self._plans[self._homes[job_id]], job_id)

    def _written(self, fingerprint: str) -> dict[str, Any]:
        before = self._memory
        plans = {model: plan.memory for model, plan in self._plans.items()}
        homes = {str(who): home for who, home in self._homes.items()}
        speeds = before.get("speeds")
        if speeds is None or self._known is not self._kept.known(speeds):
            speeds = self._known.write()
            self._kept.keep(self._known, speeds)
        written = {
            "rule": RULE_OF_MODELS,
            "fingerprint": fingerprint,
            "until_s": self._until_s,
            "homes": homes,
            "stuck": self._stuck,
            "late": sorted(self._late()),
            "speeds": speeds,
            "plans": plans,
            **({"in_danger": sorted(self._in_danger)} if self._in_danger else {}),
        }
        is_same = before.keys() == written.keys() and all(plans[model] is before["plans"].get(model) for model in plans)
        if is_same and all(written[key] == before[key] for key in written if key not in ("speeds", "plans")):
            return self._snapshot.memory  # type: ignore[no-any-return]
        return written


def _is_given_up(plan: Plan, job_id: WorkloadId) -> bool:
    claim = plan.claims.get(job_id)
    return claim is not None and claim.code == "given_up"


def _of_model(node: Node, model: str) -> Node:
    devices = tuple(device for device in node.devices if device.accelerator == model)
    return node if len(devices) == len(node.devices) else replace(node, devices=devices)


def _least_capacity(snapshot: Snapshot, num_devices: int) -> tuple[Capacity, ...]:
    """What can be counted on of `num_devices` if all that is away at a moment is of their model."""
    num_others = len(snapshot.cluster.device_ids()) - num_devices
    return tuple(
        Capacity(from_s=step.from_s, num_devices=max(0, min(num_devices, step.num_devices - num_others)))
        for step in snapshot.capacity
    )
