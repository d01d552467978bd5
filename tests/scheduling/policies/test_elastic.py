"""Elastic tries a job again that was slow when it was measured: until it is measured anew, and ever more rarely."""

from __future__ import annotations

import msgspec

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, make_view
from springtide.control.controller import check_plan
from springtide.core.decision import JobView, Overheads, Plan, PoolAllocation, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import JobState
from springtide.perf.curve import fit_scaling
from springtide.scheduling.policies.elastic import MAX_DOUBLINGS, Elastic

RETRY_S, SETTLE_S = Elastic().retry_s, Elastic().settle_s
SLOWER = {1: 10.0, 2: 4.0}


def measured(speeds, *, resized_s, most=2, steps=100_000, name="a", deadline_s=None) -> JobView:
    view = make_view(name, steps=steps, most=most, profile={}, state=JobState.RUNNING, deadline_s=deadline_s)
    return with_fields(view, throughput_samples_per_s=speeds, resized_at_s=resized_s)


def ask(now_s, *views, held, memory=None, slots=2, change_s=0.0) -> Plan:
    snapshot = Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=(make_node("n", slots),)),
        jobs=views,
        allocations={
            name: PoolAllocation(device_ids=tuple(f"n/{at}" for at in devices)) for name, devices in held.items()
        },
        memory=msgspec.json.decode(msgspec.json.encode(memory)),
        overheads=Overheads(change_s=change_s),
    )
    plan = Elastic().decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def test_a_trial_lasts_until_its_workers_have_come_and_are_measured() -> None:
    resting = measured(SLOWER, resized_s=100.0)
    began = ask(400.0, resting, held={"a": [0]})
    assert counts(began) == {"a": 2}
    assert began.reasons["a"].startswith("idle devices, to measure its speed on them again")
    # Its last change is long past while the new worker starts: that is no reason to send it away again.
    joining = ask(430.0, resting, held={"a": [0, 1]}, memory=began.memory)
    assert counts(joining) == {"a": 2}
    fresh = measured(SLOWER, resized_s=435.0)
    settling = ask(454.0, fresh, held={"a": [0, 1]}, memory=joining.memory)
    assert counts(settling) == {"a": 2}
    over = ask(455.0, fresh, held={"a": [0, 1]}, memory=settling.memory)
    assert counts(over) == {"a": 1}
    assert over.reasons["a"] == "2 devices were no faster than 1: 4 against 10 samples a second"


def test_workers_that_never_come_are_not_waited_for_for_ever() -> None:
    resting = measured(SLOWER, resized_s=100.0)
    began = ask(400.0, resting, held={"a": [0]})
    assert counts(ask(400.0 + RETRY_S, resting, held={"a": [0, 1]}, memory=began.memory)) == {"a": 1}


def test_a_trial_that_pays_is_kept_and_forgotten() -> None:
    began = ask(400.0, measured(SLOWER, resized_s=100.0), held={"a": [0]})
    better = measured({1: 10.0, 2: 18.0}, resized_s=410.0)
    kept = ask(440.0, better, held={"a": [0, 1]}, memory=began.memory)
    assert (counts(kept), kept.memory) == ({"a": 2}, None)


def test_where_changes_are_dear_a_trial_is_no_longer_than_the_measuring() -> None:
    began = ask(400.0, measured(SLOWER, resized_s=100.0), held={"a": [0]}, change_s=30.0)
    fresh = measured(SLOWER, resized_s=435.0)
    assert counts(ask(435.0 + SETTLE_S, fresh, held={"a": [0, 1]}, memory=began.memory, change_s=30.0)) == {"a": 1}


def test_each_trial_in_vain_makes_the_next_one_wait_twice_as_long() -> None:
    now_s, memory, waits_s = 100.0, None, []
    for _ in range(MAX_DOUBLINGS + 2):
        resting = measured(SLOWER, resized_s=now_s)
        plan = ask(now_s, resting, held={"a": [0]}, memory=memory)
        assert plan.revisit_at_s is not None
        waits_s.append(plan.revisit_at_s - now_s)
        began = ask(plan.revisit_at_s, resting, held={"a": [0]}, memory=plan.memory)
        assert counts(began) == {"a": 2}
        now_s = plan.revisit_at_s + 2.0
        over = ask(now_s + SETTLE_S, measured(SLOWER, resized_s=now_s), held={"a": [0, 1]}, memory=began.memory)
        assert counts(over) == {"a": 1}
        now_s, memory = now_s + SETTLE_S, over.memory
    assert waits_s == [RETRY_S * 2 ** min(number, MAX_DOUBLINGS) for number in range(MAX_DOUBLINGS + 2)]


def test_a_deadline_takes_no_more_workers_than_bring_anything() -> None:
    def in_time(speeds) -> JobView:
        # 3,200 samples, just before the deadline on all of its workers.
        needs_s = 3200.0 / fit_scaling(speeds).samples_per_s(4)
        return measured(speeds, resized_s=0.0, most=4, steps=100, deadline_s=10.0 + 1.01 * needs_s)

    # By what was measured four are no faster than one.
    assert counts(ask(10.0, in_time({1: 10.0, 4: 5.0}), held={"a": [0]}, slots=4)) == {"a": 1}
    # Where they do bring something it gets all of them, whoever else would gain.
    other = measured({1: 10.0, 4: 40.0}, resized_s=0.0, most=4, name="b")
    assert counts(ask(10.0, in_time({1: 10.0, 4: 35.0}), other, held={"a": [0]}, slots=4)) == {"a": 4}
