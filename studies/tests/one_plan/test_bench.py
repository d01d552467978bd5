"""Everything at once: which stacks say something about the default's cost, and a short day played under several."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from springtide.cli.commands.bench import Report
from springtide.core.workload import Goal, ReplicaId
from springtide_studies.one_plan.bench import MOST_OF_BEST, OURS, best_first, report_of
from springtide_studies.one_plan.play import DEFAULT, all_stacks, batch_rule, play_stack, price_on_functions, value_usd
from springtide_studies.one_plan.truth import MixedSpeeds, in_fours, stand_ins
from springtide_studies.one_plan.world import MODEL_SPEEDS, DrawnWorld, WorldSetting, draw_world

SHORT = WorldSetting(num_nodes=2, days=1, day_s=1200.0)
PLAYED = (DEFAULT, "exclusive/two-way/goodput")


def figures(stack: str, cost_usd: float, **told: Any) -> dict[str, Any]:
    kept = {"deadlines": 10, "met": 8, "broken": 0, "minimums_broken": 0, "slo_attainment": 0.99}
    return {"stack": stack, "cost_usd": cost_usd, "best_effort_jct_s": 100.0, **kept, **told}


def report(*played: dict[str, Any]) -> Report:
    return report_of(played, SHORT)


def test_a_stack_that_does_less_is_no_measure_of_cost() -> None:
    default = figures(OURS, 90.0)
    found = report(
        default,
        figures("cheap but late", 10.0, met=7),
        figures("cheap but slow", 10.0, slo_attainment=0.98),
        {"stack": "broken", "error": "ValueError: no"},
        figures("as good", 100.0, met=9, slo_attainment=0.9895),
        figures("breaks", 60.0, met=9, minimums_broken=3),
    )
    assert [row["is_comparable"] for row in found["rows"]] == [True, False, False, False, True, False]
    assert found["rows"][-1]["baseline_name"].endswith("not comparable: minimums broken 3")
    assert (found["best"], found["ratio"], found["passed"]) == ("as good", 0.9, True)


@pytest.mark.parametrize("told", [{"broken": 1}, {"minimums_broken": 1}, {"cost_usd": 91.0}])
def test_a_broken_promise_or_minimum_and_a_higher_cost_fail(told: dict[str, Any]) -> None:
    assert MOST_OF_BEST == 0.9
    assert not report(figures(OURS, 90.0) | told, figures("as good", 100.0))["passed"]
    assert not report(figures(OURS, 90.0))["passed"]


def test_the_screen_sends_on_comparable_stacks_by_cost_and_then_those_that_met_most() -> None:
    default = figures(OURS, 90.0)
    played = [default, figures("a", 120.0), figures("b", 50.0, met=6), figures("c", 110.0), figures("d", 70.0, met=7)]
    assert best_first([*played, {"stack": "e", "error": "ValueError: no"}], default) == ["c", "a", "d", "b"]


def test_stacks_are_all_pairs_and_triples() -> None:
    found = all_stacks()
    assert {"springtide", "tide/springtide", "exclusive/fifo", "infless-l/one-way/goodput"} <= set(found)
    assert len(found) == len(set(found))


def test_the_world_is_the_same_for_every_stack() -> None:
    truths = stand_ins(SHORT.hour_s)
    one, other = (draw_world(SHORT, truths, batch) for batch in ("adaptive", "tuned"))
    assert [(at_s, job.job_id) for at_s, job in one.arrivals] == [(at_s, job.job_id) for at_s, job in other.arrivals]
    assert one.timed_events == other.timed_events
    assert {job.share is None for _, job in one.arrivals} == {True, False}
    assert draw_world(SHORT, truths, "adaptive") == one


def test_where_devices_are_mixed_each_job_is_slower_on_slow_ones() -> None:
    setting, truths = replace(SHORT, is_mixed=True), stand_ins(SHORT.hour_s)
    assert [node.devices[0].accelerator for node in setting.nodes] == ["fast", "slow"]
    assert setting.capacity == pytest.approx(8 * 1.45)
    arrivals = draw_world(setting, truths, "adaptive").arrivals
    says = next(job for _, job in arrivals if job.profile_steps_per_s)
    chooses = next(job for _, job in arrivals if not job.profile_steps_per_s)
    assert chooses.family in truths
    speeds = MixedSpeeds(truths, 8, model_speeds=MODEL_SPEEDS)
    for job in (says, chooses):
        run = speeds.open_run(job, 0.0)
        run.members, run.placement, run.batch_size = (ReplicaId("w"),), (1,), job.global_batch_size
        paces = []
        for model in ("fast", "slow"):
            run.accelerators = (model,)
            paces.append(speeds.pace(run).rate)
        assert paces[1] == pytest.approx(0.45 * paces[0])


def test_a_server_of_eight_is_two_of_four() -> None:
    assert in_fours((8, 3, 5)) == (4, 4, 3, 4, 1)


@pytest.mark.slow
def test_a_refused_job_pays_functions_only_if_they_are_in_time() -> None:
    jobs = draw_world(SHORT, stand_ins(SHORT.hour_s), "adaptive").arrivals
    job = next(job for _, job in jobs if job.params["model"] == "resnet101")
    assert price_on_functions(replace(job, goal=Goal(deadline_s=1.0)), 0.0) is None
    late, early = (price_on_functions(replace(job, goal=Goal(deadline_s=at_s)), 0.0) for at_s in (1e7, 1e6))
    assert late is not None
    assert early is None or early >= late
    assert value_usd(job) > 0.0


@pytest.mark.slow
def test_the_morning_of_a_short_day_is_played_with_and_without_pools() -> None:
    truths, morning = stand_ins(SHORT.hour_s), replace(SHORT, day_s=200.0)
    worlds = {rule: draw_world(SHORT, truths, rule) for rule in {batch_rule(stack) for stack in PLAYED}}
    for number, stack in enumerate(PLAYED):
        whole = worlds[batch_rule(stack)]
        world = DrawnWorld(
            [entry for entry in whole.arrivals if entry[0] < morning.until_s],
            tuple(entry for entry in whole.timed_events if entry[0] < 100.0),
            truths,
        )
        told = list[str]()
        found = play_stack(stack, morning, world, time.process_time, tell=told.append)
        assert "error" not in found
        assert told[0].startswith("day 1 is over after ")
        assert found["deadlines"] > 0
        assert 0.0 < found["slo_attainment"] <= 1.0
        parts = ("machines_usd", "functions_usd", "unmet_usd")
        assert found["cost_usd"] == pytest.approx(sum(found[part] for part in parts))
        if not number:
            assert found["promised"] > 0
            assert (found["broken"], found["minimums_broken"]) == (0, 0)
    stopped = play_stack(PLAYED[0], morning, world, time.process_time, cpu_limit_s=0.0)
    assert stopped["error"].startswith("OutOfTime: stopped after 0 s of CPU")


# Days of two hours on which promises or minimums were broken by places: devices that were promised to lie together, a
# start that was planned without what it waits for, best effort that moved out of the way too slowly.
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stack"), [(6, DEFAULT), (6, OURS), (1, OURS)])
def test_every_deadline_and_minimum_is_kept_where_services_and_parts_are_on_every_node(seed: int, stack: str) -> None:
    setting = WorldSetting(num_nodes=8, days=1, day_s=7200.0, seed=seed)
    world = draw_world(setting, stand_ins(setting.hour_s), batch_rule(stack))
    figures = play_stack(stack, setting, world, time.process_time)
    assert (figures["broken"], figures["minimums_broken"], figures["missed"]) == (0, 0, [])
