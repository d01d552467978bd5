"""Whole runs beside services: every strategy of loans over drawn platforms, and what only the whole run shows.

Each step is watched by the executor's invariants (right-pool, cordon, one-label, drain-ends, device-once and the rest).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.simulation.sweeps import part
from springtide.core.decision import Overheads, Plan, Policy, PoolAllocation, Relabel, Snapshot
from springtide.core.events import Event, ScaleRequested, ServiceDeployed
from springtide.core.ports import Step
from springtide.core.resources import Node, make_node
from springtide.core.tide import Tide
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.simulator.fluid.play import FluidRunResult, NullJournal, play
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds, Times
from springtide_studies.loans.minimums import Minimums, minimums_for
from springtide_studies.workloads.tidal import TidalSetting, draw_tidal

SOURCE = Entrypoint(source_path="main.py", object_name="main")
POLICIES = ("dedicated/fifo", "one-way/fifo", "two-way/fifo", "two-way/elasticflow", "tide/fifo", "tide/springtide")
# A day of four minutes: a quarter of an hour of it is two and a half seconds.
DAY_S = 2400.0
TIMES = Times(service_start_s=3.0, service_stop_s=1.0, preempt_s=2.0)


class Case(msgspec.Struct, frozen=True):
    """One drawn platform: servers of two devices each, so many of them inference's, jobs and the tide's seed."""

    num_training: int
    num_inference: int
    jobs: tuple[tuple[float, TrainingJob], ...]
    seed: int
    surges_per_day: float = 0.0
    preempt_s: float = 2.0

    def nodes(self) -> list[Node]:
        return [
            make_node(f"n{index}", 2, pool="training" if index < self.num_training else "inference")
            for index in range(self.num_training + self.num_inference)
        ]

    def timed_events(self) -> tuple[tuple[float, Event], ...]:
        setting = TidalSetting(
            num_servers=self.num_inference,
            devices_per_server=2,
            num_functions=4,
            days=2,
            day_s=DAY_S,
            surges_per_day=self.surges_per_day,
        )
        return draw_tidal(self.seed, setting).timed_events


def job(index: int, num_workers: int, seconds: int, *, elastic: bool) -> TrainingJob:
    return TrainingJob(
        job_id=WorkloadId(f"job-{index}"),
        name=f"job-{index}",
        entrypoint=SOURCE,
        min_workers=1 if elastic else num_workers,
        max_workers=num_workers,
        elastic=elastic,
        requested_workers=num_workers,
        total_steps=seconds * num_workers,
        profile_steps_per_s={count: float(count) for count in (1, 2, 4, 8)},
        checkpoint_interval_s=30.0,
        max_restarts=1_000_000,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A handful of jobs, rigid or elastic, over two short days."""
    num_training, num_inference = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    arrivals, now_s = [], 0.0
    for index in range(draw(st.integers(1, 8))):
        now_s += draw(st.sampled_from((0.0, 30.0, 300.0, 700.0)))
        most = 2 * num_training
        workers = draw(st.sampled_from([count for count in (1, 2, 4) if count <= most]))
        arrivals.append((now_s, job(index, workers, draw(st.integers(5, 900)), elastic=draw(st.booleans()))))
    return Case(
        num_training=num_training,
        num_inference=num_inference,
        jobs=tuple(arrivals),
        seed=draw(st.integers(0, 50)),
        surges_per_day=draw(st.sampled_from((0.0, 3.0))),
        preempt_s=draw(st.sampled_from((0.0, 2.0, 40.0))),
    )


