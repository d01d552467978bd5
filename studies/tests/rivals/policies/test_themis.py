"""Themis lends devices for a lease to those whom sharing has slowed down most."""

from __future__ import annotations

import pytest

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.core.decision import Snapshot
from springtide.core.resources import Topology, make_node
from springtide.scheduling.placement.allocation_ledger import AllocationLedger
from springtide_studies.rivals.policies.gangs import Gangs
from springtide_studies.rivals.policies.themis import Themis


def test_the_job_with_the_worst_rho_is_served():
    # Both need 100 s alone; "late" has waited 1,000 s for it.
    late = make_view("late", at_s=0.0, steps=800, ask=8)
    new = make_view("new", at_s=990.0, steps=800, ask=8)
    plan = look(Themis(), [new, late], now_s=1000.0)
    assert counts(plan) == {"late": 8}
    assert plan.reasons["new"] == "waits for a lease of 8 devices: others are worse off"


def test_waiting_weighs_more_the_shorter_the_job():
    short, long = make_view("short", steps=80, ask=8), make_view("long", steps=80_000, ask=8)
    assert counts(look(Themis(), [long, short], now_s=100.0)) == {"short": 8}


def test_rho_is_the_time_shared_over_the_time_on_a_private_share():
    view, other = make_view("a", steps=800, ask=8, done=400), make_view("b", ask=8)
    snapshot = Snapshot(now_s=150.0, cluster=Topology(nodes=(make_node("n", 8),)), jobs=(view, other))
    # 150 s since it came and 50 s to go; alone 100 s, on half of the cluster 200 s.
    assert Themis().unfairness(Gangs(AllocationLedger(snapshot)), view) == pytest.approx((150.0 + 50.0) / 200.0)


def test_a_lease_is_not_broken_but_ends():
    first, second = make_view("first", steps=100_000, ask=8), make_view("second", at_s=10.0, steps=8000, ask=8)
    run = play(Themis(lease_s=600.0), [first, second], until_s=1500.0)
    assert run.at(599.0) == {"first": 8}
    assert run.at(601.0) == {"second": 8}
    assert run.num_changes >= 1


def test_over_time_equal_jobs_end_equally_late():
    views = [make_view(f"j{number}", steps=8 * 3000, ask=8) for number in range(3)]
    run = play(Themis(lease_s=300.0), views)
    ends = sorted(run.finished_at_s.values())
    assert ends[-1] == pytest.approx(9000.0)
    assert ends[0] > 7000.0, "first come, first served would end the first at 3,000 s"


def test_leases_are_renewed_without_a_change_while_nobody_waits():
    views = [make_view("a", steps=100_000, ask=4), make_view("b", steps=100_000, ask=4)]
    run = play(Themis(lease_s=60.0), views, until_s=3600.0)
    assert (run.num_changes, run.num_decisions) == (0, 1)


def test_without_the_filter_the_auction_prefers_what_gains_most_for_a_device():
    wide, narrow = make_view("wide", steps=8000, ask=8), make_view("narrow", steps=1000, ask=1)
    assert counts(look(Themis(fairness_fraction=0.0), [wide, narrow], now_s=10.0)) == {"narrow": 1}


def test_a_cluster_that_has_lost_all_its_nodes_gets_a_plan():
    assert counts(look(Themis(), [make_view("a", ask=8)], slots=0, now_s=10.0)) == {}
