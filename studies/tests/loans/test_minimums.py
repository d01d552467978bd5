"""Whether minimums were kept is read from the journal: who was demanded, missed, ready, and for how long too long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from springtide.core.actions import Action, StartReplica, StopReplica
from springtide.core.events import (
    CancelRequested,
    Event,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, InferenceService
from springtide_studies.loans.minimums import Minimums

SOURCE = Entrypoint(source_path="trace")
JOINED = NodeJoined(node=make_node("n", 4))
# A grace of 10 s and a start of 4 s: 15 s with the turns of the loop.
BOUND_S = 15.0


def deployed(minimum: int, name: str = "s") -> ServiceDeployed:
    return ServiceDeployed(
        service=InferenceService(
            service_id=name, name=name, entrypoint=SOURCE, min_replicas=minimum, max_replicas=minimum + 2
        )
    )


def start(number: int, name: str = "s") -> StartReplica:
    workload = deployed(0, name).service
    return StartReplica(workload=workload, replica_id=f"{name}.{number}", device_id=f"n/{number}", generation=1)


def ready(number: int, name: str = "s") -> ReplicaReady:
    return ReplicaReady(workload_id=name, replica_id=f"{name}.{number}")


def stop(number: int, name: str = "s") -> StopReplica:
    return StopReplica(workload_id=name, replica_id=f"{name}.{number}")


def watched(*steps: tuple[float, Sequence[Event], Sequence[Action]], until_s: float = 100.0) -> Minimums:
    minimums = Minimums(start_s=4.0, grace_s=10.0)
    for now_s, events, actions in steps:
        minimums.note(Step(now_s=now_s, events=tuple(events), actions=tuple(actions)))
    minimums.finish(until_s)
    return minimums


def waits(minimums: Minimums) -> list[tuple[float, float, bool]]:
    return [(shortage.demanded_s, shortage.until_s, shortage.is_met) for shortage in minimums.shortages]


BEGIN = (0.0, [JOINED, deployed(2)], [start(0), start(1)])


def test_each_replica_of_a_minimum_is_demanded_from_the_deployment_until_it_is_ready() -> None:
    minimums = watched(BEGIN, (4.0, [ready(0)], []), (15.0, [ready(1)], []))
    assert waits(minimums) == [(0.0, 4.0, True), (0.0, 15.0, True)]
    assert (minimums.num_demanded, minimums.num_broken, minimums.longest_s) == (2, 0, 15.0)
    assert minimums.bound_s == BOUND_S


def test_a_minimum_that_is_missing_for_longer_is_broken_once() -> None:
    minimums = watched(BEGIN, (16.0, [ready(0)], []), (17.0, [ready(1)], []))
    assert [shortage.waited_s for shortage in minimums.broken] == [16.0, 17.0]
    assert minimums.num_broken == 1, "two replicas at a time are one break"


def test_one_that_never_comes_is_broken_at_the_end() -> None:
    minimums = watched(BEGIN, (4.0, [ready(0)], []), until_s=20.0)
    assert waits(minimums) == [(0.0, 4.0, True), (0.0, 20.0, False)]
    assert minimums.num_broken == 1


def test_a_raised_minimum_counts_from_its_raise() -> None:
    minimums = watched(
        BEGIN,
        (4.0, [ready(0), ready(1)], []),
        (50.0, [ScaleRequested(workload_id="s", minimum=3, maximum=4)], [start(2)]),
        (60.0, [ready(2)], []),
    )
    assert waits(minimums)[2:] == [(50.0, 60.0, True)]
    assert minimums.num_demanded == 3


def test_growth_above_the_minimum_is_nobodys_due() -> None:
    minimums = watched(
        BEGIN,
        (4.0, [ready(0), ready(1)], [start(2)]),
        (9.0, [ready(2)], []),
        (20.0, [], [stop(2)]),
        (21.0, [ReplicaStopped(workload_id="s", replica_id="s.2")], []),
    )
    assert minimums.num_demanded == 2
    assert len(waits(minimums)) == 2


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ([ReplicaLost(workload_id="s", replica_id="s.1")], []),
        ([], [stop(1)]),
        ([], [stop(0)]),
    ],
)
def test_a_ready_replica_that_is_lost_or_taken_is_missing_from_then_on(
    events: Sequence[Event], actions: Sequence[Action]
) -> None:
    minimums = watched(
        BEGIN,
        (4.0, [ready(0), ready(1)], []),
        (30.0, events, [*actions, start(2)]),
        (33.0, [ReplicaStopped(workload_id="s", replica_id="s.1")] if actions == [stop(1)] else [], []),
        (50.0, [ready(2)], []),
    )
    assert waits(minimums)[2:] == [(30.0, 50.0, True)]
    assert minimums.num_broken == 1


def test_two_losses_have_each_their_own_wait() -> None:
    minimums = watched(
        BEGIN,
        (4.0, [ready(0), ready(1)], []),
        (30.0, [ReplicaLost(workload_id="s", replica_id="s.1")], [start(2)]),
        (40.0, [ReplicaLost(workload_id="s", replica_id="s.0")], [start(3)]),
        (44.0, [ready(2)], []),
        (48.0, [ready(3)], []),
    )
    assert sorted(waits(minimums)[2:]) == [(30.0, 48.0, True), (40.0, 44.0, True)]


def test_a_removed_or_lowered_service_asks_for_nothing_more() -> None:
    minimums = watched(
        BEGIN,
        (5.0, [ready(0), CancelRequested(workload_id="s")], []),
        (6.0, [deployed(3, "t")], []),
        (8.0, [ScaleRequested(workload_id="t", minimum=1, maximum=3)], [start(2, "t")]),
        (12.0, [ready(2, "t")], []),
    )
    assert waits(minimums) == [
        (0.0, 5.0, True),
        (0.0, 5.0, False),
        (6.0, 8.0, False),
        (6.0, 8.0, False),
        (6.0, 12.0, True),
    ]
    assert minimums.num_broken == 0


def test_a_lost_node_leaves_its_services_short_and_too_few_devices_are_nobodys_fault() -> None:
    lost, back = NodeLost(node_id="n"), JOINED
    minimums = watched(BEGIN, (4.0, [ready(0), ready(1)], []), (10.0, [lost], []), (60.0, [back], []), until_s=200.0)
    assert waits(minimums)[2:] == [(10.0, 200.0, False), (10.0, 200.0, False)]
    assert (minimums.num_broken, len(minimums.impossible)) == (0, 2)


def test_breaks_of_two_services_are_two() -> None:
    minimums = watched(BEGIN, (0.0, [deployed(1, "t")], []), until_s=50.0)
    assert minimums.num_broken == 2


def test_the_summary_has_figures_or_none() -> None:
    summary = watched(BEGIN, (4.0, [ready(0)], []), (6.0, [ready(1)], [])).summary()
    assert (summary["minimums_demanded"], summary["minimums_broken"]) == (2, 0)
    assert (summary["minimum_wait_p50_s"], summary["minimum_wait_max_s"]) == (5.0, 6.0)
    assert summary["minimum_short_device_s"] == 10.0
    assert summary["reclaims"] == 0
    assert summary["reclaim_p95_s"] is None
    assert Minimums().summary()["minimum_wait_max_s"] is None
