"""What the tests of the quote share: a small policy that promises, jobs with profiles, and random platforms."""

from __future__ import annotations

import numpy as np

from springtide.control.controller import Controller
from springtide.control.quotes.inquiry import known_curve
from springtide.core.decision import Plan, PlannedRun, PoolAllocation, Refusal
from springtide.core.events import JobResized, JobSubmitted, NodeJoined, ProgressReported, ReplicaReady, ReplicaStopped
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.perf.curve import interpolate

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


class Reserving:
    """A tiny policy with admission: a promised job keeps the fewest devices that make its deadline from its arrival.

    Others get one device each of what is left. A job that cannot be promised is refused at once, or waits.
    """

    def decide(self, snapshot):
        promised = {
            view.job.job_id: snapshot.memory[view.job.job_id]
            for view in snapshot.jobs
            if view.job.job_id in (snapshot.memory or {})
        }
        total = len(snapshot.cluster.device_ids())
        rejected, admitted, future = {}, {}, {}
        for view in snapshot.jobs:
            job_id, left = view.job.job_id, total - sum(promised.values())
            if job_id in promised or not view.job.goal.is_hard or known_curve(view) is None:
                continue
            run = _fewest(view, snapshot, left)
            if run is None and view.job.goal.waits:
                continue
            if run is None:
                rejected[job_id] = Refusal(reason=f"only {left} devices are not promised to others")
            else:
                promised[job_id], admitted[job_id], future[job_id] = run.num_devices, run.end_s, (run,)
        counts = dict(promised)
        for view in snapshot.jobs:
            is_in_line = view.job.goal.waits or view.job.job_id in rejected
            if view.job.job_id not in counts and not is_in_line and sum(counts.values()) < total:
                counts[view.job.job_id] = 1
        return Plan(
            allocations=_placed(counts, snapshot),
            admitted=admitted,
            rejected=rejected,
            future=future,
            memory=promised,
        )


def _fewest(view, snapshot, left):
    """The fewest devices on which it ends in time, as a planned run; None if that takes more than are left."""
    curve = known_curve(view)
    for n in curve.sizes:
        end_s = snapshot.now_s + snapshot.overheads.cost_s(n) + view.total_steps / curve.rate(n)
        if end_s <= view.job.goal.deadline_s:
            return PlannedRun(start_s=snapshot.now_s, end_s=end_s, num_devices=n) if n <= left else None
    return None


def _placed(counts, snapshot):
    """Everyone keeps what they hold as far as it goes; what is missing comes from what nobody keeps."""
    held = {
        job_id: list(snapshot.allocations[job_id].device_ids) for job_id in counts if job_id in snapshot.allocations
    }
    kept = {job_id: held.get(job_id, [])[:count] for job_id, count in counts.items()}
    taken = {device for devices in kept.values() for device in devices}
    room = [device for device in snapshot.cluster.device_ids() if device not in taken]
    for job_id, count in counts.items():
        missing = count - len(kept[job_id])
        kept[job_id] += room[:missing]
        room = room[missing:]
    return {job_id: PoolAllocation(device_ids=tuple(devices)) for job_id, devices in kept.items()}


def training_job(job_id="new", *, minutes=10.0, deadline_s=None, now_s=0.0, most=8, epochs=10, fraction=0.9, **options):
    """A job that takes so many minutes on one worker; Amdahl's law with that parallel fraction."""
    steps = options.pop("total_steps", 600)
    rate = (steps or 600) / (minutes * 60.0)
    profile = {n: rate / (1 - fraction + fraction / n) for n in (1, 2, 4, 8, 16, 32)}
    goal = options.pop("goal", None) or Goal(deadline_s=None if deadline_s is None else now_s + deadline_s)
    return TrainingJob(
        **{
            "job_id": job_id,
            "name": job_id,
            "entrypoint": SOURCE,
            "max_workers": most,
            "num_virtual_shards": max(4, 1 << (most - 1).bit_length()),
            "num_epochs": epochs,
            "total_steps": steps,
            "profile_steps_per_s": profile,
            "goal": goal,
            "global_batch_size": 64,
            **options,
        }
    )


