"""Springtide and measurements: nobody is shrunk while it is measured, and nobody given up for one bad moment."""

from __future__ import annotations

import msgspec
import pytest

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from springtide.core.decision import JobView, Overheads, Plan
from springtide.core.workload import JobState
from springtide.scheduling.policies.springtide.outside import MAX_DOUBLINGS, RETRY_S
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import SETTLE_S, PromiseRow

COSTS = Overheads(change_s=1.0)
# Two devices seem to be slower than one.
SLOWER = {1: 10.0, 2: 4.0}
# When a promised job of 100,000 steps ends that goes on from 420 s at nine tenths of a step a second. A trial stands
# still for two changes and until it is measured: 22 s.
KEPT_AT_S = 420.0 + 100_000 / 0.9


def measured(
    speeds, *, held=1, resized_s=100.0, told_s=100.0, steps=100_000, most=2, name="a", deadline_s=None, **others
) -> JobView:
    """A job without a profile that runs on `held` devices since `resized_s` and last reported at `told_s`."""
    view = make_view(name, steps=steps, most=most, profile={}, deadline_s=deadline_s, state=JobState.RUNNING)
    job = msgspec.structs.replace(view.job, global_batch_size=10)
    return with_fields(
        view,
        job=job,
        throughput_samples_per_s=speeds,
        num_replicas=held,
        resized_at_s=resized_s,
        progress_at_s=told_s,
        started_at_s=0.0,
        **others,
    )


class Platform:
    """One policy from decision to decision on a node of `slots` devices; every plan is carried out at once."""

    def __init__(self, slots: int = 2) -> None:
        self.policy = Springtide()
        self.slots = slots
        self.memory = None
        self.held: dict[str, list[int]] = {}

    def ask(self, now_s: float, *views: JobView) -> Plan:
        # The memory goes through the journal, and every other policy starts anew from it.
        memory = msgspec.json.decode(msgspec.json.encode(self.memory))
        held = {view.job.job_id: self.held[view.job.job_id] for view in views if view.job.job_id in self.held}
        views = tuple(msgspec.structs.replace(view, num_replicas=len(held.get(view.job.job_id, ()))) for view in views)
        options = {"slots": self.slots, "held": held, "now_s": now_s, "overheads": COSTS}
        anew = look(Springtide(), views, memory=memory, **options)
        plan = look(self.policy, views, memory=self.memory, **options)
        assert (anew.allocations, anew.memory, anew.revisit_at_s) == (plan.allocations, plan.memory, plan.revisit_at_s)
        self.memory = plan.memory
        self.held = {who: [int(d[2:]) for d in given.device_ids] for who, given in plan.allocations.items()}
        return plan

    def begin(self, **goal) -> Plan:
        """`a` has run on two devices since 100 s, and on one before."""
        self.ask(0.0, measured({1: 10.0}, resized_s=0.0, told_s=0.0, **goal))
        plan = self.ask(90.0, measured({1: 10.0}, resized_s=0.0, told_s=90.0, **goal))
        assert counts(plan) == {"a": 2}
        return plan


def test_a_job_whose_owner_allows_fewer_workers_is_told_that() -> None:
    platform = Platform()
    platform.begin()
    faster = {1: 10.0, 2: 19.0}
    platform.ask(102.0, measured(faster, held=2, told_s=102.0))
    view = measured(faster, held=2, told_s=104.0)
    view = msgspec.structs.replace(view, bounds=msgspec.structs.replace(view.bounds, max_workers=1, num_edits=1))
    plan = platform.ask(104.0, view)
    assert counts(plan) == {"a": 1}
    assert plan.reasons["a"] == "its owner allows at most 1 device"


def test_nobody_is_shrunk_while_it_is_measured() -> None:
    platform = Platform()
    platform.begin()
    # Its new worker is on its way, then it has joined and reports for the first time; then for the first time in full.
    assert counts(platform.ask(95.0, measured({1: 10.0}, resized_s=0.0, told_s=95.0))) == {"a": 2}
    assert counts(platform.ask(102.0, measured(SLOWER, told_s=102.0))) == {"a": 2}
    assert counts(platform.ask(119.0, measured(SLOWER, told_s=119.0))) == {"a": 2}
    settled = platform.ask(100.0 + SETTLE_S, measured(SLOWER, told_s=100.0 + SETTLE_S))
    assert counts(settled) == {"a": 1}
    assert settled.reasons["a"] == "2 devices were no faster than 1: 4 against 10 samples a second"


