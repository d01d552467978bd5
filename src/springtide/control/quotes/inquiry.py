"""Asks a policy what it would do with one more job: the policy itself decides, on a Snapshot that is then discarded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from springtide.control.parts import guaranteed_curve, job_in_devices
from springtide.control.quotes.budget import WithinBudget
from springtide.control.quotes.forecast import after_one_turn, roll_forward, while_changing
from springtide.core.decision import JobView, Plan, PlannedRun, Policy, Schedule, Snapshot
from springtide.core.job_parts import JobBounds
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool, Topology
from springtide.core.shares import Share
from springtide.core.workload import MAX_VIRTUAL_SHARDS, Goal, JobState, TrainingJob
from springtide.perf.curve import SpeedCurve
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.functions.policy import machines_only

Options = Mapping[str, float | int | None]


class InquiryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy would do now with the job in `view`, besides all other jobs.

    `view` counts workers of `devices_each` devices; `snapshot` and `plan` count devices.
    """

    view: JobView
    snapshot: Snapshot
    plan: Plan
    devices_each: int = 1

    @property
    def is_accepted(self) -> bool:
        """Whether the job would be accepted."""
        return self.view.job.job_id not in self.plan.rejected

    @property
    def is_promised(self) -> bool:
        """Whether its deadline would be guaranteed."""
        return self.view.job.job_id in self.plan.admitted

    @property
    def refusal(self) -> str:
        """The policy's reason for its refusal; empty for an accepted job."""
        refused = self.plan.rejected.get(self.view.job.job_id)
        return "" if refused is None else refused.reason


class Inquiry:
    """Asks one policy at one instant about a job and changed versions of it.

    Deterministic: the same question gets the same answer. Forecasts are expensive, so they are cached.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, usd_per_device_hour: float = 0.0) -> None:
        # Jobs on functions take no machine from other jobs.
        self.snapshot = machines_only(snapshot)
        self.policy = WithinBudget(policy, usd_per_device_hour)
        self._decisions = DecisionCache(self.policy)
        self.usd_per_device_hour = usd_per_device_hour
        self._on_larger: dict[int, tuple[Snapshot, Snapshot]] = {}
        self._forecasts: dict[tuple[Goal, int, int, int, int, Share | None], Schedule | None] = {}

    def ask(self, job: TrainingJob, num_devices: int | None = None) -> InquiryResult:
        """The policy's answer if the job were submitted now, or right after the cluster grew to `num_devices`."""
        if num_devices is None:
            return self._ask(job, self.snapshot)
        settled, changing = self._larger(num_devices)
        answer = self._ask(job, settled)
        if not answer.is_accepted:
            return answer
        # If the job is submitted right away, the other jobs are still moving to the new devices.
        submitted_now = self._ask(job, changing)
        return (
            answer if submitted_now.is_accepted and submitted_now.is_promised == answer.is_promised else submitted_now
        )

    def _ask(self, job: TrainingJob, before: Snapshot) -> InquiryResult:
        snapshot = replace(before, jobs=(*before.jobs, arriving(job_in_devices(job), before.now_s)))
        return InquiryResult(
            # Counted in workers it is a job like any other.
            view=arriving(job if job.devices_each == 1 else replace(job, devices_each=1), before.now_s),
            snapshot=snapshot,
            plan=self._decisions.decide(snapshot),
            devices_each=job.devices_each,
        )

    def _larger(self, num_devices: int) -> tuple[Snapshot, Snapshot]:
        """The snapshots after new devices joined and the policy gave them to the present workloads: once these hold
        them, and while they are still moving to them."""
        known = self._on_larger.get(num_devices)
        if known is None:
            joined = replace(self.snapshot, cluster=grown(self.snapshot.cluster, num_devices))
            known = (after_one_turn(joined, self.policy), while_changing(joined, self.policy))
            self._on_larger[num_devices] = known
        return known

    def schedule(self, answer: InquiryResult) -> Schedule | None:
        """The workers the accepted job would have until its end, from the plan or a forecast; None if not known."""
        job_id, each = answer.view.job.job_id, answer.devices_each
        # Without a known length and speed, a plan would be based on a guess.
        if not answer.is_accepted or known_curve(answer.view) is None:
            return None
        planned = answer.plan.future.get(job_id)
        if planned:
            return times(planned, 1, each)
        job, num_devices = answer.view.job, len(answer.snapshot.cluster.device_ids())
        key = (job.goal, job.num_epochs, job.max_workers, num_devices, each, job.share)
        if key not in self._forecasts:
            forecast = roll_forward(answer.snapshot, self.policy, until=job_id)
            has_end = job_id in forecast.finishes_s
            self._forecasts[key] = times(forecast.schedules.get(job_id, ()), 1, each) if has_end else None
        return self._forecasts[key]