class Story(NullJournal):
    """The steps of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def append(self, step: Step) -> int:
        self.steps.append(step)
        return super().append(step)


def run(
    policy: str | Policy, case: Case, *, story: Story | None = None, **options: object
) -> tuple[FluidRunResult, Minimums]:
    times = replace(TIMES, preempt_s=case.preempt_s)
    minimums = minimums_for(case.jobs, times)
    played = play(
        make_policy(policy) if isinstance(policy, str) else policy,
        case.jobs,
        case.nodes(),
        rule=OverheadRule(name="test", pause=Overheads(change_s=2.0)),
        speeds=ProfiledSpeeds(devices_per_node=2, feels_placement=False),
        timed_events=options.pop("timed_events", case.timed_events()),
        times=times,
        keeps_promises=False,
        until_s=2 * DAY_S,
        tide=Tide(day_s=DAY_S),
        journal=story,
        watcher=minimums,
        **options,
    )
    return played, minimums


def check(policy: str, case: Case) -> None:
    played, minimums = run(policy, case)
    assert all(run_of_job.state is JobState.SUCCEEDED for run_of_job in played.runs.values())
    for run_of_job in played.runs.values():
        assert run_of_job.done_steps == pytest.approx(run_of_job.total_steps)
    assert minimums.num_demanded > 0
    assert minimums.num_broken == 0, minimums.broken
    occupied = zip(played.timeline.devices, played.timeline.serving, strict=True)
    most = 2 * (case.num_training + case.num_inference)
    assert max(jobs + services for jobs, services in occupied) <= most
    for reclaim in minimums.reclaims:
        assert reclaim.labelled_s is None or reclaim.labelled_s - reclaim.drained_s <= 15.0 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(case=cases())
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # A policy that turns in place takes long to be caught: it is not made smaller a hundred times.
    phases=[Phase.explicit, Phase.generate],
)
def test_every_strategy_keeps_every_minimum_and_ends_every_job(policy: str, case: Case) -> None:
    check(policy, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
@given(case=cases())
@settings(max_examples=part(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_strategy_keeps_every_minimum_and_ends_every_job_for_long(policy: str, case: Case) -> None:
    check(policy, case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["two-way/fifo", "tide/springtide"])
def test_no_minimum_is_broken_in_two_hundred_seeds(policy: str) -> None:
    for seed in range(part(200)):
        check(policy, replace(BUSY, seed=seed, surges_per_day=3.0 * (seed % 2)))


BUSY = Case(
    num_training=2,
    num_inference=3,
    jobs=tuple((150.0 * number, job(number, 4, 500, elastic=number % 2 == 0)) for number in range(12)),
    seed=3,
)


def test_loans_are_made_taken_back_and_paid_for() -> None:
    alone, kept = run("dedicated/fifo", BUSY)
    lent, loaned = run("two-way/fifo", BUSY)
    assert kept.loans.num_loans == 0
    assert loaned.loans.num_loans > 0
    means = [
        sum(one.ended_s - one.submitted_s for one in played.runs.values()) / len(BUSY.jobs) for played in (alone, lent)
    ]
    assert means[1] < means[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["two-way/fifo", "tide/springtide"])
def test_the_same_case_gives_the_same_journal(policy: str) -> None:
    stories = Story(), Story()
    for story in stories:
        run(policy, BUSY, story=story)
    assert stories[0].steps == stories[1].steps
    assert len(stories[0].steps) > 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["two-way/fifo", "tide/springtide"])
def test_minimums_hold_when_nodes_fail_as_long_as_there_are_devices(policy: str) -> None:
    names = [node.node_id for node in BUSY.nodes()]
    num_faults = 0
    for seed in range(2):
        # Several a day, on five nodes.
        played, minimums = run(policy, BUSY, faults=NodeFaults(names, seed=seed, mtbf_hours=1.0, repair_hours=0.05))
        assert minimums.num_demanded > 0
        assert minimums.num_broken == 0, (seed, minimums.broken)
        num_faults += played.num_faults
    assert num_faults > 3


def test_the_run_goes_on_to_its_horizon_and_services_may_stay() -> None:
    played, _ = run("dedicated/fifo", replace(BUSY, jobs=()))
    jobs_s, services_s = played.timeline.occupied_s(2 * DAY_S)
    assert jobs_s == 0.0
    assert services_s > 0.0
    assert played.timeline.serving[-1] > 0


# --- policies that do it wrong ----------------------------------------------------------------------------------------


class Wrong:
    """A strategy over FIFO that spoils its plans in one way."""

    def __init__(self, fault: str) -> None:
        self._policy = make_policy("two-way/fifo")
        self._fault = fault

    def decide(self, snapshot: Snapshot) -> Plan:
        plan = self._policy.decide(snapshot)
        services = [view.service.service_id for view in snapshot.services]
        if self._fault == "stingy":
            # It gives services nothing at all.
            return replace(plan, allocations={k: v for k, v in plan.allocations.items() if k not in services})
        if self._fault == "forgetful":
            # It gives one replica less than the minimum.
            return replace(
                plan,
                allocations={
                    k: PoolAllocation(device_ids=v.device_ids[:-1]) if k in services else v
                    for k, v in plan.allocations.items()
                },
            )
        # It has every server of training drained for services, and never lets anybody go.
        pools = {n.node_id: Relabel(pool="inference") for n in snapshot.cluster.nodes if n.pool == "training"}
        held = {view.job.job_id: snapshot.allocations.get(view.job.job_id) for view in snapshot.jobs}
        kept = {job_id: given for job_id, given in held.items() if given is not None}
        return replace(plan, pools=pools, allocations={**plan.allocations, **kept})


@pytest.mark.parametrize("fault", ["stingy", "forgetful"])
def test_broken_minimums_are_found(fault: str) -> None:
    _, minimums = run(Wrong(fault), BUSY)
    assert minimums.num_broken > 0


def test_a_minimum_that_is_raised_under_load_is_reclaimed_for_in_time() -> None:
    """A function that needs little asks for all that inference owns while jobs sit there."""
    service = InferenceService(service_id=WorkloadId("s"), name="s", entrypoint=SOURCE, min_replicas=1, max_replicas=1)
    raised: Sequence[tuple[float, Event]] = [
        (0.0, ServiceDeployed(service=service)),
        (1000.0, ScaleRequested(workload_id=service.service_id, minimum=6, maximum=6)),
    ]
    for policy in ("one-way/fifo", "two-way/fifo", "tide/fifo"):
        _, minimums = run(policy, BUSY, timed_events=raised)
        assert minimums.num_broken == 0, policy
        assert minimums.reclaims, policy
        late = [shortage.until_s for shortage in minimums.shortages if shortage.demanded_s == 1000.0]
        assert late
        assert max(late) <= 1000.0 + minimums.bound_s


def test_a_violation_names_the_command() -> None:
    class Careless(Wrong):
        def decide(self, snapshot: Snapshot) -> Plan:
            plan = self._policy.decide(snapshot)
            return replace(plan, reasons={})

    with pytest.raises(InvariantViolation, match="told like this"):
        run(Careless(""), BUSY, command="told like this")
