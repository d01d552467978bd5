"""Many seeds of loans: what a seed's check finds, what the exact choice is compared with, and when it does not hold."""

from __future__ import annotations

import pytest

from kits.simulation.sweeps import part
from springtide.core.decision import Overheads, PoolAllocation, Snapshot
from springtide.core.resources import NodeId, Topology, make_node
from springtide.core.workload import WorkloadId
from springtide.scheduling.loans.pools import NodeView, PoolState
from springtide_studies.bounds import highs
from springtide_studies.loans.check import BOUND_S, SeedChoice, SeedResult, check_seed, compared, main, summary

NEEDS_SOLVER = pytest.mark.skipif(not highs.is_available(), reason="the exact choice needs SciPy")
A, B = WorkloadId("a"), WorkloadId("b")


def result(**changed: object) -> SeedResult:
    known = {"seed": 1, "policy": "tide/fifo", "minimums": 5, "broken": 0, "reclaims_s": (5.0,), "num_interrupting": 1}
    return SeedResult(**{**known, "choices": (), **changed})  # type: ignore[arg-type]


def choice(device_s: float) -> SeedChoice:
    return SeedChoice(at_s=0.0, num_servers=1, jobs=1.0, least_jobs=1.0, device_s=device_s, least_device_s=10.0)


@NEEDS_SOLVER
def test_a_choice_is_compared_by_jobs_and_by_devices() -> None:
    """One job of four devices on the first two servers, two of one device each on the third: Figure 6's kind."""
    nodes = [make_node(f"n{index}", 2, pool="training") for index in range(3)]
    topology = Topology(nodes=tuple(nodes))
    ids = topology.device_ids()
    allocations = {A: PoolAllocation(device_ids=ids[:4]), B: PoolAllocation(device_ids=ids[4:5])}
    snapshot = Snapshot(now_s=3.0, cluster=topology, allocations=allocations, overheads=Overheads(change_s=2.0))
    views = tuple(
        NodeView(node_id=node.node_id, pool="training", owner="training", num_devices=2, jobs=jobs)
        for node, jobs in zip(nodes, ({A: 2}, {A: 2}, {B: 1}), strict=True)
    )
    pools = PoolState(snapshot=snapshot, nodes=views, needs=())
    found = compared(pools, views, {NodeId("n0")})
    # The job of four stands still with all its devices, where the job of one would have done.
    assert (found.jobs, found.least_jobs) == (1.0, 1.0)
    assert (found.device_s, found.least_device_s) == (8.0, 2.0)


def test_what_has_to_hold() -> None:
    assert summary([result()])[1]
    assert not summary([result(), result(seed=7, broken=1)])[1]
    assert "seeds [7]" in summary([result(), result(seed=7, broken=1)])[0]
    assert not summary([result(reclaims_s=(BOUND_S + 1.0,))])[1]
    assert not summary([result(choices=(choice(12.0),))])[1]
    assert summary([result(policy="two-way/fifo", choices=(choice(12.0),))])[1]


@pytest.mark.slow
@NEEDS_SOLVER
@pytest.mark.parametrize("policy", ["two-way/fifo", "tide/fifo"])
def test_a_few_seeds_hold(policy: str) -> None:
    results = [check_seed(seed, policy) for seed in range(part(3, least=1))]
    line, holds = summary(results)
    assert holds, line
    assert all(found.minimums > 0 for found in results)


@pytest.mark.slow
@NEEDS_SOLVER
def test_the_command_prints_a_line_for_each_policy() -> None:
    said: list[str] = []
    assert main(["--seeds", "1", "--first", "3", "--policy", "dedicated/fifo,two-way/fifo"], said.append) == 0
    assert [line.partition(":")[0] for line in said] == ["dedicated/fifo", "two-way/fifo"]
