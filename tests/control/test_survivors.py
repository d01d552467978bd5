"""The loss of one worker leaves the others alone, under every policy and for every rank."""

from __future__ import annotations

import pytest

from kits.cheap_policies import cheap_names
from springtide.control.controller import Controller
from springtide.core import events
from springtide.core.actions import PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.scheduling.registry import make_policy

JOB = WorkloadId("job")
RATES = {1: 10.0, 2: 19.0, 3: 27.0, 4: 34.0}


class OneJob:
    """A controller with one node of four devices and one job, whose workers do at once what they are asked to."""

    def __init__(self, policy: str) -> None:
        self.controller = Controller(make_policy(policy))
        self.steps: list[Step] = []
        self.now_s = 0.0
        job = TrainingJob(
            job_id=JOB,
            name="job",
            entrypoint=Entrypoint(source_path="job.py", object_name="fit"),
            max_workers=4,
            requested_workers=4,
            total_steps=20_000,
            goal=Goal(deadline_s=1200.0),
            profile_steps_per_s=RATES,
        )
        self.tell(events.NodeJoined(node=make_node("n", 4)))
        self.tell(events.JobSubmitted(job=job))
        self.follow()

    @property
    def record(self):
        return self.controller.state.jobs[JOB]

    def tell(self, *happened: events.Event) -> None:
        self.now_s += 0.01
        self.steps.append(self.controller.step(self.now_s, happened))

    def follow(self) -> None:
        """Confirm what was decided until nothing more is."""
        for _ in range(20):
            actions = self.steps[-1].actions
            news: list[events.Event] = []
            for action in actions:
                if isinstance(action, StartReplica):
                    news.append(events.ReplicaReady(workload_id=JOB, replica_id=action.replica_id))
                elif isinstance(action, StopReplica):
                    news.append(events.ReplicaStopped(workload_id=JOB, replica_id=action.replica_id))
                elif isinstance(action, ResizeJob):
                    news.append(
                        events.JobResized(
                            job_id=JOB,
                            generation=action.generation,
                            world_size=len(action.replica_ids),
                            step=10,
                            pause_s=0.01,
                            direction="recover" if action.forced else "grow",
                        )
                    )
            if not news:
                return
            self.tell(*news)
        raise AssertionError("the job does not come to rest")

    def pass_time(self, until_s: float) -> None:
        while (wakeup_s := self.controller.wakeup_at_s) is not None and wakeup_s <= until_s:
            self.now_s = max(self.now_s, wakeup_s)
            self.tell()
            self.follow()
        self.now_s = max(self.now_s, until_s)

    def lose(self, replica_id: ReplicaId) -> None:
        self.tell(events.ReplicaLost(workload_id=JOB, replica_id=replica_id, reason="signal 9"))
        self.follow()


@pytest.mark.parametrize("policy", cheap_names(round_s=60.0))
@pytest.mark.parametrize("rank", range(4))
def test_the_others_go_on_and_another_worker_joins_after_the_back_off(policy: str, rank: int) -> None:
    platform = OneJob(policy)
    platform.pass_time(61.0)
    before = platform.record.group.members
    assert platform.record.state is JobState.RUNNING
    if len(before) < 2:
        pytest.skip(f"{policy} gives the job one worker")
    first = len(platform.steps)
    platform.lose(before[rank % len(before)])
    assert platform.record.state is JobState.RUNNING
    assert platform.record.group.members == tuple(m for m in before if m != before[rank % len(before)])
    platform.pass_time(platform.now_s + 30.0)
    assert not [a for step in platform.steps[first:] for a in step.actions if isinstance(a, PreemptJob)]
    assert len(platform.record.group.members) == len(before)
    assert "moved" not in platform.record.reason


@pytest.mark.parametrize("policy", ["springtide", "goodput", "elasticflow"])
def test_losses_one_after_the_other_stop_nothing(policy: str) -> None:
    platform = OneJob(policy)
    platform.pass_time(61.0)
    first = len(platform.steps)
    for number in range(8):
        if len(platform.record.group.members) > 1:
            platform.lose(platform.record.group.members[number % len(platform.record.group.members)])
        platform.pass_time(platform.now_s + 40.0)
    assert platform.record.restarts.num_restarts == 0
    assert not [a for step in platform.steps[first:] for a in step.actions if isinstance(a, PreemptJob)]
