"""Faults during a loan or a reclaim leave no server in both pools and none in neither, and nothing lost or done twice.

First by chance (a failure prints the command that tells its story), then one by one: over a compressed day with loans
and reclaims of every kind the control plane is killed at every point that it passes, and nodes at every step.
"""

from __future__ import annotations

import os

import pytest

from kits.cheap_policies import cheap_names, long_sweep
from kits.simulation.moving import Moving
from kits.simulation.story import story
from kits.simulation.sweeps import STRIDE, part
from springtide.core.events import CancelRequested, JobSubmitted, ScaleRequested, ServiceDeployed
from springtide.core.ports import Step
from springtide.core.resources import Node, NodeId, make_node
from springtide.core.workload import JobState
from springtide.scheduling.registry import make_policy
from springtide_studies.fault_seeds.faults import CRASH_POINTS
from springtide_studies.fault_seeds.faults_loans import LOAN_FAULT_KINDS
from springtide_studies.fault_seeds.seeds import FaultRun, SeedOutcome, run_seed
from springtide_studies.fault_seeds.workload import LoadProfile, OwnerRequest, Workload, make_job, make_service

BASE_SEED = int(os.environ.get("SPRINGTIDE_BASE_SEED", "20261121"))
NUM_SEEDS = int(os.environ.get("SPRINGTIDE_LOAN_SEEDS", "400"))
CHUNK = 20
POLICIES = ("two-way/fifo", "two-way/elastic", "tide/springtide", "one-way/edf", "moving")


def owned(node: Node) -> bool:
    """The tests' own policy leaves shared nodes to jobs."""
    return node.owner != "shared"


def run(seed: int, policy: str, num_faults: float | None = None, *, has_more_faults: bool = False) -> SeedOutcome:
    if policy == "moving":
        return run_seed(
            seed, Moving, has_pools=True, num_faults=num_faults, has_more_faults=has_more_faults, reaches=owned
        )
    return run_seed(seed, policy, num_faults=num_faults, has_more_faults=has_more_faults)


def run_and_check(
    seed: int, policy: str, num_faults: float | None = None, *, has_more_faults: bool = False
) -> SeedOutcome:
    result = run(seed, policy, num_faults, has_more_faults=has_more_faults)
    assert not result.violation, f"{result.violation}: reproduce with\n    {result.command}\n{result.detail}"
    return result


# --- by chance -------------------------------------------------------------------------------------------------------

# Each of these once found something. They stay.
NAMED_SEEDS = [
    (2354, "moving", "a member lost in the turn in which a grace is over calls for one new group, not two"),
    (310, "moving", "a drain is no reclaim any more when only those are left who may stay"),
    (111, "tide/springtide", "nodes do not turn to and fro for a need that either of them could meet"),
    (124, "tide/springtide", "the same, with a job that starts on the one as it is stopped on the other"),
    (1009, "tide/goodput", "a job that moves off a node is checked again when the node is reclaimed"),
    (1085, "tide/goodput", "the same, with a guaranteed replica that waits for the node"),
    (10004162, "tide/elasticflow", "the same, seen when a control plane recovers in between"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "policy"), [pytest.param(s, p, id=f"{s}-{p}") for s, p, _ in NAMED_SEEDS])
