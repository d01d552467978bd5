"""Jobs on parts where devices are of two models: each is as fast as on its own one, and promised no more."""

from __future__ import annotations

import pytest

from kits.job_parts import with_fields
from kits.scheduling.sharing_views import HALF, decide, job, service
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.workload import Goal, JobState
from springtide.scheduling.registry import make_live_policy

# One worker with half of a fast device takes 200 s, with half of a slow one 500 s.
PROFILES = {"fast": {1: 1.0, 2: 2.0}, "slow": {1: 0.4, 2: 0.8}}
KNOWN = {"total_steps": 100, "profiles": PROFILES, "profile_steps_per_s": PROFILES["fast"], "num_virtual_shards": 4}
NODES = (make_node("s", 2, accelerator="slow"), make_node("f", 2, accelerator="fast"))
LARGE = Share(request=0.8, limit=0.9)
FULL = [service(f"full{n}", LARGE, min_replicas=1, ready=1) for n in range(2)]
FULL_HELD = {f"full{n}": ([f"f/{n}"], LARGE) for n in range(2)}


@pytest.fixture
def policy():
    return make_live_policy("springtide")


def models(plan, who):
    return {device_id[0] for device_id in plan.allocations[who].device_ids}


def test_a_deadline_is_promised_on_the_model_that_makes_it(policy):
    plan = decide(policy, [job("j", HALF, workers=(1, 2), goal=Goal(deadline_s=300.0), **KNOWN)], (), {}, NODES)
    assert "j" in plan.admitted
    assert models(plan, "j") == {"f"}


def test_a_deadline_that_only_fast_devices_make_is_refused_where_these_are_full(policy):
    asked = job("j", HALF, goal=Goal(deadline_s=300.0), **KNOWN)
    plan = decide(policy, [asked], FULL, FULL_HELD, NODES)
    assert "it takes 500 s" in plan.rejected["j"].reason
    assert "j" not in plan.allocations


def test_a_promise_on_slow_devices_counts_on_their_speed(policy):
    asked = job("j", HALF, goal=Goal(deadline_s=600.0), **KNOWN)
    plan = decide(policy, [asked], FULL, FULL_HELD, NODES)
    assert models(plan, "j") == {"s"}
    assert plan.admitted["j"] == pytest.approx(10.0 + 500.0)


def test_a_running_job_grows_on_its_own_model_alone(policy):
    asked = job("j", HALF, workers=(1, 4), **KNOWN)
    runs = with_fields(asked, state=JobState.RUNNING, num_replicas=1, started_at_s=0.0, step=1, progress_at_s=10.0)
    plan = decide(policy, [runs], (), {"j": (["s/0"], HALF)}, NODES, now_s=60.0)
    assert plan.allocations["j"].device_ids == ("s/0", "s/1")


def test_one_whose_speed_is_known_on_one_model_waits_for_that(policy):
    known = {**KNOWN, "profiles": {"fast": PROFILES["fast"]}}
    plan = decide(policy, [job("j", HALF, **known)], FULL, FULL_HELD, NODES)
    assert (
        plan.reasons["j"]
        == "waits for room: on fast a worker needs 0.5 of a device, and the most that is left of one is 0.2"
    )


@pytest.mark.parametrize("goal", [Goal(), Goal(deadline_s=300.0)])
def test_nothing_is_promised_where_no_speed_is_known_but_it_starts(policy, goal):
    asked = job("j", HALF, goal=goal, total_steps=100, num_virtual_shards=4)
    plan = decide(policy, [asked], (), {}, NODES)
    assert "j" in plan.allocations
    assert not plan.admitted


def test_in_pools_a_profile_of_a_model_counts_for_the_part_that_is_booked():
    nodes = [make_node(name, 2, accelerator=name, pool="training") for name in ("slow", "fast")]
    asked = job("j", HALF, goal=Goal(deadline_s=150.0), **KNOWN)
    plan = decide(make_live_policy("tide/springtide"), [asked], (), {}, nodes)
    assert "j" not in plan.admitted
