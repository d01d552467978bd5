"""A platform small enough to hold in mind: jobs with known speeds under one policy, from instant to instant.

At every decision it asks twice more, half-way through the plan and after it: a policy has to stand by what it decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kits.job_parts import with_fields
from springtide.control.controller import check_plan
from springtide.core.decision import JobView, Overheads, Plan, PoolAllocation, Snapshot
from springtide.core.job_parts import JobBounds, JobProgress
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob

SOURCE = Entrypoint(source_path="a.py")
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}


def make_view(
    name,
    *,
    at_s=0.0,
    steps=100,
    done=0,
    ask=1,
    most=8,
    least=1,
    deadline_s=None,
    profile: Mapping[int, float] = LINEAR,
    attained_s=0.0,
    started_at_s=None,
    state=JobState.PENDING,
    elastic=True,
) -> JobView:
    """A job of `steps` steps that asked for `ask` workers, one step a second on each unless its profile says else."""
    job = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=SOURCE,
        min_workers=least,
        max_workers=most,
        num_virtual_shards=64,
        total_steps=steps,
        profile_steps_per_s=dict(profile),
        requested_workers=ask,
        elastic=elastic,
        goal=Goal(deadline_s=deadline_s),
    )
    return JobView(
        job=job,
        state=state,
        submitted_at_s=at_s,
        total_steps=steps,
        service_offset_s=attained_s,
        started_at_s=started_at_s,
        bounds=JobBounds(min_workers=least, max_workers=most),
        progress=JobProgress(step=done, progress_at_s=at_s),
    )


def look(policy, views, *, slots=8, held=None, now_s=0.0, memory=None, overheads=None) -> Plan:
    """One decision about these jobs on one node. `held` maps names to the indices of the devices they hold."""
    snapshot = Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=tuple(views),
        allocations={
            name: PoolAllocation(device_ids=tuple(f"n/{index}" for index in indices), global_batch_size=32)
            for name, indices in (held or {}).items()
        },
        memory=memory,
        overheads=overheads or Overheads(),
    )
    plan = policy.decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def counts(plan: Plan) -> dict[str, int]:
    """How many devices each job gets."""
    return {name: allocation.num_devices for name, allocation in plan.allocations.items()}


class Run(msgspec.Struct):
    """What came of it: who held how many devices from when to when, when each job ended, how often one changed."""

    spans: list[tuple[str, float, float, int]] = []
    finished_at_s: dict[str, float] = {}
    num_changes: int = 0
    num_decisions: int = 0

    def seconds(self, name: str, from_s: float = 0.0, to_s: float = math.inf) -> float:
        """How long the job held devices within a stretch of time."""
        return sum(max(0.0, min(end, to_s) - max(start, from_s)) for who, start, end, _ in self.spans if who == name)

    def at(self, time_s: float) -> dict[str, int]:
        """Who held how many devices at a moment."""
        return {who: count for who, start, end, count in self.spans if start <= time_s < end}


def play(policy, views, *, slots=8, until_s=math.inf) -> Run:
    """Let the jobs run to their ends (or `until_s`) without overheads."""
    arrivals = sorted(views, key=lambda view: view.submitted_at_s)
    run, live, held, memory, now_s = Run(), {}, {}, None, 0.0
    while (arrivals or live) and now_s < until_s:
        while arrivals and arrivals[0].submitted_at_s <= now_s:
            view = arrivals.pop(0)
            live[view.job.job_id] = view
        plan = _stand_by(policy, _snapshot(live, held, slots, now_s, memory))
        run.num_decisions += 1
        memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
        wanted = {name: allocation.device_ids for name, allocation in plan.allocations.items()}
        run.num_changes += sum(name in held and held.get(name) != wanted.get(name) for name in live)
        for name in live:
            live[name] = _switch(live[name], len(wanted.get(name, ())), now_s)
        held = wanted
        ends = [now_s + _left_s(live[name], len(devices)) for name, devices in held.items()]
        moments = [
            *ends,
            *(view.submitted_at_s for view in arrivals[:1]),
            *([plan.revisit_at_s] * bool(plan.revisit_at_s)),
        ]
        assert moments, f"nothing will ever happen to {sorted(live)}"
        next_s = min(min(moments), until_s)
        for name, devices in held.items():
            run.spans.append((name, now_s, next_s, len(devices)))
            done = _left_s(live[name], len(devices)) <= next_s - now_s + 1e-9
            live[name] = _progress(live[name], len(devices), now_s, next_s)
            if done:
                run.finished_at_s[name] = next_s
        now_s = next_s
        for name in [name for name in live if name in run.finished_at_s]:
            live.pop(name)
            held.pop(name)
    return run


def _snapshot(live, held, slots, now_s, memory) -> Snapshot:
    return Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=tuple(live.values()),
        allocations={name: PoolAllocation(device_ids=devices, global_batch_size=32) for name, devices in held.items()},
        memory=memory,
    )


def _stand_by(policy, snapshot: Snapshot) -> Plan:
    plan = policy.decide(snapshot)
    check_plan(snapshot, plan)
    wanted = {name: allocation.device_ids for name, allocation in plan.allocations.items()}
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    released = {
        name: held.__class__(device_ids=kept, global_batch_size=32)
        for name, held in snapshot.allocations.items()
        if (kept := tuple(device for device in held.device_ids if device in wanted.get(name, ())))
    }
    for allocations in (released, plan.allocations):
        views = tuple(
            _switch(
                view,
                len(allocations[view.job.job_id].device_ids) if view.job.job_id in allocations else 0,
                snapshot.now_s,
            )
            for view in snapshot.jobs
        )
        later = msgspec.structs.replace(snapshot, jobs=views, allocations=allocations, memory=memory)
        again = policy.decide(later)
        assert {name: a.device_ids for name, a in again.allocations.items()} == wanted, "it does not stand by its plan"
        assert again.revisit_at_s == plan.revisit_at_s
    return plan


def _switch(view: JobView, count: int, now_s: float) -> JobView:
    """The view of a job that holds `count` devices from now on."""
    return with_fields(
        view,
        state=JobState.RUNNING if count else JobState.PENDING,
        service_offset_s=view.attained_service_s(now_s) - count * now_s,
        num_replicas=count,
        started_at_s=now_s if count and view.started_at_s is None else view.started_at_s,
        progress_at_s=now_s,
    )


def _rate(view: JobView, count: int) -> float:
    profile = view.job.profile_steps_per_s
    return profile.get(count, 0.0) or profile[max(n for n in profile if n <= count)]


def _left_s(view: JobView, count: int) -> float:
    return (view.total_steps - view.progress.step) / _rate(view, count)


def _progress(view: JobView, count: int, from_s: float, to_s: float) -> JobView:
    # Steps are kept as fractions here, so that nothing is lost at a switch.
    step = view.progress.step + _rate(view, count) * (to_s - from_s)
    return with_fields(view, step=step, progress_at_s=to_s)
