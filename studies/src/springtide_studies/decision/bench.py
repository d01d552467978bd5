"""`springtide bench decision`: how long a policy takes to decide at one event, as the cluster and its jobs grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
import numpy as np

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.control.controller import Controller
from springtide.core.actions import EndJob
from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.events import JobSubmitted, ProgressReported
from springtide.core.resources import Node, make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.registry import make_policy
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.simulator.fluid.rules import Speeds, overhead_rule
from springtide_studies.decision.goodput import GoodputCrowd, is_goodput_policy, rows_of
from springtide_studies.options import names_of, policies_option, seed_option, sizes_of, sizes_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

DEVICES_PER_NODE = 8
SIZES: tuple[int, ...] = (64, 512, 1024, 2048, 4096, 8192)
# At the largest size 2,000 jobs live; smaller clusters have as many for each device.
DEVICES_PER_JOB = 8192 / 2000
BOUND_MS = 100.0
_MOST_DEVICES = 1 << 20
NUM_EVENTS = 500
OURS, OTHERS = "springtide", ("elasticflow", "edf")
# The warm state comes about in this many batches, a second apart.
_NUM_BATCHES = 40
_PAUSE_S = 1.0
# It is warm once this share of the crowd lives (some of the first are turned away), at the latest after so many
# arrivals and endings for each job.
_FULL_FRACTION = 0.98
_MOST_WARM_UPS = 1.5
# Most jobs ask for a single device, few for many: the shares in the published traces of ElasticFlow, rounded.
_REQUESTED = (1, 2, 4, 8, 16, 32)
_SHARES = (0.50, 0.20, 0.15, 0.12, 0.02, 0.01)
_BEST_EFFORT_FRACTION = 0.1


class DecisionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy took on one size. An instant is a moment at which a job arrived or ended, or a plan changed;
    its time is the sum over every decision of that moment, echoes included. `turn` is that of the whole control loop.
    `quiet` are the moments at which a policy only looked. Milliseconds of CPU.
    """

    policy: str
    num_devices: int
    num_jobs_mean: float
    num_instants: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    turn_p99_ms: float
    quiet_p50_ms: float | None
    quiet_max_ms: float | None
    warm_up_s: float


class _Timed:
    """Sums the time that the policy takes to decide."""

    def __init__(self, policy: Policy, timer: Callable[[], float]) -> None:
        self._decisions = DecisionCache(policy)
        self._timer = timer
        self.spent_s = 0.0

    def decide(self, snapshot: Snapshot) -> Plan:
        began_s = self._timer()
        plan = self._decisions.decide(snapshot)
        self.spent_s += self._timer() - began_s
        return plan


def draw_jobs(rng: np.random.Generator) -> Iterator[tuple[TrainingJob, float]]:
    """Jobs without end, each with its length on what it asks for (s); deadlines are relative to submission.

    Speeds: the first device drawn log-uniformly from 0.5 to 50 steps/s, n devices n^a times that with a drawn from
    0.6 to 0.95, up to a drawn peak past which every doubling loses a tenth. Lengths are log-uniform from 10 min to
    24 h, deadlines 0.5 to 1.5 times the length (ElasticFlow, section 6.1); a tenth is best effort.
    """
    index = 0
    while True:
        single = float(np.exp(rng.uniform(np.log(0.5), np.log(50.0))))
        power, peak = float(rng.uniform(0.6, 0.95)), int(2 ** rng.integers(2, 7))
        profile = {
            n: single * min(n, peak) ** power * 0.9 ** max(0.0, float(np.log2(n / peak)))
            for n in (1, 2, 4, 8, 16, 32, 64)
        }
        requested = min(int(rng.choice(_REQUESTED, p=_SHARES)), peak)
        length_s = float(np.exp(rng.uniform(np.log(600.0), np.log(86400.0))))
        slack = float(rng.uniform(0.5, 1.5))
        is_best_effort = bool(rng.random() < _BEST_EFFORT_FRACTION)
        yield (
            TrainingJob(
                job_id=WorkloadId(f"job-{index:06d}"),
                name=f"job-{index:06d}",
                entrypoint=Entrypoint(source_path="", object_name="train"),
                max_workers=64,
                num_virtual_shards=64,
                goal=Goal(deadline_s=None if is_best_effort else slack * length_s),
                total_steps=max(1, round(length_s * profile[requested])),
                profile_steps_per_s=profile,
                requested_workers=requested,
            ),
            length_s,
        )
        index += 1


