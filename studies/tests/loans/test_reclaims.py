"""What a reclaim took, read from the journal: whom it stopped or made smaller, how long, and work lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from springtide.core.actions import Action, DrainNode, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import Event, JobResized, NodeJoined, NodeLost, ReplicaReady, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob
from springtide_studies.loans.minimums import Minimums

SOURCE = Entrypoint(source_path="trace")
SERVICE = InferenceService(service_id="s", name="s", entrypoint=SOURCE, max_replicas=4)
LENT = make_node("lent", 2, pool="inference")
OWN = make_node("own", 2, pool="training")


def started(device: str, name: str = "a") -> StartReplica:
    job = TrainingJob(job_id=name, name=name, entrypoint=SOURCE)
    return StartReplica(workload=job, replica_id=f"{name}@{device}", device_id=device, generation=1)


def served(device: str) -> StartReplica:
    return StartReplica(workload=SERVICE, replica_id=f"s@{device}", device_id=device, generation=1)


def formed(*devices: str, name: str = "a", generation: int = 1) -> ResizeJob:
    members = tuple(f"{name}@{device}" for device in devices)
    return ResizeJob(job_id=name, generation=generation, replica_ids=members, global_batch_size=32)


def resized(world_size: int, pause_s: float, name: str = "a") -> JobResized:
    return JobResized(job_id=name, generation=2, world_size=world_size, step=0, pause_s=pause_s, direction="shrink")


def preempted(*devices: str, name: str = "a") -> PreemptJob:
    return PreemptJob(job_id=name, generation=2, replica_ids=tuple(f"{name}@{device}" for device in devices))


def stopped(device: str, name: str = "a") -> ReplicaStopped:
    return ReplicaStopped(workload_id=name, replica_id=f"{name}@{device}")


HARD = DrainNode(node_id="lent", pool="inference", is_reclaim=True, cost_s=40.0)
SOFT = DrainNode(node_id="lent", pool="inference")
HOME = LabelNode(node_id="lent", pool="inference")
ALL = ("lent/0", "lent/1", "own/0", "own/1")
# A job on both nodes, one of which is lent.
BEGIN = (
    0.0,
    [NodeJoined(node=LENT), NodeJoined(node=OWN)],
    [LabelNode(node_id="lent", pool="training"), *map(started, ALL), formed(*ALL)],
)

Story = tuple[float, Sequence[Event], Sequence[Action]]


def watched(*steps: Story, until_s: float = 200.0, lost_s: Sequence[float] = (0.0, 0.0)) -> Minimums:
    """`lost_s` is what the job had lost before and after it made way."""
    left = list(lost_s)
    minimums = Minimums(start_s=4.0, grace_s=10.0, lost_of=lambda _: left.pop(0))
    for now_s, events, actions in steps:
        minimums.note(Step(now_s=now_s, events=tuple(events), actions=tuple(actions)))
    minimums.finish(until_s)
    return minimums


@pytest.mark.slow
def test_a_preempted_job_is_an_interruption_and_the_reclaim_lasts_until_replicas_serve() -> None:
    minimums = watched(
        BEGIN,
        (100.0, [], [preempted(*ALL), HARD]),
        (102.0, [stopped(device) for device in ALL], [HOME, served("lent/0"), served("lent/1")]),
        (105.0, [ReplicaReady(workload_id="s", replica_id="s@lent/0")], []),
        (106.0, [ReplicaReady(workload_id="s", replica_id="s@lent/1")], []),
        (120.0, [], [started("own/0"), formed("own/0", generation=3)]),
        (120.0, [resized(1, 5.0)], []),
        lost_s=(1.0, 8.0),
    )
    (reclaim,) = minimums.reclaims
    assert (reclaim.drained_s, reclaim.labelled_s, reclaim.served_s) == (100.0, 102.0, 106.0)
    assert reclaim.is_interrupting
    # Four workers saved for 2 s, one stood still for 5 s, and steps of 7 s were done again.
    assert reclaim.lost_device_s == 4 * 2.0 + 5.0 + 7.0
    summary = minimums.summary()
    assert (summary["reclaims"], summary["reclaims_interrupting"], summary["jobs_interrupted"]) == (1, 1, 1)
    assert (summary["reclaim_label_max_s"], summary["reclaim_p95_s"]) == (2.0, 6.0)
    assert (summary["reclaim_reckoned_device_s"], summary["reclaim_lost_device_s"]) == (40.0, 20.0)


@pytest.mark.slow
def test_a_job_that_only_gets_smaller_is_not_interrupted() -> None:
    minimums = watched(
        BEGIN,
        (100.0, [], [HARD, formed("own/0", "own/1", generation=2)]),
        (100.0, [stopped("lent/0"), stopped("lent/1"), resized(2, 5.0)], [HOME]),
    )
    (reclaim,) = minimums.reclaims
    assert (reclaim.is_interrupting, list(reclaim.shrunk), reclaim.lost_device_s) == (False, ["a"], 10.0)
    assert minimums.summary()["reclaims_shrinking"] == 1
    assert reclaim.served_s is None, "nobody started there"


def test_a_member_that_is_stopped_by_force_is_an_interruption() -> None:
    minimums = watched(
        BEGIN,
        (100.0, [], [HARD]),
        (110.0, [], [StopReplica(workload_id="a", replica_id="a@lent/0", grace_s=0.0)]),
    )
    assert list(minimums.reclaims[0].stopped) == ["a"]


@pytest.mark.parametrize(
    "after", [StopReplica(workload_id="a", replica_id="a@lent/0"), preempted("own/0", "own/1", name="b")]
)
def test_who_is_elsewhere_or_gone_already_is_no_interruption(after: Action) -> None:
    minimums = watched(
        BEGIN,
        (100.0, [], [HARD, formed("own/0", "own/1", generation=2), after]),
    )
    assert not minimums.reclaims[0].is_interrupting


def test_servers_that_a_job_left_together_share_what_it_lost() -> None:
    other = make_node("other", 2, pool="inference")
    minimums = watched(
        BEGIN,
        (
            1.0,
            [NodeJoined(node=other)],
            [LabelNode(node_id="other", pool="training"), started("other/0"), formed(*ALL, "other/0", generation=2)],
        ),
        (
            100.0,
            [],
            [
                HARD,
                DrainNode(node_id="other", pool="inference", is_reclaim=True),
                formed("own/0", "own/1", generation=3),
            ],
        ),
        (100.0, [resized(2, 6.0)], []),
    )
    assert [reclaim.lost_device_s for reclaim in minimums.reclaims] == [6.0, 6.0]


def test_a_cordon_is_no_reclaim_until_somebody_has_to_go() -> None:
    minimums = watched(BEGIN, (50.0, [], [SOFT]), (100.0, [], [HARD]))
    assert [reclaim.drained_s for reclaim in minimums.reclaims] == [100.0]
    assert minimums.summary()["cordons"] == 1


@pytest.mark.parametrize(
    "after",
    [(101.0, [], [LabelNode(node_id="lent", pool="training")]), (101.0, [NodeLost(node_id="lent")], [])],
)
def test_a_reclaim_that_comes_to_nothing_is_told_apart(after: Story) -> None:
    summary = watched(BEGIN, (100.0, [], [HARD]), after).summary()
    assert (summary["reclaims"], summary["reclaims_called_off"]) == (0, 1)


def test_loans_are_counted_and_weighted_by_time() -> None:
    minimums = watched(
        BEGIN,
        (50.0, [], [LabelNode(node_id="own", pool="inference")]),
        (100.0, [], [HOME]),
        (150.0, [NodeLost(node_id="own")], []),
    )
    loans = minimums.loans
    assert list(loans.time_s) == [0.0, 50.0, 100.0, 150.0]
    assert (list(loans.lent), list(loans.borrowed)) == ([1, 1, 0, 0], [0, 1, 1, 0])
    summary = minimums.summary()
    assert (summary["loans"], summary["lent_mean"], summary["borrowed_mean"]) == (2, 0.5, 0.5)
    assert (summary["lent_max"], summary["borrowed_max"]) == (1, 1)