def test_named_seed_holds_every_invariant(seed: int, policy: str) -> None:
    run_and_check(seed, policy)
    run_and_check(seed, policy, num_faults=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_few_seeds_hold_every_invariant(policy: str) -> None:
    print(f"base seed {BASE_SEED}: set SPRINGTIDE_BASE_SEED and SPRINGTIDE_LOAN_SEEDS for others")
    results = [run_and_check(BASE_SEED + index, policy) for index in range(part(5, least=2))]
    assert sum(result.num_loans for result in results) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_fresh_seeds_hold_every_invariant(first: int) -> None:
    for index in range(first, min(first + CHUNK, NUM_SEEDS)):
        number, which = divmod(index, len(POLICIES))
        run_and_check(BASE_SEED + index, POLICIES[which], has_more_faults=number % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("training", long_sweep(cheap_names(round_s=2.0)))
@pytest.mark.parametrize("strategy", ["two-way", "tide"])
def test_every_training_policy_holds_every_invariant(strategy: str, training: str) -> None:
    for index in range(part(3, least=1)):
        run_and_check(BASE_SEED + index, f"{strategy}/{training}")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_without_faults_every_minimum_is_there_within_grace_and_start(policy: str) -> None:
    results = [run_and_check(BASE_SEED + index, policy, num_faults=0.0) for index in range(part(30, least=10))]
    assert sum(result.num_reclaims for result in results) > 0


@pytest.mark.slow
def test_faults_of_every_kind_happen_to_loans() -> None:
    points = {f"crash at {kind}.{side}" for kind in ("DrainNode", "LabelNode") for side in ("before", "after")}
    missing = {*LOAN_FAULT_KINDS, *points}
    for index in range(60):
        missing -= {*run(BASE_SEED + index, "moving").faults}
        if not missing:
            break
    assert not missing


@pytest.mark.slow
def test_a_seed_gives_the_same_run_every_time() -> None:
    assert run(7, "two-way/fifo") == run(7, "two-way/fifo")
    assert run(7, "two-way/fifo").command == "python -m springtide_studies.fault_seeds --seed 7 --policy two-way/fifo"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tide/springtide", "two-way/elastic"])
def test_two_processes_two_hash_seeds_one_story(policy: str) -> None:
    assert story(11, policy, "1") == story(11, policy, "4242")


# --- one by one ------------------------------------------------------------------------------------------------------

NODES = (
    make_node("lent-0", 2, pool="inference"),
    make_node("lent-1", 2, pool="inference"),
    make_node("own", 2, pool="training"),
)
GONE_S = 6.0
# What is lost before this is back before the day is over.
EVENING_S = 60.0


def compressed_day() -> Workload:
    """By night both servers of inference are loaned; the morning takes them back from a rigid and an elastic job."""
    rigid = make_job("rigid", num_samples=4000, samples_per_s=50.0, workers=(2, 2), elastic=False, grace_s=3.0)
    elastic = make_job("elastic", num_samples=5000, samples_per_s=50.0, workers=(1, 4), grace_s=2.0)
    service = make_service("answers", max_replicas=1, idle_s=2.0, grace_s=2.0)
    scaled = ((8.0, 1, 2), (13.0, 3, 4), (22.0, 0, 1), (30.0, 2, 3), (44.0, 0, 1))
    requests = [
        OwnerRequest(at_s=0.0, event=JobSubmitted(job=rigid)),
        OwnerRequest(at_s=1.0, event=JobSubmitted(job=elastic)),
        OwnerRequest(at_s=2.0, event=ServiceDeployed(service=service)),
    ]
    requests += [
        OwnerRequest(at_s=at_s, event=ScaleRequested(workload_id=service.service_id, minimum=least, maximum=most))
        for at_s, least, most in scaled
    ]
    requests.append(OwnerRequest(at_s=90.0, event=CancelRequested(workload_id=service.service_id)))
    load = LoadProfile(
        service_id=service.service_id,
        start_s=3.0,
        end_s=40.0,
        base_per_s=20.0,
        wave_per_s=20.0,
        period_s=20.0,
        service_time_s=0.1,
    )
    return Workload(requests=tuple(requests), loads=(load,))


class Day(FaultRun):
    """The compressed day; after one step, before its effects, a node may go down and the control plane with it."""

    def __init__(self, policy: str, lost: str = "", at_step: int = 0, *, kills: bool = False) -> None:
        super().__init__(0, maker(policy), num_faults=0.0, workload=compressed_day(), nodes=NODES)
        self.lost, self.at_step, self.kills = NodeId(lost), at_step, kills
        self.num_steps = self.num_by_evening = 0

    def note_journaled(self, step: Step) -> None:
        super().note_journaled(step)
        self.num_steps += 1
        self.num_by_evening += step.now_s < EVENING_S
        if self.num_steps == self.at_step:
            self.faults.lose_node(self.lost, GONE_S, is_noticed=True)
            if self.kills:
                self.faults.arm("start.before", 0, 0.7)
            self.judge_at_once(GONE_S)

    def judge_at_once(self, trouble_s: float) -> None:
        """Nothing may be late only because a fault was due: what is late is late from now on, but for that time."""
        self.faults.end_s = 0.0
        self.loans.note_outage(self.clock.now_s() + trouble_s)

    def finish(self) -> None:
        """Play it: every job succeeds."""
        self.run()
        jobs = self.controller.state.jobs
        assert {name: str(job.state) for name, job in jobs.items()} == dict.fromkeys(jobs, str(JobState.SUCCEEDED))


def maker(policy: str):
    return Moving if policy == "moving" else lambda: make_policy(policy)


DAYS = ("two-way/fifo", "two-way/elastic", "tide/springtide", "moving")


@pytest.mark.parametrize("policy", DAYS)
def test_the_day_holds_loans_and_reclaims(policy: str) -> None:
    day = Day(policy)
    day.finish()
    assert day.loans.num_labels >= 4
    assert day.loans.num_reclaims >= 2


def kill_everywhere(policy: str, points: tuple[str, ...], stride: int) -> int:
    """Kill the control plane at every `stride`-th passage of the points; return how often it was killed."""
    plain = Day(policy)
    plain.finish()
    num_killed = 0
    for point in points:
        for skip in range(0, plain.faults.passed[point], stride):
            day = Day(policy)
            day.faults.arm(point, skip, 0.7, window_s=1000.0)
            day.judge_at_once(0.0)
            try:
                day.finish()
            except Exception as error:
                raise AssertionError(f"{policy}: control plane killed at {point} number {skip}") from error
            num_killed += day.num_crashes
    return num_killed


@pytest.mark.slow
def test_a_control_plane_killed_between_two_effects_leaves_every_node_in_one_pool() -> None:
    assert kill_everywhere("two-way/fifo", ("start.before", "start.after"), 2) > 20


@pytest.mark.slow
@pytest.mark.parametrize("policy", DAYS)
@pytest.mark.parametrize("point", CRASH_POINTS[:-2])
def test_a_control_plane_killed_anywhere_leaves_every_node_in_one_pool(policy: str, point: str) -> None:
    assert kill_everywhere(policy, (point,), STRIDE) > 20 // STRIDE


def lose_at_every_step(policy: str, node_id: str, stride: int, *, kills: bool = False) -> int:
    """Lose the node after every `stride`-th step, before its effects; return how often."""
    plain = Day(policy)
    plain.finish()
    num_lost = 0
    for number in range(2, plain.num_by_evening, stride):
        try:
            Day(policy, node_id, number, kills=kills).finish()
        except Exception as error:
            raise AssertionError(f"{policy}: {node_id} lost after step {number}") from error
        num_lost += 1
    return num_lost


@pytest.mark.slow
def test_a_node_lost_while_it_drains_or_is_labelled_comes_back_into_one_pool() -> None:
    assert lose_at_every_step("two-way/fifo", "lent-0", 4) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("node_id", ["lent-0", "lent-1", "own"])
@pytest.mark.parametrize("policy", DAYS)
def test_a_node_lost_at_any_step_comes_back_into_one_pool(policy: str, node_id: str, kills: bool) -> None:
    assert lose_at_every_step(policy, node_id, STRIDE, kills=kills) > 40 // STRIDE