def platform(policy, *jobs, devices=8, nodes=1, now_s=0.0, overheads=None):
    """A real controller that has taken these jobs in, in order."""
    controller = Controller(policy, overheads=overheads)
    for index in range(nodes):
        controller.step(now_s, [NodeJoined(node=make_node(f"node-{index}", devices // nodes))])
    for job in jobs:
        controller.step(now_s, [JobSubmitted(job=job)])
    return controller


def obey(controller, now_s):
    """Let every replica do at once what it was asked, until nobody is asked for anything more."""
    for _ in range(20):
        told = []
        for record in controller.state.jobs.values():
            job_id, by_id = record.workload_id, {r.replica_id: r for r in record.replicas}
            told += [ReplicaReady(workload_id=job_id, replica_id=r) for r in by_id if by_id[r].state == "STARTING"]
            told += [ReplicaStopped(workload_id=job_id, replica_id=r) for r in by_id if by_id[r].state == "STOPPING"]
            if record.group.members and not record.group.is_confirmed:
                told.append(
                    JobResized(
                        job_id=job_id,
                        generation=record.group.generation,
                        world_size=record.world_size,
                        step=record.progress.step,
                        pause_s=0.0,
                        direction="grow",
                    )
                )
        if not told:
            return
        controller.step(now_s, told)


def pass_time(controller, from_s, to_s, rng):
    """Every running job trains up to `to_s` at its profiled speed, give or take what `rng` says, and reports it."""
    obey(controller, from_s)
    told = []
    for record in controller.state.jobs.values():
        job = record.job
        error = float(np.exp(rng.normal(0.0, 0.03)))
        if record.state != "RUNNING" or not record.group.members or record.lifecycle.outcome is not None:
            continue
        rate = interpolate(job.profile_steps_per_s, 64)[record.world_size] * error
        step = min(job.total_steps - 1, record.progress.step + int(rate * (to_s - from_s)))
        told.append(
            ProgressReported(
                job_id=job.job_id,
                generation=record.group.generation,
                step=step,
                total_steps=job.total_steps,
                world_size=record.world_size,
                samples_per_s=rate * job.global_batch_size,
            )
        )
    controller.step(to_s, told)
    obey(controller, to_s)


def verdict_of(controller, job, now_s):
    """What a submission really meets."""
    controller.step(now_s, [JobSubmitted(job=job)])
    return "refused" if controller.state.jobs[job.job_id].state == "REJECTED" else "accepted"


def random_case(rng):
    """A platform's load and a job that often cannot be promised its deadline."""
    devices = int(rng.choice([4, 8, 16, 32]))
    nodes = int(rng.choice([1, 2])) if devices > 4 else 1
    jobs = []
    for index in range(int(rng.integers(0, 10))):
        minutes = float(np.exp(rng.uniform(np.log(2), np.log(200))))
        tight = float(rng.uniform(0.2, 2.0))
        deadline_s = None if rng.random() < 0.3 else minutes * 60 * tight
        jobs.append(
            training_job(
                f"old-{index}",
                minutes=minutes,
                deadline_s=deadline_s,
                most=int(rng.choice([1, 2, 4, 8, 16])),
                fraction=float(rng.uniform(0.5, 0.99)),
                total_steps=int(rng.integers(50, 5000)),
            )
        )
    minutes = float(np.exp(rng.uniform(np.log(2), np.log(200))))
    new = training_job(
        "new",
        minutes=minutes,
        deadline_s=minutes * 60 * float(rng.uniform(0.05, 0.8)),
        most=int(rng.choice([2, devices])),
        fraction=float(rng.uniform(0.5, 0.99)),
        epochs=int(rng.integers(1, 20)),
        total_steps=int(rng.integers(50, 5000)),
    )
    return devices, nodes, jobs, new
