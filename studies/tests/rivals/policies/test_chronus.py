"""Chronus gives leases to as many deadline jobs as can make it, and what is left to best effort."""

from __future__ import annotations

import pytest

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.core.decision import Overheads
from springtide.core.errors import InvalidRequest
from springtide_studies.rivals.policies.chronus import Chronus
from springtide_studies.rivals.solvers import lease_milp

pytest.importorskip("scipy", reason="the solver is an extra")


def test_a_deadline_that_cannot_be_made_takes_no_lease_from_anyone():
    # 1,000 s of work and 500 s to go: the best-effort job, though longer, keeps its devices lease after lease.
    hopeless = make_view("hopeless", at_s=10.0, steps=8000, ask=8, deadline_s=510.0)
    effort = make_view("effort", steps=16_000, ask=8)
    run = play(Chronus(lease_s=100.0), [effort, hopeless])
    assert run.finished_at_s["effort"] == pytest.approx(2000.0)
    assert run.finished_at_s["hopeless"] == pytest.approx(3000.0), "it is not turned away"


def test_a_deadline_that_can_be_made_takes_the_next_lease_it_needs():
    effort = make_view("effort", steps=16_000, ask=8)
    urgent = make_view("urgent", at_s=10.0, steps=1600, ask=8, deadline_s=450.0)
    run = play(Chronus(lease_s=100.0), [effort, urgent])
    assert run.at(99.0) == {"effort": 8}, "a lease is not broken"
    assert run.finished_at_s["urgent"] <= 450.0
    assert run.seconds("effort", 100.0, run.finished_at_s["urgent"]) > 0.0, "what can wait leaves room to best effort"


def test_as_many_deadlines_as_possible_are_made():
    # One job of 400 s or two of 200 s: the devices are enough for either, not for both.
    wide = make_view("wide", at_s=0.1, steps=3200, ask=8, deadline_s=500.0)
    small = [make_view(f"small{number}", at_s=0.2, steps=1600, ask=8, deadline_s=500.0) for number in range(2)]
    start = make_view("start", steps=799, ask=8)
    run = play(Chronus(lease_s=100.0), [start, wide, *small])
    met = [name for name in ("wide", "small0", "small1") if run.finished_at_s[name] <= 500.0]
    assert met == ["small0", "small1"]


def test_an_accepted_job_is_not_given_up_for_a_better_bargain():
    # Only one of the three fits at the first lease of contention; later, shorter ones may not take its place.
    first = make_view("first", steps=3200, ask=8, deadline_s=420.0)
    other = make_view("other", at_s=0.5, steps=3200, ask=8, deadline_s=9000.0)
    late = [make_view(f"late{number}", at_s=150.0, steps=1000, ask=8, deadline_s=430.0) for number in range(2)]
    run = play(Chronus(lease_s=100.0), [first, other, *late])
    assert run.finished_at_s["first"] <= 420.0


def test_best_effort_jobs_go_by_remaining_service():
    run = play(
        Chronus(lease_s=100.0),
        [
            make_view("a", steps=8000, ask=8),
            make_view("long", at_s=1.0, steps=4000, ask=8),
            make_view("short", at_s=2.0, steps=1600, ask=8),
        ],
    )
    assert sorted(run.finished_at_s, key=run.finished_at_s.get) == ["short", "long", "a"]


def test_while_all_fit_there_are_no_leases():
    views = [make_view("a", steps=800, ask=4, deadline_s=900.0), make_view("b", steps=800, ask=4)]
    run = play(Chronus(lease_s=10.0), views)
    assert run.num_changes == 0
    assert run.num_decisions <= 2


def test_the_overhead_of_a_start_is_reserved():
    memory = look(Chronus(lease_s=100.0), [make_view("a", ask=8), make_view("b", at_s=1.0, ask=8)], now_s=5.0).memory
    views = [make_view("a", steps=80_000, ask=8), make_view("b", at_s=1.0, steps=800, ask=8, deadline_s=205.0)]
    held = {"a": range(8)}
    assert counts(look(Chronus(lease_s=100.0), views, held=held, now_s=100.0, memory=memory)) == {"b": 8}
    costly = look(
        Chronus(lease_s=100.0), views, held=held, now_s=100.0, memory=memory, overheads=Overheads(change_s=7.0)
    )
    assert counts(costly) == {"a": 8}
    assert costly.reasons["b"].startswith("its deadline cannot be made on 8 devices any more")


def test_without_the_solver_it_says_so(monkeypatch):
    monkeypatch.setattr("springtide_studies.rivals.policies.chronus.is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="needs SciPy's solver: pip install"):
        Chronus()
    monkeypatch.setattr(lease_milp, "is_available", lambda: False)
    job = lease_milp.LeaseJob(width=2, num_needed=2, num_usable=2)
    with pytest.raises(InvalidRequest, match="needs SciPy"):
        lease_milp.plan_leases([job, job], 3)