def arriving(job: TrainingJob, now_s: float) -> JobView:
    """A job as the policy sees it when it is submitted."""
    return JobView(
        job=job,
        state=JobState.PENDING,
        submitted_at_s=now_s,
        total_steps=job.total_steps,
        global_batch_size=job.global_batch_size,
        total_equivalent_steps=None if job.total_steps is None else float(job.total_steps),
        bounds=JobBounds(min_workers=job.min_workers, max_workers=job.max_workers),
    )


def known_curve(view: JobView) -> SpeedCurve | None:
    """The job's guaranteed speed curve; None if its length or its speed is not known."""
    curve = guaranteed_curve(view)
    return None if view.total_steps is None or curve.source == "guess" or not curve.sizes else curve


def unbounded_curve(view: JobView) -> SpeedCurve | None:
    """The speed curve that the job would have without its owner's upper bound on workers."""
    if not view.job.elastic:
        return known_curve(view)
    job = replace(view.job, num_virtual_shards=MAX_VIRTUAL_SHARDS)
    return known_curve(replace(view, job=job, bounds=replace(view.bounds, max_workers=MAX_VIRTUAL_SHARDS)))


def slowed(job: TrainingJob, factor: float) -> TrainingJob:
    """The job with a profile that is slower by this factor."""
    return replace(job, profile_steps_per_s={n: rate / factor for n, rate in job.profile_steps_per_s.items()})


def changed_job(job: TrainingJob, options: Options, now_s: float) -> TrainingJob:
    """The job with some options of POST /v1/jobs changed, as a submission at `now_s` would make it.

    Knows deadline_s, budget_usd, num_epochs, min_workers, max_workers and share (None: whole devices). Fewer epochs
    shorten a known length in proportion.
    """
    goal = job.goal
    if "deadline_s" in options:
        deadline_s = options["deadline_s"]
        without = Goal(budget_usd=goal.budget_usd)
        goal = without if deadline_s is None else replace(goal, deadline_s=now_s + deadline_s)
    if "budget_usd" in options:
        goal = replace(goal, budget_usd=options["budget_usd"])
    changed = replace(job, goal=goal)
    if "share" in options:
        changed = replace(changed, share=None)
    if options.get("num_epochs"):
        num_epochs = int(options["num_epochs"] or 1)
        total = job.total_steps
        changed = replace(
            changed,
            num_epochs=num_epochs,
            total_steps=None if total is None else -(-total * num_epochs // job.num_epochs),
        )
    if options.get("max_workers"):
        least = int(options.get("min_workers") or job.min_workers)
        most = max(least, int(options["max_workers"] or 1))
        shards = max(4, 1 << (most - 1).bit_length())
        changed = replace(
            changed,
            max_workers=most,
            min_workers=least,
            num_virtual_shards=max(job.num_virtual_shards, shards),
        )
    return changed


def grown(cluster: Topology, num_devices: int) -> Topology:
    """The cluster with `num_devices` or more: with further nodes like its last one, or more devices in its only node.

    In a cluster with pools the new nodes belong to the training pool.
    """
    devices = cluster.device_ids()
    missing = num_devices - len(devices)
    if missing <= 0 or not cluster.nodes:
        return cluster
    last = cluster.nodes[-1]
    like = last.devices[0] if last.devices else Device(device_id=DeviceId(""), node_id=last.node_id, index=0)

    def device(node_id: NodeId, index: int) -> Device:
        return replace(like, device_id=DeviceId(f"{node_id}/{index}"), node_id=node_id, index=index, memory_mb=0)

    if len(cluster.nodes) == 1:
        more = tuple(device(last.node_id, len(devices) + index) for index in range(missing))
        return Topology(nodes=(replace(last, devices=(*last.devices, *more)),))
    size = len(last.devices)
    pool: Pool = "training" if cluster.has_pools else last.pool
    fresh = []
    for number in range(-(-missing // size)):
        node_id = NodeId(f"{last.node_id}-more-{number}")
        devices_here = tuple(device(node_id, index) for index in range(size))
        fresh.append(Node(node_id=node_id, devices=devices_here, pool=pool, home=pool))
    return Topology(nodes=(*cluster.nodes, *fresh))


def times(schedule: Schedule, factor: int, divisor: int = 1) -> Schedule:
    """The schedule with other counts: of devices for workers of several each, or the other way round."""
    if factor == divisor:
        return schedule
    return tuple(replace(run, num_devices=run.num_devices * factor // divisor) for run in schedule)


def longest_run(schedule: Schedule) -> int:
    """The number of workers that a schedule uses for the longest time; of equal ones the earlier."""
    times_s: dict[int, float] = {}
    for run in schedule:
        times_s[run.num_devices] = times_s.get(run.num_devices, 0.0) + run.end_s - run.start_s
    return max(times_s, key=lambda count: (count > 0, times_s[count]))


def from_now(schedule: Schedule, now_s: float) -> Schedule:
    """The runs of the schedule with devices, in seconds from `now_s`."""
    return tuple(
        PlannedRun(start_s=max(0.0, run.start_s - now_s), end_s=run.end_s - now_s, num_devices=run.num_devices)
        for run in schedule
        if run.num_devices
    )
