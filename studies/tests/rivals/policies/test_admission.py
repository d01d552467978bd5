"""Quotas, prices and the reserve for failures."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import look, make_view
from springtide.core.decision import Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology, make_node
from springtide_studies.rivals.policies.admission import (
    OwnerQuota,
    PriceGate,
    UrgencyPricing,
    reserve_for_failures,
    reserve_fraction,
    review_all,
)
from springtide_studies.rivals.policies.elasticflow import ElasticFlow

LINEAR = {1: 1.0, 2: 2.0, 4: 4.0}
CONCAVE = {1: 1.0, 2: 1.5, 4: 2.0}


def snapshot_at(now_s, *views):
    return Snapshot(now_s=now_s, cluster=Topology(), jobs=views)


def view_of(owner, name="a", *, admitted_at_s=None):
    view = make_view(name, steps=3600, deadline_s=1e6, profile=LINEAR)
    return with_fields(view, job=replace(view.job, owner=owner), admitted_at_s=admitted_at_s)


def test_the_daily_quota_counts_24_hours_back_also_what_has_ended():
    quota, ledger = OwnerQuota(max_per_day=2), {}
    for now_s in (0.0, 3600.0):
        objection, ledger = quota.review(view_of("ada"), snapshot_at(now_s), ledger)
        assert objection is None
    objection, after = quota.review(view_of("ada"), snapshot_at(7200.0), ledger)
    assert "'ada' was promised 2 deadlines" in objection
    assert after == ledger
    assert quota.review(view_of("bob"), snapshot_at(7200.0), ledger)[0] is None
    assert quota.review(view_of("ada"), snapshot_at(86_401.0), ledger)[0] is None


def test_the_quota_of_unfinished_jobs_counts_promises_only():
    quota = OwnerQuota(max_unfinished=1)
    best_effort = view_of("ada", "b")
    assert quota.review(view_of("ada"), snapshot_at(5.0, best_effort), {})[0] is None
    busy = view_of("ada", "b", admitted_at_s=1.0)
    assert "quota is 1" in quota.review(view_of("ada"), snapshot_at(5.0, busy), {})[0]
    assert quota.review(view_of("bob"), snapshot_at(5.0, busy), {})[0] is None


def test_a_tighter_deadline_costs_more():
    pricing = UrgencyPricing(usd_per_device_hour=2.0)
    loose = make_view("a", steps=3600, deadline_s=7200.0, profile=CONCAVE)
    tight = make_view("a", steps=3600, deadline_s=2400.0, profile=CONCAVE)
    assert pricing.price_usd(loose, 0.0) == pytest.approx(2.0)
    # Two devices for 2400 s, and it must be done 1.5 times as fast as one device does it.
    assert pricing.price_usd(tight, 0.0) == pytest.approx(2 * 2400 / 3600 * 2.0 * 1.5)
    assert pricing.price_usd(make_view("a", steps=3600, deadline_s=10.0, profile=CONCAVE), 0.0) is None
    assert pricing.price_usd(make_view("a", deadline_s=10.0, profile={}), 0.0) is None


def test_a_budget_below_the_price_is_refused_with_the_price():
    gate = PriceGate(pricing=UrgencyPricing(usd_per_device_hour=2.0))
    view = make_view("a", steps=3600, deadline_s=7200.0, profile=CONCAVE)
    poor = replace(view, job=replace(view.job, goal=replace(view.job.goal, budget_usd=1.0)))
    assert "costs 2.00 USD" in gate.review(poor, snapshot_at(0.0), {})[0]
    assert gate.review(view, snapshot_at(0.0), {})[0] is None
    plan = look(ElasticFlow(hooks=(gate,)), [poor])
    assert "its budget is 1.00 USD" in plan.rejected["a"].reason


def test_the_first_objection_counts_and_leaves_every_ledger_as_it_was():
    hooks = (OwnerQuota(max_per_day=5), PriceGate(pricing=UrgencyPricing(usd_per_device_hour=1e6)))
    view = view_of("ada")
    poor = replace(view, job=replace(view.job, goal=replace(view.job.goal, budget_usd=1.0)))
    objection, ledgers = review_all(hooks, poor, snapshot_at(0.0), {})
    assert "USD" in objection
    assert ledgers == {}
    objection, ledgers = review_all(hooks, view, snapshot_at(0.0), {})
    assert objection is None
    assert ledgers["quota"] == {"ada": [0.0]}


def test_the_reserve_covers_as_many_failures_as_asked():
    nodes = tuple(make_node(f"n{index}", 8 if index else 4) for index in range(4))
    topology = Topology(nodes=nodes)
    # By hand: every pattern of nodes that are down, 1 in 10 each.
    for confidence in (0.5, 0.9, 0.99, 0.99985):
        reserved = reserve_for_failures(topology, mtbf_hours=9.0, repair_hours=1.0, confidence=confidence)
        most_down = {0: 0, 8: 1, 16: 2, 24: 3, 28: 4}[reserved]

        def covered(limit):
            return sum(
                0.1 ** sum(down) * 0.9 ** (4 - sum(down))
                for down in itertools.product((0, 1), repeat=4)
                if sum(down) <= limit
            )

        assert covered(most_down) >= confidence
        assert most_down == 0 or covered(most_down - 1) < confidence
    assert reserve_for_failures(topology, mtbf_hours=float("inf"), repair_hours=1.0) == 0
    assert reserve_for_failures(Topology(), mtbf_hours=1.0, repair_hours=1.0) == 0
    assert reserve_fraction(topology, 7) == 0.25
    assert reserve_fraction(Topology(), 0) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtbf_hours": 0.0, "repair_hours": 1.0},
        {"mtbf_hours": 1.0, "repair_hours": -1.0},
        {"mtbf_hours": 1.0, "repair_hours": 1.0, "confidence": 1.0},
    ],
)
def test_figures_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        reserve_for_failures(Topology(), **wrong)
