"""Workers of a job are killed at drawn moments, under every policy: the others train on and lose no step."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kits.cheap_policies import cheap_names
from kits.simulation.sweeps import part
from springtide.core.actions import Action, PreemptJob, ResizeJob, StartReplica
from springtide.core.events import JobResized, JobSubmitted, ProgressReported, ReplicaLost
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.registry import make_policy
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.models import job_model
from springtide_studies.fault_seeds.seeds import FaultRun
from springtide_studies.fault_seeds.workload import OwnerRequest, Workload, make_job

JOB = WorkloadId("job")
NUM_SEEDS = 200
# Round by round of kills: while nothing is under way, while a joiner warms up, while a resize is unconfirmed.
WAYS = ("at rest", "joiner", "resize")


def workload() -> Workload:
    job = make_job(JOB, num_samples=2400, samples_per_s=40.0, parallel_fraction=0.97, workers=(1, 4), deadline_s=900.0)
    model = job_model(job)
    rates = {n: 1.0 / model.step_s(n, job.global_batch_size) for n in range(1, 5)}
    job = replace(job, total_steps=model.total_steps, profile_steps_per_s=rates, requested_workers=4, max_restarts=20)
    return Workload(requests=(OwnerRequest(at_s=0.0, event=JobSubmitted(job=job)),))


class Kills(FaultRun):
    """One job alone on four devices; the ranks, moments and ways of the kills are drawn from the seed."""

    def __init__(self, seed: int, policy: str) -> None:
        super().__init__(
            seed, lambda: make_policy(policy), num_faults=0.0, workload=workload(), nodes=(make_node("n", 4),)
        )
        self.rng = np.random.default_rng([seed, 26])
        self.killed: dict[str, int] = dict.fromkeys(WAYS, 0)
        self.ranks: set[int] = set()
        self.furthest = 0
        for at_s in np.sort(self.rng.uniform(3.0, 30.0, 3)):
            self.machine.agenda.at(float(at_s), lambda: self.kill("at rest"))
        kinds: tuple[tuple[str, type[Action], float], ...] = (
            ("joiner", StartReplica, 1.0),
            ("resize", ResizeJob, 0.05),
        )
        for way, kind, most_s in kinds:
            at_s, delay_s = float(self.rng.uniform(3.0, 20.0)), float(self.rng.uniform(0.0, most_s))
            self.machine.agenda.at(at_s, lambda way=way, kind=kind, delay_s=delay_s: self.arm(way, kind, delay_s))

    def arm(self, way: str, kind: type[Action], delay_s: float) -> None:
        """Kill a member soon after the next action of this kind."""
        self.faults.watch(kind, lambda action: self.machine.agenda.after(delay_s, lambda: self.kill(way)))

    def kill(self, way: str) -> None:
        """Kill a member of a group of which another one lives."""
        run = self.machine.runs.get(JOB)
        members = [] if run is None or run.group is None else [one for one in run.group.members if one.is_alive]
        if len(members) > 1:
            rank = int(self.rng.integers(len(members)))
            self.killed[way] += 1
            self.ranks.add(rank)
            self.machine.die(members[rank], "signal 9")

    def note_journaled(self, step: Step) -> None:
        super().note_journaled(step)
        record = self.controller.state.jobs.get(JOB)
        for event in step.events:
            if isinstance(event, ProgressReported):
                self.furthest = max(self.furthest, event.step)
            elif isinstance(event, JobResized) and event.step < self.furthest:
                complain("no-step-lost", f"step {event.step} after step {self.furthest}")
        if any(isinstance(action, PreemptJob) for action in step.actions):
            complain("survivors-go-on", "the job is alone and is stopped")
        lost = [event for event in step.events if isinstance(event, ReplicaLost)]
        has_formed = any(isinstance(action, ResizeJob) and action.forced for action in step.actions)
        if lost and has_formed and record is not None and "after a loss" not in record.reason:
            complain("reason-of-loss", f"a worker was lost, and the reason is {record.reason!r}")


def play(policy: str, seeds: range) -> tuple[dict[str, int], set[int]]:
    killed, ranks = dict.fromkeys(WAYS, 0), set[int]()
    for seed in seeds:
        run = Kills(seed, policy)
        try:
            run.run()
        except Exception as error:
            raise AssertionError(f"{policy}, seed {seed}") from error
        record = run.controller.state.jobs[JOB]
        assert record.state is JobState.SUCCEEDED
        assert record.restarts.num_restarts == 0, "the job never started again"
        killed = {way: killed[way] + run.killed[way] for way in WAYS}
        ranks |= run.ranks
    return killed, ranks


POLICIES = cheap_names(round_s=2.0)


@pytest.mark.parametrize("policy", ["springtide", "goodput:round_s=2"])
def test_a_few_kills_leave_the_other_workers_alone(policy: str) -> None:
    play(policy, range(6))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_kills_of_every_rank_in_every_way_leave_the_other_workers_alone(policy: str) -> None:
    seeds = part(NUM_SEEDS, least=20)
    killed, ranks = play(policy, range(100, 100 + seeds))
    print(f"{policy}: {killed} in {seeds} seeds")
    if sum(killed.values()) == 0:
        pytest.skip(f"{policy} gives the job one worker")
    assert min(killed.values()) >= seeds // 10
    assert ranks == set(range(4))
