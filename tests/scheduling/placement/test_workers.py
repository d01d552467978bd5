"""Plans of whole workers, whatever the policy: the devices of each on one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from springtide.control.controller import Controller, check_plan
from springtide.core import events
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.errors import PolicyError
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.placement.workers import whole_workers
from springtide.scheduling.registry import make_policy

SOURCE = Entrypoint(source_path="job.py", object_name="fit")


def job(name: str, each: int = 2, most: int = 2, **options) -> TrainingJob:
    return TrainingJob(
        **{"job_id": name, "name": name, "entrypoint": SOURCE, "max_workers": most, "devices_each": each, **options}
    )


class Wanted:
    """Gives those that it sees what the test says, or as much of it as their bounds allow."""

    def __init__(self, **wish: Sequence[str]) -> None:
        self.wish: Mapping[str, Sequence[str]] = wish

    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan(
            allocations={
                view.job.job_id: PoolAllocation(device_ids=tuple(self.wish[view.job.job_id])[: view.bounds.max_workers])
                for view in snapshot.jobs
                if view.job.job_id in self.wish
            }
        )


def seen(*happened: events.Event, nodes: Sequence[int] = (4, 4)) -> Snapshot:
    """What a policy sees after these events, before it has decided."""
    controller = Controller(Wanted())
    joined = [events.NodeJoined(node=make_node(f"n{index}", width)) for index, width in enumerate(nodes)]
    controller.step(0.0, [*joined, *happened])
    return controller.snapshot(0.0)


def planned(snapshot: Snapshot, **wish: Sequence[str]) -> dict[str, tuple[str, ...]]:
    plan = whole_workers(Wanted(**wish).decide, snapshot)
    check_plan(snapshot, plan)
    return {who: given.device_ids for who, given in plan.allocations.items()}


def holding(snapshot: Snapshot, **held: Sequence[str]) -> Snapshot:
    return replace(snapshot, allocations={who: PoolAllocation(device_ids=tuple(ids)) for who, ids in held.items()})


def test_the_view_of_a_job_counts_devices() -> None:
    view = seen(events.JobSubmitted(job=job("a", min_workers=1, profile_steps_per_s={1: 2.0, 2: 3.0}))).jobs[0]
    assert (view.bounds.min_workers, view.bounds.max_workers, view.job.num_virtual_shards) == (2, 4, 8)
    assert view.job.profile_steps_per_s == {2: 2.0, 4: 3.0}


def test_a_plan_of_whole_workers_is_left_as_it_is() -> None:
    snapshot = seen(events.JobSubmitted(job=job("a")))
    plan = Wanted(a=("n0/0", "n0/1", "n1/0", "n1/1")).decide(snapshot)
    assert whole_workers(lambda shown: plan, snapshot) is plan


def test_a_new_worker_is_completed_on_its_node_and_the_rest_taken_away() -> None:
    snapshot = seen(events.JobSubmitted(job=job("a")))
    assert planned(snapshot, a=("n0/0", "n1/0")) == {"a": ("n0/0", "n0/1")}
    assert planned(snapshot, a=("n0/0", "n0/1", "n0/2")) == {"a": ("n0/0", "n0/1")}


def test_a_worker_that_is_there_is_kept_whole_by_an_exchange() -> None:
    snapshot = holding(seen(*[events.JobSubmitted(job=job(name, each)) for name, each in (("a", 2), ("b", 1))]))
    snapshot = holding(snapshot, a=("n0/0", "n0/2", "n0/1", "n0/3"))
    assert planned(snapshot, a=("n0/0", "n0/1"), b=("n0/2", "n0/3")) == {"a": ("n0/0", "n0/2"), "b": ("n0/1", "n0/3")}


def test_what_is_new_gets_a_device_of_another_node_where_a_worker_needs_the_one_that_it_was_to_have() -> None:
    snapshot = seen(*[events.JobSubmitted(job=job(name, each)) for name, each in (("a", 2), ("b", 1))], nodes=(3, 3))
    snapshot = holding(snapshot, a=("n0/0", "n0/1", "n1/2", "n1/0"))
    wish = {"a": ("n0/0", "n0/1", "n0/2", "n1/2"), "b": ("n1/0",)}
    assert planned(snapshot, **wish) == {"a": ("n0/0", "n0/1", "n1/2", "n1/0"), "b": ("n0/2",)}


def test_a_job_that_needs_several_workers_is_told_how_many_there_is_room_for() -> None:
    jobs = [events.JobSubmitted(job=job(name, each, min_workers=2)) for name, each in (("a", 2), ("b", 1))]
    snapshot = holding(seen(*jobs, nodes=(3, 3)), b=("n0/0", "n0/1"))
    plan = whole_workers(Wanted(a=("n0/2", "n1/0", "n1/1", "n1/2"), b=("n0/0", "n0/1")).decide, snapshot)
    why = "its 2 workers need 2 devices each, of one node; there is room for 1 of them beside what stronger claims hold"
    assert plan.no_room == {"a": why}


def test_a_device_has_no_price_where_a_job_was_bounded() -> None:
    def priced(shown: Snapshot) -> Plan:
        return replace(Wanted(a=("n0/0", "n0/1", "n0/2", "n1/0")).decide(shown), price_s=0.0, prices_s={"cpu": 0.0})

    snapshot = seen(events.JobSubmitted(job=job("a")), nodes=(3, 1))
    assert (whole_workers(priced, snapshot).price_s, whole_workers(priced, snapshot).prices_s) == (None, {})


def test_the_policy_is_asked_again_without_a_job_that_has_no_node() -> None:
    snapshot = seen(*[events.JobSubmitted(job=job(name, each)) for name, each in (("a", 2), ("b", 1))], nodes=(2, 2))
    snapshot = holding(snapshot, b=("n0/0", "n1/0"))
    plan = whole_workers(Wanted(a=("n0/1", "n1/1"), b=("n0/0", "n1/0")).decide, snapshot)
    assert set(plan.allocations) == {"b"}
    assert plan.no_room == {
        "a": "no node has 2 devices for a worker beside what stronger claims hold; the most that are free is 1"
    }


def test_a_job_whose_worker_fits_no_node_waits_or_is_refused_with_the_reason() -> None:
    controller = Controller(make_policy("springtide"))
    joined = [events.NodeJoined(node=make_node(name, 2)) for name in ("m", "n")]
    wide = job("wide", 4), job("hard", 4, goal=Goal(deadline_s=50.0))
    controller.step(0.0, [*joined, *[events.JobSubmitted(job=each) for each in wide]])
    why = "no node has 4 devices, which each of its workers needs; the largest has 2"
    assert [(str(record.state), record.reason) for record in controller.state.jobs.values()] == [
        ("PENDING", why),
        ("REJECTED", why),
    ]
    controller.step(1.0, [events.JobSubmitted(job=job("wider", 8))])
    more = "no node has 8 devices, which each of its workers needs; the largest has 2"
    assert controller.state.jobs["wider"].reason == more, "not that all nodes together have too few"


def test_a_plan_with_a_worker_on_two_nodes_is_refused() -> None:
    snapshot = seen(events.JobSubmitted(job=job("a")))
    with pytest.raises(PolicyError, match="each of its workers or replicas needs 2 devices of one node"):
        check_plan(snapshot, Wanted(a=("n0/0", "n1/0")).decide(snapshot))


@pytest.mark.parametrize("policy", ["springtide", "elastic", "edf", "fifo", "goodput", "dilu/springtide"])
def test_workers_start_with_all_their_devices_and_are_charged_for_them(policy: str) -> None:
    controller = Controller(make_policy(policy))
    controller.step(
        0.0,
        [events.NodeJoined(node=make_node("n", 4)), events.JobSubmitted(job=job("a", profile_steps_per_s={1: 1.0}))],
    )
    for now_s in (1.0, 300.0):
        controller.step(now_s, [])
    record = controller.state.jobs["a"]
    assert record.replicas
    assert all(len(replica.device_ids) == 2 for replica in record.replicas)
    started_s = record.replicas[0].started_at_s
    assert record.attained_service_s(started_s + 10.0) == 20.0 * len(record.replicas)