@pytest.mark.parametrize("deadline_s", [None, 300.0], ids=["best effort", "a deadline"])
def test_a_job_that_is_measured_keeps_its_size_but_not_from_one_that_could_not_run(deadline_s) -> None:
    platform = Platform()
    platform.begin()
    view = measured(SLOWER, told_s=102.0)
    assert counts(platform.ask(102.0, view)) == {"a": 2}
    other = make_view("b", at_s=103.0, steps=500, profile={}, deadline_s=deadline_s)
    plan = platform.ask(103.0, view, other)
    assert counts(plan) == {"a": 1, "b": 1}
    assert plan.reasons["a"] == "'b' needs 1 device"


def shrunk(platform: Platform, **goal) -> Plan:
    """It was measured on two devices at a bad moment, and has run on one since 126 s."""
    platform.begin(**goal)
    platform.ask(102.0, measured(SLOWER, told_s=102.0, **goal))
    platform.ask(125.0, measured(SLOWER, told_s=125.0, **goal))
    return platform.ask(126.0, measured(SLOWER, resized_s=126.0, told_s=126.0, **goal))


def test_who_was_shrunk_is_tried_again_on_idle_devices_and_the_plan_wakes_for_it() -> None:
    platform = Platform()
    plan = shrunk(platform)
    assert counts(plan) == {"a": 1}
    assert plan.revisit_at_s == 126.0 + RETRY_S
    view = measured(SLOWER, resized_s=126.0, told_s=420.0)
    assert counts(platform.ask(425.9, view)) == {"a": 1}
    tried = platform.ask(426.0, view)
    assert counts(tried) == {"a": 2}
    assert (
        tried.reasons["a"] == "idle devices, to measure its speed on them again: it may have been slow there for once"
    )
    # Nothing takes it back before it is measured: while its worker comes, and while the old figure is averaged away.
    assert counts(platform.ask(430.0, with_fields(view, progress_at_s=430.0))) == {"a": 2}
    assert counts(platform.ask(440.0, measured({1: 10.0, 2: 8.0}, resized_s=434.0, told_s=440.0))) == {"a": 2}
    better = measured({1: 10.0, 2: 18.0}, resized_s=434.0, told_s=460.0)
    assert counts(platform.ask(460.0, better)) == {"a": 2}
    assert "trials" not in platform.memory


def test_each_trial_in_vain_makes_the_next_one_wait_twice_as_long() -> None:
    platform = Platform()
    shrunk(platform)
    resized_s, waits_s = 126.0, []
    for _ in range(MAX_DOUBLINGS + 2):
        steps_left = {"steps": 10_000_000}
        plan = platform.ask(resized_s, measured(SLOWER, resized_s=resized_s, told_s=resized_s, **steps_left))
        waits_s.append(plan.revisit_at_s - resized_s)
        began_s = plan.revisit_at_s
        view = measured(SLOWER, resized_s=resized_s, told_s=began_s, **steps_left)
        assert counts(platform.ask(began_s, view)) == {"a": 2}
        resized_s = began_s + 5.0
        platform.ask(resized_s, measured(SLOWER, resized_s=resized_s, told_s=resized_s, **steps_left))
        told_s = resized_s + SETTLE_S
        assert counts(platform.ask(told_s, measured(SLOWER, resized_s=resized_s, told_s=told_s, **steps_left))) == {
            "a": 1
        }
        resized_s = told_s + 1.0
    assert waits_s == [RETRY_S * 2 ** min(number, MAX_DOUBLINGS) for number in range(MAX_DOUBLINGS + 2)]


def test_a_trial_goes_back_at_once_when_somebody_comes_and_does_not_count() -> None:
    platform = Platform()
    shrunk(platform)
    view = measured(SLOWER, resized_s=126.0, told_s=420.0)
    assert counts(platform.ask(426.0, view)) == {"a": 2}
    other = make_view("b", at_s=428.0, steps=500)
    plan = platform.ask(428.0, view, other)
    assert counts(plan) == {"a": 1, "b": 1}
    assert plan.reasons["a"] == "'b' needs 1 device"
    assert platform.memory["trials"] == {"a": [0, 0]}