class _Crowd:
    """Keeps a number of jobs alive: a second after one ends, another arrives."""

    def __init__(self, num_jobs: int, seed: int) -> None:
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, num_jobs]))
        self._drawn = draw_jobs(self._rng)
        self.num_jobs = num_jobs
        self.due_s: float | None = None

    def warm(self) -> list[tuple[float, TrainingJob]]:
        """The first jobs, each with a random part of its work behind it, in batches a second apart."""
        return [
            (float(index * _NUM_BATCHES // self.num_jobs), self._job(0.0, float(self._rng.uniform(0.05, 1.0))))
            for index in range(self.num_jobs)
        ]

    def next(self, now_s: float) -> TrainingJob:
        """One that arrives now."""
        self.due_s = None
        return self._job(now_s, 1.0)

    def _job(self, now_s: float, left: float) -> TrainingJob:
        job, _ = next(self._drawn)
        deadline_s = None if job.goal.deadline_s is None else now_s + job.goal.deadline_s * left
        steps = max(1, round((job.total_steps or 1) * left))
        return msgspec.structs.replace(job, goal=Goal(deadline_s=deadline_s), total_steps=steps)


class _Platform:
    """The real Controller over an executor without processes, timed turn by turn."""

    def __init__(self, policy: str, num_devices: int, crowd: _Crowd | GoodputCrowd, timer: Callable[[], float]) -> None:
        rule = overhead_rule("elasticflow", num_devices)
        nodes: Sequence[Node] = [
            make_node(f"node-{index}", DEVICES_PER_NODE) for index in range(num_devices // DEVICES_PER_NODE)
        ]
        speeds: Speeds | None = None
        if isinstance(crowd, GoodputCrowd):
            nodes, speeds = crowd.nodes, crowd.speeds
        self._timer = timer
        self._timed = _Timed(make_policy(policy), timer)
        self._crowd = crowd
        self._clock = VirtualClock()
        self._controller = Controller(self._timed, overheads=rule.announced)
        warm = crowd.warm()
        self._executor = FluidExecutor(
            self._clock, nodes, warm, rule=rule, speeds=speeds, reports_progress=speeds is not None
        )
        self.num_live = 0
        self.num_events = 0
        self.now_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen any more."""
        return self._executor.is_over

    def turn(self) -> tuple[float, float, bool]:
        """One turn of the loop: seconds of deciding, seconds of the whole turn, and whether anything changed."""
        crowd, executor = self._crowd, self._executor
        moments_s = [at_s for at_s in (self._controller.wakeup_at_s, crowd.due_s) if at_s is not None]
        events = list(executor.wait(min(moments_s, default=None)))
        self.now_s = self._clock.now_s()
        if crowd.due_s is not None and self.now_s >= crowd.due_s:
            job = crowd.next(self.now_s)
            executor.add_job(job)
            events.append(JobSubmitted(job=job))
        before_s, began_s = self._timed.spent_s, self._timer()
        step = self._controller.step(self.now_s, events)
        turn_s, decide_s = self._timer() - began_s, self._timed.spent_s - before_s
        executor.acknowledge(events)
        for action in step.actions:
            executor.start(action)
        num_arrived = sum(1 for event in events if isinstance(event, JobSubmitted))
        num_ended = sum(1 for action in step.actions if isinstance(action, EndJob))
        self.num_live += num_arrived - num_ended
        self.num_events += num_arrived + num_ended
        if self.now_s >= _NUM_BATCHES and self.num_live < crowd.num_jobs and crowd.due_s is None:
            crowd.due_s = self.now_s + _PAUSE_S
        # Turns that only take in progress reports are not counted.
        is_news = bool(step.actions) or any(not isinstance(event, ProgressReported) for event in events)
        return decide_s, turn_s, is_news


def measure(
    policy: str, num_devices: int, *, seed: int, timer: Callable[[], float], num_events: int = NUM_EVENTS
) -> DecisionTimes:
    """Warm a cluster of `num_devices` up and time the policy over `num_events` further arrivals and endings.

    `timer` counts seconds, best of CPU: what else runs on the machine is then no part of the answer.
    """
    crowd: _Crowd | GoodputCrowd = (
        GoodputCrowd(num_devices, seed)
        if is_goodput_policy(policy)
        else _Crowd(max(1, round(num_devices / DEVICES_PER_JOB)), seed)
    )
    platform = _Platform(policy, num_devices, crowd, timer)
    began_s = timer()
    while not platform.is_over and platform.num_events < _MOST_WARM_UPS * crowd.num_jobs:
        if platform.now_s > _NUM_BATCHES + _PAUSE_S and platform.num_live >= _FULL_FRACTION * crowd.num_jobs:
            break
        platform.turn()
    warm_up_s, warm_events = timer() - began_s, platform.num_events
    spent: list[tuple[float, float, int]] = []
    quiet_s: list[float] = []
    at_s, decided_s, turned_s, is_news = platform.now_s, 0.0, 0.0, False
    while platform.num_events - warm_events < num_events and not platform.is_over:
        num_live = platform.num_live
        decide_s, turn_s, is_change = platform.turn()
        if platform.now_s > at_s:
            # The instant is over: the times of all its turns add up to one sample.
            if is_news:
                spent.append((decided_s * 1000.0, turned_s * 1000.0, num_live))
            elif turned_s:
                quiet_s.append(decided_s)
            at_s, decided_s, turned_s, is_news = platform.now_s, 0.0, 0.0, False
        decided_s, turned_s, is_news = decided_s + decide_s, turned_s + turn_s, is_news or is_change
    decided_ms, turned_ms, live = np.array(spent or [(0.0, 0.0, 0)]).T
    return DecisionTimes(
        policy=policy,
        num_devices=num_devices,
        num_jobs_mean=float(live.mean()),
        num_instants=len(spent),
        p50_ms=float(np.percentile(decided_ms, 50)),
        p90_ms=float(np.percentile(decided_ms, 90)),
        p99_ms=float(np.percentile(decided_ms, 99)),
        max_ms=float(decided_ms.max()),
        turn_p99_ms=float(np.percentile(turned_ms, 99)),
        quiet_p50_ms=float(np.percentile(quiet_s, 50)) * 1000.0 if quiet_s else None,
        quiet_max_ms=max(quiet_s) * 1000.0 if quiet_s else None,
        warm_up_s=warm_up_s,
    )


def run_bench(
    policies: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    num_events: int = NUM_EVENTS,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every policy on every size and return the report of `springtide bench`.

    Each row sets the first policy beside another one; `bound` stands where the aim stands, at the largest size.
    `tell` is given a line after each measurement. Raises InvalidRequest for a policy that is not known.
    """
    names = tuple(policies or (OURS, *OTHERS))
    for name in names:
        make_policy(name)
    load_before = machine_load()
    measured: dict[tuple[str, int], DecisionTimes] = {}
    for num_devices in sizes:
        for name in names:
            found = measured[name, num_devices] = measure(
                name, num_devices, seed=seed, timer=timer, num_events=num_events
            )
            tell(
                f"{name} on {num_devices} devices, {found.num_jobs_mean:.0f} jobs: p50 {found.p50_ms:.2f} ms, "
                f"p99 {found.p99_ms:.2f} ms, max {found.max_ms:.2f} ms over {found.num_instants} instants"
            )
    by_goodput = [name for name in names if is_goodput_policy(name)]
    ours, *others = [name for name in names if name not in by_goodput] or [""]
    rows: list[dict[str, Any]] = [
        {
            "case": f"{num_devices} devices, {measured[ours, num_devices].num_jobs_mean:.0f} jobs: {ours} p99",
            "ours": measured[ours, num_devices].p99_ms,
            "baseline": measured[other, num_devices].p99_ms,
            "baseline_name": f"{other} p99",
            "ratio": ratio(measured[ours, num_devices].p99_ms, measured[other, num_devices].p99_ms),
            "bound": BOUND_MS if num_devices == max(SIZES) else None,
            "unit": "ms CPU",
        }
        for num_devices in sizes
        for other in others or (ours,)
        if ours
    ]
    for name in by_goodput:
        rows += rows_of(name, {size: msgspec.to_builtins(measured[name, size]) for size in sizes})
    largest = [measured[ours, num_devices] for num_devices in sizes if ours and num_devices == max(SIZES)]
    return {
        "bench": "decision",
        "machine": machine_facts(load_before) | {"seed": seed, "events": num_events},
        "rows": rows,
        "criterion": (
            f"{ours} decides within {BOUND_MS:.0f} ms of CPU at p99 on {max(SIZES):,} devices with about "
            f"{max(SIZES) / DEVICES_PER_JOB:,.0f} jobs"
            if ours
            else "goodput jobs: p90 within 50 ms of CPU on 128 devices, p99 within 1 s on 8,192"
        ),
        "passed": bool(largest or by_goodput)
        and all(found.p99_ms <= BOUND_MS for found in largest)
        and all(row["bound"] is None or row["ours"] <= row["bound"] for row in rows if "goodput jobs" in row["case"]),
        "table": [msgspec.to_builtins(found) for found in measured.values()],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The growth table of a report, for a page of results."""
    header = ("policy", "devices", "jobs", "instants", "p50 ms", "p90 ms", "p99 ms", "max ms", "turn p99 ms")
    rows = sorted(report["table"], key=lambda row: (row["policy"] != OURS, row["policy"], row["num_devices"]))
    return markdown_table(
        header,
        [
            (
                row["policy"],
                f"{row['num_devices']:,}",
                f"{row['num_jobs_mean']:,.0f}",
                str(row["num_instants"]),
                *(f"{row[key]:.3g}" for key in ("p50_ms", "p90_ms", "p99_ms", "max_ms", "turn_p99_ms")),
            )
            for row in rows
        ],
    )


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    example = f"multiples of {DEVICES_PER_NODE}, as 64,512"
    sizes = sizes_of(options["sizes"], DEVICES_PER_NODE, _MOST_DEVICES, "devices", example, DEVICES_PER_NODE)
    return run_bench(
        names_of(options["policies"]) or None,
        sizes=sizes or SIZES,
        seed=options["seed"],
        num_events=options["events"],
        timer=time.process_time,
        tell=tell,
    )


BENCH = Bench(
    run=_run,
    options=[
        policies_option(),
        sizes_option("devices"),
        click.Option(
            ["--events"],
            type=click.IntRange(min=1),
            default=NUM_EVENTS,
            help=f"So many arrivals and endings. [default: {NUM_EVENTS}]",
        ),
        seed_option(),
    ],
    markdown=markdown,
)
