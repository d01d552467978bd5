"""Shortest job first: of those that wait, the one with the least left starts next."""

from __future__ import annotations

from msgspec.structs import replace

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide_studies.rivals.policies.sjf import ShortestJobFirst


def test_the_shortest_of_those_that_wait_starts_next():
    views = [
        make_view("a", steps=800, ask=8),
        make_view("long", steps=1600, ask=8),
        make_view("short", steps=80, ask=8),
    ]
    run = play(ShortestJobFirst(), views)
    assert sorted(run.finished_at_s, key=run.finished_at_s.get) == ["short", "a", "long"]
    assert run.num_changes == 0


def test_work_is_counted_in_time_on_the_workers_asked_for():
    wide, narrow = make_view("wide", steps=800, ask=8), make_view("narrow", steps=200, ask=1)
    assert counts(look(ShortestJobFirst(), [narrow, wide], slots=8)) == {"wide": 8}, "100 s against 200 s"


def test_a_running_job_is_stopped_only_by_the_preemptive_one():
    views = [make_view("long", steps=8000, ask=8), make_view("short", at_s=1.0, steps=8, ask=8)]
    held = {"long": range(8)}
    assert counts(look(ShortestJobFirst(), views, held=held, now_s=1.0)) == {"long": 8}
    plan = look(ShortestJobFirst(preemptive=True), views, held=held, now_s=1.0)
    assert counts(plan) == {"short": 8}
    assert plan.reasons["long"] == "a shorter job needs the devices"


def test_who_does_not_fit_is_passed_over_and_the_unknown_come_last():
    unknown = replace(make_view("unknown", ask=2), total_steps=None)
    views = [unknown, make_view("wide", ask=8), make_view("running", ask=2, at_s=0.0)]
    plan = look(ShortestJobFirst(), views, slots=4)
    assert counts(plan) == {"wide": 4}, "clipped to the cluster it is the shortest"
    plan = look(ShortestJobFirst(), views, slots=4, held={"running": (0, 1)})
    assert counts(plan) == {"running": 2, "unknown": 2}
    assert plan.reasons["wide"] == "waits for 4 devices behind shorter or running jobs"
