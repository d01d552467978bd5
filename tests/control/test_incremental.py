"""What is remembered between turns: each input, changed alone, is noticed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.control.incremental import WaitingReasons, Worklist
from springtide.control.journal.codec import decode_step, encode_step
from springtide.control.records import StateReason
from springtide.core import events
from springtide.core.decision import Drain, Plan, PoolAllocation
from springtide.core.resources import DeviceId, NodeId, make_node
from springtide.core.shares import Share
from springtide.core.workload import Goal, WorkloadId
from springtide.scheduling.registry import make_live_policy

A, B = WorkloadId("a"), WorkloadId("b")
WANTED = PoolAllocation(device_ids=(DeviceId("n/0"),))
PLAN = Plan(allocations={A: WANTED})
DRAINS = {NodeId("n"): Drain(pool="inference", since_s=1.0, reason="")}


@pytest.fixture
def worklist() -> Worklist:
    made = Worklist()
    made.pending(PLAN, DRAINS)
    made.mark_settled(A, WANTED)
    assert made.pending(PLAN, DRAINS) == set()
    return made


def test_equal_inputs_that_are_other_objects_change_nothing(worklist: Worklist) -> None:
    same = PoolAllocation(device_ids=(DeviceId("n/0"),))
    assert worklist.pending(Plan(allocations={A: same}), dict(DRAINS)) == set()


@pytest.mark.parametrize(
    "other",
    [
        Plan(allocations={A: PoolAllocation(device_ids=(DeviceId("n/1"),))}),
        Plan(allocations={A: PoolAllocation(device_ids=WANTED.device_ids, global_batch_size=8)}),
        Plan(
            allocations={
                A: PoolAllocation(device_ids=WANTED.device_ids, share=Share(request=0.5, limit=0.5, memory_mb=1))
            }
        ),
        Plan(allocations={}),
        Plan(allocations={A: WANTED}, admitted={A: 1.0}),
    ],
    ids=["devices", "batch", "share", "nothing", "admitted"],
)
def test_another_plan_has_it_checked_again(worklist: Worklist, other: Plan) -> None:
    assert worklist.pending(other, DRAINS) == {A}


def test_its_record_has_it_checked_again(worklist: Worklist) -> None:
    worklist.mark_changed([A])
    assert worklist.pending(PLAN, DRAINS) == {A}


@pytest.mark.parametrize(
    "drains",
    [{}, {NodeId("n"): Drain(pool="inference", since_s=1.0, reason="", reclaim_since_s=2.0)}],
    ids=["ended", "a reclaim"],
)
def test_other_drains_have_it_checked_again(worklist: Worklist, drains: dict[NodeId, Drain]) -> None:
    assert worklist.pending(PLAN, drains) == {A}
    worklist.mark_settled(A, WANTED)
    assert worklist.pending(PLAN, drains) == set()


def test_one_that_has_ended_is_not_checked(worklist: Worklist) -> None:
    worklist.mark_changed([B])
    worklist.forget(B)
    assert worklist.pending(PLAN, DRAINS) == set()


# --- what waiting workloads are told ---------------------------------------------------------------------------------


def test_a_reason_is_told_again_when_an_event_has_changed_the_record(stage, job) -> None:
    reasons = {A: "others have the devices"}
    waiting = WaitingReasons()
    stage.tell(events.NodeJoined(node=make_node("n", 1)), events.JobSubmitted(job=job("a")))
    state, plan = stage.controller.state, Plan(reasons=reasons)
    assert waiting.news(state, plan)[0] == {A: "others have the devices"}
    told = replace(stage.job("a").lifecycle, reason=StateReason("others have the devices"))
    state.jobs[A] = replace(stage.job("a"), lifecycle=told)
    waiting.mark_changed([A])
    assert waiting.news(state, plan)[0] == {}
    state.jobs[A] = replace(stage.job("a"), lifecycle=replace(told, reason=StateReason("resumed")))
    assert waiting.news(state, plan)[0] == {}, "nothing has been marked"
    waiting.mark_changed([A])
    assert waiting.news(state, plan)[0] == {A: "others have the devices"}


def test_what_a_plan_says_about_room_alone_is_told(stage, job) -> None:
    waiting = WaitingReasons()
    stage.tell(events.NodeJoined(node=make_node("n", 1)), events.JobSubmitted(job=job("a")))
    state, plan = stage.controller.state, Plan(reasons={A: "others have the devices"})
    assert waiting.news(state, plan)[0] == {A: "others have the devices"}
    assert waiting.news(state, replace(plan, no_room={A: "asks for 16 CPUs"}))[0] == {A: "asks for 16 CPUs"}
    assert waiting.news(state, plan)[0] == {A: "others have the devices"}


def test_a_job_that_the_platform_is_too_small_for_is_told_so_until_nodes_join(stage, job) -> None:
    stage.want()
    stage.tell(events.NodeJoined(node=make_node("n", 4)))
    stage.tell(events.JobSubmitted(job=job("a", min_workers=64, max_workers=64, num_virtual_shards=64)))
    assert stage.job("a").reason == "needs at least 64 devices, and the platform has 4"
    stage.tell(events.NodeJoined(node=make_node("m", 4)))
    assert stage.job("a").reason == "needs at least 64 devices, and the platform has 8"
    stage.want(a="0")
    stage.tell(events.NodeJoined(node=make_node("o", 64)))
    assert stage.job("a").reason != "needs at least 64 devices, and the platform has 8"


def test_since_when_a_promise_is_given_up_is_in_the_journal(job) -> None:
    fit = replace(job("a", max_workers=2), total_steps=1000, profile_steps_per_s={1: 5.0, 2: 10.0})
    controller, again = Controller(make_live_policy("springtide")), Controller(make_live_policy("springtide"))
    lost = events.NodeLost(node_id=NodeId("m"))
    turns = [
        (0.0, [events.NodeJoined(node=make_node("n", 1)), events.NodeJoined(node=make_node("m", 1))]),
        (0.0, [events.JobSubmitted(job=replace(fit, goal=Goal(deadline_s=130.0)))]),
        (1.0, [lost]),
        (2.0, [events.NodeLost(node_id=NodeId("n"))]),
        (3.0, [events.JobEdited(job_id=A, goal=Goal(deadline_s=130.0, budget_usd=5.0), promised_finish_s=120.0)]),
        (4.0, [events.NodeJoined(node=make_node("n", 2))]),
    ]
    seen = []
    for now_s, told in turns:
        step = controller.step(now_s, told)
        again.restore(decode_step(encode_step(step)))
        seen.append(controller.state.jobs[A].lifecycle.given_up_at_s if A in controller.state.jobs else None)
        assert again.state.jobs == controller.state.jobs
    assert seen == [None, None, 1.0, 1.0, 1.0, None]
