"""First runs: what a deadline waits for while nothing is measured, and what is promised once something is."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from springtide.core.decision import JobView, Plan, PromiseCondition
from springtide.core.workload import Goal, JobState
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.policies.springtide.first_runs import MEASURED_FRACTION
from springtide.scheduling.policies.springtide.memory import PAD_S
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import SETTLE_S

STEPS = 1000
BATCH = 10


def unknown(deadline_s: float, *, most: int = 1) -> JobView:
    view = make_view("new", steps=STEPS, most=most, profile={}, deadline_s=deadline_s)
    return replace(view, job=replace(view.job, global_batch_size=BATCH))


def running(view: JobView, step_s: float, *, at_s: float, size: int = 1, step: int | None = None, **fields) -> JobView:
    """The job on `size` devices since 0, measured at this speed there."""
    speeds = {size: BATCH / step_s}
    step = int(at_s / step_s) if step is None else step
    known = {"throughput_samples_per_s": speeds, "resized_at_s": 0.0, "progress_at_s": at_s, "started_at_s": 0.0}
    return with_fields(view, state=JobState.RUNNING, num_replicas=size, step=step, **{**known, **fields})


class Platform:
    """Four devices. Each decision is made twice, the second time from the memory alone."""

    def __init__(self) -> None:
        self.policy, self.memory, self.held = Springtide(), None, {}

    def ask(self, now_s: float, *views: JobView) -> Plan:
        memory = msgspec.json.decode(msgspec.json.encode(self.memory))
        options = {"slots": 4, "held": self.held, "now_s": now_s}
        anew = look(Springtide(), views, memory=memory, **options)
        plan = look(self.policy, views, memory=self.memory, **options)
        assert (anew.memory, anew.admitted, anew.conditions) == (plan.memory, plan.admitted, plan.conditions)
        self.memory = plan.memory
        self.held = {who: [int(d[2:]) for d in given.device_ids] for who, given in plan.allocations.items()}
        return plan


def slowest_step_s(plan: Plan, now_s: float, deadline_s: float, size: int, steps_left: float) -> float:
    """By the plan alone: the longest stretch before the deadline in which others leave `size` of four devices."""
    runs = [run for who, planned in plan.future.items() if who != "new" for run in planned]
    edges = sorted(
        {now_s, deadline_s, *(at for run in runs for at in (run.start_s, run.end_s) if now_s < at < deadline_s)}
    )
    longest_s, began_s = 0.0, None
    for from_s, to_s in pairwise(edges):
        used = sum(run.num_devices for run in runs if run.start_s <= from_s < run.end_s)
        began_s = None if used > 4 - size else from_s if began_s is None else began_s
        if began_s is not None:
            lost_s = PAD_S if began_s == now_s else 2 * PAD_S
            longest_s = max(longest_s, to_s - began_s - lost_s)
    return MEASURED_FRACTION * longest_s / steps_left


def test_a_deadline_that_is_only_pursued_is_not_called_a_promise() -> None:
    platform, view, idle = Platform(), unknown(500.0), make_view("idle", at_s=5.0, steps=STEPS, least=4, most=4)
    platform.ask(0.0, view)
    plan = platform.ask(10.0, running(view, 0.4, at_s=10.0), idle)
    assert plan.reasons["idle"] == "waiting: pursued deadlines need the devices"
    promised = make_view("new", steps=STEPS, deadline_s=5000.0)
    assert Platform().ask(5.0, promised, idle).reasons["idle"] == "waiting: promised deadlines need the devices"


def test_what_is_unknown_is_told_how_fast_it_has_to_be() -> None:
    plan = Platform().ask(0.0, unknown(500.0))
    assert plan.conditions == {
        "new": PromiseCondition(step_s=pytest.approx(0.9 * (500.0 - PAD_S) / STEPS), num_workers=1)
    }
    assert plan.conditions["new"].text() == (
        "its deadline is promised once its speed is measured, if a step takes <= 0.449 s on 1 worker"
    )


def test_conditions_are_in_the_order_of_the_jobs_whatever_was_derived_before() -> None:
    policy, first = DecisionCache(Springtide()), unknown(500.0)
    second = replace(first, job=replace(first.job, job_id="second", name="second"))
    at_first = look(policy, [second, first], slots=4)
    held = {"new": [0], "second": [1]}
    views = [running(first, 0.4, at_s=10.0), second]
    options = {"slots": 4, "held": held, "now_s": 10.0, "memory": at_first.memory}
    warm, cold = look(policy, views, **options), look(Springtide(), views, **options)
    assert list(warm.conditions) == list(cold.conditions) == ["new", "second"]
    assert msgspec.json.encode(warm.memory) == msgspec.json.encode(cold.memory)


def test_without_a_length_or_a_hard_deadline_nothing_is_waited_for() -> None:
    view = unknown(500.0)
    soft = replace(view, job=replace(view.job, goal=replace(view.job.goal, is_soft=True)))
    for other in (soft, replace(view, total_steps=None, job=replace(view.job, total_steps=None))):
        assert Platform().ask(0.0, other).conditions == {}


def test_a_deadline_is_promised_as_soon_as_its_speed_is_measured_for_long_enough() -> None:
    platform, view = Platform(), unknown(500.0)
    platform.ask(0.0, view)
    early = platform.ask(10.0, running(view, 0.4, at_s=10.0))
    assert (early.admitted, early.conditions["new"].measured_s) == ({}, None)
    assert "new" in early.future
    plan = platform.ask(SETTLE_S, running(view, 0.4, at_s=SETTLE_S))
    assert plan.admitted == {"new": pytest.approx(SETTLE_S + (STEPS - 50) * 0.4 / 0.9, abs=0.1)}
    assert plan.conditions == {}
    # It is ahead of a plan that counts on less, which is no reason to plan anew; being slower than that is.
    promised = running(view, 0.4, at_s=120.0, admitted_at_s=SETTLE_S)
    assert platform.ask(120.0, promised).memory == platform.ask(120.0, promised).memory
    known = platform.memory
    assert platform.ask(140.0, running(view, 0.4, at_s=140.0, admitted_at_s=SETTLE_S)).memory is known
    slower = running(view, 0.46, at_s=200.0, step=200, admitted_at_s=SETTLE_S)
    assert platform.ask(200.0, slower).memory is not known
    # Now all of the measured speed counts, so that the promise is not given up.
    assert platform.ask(200.0, slower).future["new"][-1].end_s == pytest.approx(200.0 + 800 * 0.46, abs=0.1)


def test_what_is_too_slow_is_told_by_how_much() -> None:
    platform, view = Platform(), unknown(500.0)
    platform.ask(0.0, view)
    plan = platform.ask(SETTLE_S, running(view, 0.47, at_s=SETTLE_S))
    assert plan.admitted == {}
    (condition,) = plan.conditions.values()
    assert condition.measured_s == pytest.approx(0.47)
    assert condition.step_s == pytest.approx(0.9 * 480.0 / (STEPS - 42), rel=1e-3)
    assert condition.text() == (
        "its deadline is pursued and not promised: a step takes 0.47 s on 1 worker, more than 0.45 s"
    )


def test_a_promise_rests_on_the_measured_workers_or_fewer() -> None:
    view = unknown(500.0, most=4)
    platform = Platform()
    platform.held = {"new": [0, 1]}
    plan = platform.ask(30.0, running(view, 0.4, at_s=30.0, size=2))
    # On one of the two it is taken to be half as fast; on four it would be faster, which nothing shows.
    assert plan.admitted["new"] <= 500.0
    assert platform.memory["sure"]["new"][:2] == [[1, pytest.approx(1.125)], [2, pytest.approx(2.25)]]
    assert max(n for n, _ in platform.memory["sure"]["new"]) == 2


def test_a_promised_first_run_is_tried_on_more_where_it_can_afford_to_stand_still() -> None:
    for deadline_s, size in ((450.0, 1), (4000.0, 2)):
        view, platform = unknown(deadline_s, most=2), Platform()
        platform.held = {"new": [0]}
        # Another job has the other devices until now.
        other = make_view("other", steps=90, most=3, least=3, ask=3, deadline_s=30.5, profile={3: 3.0})
        platform.ask(0.0, view, other)
        platform.held = {"new": [0], "other": [1, 2, 3]}
        plan = platform.ask(25.0, running(view, 0.4, at_s=25.0), other)
        assert counts(plan) == {"new": 1, "other": 3}
        assert set(plan.admitted) >= {"new"}
        after = platform.ask(31.0, running(view, 0.4, at_s=31.0, admitted_at_s=25.0))
        assert counts(after) == {"new": size}
        assert after.future["new"][-1].end_s <= deadline_s


def test_others_are_planned_anew_for_it_within_their_deadlines() -> None:
    platform, view = Platform(), unknown(140.0)
    other = make_view("other", steps=210, least=4, most=4, ask=4, deadline_s=300.0, profile={4: 4.2})
    other = with_fields(other, starts_at_s=100.0)
    first = platform.ask(0.0, view, other)
    assert first.future["other"][0].start_s == 100.0
    # By its speed it is done at 95 s; at nine tenths of it, it is in the way.
    measured = running(view, 1 / 10.5, at_s=SETTLE_S, step=210)
    plan = platform.ask(SETTLE_S, measured, with_fields(other, admitted_at_s=0.0))
    assert 100.0 < plan.admitted["new"] < 140.0
    assert plan.future["other"][0].start_s >= plan.admitted["new"]
    assert plan.future["other"][-1].end_s <= 300.0


def test_a_deadline_that_its_owner_gets_promised_is_one_in_the_table_too() -> None:
    platform, view = Platform(), unknown(500.0)
    platform.ask(0.0, view)
    slow = running(view, 0.47, at_s=SETTLE_S)
    assert platform.ask(SETTLE_S, slow).admitted == {}
    later = replace(slow, job=replace(slow.job, goal=Goal(deadline_s=900.0)))
    # What `reconsider` asks: as if it came now.
    alias = with_fields(later, job=replace(later.job, job_id="new~"), state=JobState.PENDING, num_replicas=0)
    assert look(Springtide(), [alias], slots=4, now_s=SETTLE_S).admitted["new~"] <= 900.0
    platform.ask(SETTLE_S + 1.0, with_fields(later, admitted_at_s=SETTLE_S, num_edits=1))
    (flags,) = [job[4] for job in platform.memory["jobs"].values()]
    assert flags == 2


@settings(max_examples=25)
@given(
    others=st.lists(st.tuples(st.integers(50, 400), st.integers(1, 4), st.floats(1.05, 4.0)), max_size=3),
    deadline_s=st.floats(100.0, 1200.0),
    part=st.floats(0.3, 1.4),
)
def test_who_is_as_fast_as_was_said_is_promised_and_nobody_loses_by_it(others, deadline_s, part) -> None:
    platform, view = Platform(), unknown(deadline_s)
    jobs = [
        make_view(f"j{index}", steps=steps, most=most, deadline_s=slack * steps / most, profile={most: float(most)})
        for index, (steps, most, slack) in enumerate(others)
    ]
    first = platform.ask(0.0, *jobs, view)
    jobs = [with_fields(job, admitted_at_s=0.0) for job in jobs if job.job.job_id in first.admitted]
    condition = first.conditions["new"]
    assert condition.step_s == pytest.approx(slowest_step_s(first, 0.0, deadline_s, condition.num_workers, STEPS))
    if "new" not in first.allocations or not condition.step_s:
        return
    step_s = part * condition.step_s
    at_s = SETTLE_S + PAD_S
    measured = running(view, step_s, at_s=at_s, step=min(STEPS - 1, int(SETTLE_S / step_s)))
    others_run = [
        with_fields(job, state=JobState.RUNNING, num_replicas=len(platform.held.get(job.job.job_id, ())))
        for job in jobs
    ]
    plan = platform.ask(at_s, *others_run, measured)
    for job in jobs:
        assert plan.future[job.job.job_id][-1].end_s <= job.job.goal.deadline_s + 1e-6
    if part <= 1.0:
        assert "new" in plan.admitted
    if "new" in plan.admitted:
        assert plan.admitted["new"] == plan.future["new"][-1].end_s <= deadline_s + 1e-6
        assert "new" not in plan.conditions
    else:
        told = plan.conditions["new"]
        assert told.measured_s == pytest.approx(step_s)
        assert told.measured_s > told.step_s
