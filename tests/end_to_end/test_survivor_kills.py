"""SIGKILL for workers of running jobs, one after the other: the others train on, and `why` names the death.

Ranks, moments and numbers of workers are drawn from a seed: while nothing is under way, while the worker that takes the
place of the last one warms up, and while the group is about to change.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from kits.end_to_end.live_platform import LivePlatform, artifact_digest, assert_exactly_once, wait_for
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.actions import PreemptJob, ResizeJob
from springtide.core.events import JobResized, ReplicaLost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_KILLS = int(os.environ.get("SPRINGTIDE_KILLS", "50"))
SEED = int(os.environ.get("SPRINGTIDE_KILL_SEED", "20261126"))
# With every loss the next worker waits longer; more than these and a job would wait for most of its life.
KILLS_A_JOB = 4
EPOCHS, SHARD_S = 60, 0.02
GONE = ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED")


class Victim:
    """One job with a deadline, alone on an idle platform of four slots."""

    def __init__(self, platform: LivePlatform, name: str, num_workers: int) -> None:
        self.platform, self.num_workers = platform, num_workers
        self.job_id = platform.submit(
            name, key=name, num_epochs=EPOCHS, max_workers=num_workers, shard_s=SHARD_S, deadline_s=3600.0
        )
        self.killed: list[str] = []
        self.ranks: list[int] = []

    @property
    def status(self) -> dict:
        return self.platform.job(self.job_id)

    def holders(self) -> list[str]:
        """The living workers that have the job's state, by rank: the members of the last group that has formed."""
        members, formed, lost = {}, (), set()
        journal = SqliteJournal(self.platform.state_dir / "journal.db", read_only=True)
        for _, step in journal.read():
            for event in step.events:
                if isinstance(event, JobResized) and event.job_id == self.job_id:
                    formed = members.get(event.generation, ())
                elif isinstance(event, ReplicaLost):
                    lost.add(event.replica_id)
            for action in step.actions:
                if isinstance(action, ResizeJob) and action.job_id == self.job_id:
                    members[action.generation] = action.replica_ids
        journal.close()
        return [member for member in formed if member not in lost]

    def is_at_rest(self) -> bool:
        return len(self.holders()) == len(self.status["replicas"]) == self.num_workers

    def has_joiner(self) -> bool:
        return any(one["state"] == "STARTING" for one in self.status["replicas"])

    def is_over(self) -> bool:
        return self.status["state"] in GONE

    def kill(self, rank: int) -> bool:
        """End the worker of this rank, if another one has the state; wait until the platform has noticed."""
        pids = self.platform.worker_pids()
        members = [member for member in self.holders() if member in pids]
        if len(members) < 2:
            return False
        victim = members[rank % len(members)]
        os.kill(pids[victim], signal.SIGKILL)
        self.killed.append(victim)
        self.ranks.append(rank % len(members))
        wait_for(lambda: victim not in self.holders() or self.is_over(), 10.0, f"the loss of {victim}")
        if not self.is_over():
            why = self.platform.request("GET", f"/v1/workloads/{self.job_id}/why")
            told = [why["reason"], *why["evidence"], *(entry["text"] for entry in why["history"])]
            assert sum("SIGKILL" in text for text in told) >= len(self.killed), why
        return True


def assert_nobody_else_was_stopped(platform: LivePlatform, victims: list[Victim]) -> None:
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    steps = [step for _, step in journal.read()]
    journal.close()
    preempted = [action for step in steps for action in step.actions if isinstance(action, PreemptJob)]
    assert not preempted, "each job was alone: nothing could be more urgent"
    lost = {event.replica_id for step in steps for event in step.events if isinstance(event, ReplicaLost)}
    assert lost == {replica_id for victim in victims for replica_id in victim.killed}
    formed = [action for step in steps for action in step.actions if isinstance(action, ResizeJob) and action.forced]
    assert {action.job_id for action in formed} == {victim.job_id for victim in victims if victim.killed}


def test_killed_workers_leave_the_others_alone(platform: LivePlatform) -> None:
    print(f"reproduce: SPRINGTIDE_KILL_SEED={SEED} SPRINGTIDE_KILLS={NUM_KILLS} pytest -m slow {__file__}")
    rng = np.random.default_rng(SEED)
    platform.start(policy="springtide")
    reference = platform.submit("reference", num_epochs=EPOCHS, max_workers=1)
    victims: list[Victim] = []
    ways = dict.fromkeys(("at rest", "joiner", "resize"), 0)
    platform.wait_job(reference)
    while sum(ways.values()) < NUM_KILLS:
        victim = Victim(platform, f"job{len(victims)}", int(rng.integers(2, 5)))
        victims.append(victim)
        for number in range(KILLS_A_JOB):
            way = ("at rest", "joiner", "resize")[number % 3]
            come = victim.is_at_rest if way == "at rest" else victim.has_joiner
            wait_for(lambda come=come, victim=victim: come() or victim.is_over(), 60.0, f"{way} of {victim.job_id}")
            # A worker that warms up is ready, and the group changed, within about a second.
            time.sleep(float(rng.uniform(0.0, 0.3)) if way != "resize" else float(rng.uniform(0.3, 1.2)))
            if victim.is_over() or sum(ways.values()) == NUM_KILLS:
                break
            ways[way] += victim.kill(int(rng.integers(4)))
        status = platform.wait_job(victim.job_id, 240.0)
        assert status["state"] == "SUCCEEDED", status
        assert (status["num_preemptions"], status["num_restarts"]) == (0, 0), status
        assert_exactly_once(platform.workload(victim.job_id), num_samples=96, batch=16, num_epochs=EPOCHS)
        assert artifact_digest(platform.workload(victim.job_id)) == artifact_digest(platform.workload(reference))
    platform.stop()
    assert_nobody_else_was_stopped(platform, victims)
    print(f"{ways} kills in {len(victims)} jobs, each job once and exactly")
    assert min(ways.values()) >= 1
    # With few kills chance and the pace of the machine decide which ranks die.
    assert len({rank for victim in victims for rank in victim.ranks}) >= (4 if NUM_KILLS >= 50 else 2)