def test_idle_devices_go_first_to_whoever_is_known_to_gain() -> None:
    platform = Platform(slots=3)
    grows = measured({1: 10.0, 2: 20.0}, name="b", held=1, resized_s=0.0, told_s=90.0)
    platform.ask(0.0, measured({1: 10.0}, resized_s=0.0, told_s=0.0))
    platform.held = {"a": [0], "b": [1]}
    plan = platform.ask(500.0, measured(SLOWER, resized_s=126.0, told_s=500.0), grows)
    assert counts(plan) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "view",
    [
        # At best it would end 50 s sooner, for two changes and the time until it is measured.
        measured(SLOWER, resized_s=126.0, told_s=420.0, steps=100),
        measured(SLOWER, resized_s=126.0, told_s=420.0, most=1),
        # Its promised deadline leaves no time for it.
        measured(SLOWER, resized_s=126.0, told_s=420.0, admitted_at_s=1.0, deadline_s=KEPT_AT_S + 15.0),
    ],
    ids=["nearly done", "its owner allows one", "promised"],
)
def test_who_cannot_gain_enough_or_has_promised_too_much_is_not_tried(view: JobView) -> None:
    platform = Platform()
    shrunk(platform)
    assert counts(platform.ask(1000.0, view)) == {"a": 1}


def test_a_promised_one_is_tried_if_it_keeps_its_deadline_anyway() -> None:
    platform = Platform()
    shrunk(platform)
    view = measured(SLOWER, resized_s=126.0, told_s=420.0, admitted_at_s=1.0, deadline_s=KEPT_AT_S + 30.0)
    plan = platform.ask(1000.0, view)
    assert counts(plan) == {"a": 2}
    assert plan.future["a"][-1].end_s <= KEPT_AT_S + 30.0


def test_who_has_a_profile_is_not_tried() -> None:
    flat = make_view("a", profile={1: 10.0, 2: 4.0}, most=2, steps=1_000_000, state=JobState.RUNNING)
    flat = with_fields(flat, resized_at_s=10.0, progress_at_s=900.0)
    assert PromiseRow(flat).trial_sizes == ()
    plan = look(Springtide(), [flat], slots=2, held={"a": [0]}, now_s=1000.0)
    assert counts(plan) == {"a": 1}
    assert plan.revisit_at_s is None


def test_a_pursued_deadline_keeps_its_devices_until_its_speed_is_measured() -> None:
    platform = Platform()
    goal = {"deadline_s": 60_000.0, "steps": 20_000}
    platform.ask(0.0, measured({1: 10.0}, resized_s=0.0, told_s=0.0, **goal))
    assert counts(platform.ask(90.0, measured({1: 10.0}, resized_s=0.0, told_s=90.0, **goal))) == {"a": 2}
    assert counts(platform.ask(102.0, measured(SLOWER, told_s=102.0, **goal))) == {"a": 2}
    settled = platform.ask(121.0, measured(SLOWER, told_s=121.0, **goal))
    assert counts(settled) == {"a": 1}
    assert settled.reasons["a"] == "2 devices were no faster than 1: 4 against 10 samples a second"


def test_who_is_pursued_on_little_is_tried_on_more_as_well_and_gives_way_to_whoever_could_not_run() -> None:
    platform = Platform()
    goal = {"deadline_s": 60_000.0, "steps": 20_000}
    shrunk(platform, **goal)
    assert counts(platform.ask(425.0, measured(SLOWER, resized_s=126.0, told_s=425.0, **goal))) == {"a": 1}
    view = measured(SLOWER, resized_s=126.0, told_s=425.5, **goal)
    tried = platform.ask(426.0, view)
    assert counts(tried) == {"a": 2}
    assert tried.reasons["a"].startswith("idle devices, to measure its speed on them again")
    assert "a" in tried.future
    # Its new worker is on its way, and whatever is reported meanwhile: it is left alone.
    assert counts(platform.ask(430.0, with_fields(view, progress_at_s=430.0, step=1))) == {"a": 2}
    fresh = measured({1: 10.0, 2: 8.0}, resized_s=434.0, told_s=440.0, **goal)
    assert counts(platform.ask(440.0, fresh)) == {"a": 2}
    assert counts(platform.ask(441.0, fresh, make_view("b", at_s=441.0, steps=500))) == {"a": 1, "b": 1}


def test_what_its_owner_does_not_allow_any_more_is_no_trial() -> None:
    platform = Platform()
    platform.begin()
    narrowed = measured(SLOWER, told_s=102.0, most=1)
    assert counts(platform.ask(102.0, narrowed)) == {"a": 1}
