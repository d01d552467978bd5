"""Tiresias and Optimus as the artifact plays them: two queues, marginal gains, the emptiest node first."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, make_view
from springtide.control.controller import check_plan
from springtide.core.decision import Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import JobState
from springtide_studies.rivals.policies.tuned import OptimusOracle, TiresiasTuned, reported_steps_left

ROOT = {count: count**0.5 for count in range(1, 9)}
LINEAR = {count: float(count) for count in range(1, 9)}


def look(policy, *views, now_s=0.0, before=None, nodes=(4, 4)):
    snapshot = Snapshot(
        now_s=now_s,
        cluster=Topology(nodes=tuple(make_node(f"n{index}", size) for index, size in enumerate(nodes))),
        jobs=views,
        allocations=dict(before.allocations) if before else {},
        memory=msgspec.json.decode(msgspec.json.encode(before.memory)) if before else None,
    )
    plan = policy.decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def test_tiresias_gives_what_was_asked_for_and_passes_over_who_does_not_fit():
    plan = look(TiresiasTuned(), make_view("a", ask=6), make_view("b", ask=4), make_view("c", ask=2))
    assert counts(plan) == {"a": 6, "c": 2}


def test_tiresias_moves_a_job_down_when_it_has_had_its_share():
    policy = TiresiasTuned(threshold_s=60 * 8)
    first = look(policy, make_view("a", ask=8))
    second = look(policy, make_view("a", ask=8), make_view("b", ask=4), now_s=60.0, before=first)
    assert counts(second) == {"b": 4}
    assert second.memory["state"]["second"] == ["a"]
    third = look(policy, make_view("a", ask=8), now_s=120.0, before=second)
    assert counts(third) == {"a": 8}


def test_who_runs_on_keeps_its_devices_and_others_fill_the_emptiest_node_first():
    policy = TiresiasTuned()
    first = look(policy, make_view("a", ask=3), make_view("b", ask=2))
    assert first.allocations["a"].device_ids == ("n0/0", "n0/1", "n0/2")
    assert first.allocations["b"].device_ids == ("n1/0", "n1/1")
    after = look(policy, make_view("a", ask=3), make_view("c", ask=5), now_s=60.0, before=first)
    assert after.allocations["a"].device_ids == first.allocations["a"].device_ids
    assert after.allocations["c"].device_ids == ("n1/0", "n1/1", "n1/2", "n1/3", "n0/3")


def test_optimus_gives_everybody_one_and_the_rest_to_whom_it_saves_most():
    long, short = make_view("long", steps=10_000, profile=ROOT), make_view("short", steps=100, profile=ROOT)
    assert counts(look(OptimusOracle(), long, short)) == {"long": 7, "short": 1}
    flat = make_view("flat", steps=10_000, profile={1: 1.0, 2: 0.9})
    assert counts(look(OptimusOracle(), flat, short)) == {"flat": 1, "short": 7}


def test_optimus_reckons_with_the_speeds_it_was_told():
    told = with_fields(make_view("a", steps=1000, profile=LINEAR), throughput_samples_per_s={1: 1e-3})
    plan = look(OptimusOracle(), told, make_view("b", steps=1000, profile=LINEAR))
    assert counts(plan) == {"a": 4, "b": 4}


def test_optimus_counts_the_steps_since_the_last_report():
    view = replace(make_view("a", steps=1000, profile=LINEAR), state=JobState.RUNNING)
    assert reported_steps_left(view, 2, 100.0) == 800.0
    assert reported_steps_left(view, 0, 100.0) == 1000.0
    assert reported_steps_left(replace(view, total_steps=None), 2, 100.0) == 1.0


@pytest.mark.parametrize("policy", [OptimusOracle(), TiresiasTuned()])
def test_more_jobs_than_devices_wait(policy):
    plan = look(policy, *(make_view(f"j{index}", profile=LINEAR) for index in range(12)))
    assert sum(counts(plan).values()) == 8
