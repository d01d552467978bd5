"""Every strategy of loans keeps the contract of policies that label nodes, over several training policies."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from springtide.core.decision import Plan, Relabel
from springtide.core.errors import PolicyError
from springtide.scheduling.registry import make_policy
from springtide.testing.pooled_policy import carry_out, check_pooled_policy, draw_pooled_snapshot

NAMES = (
    "dedicated/fifo",
    "one-way/edf",
    "one-way/elastic",
    "two-way/fifo",
    "two-way/elastic",
    "two-way/springtide",
    "tide/fifo",
    "tide/elastic",
    "tide/springtide",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_strategy_keeps_the_contract_of_pools(name: str) -> None:
    check_pooled_policy(lambda: make_policy(name))


class Plain:
    """FIFO under a strategy, with something wrong in it."""

    def __init__(self, spoil) -> None:
        self.inner, self.spoil = make_policy("two-way/fifo"), spoil

    def decide(self, snapshot):
        return self.spoil(snapshot, self.inner.decide(snapshot))


def label_all(snapshot, plan, pool, reason="because"):
    wishes = {node.node_id: Relabel(pool=pool, reason=reason) for node in snapshot.cluster.nodes}
    return replace(plan, pools=wishes)


def label_the_lost(snapshot, plan):
    return replace(plan, pools={**plan.pools, "gone": Relabel(pool="training", reason="why not")})


def turn_every_node(snapshot, plan):
    turned = {"training": "inference", "inference": "training"}
    return Plan(
        pools={
            node.node_id: Relabel(pool=turned[node.pool], reason="the other way round")
            for node in snapshot.cluster.nodes
            if node.pool in turned
        }
    )


def no_reasons(snapshot, plan):
    return replace(plan, pools={node_id: replace(wish, reason="") for node_id, wish in plan.pools.items()})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda snapshot, plan: label_all(snapshot, plan, "training"), "which it is|labelled for"),
        (lambda snapshot, plan: label_all(snapshot, plan, "shared"), "shared"),
        (label_the_lost, "no such node is alive"),
        (turn_every_node, "wanted|change the plan"),
        (no_reasons, "no reason"),
    ],
    ids=["as it is", "both kinds together", "a lost node", "to and fro", "no reason"],
)
def test_the_kit_finds_a_policy_that_breaks_it(spoil, complaint: str) -> None:
    with pytest.raises((AssertionError, PolicyError), match=complaint):
        check_pooled_policy(lambda: Plain(spoil))


def test_drawn_platforms_have_loans_drains_and_both_kinds_of_workload() -> None:
    rng = np.random.default_rng(np.random.SeedSequence(0))
    drawn = [draw_pooled_snapshot(rng) for _ in range(100)]
    assert any(node.is_loaned for snapshot in drawn for node in snapshot.cluster.nodes)
    assert any(snapshot.drains for snapshot in drawn)
    assert any(drain.reclaim_since_s is not None for snapshot in drawn for drain in snapshot.drains.values())
    for snapshot in drawn:
        done = carry_out(snapshot, make_policy("dedicated/fifo").decide(snapshot))
        assert done.cluster.device_set == snapshot.cluster.device_set
