"""The executor of long traces keeps the contract of executors: the same kit that the others pass."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.core.resources import NodeId, Pool, make_node
from springtide.core.shares import Share
from springtide.core.workload import TrainingJob
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.testing.executor import CHECKS, POOL_CHECKS, SHARE_CHECKS
from springtide_studies.fault_seeds.workload import make_job, make_service


def job(name: str, total_steps: int) -> TrainingJob:
    plain = make_job(name, num_samples=32 * total_steps, samples_per_s=100.0, workers=(1, 2))
    return replace(plain, total_steps=total_steps, profile_steps_per_s={1: 3.0, 2: 5.0})


class FluidWorld:
    """One node with two devices. The executor is its machines, so a new control plane meets the same one again."""

    def __init__(self, pool: Pool = "shared") -> None:
        self.clock = VirtualClock()
        node = make_node("node", 2, pool=pool)
        self.pooled_node = node.node_id
        self.devices = [device.device_id for device in node.devices]
        self.executor = FluidExecutor(self.clock, [node])
        self.long_job = job("long", 3000)
        self.short_job = job("short", 3)
        self.service = make_service("service")

    def restart(self) -> FluidExecutor:
        return self.executor

    def label_of(self, node_id: NodeId) -> Pool:
        return self.executor.nodes.pool_of(node_id)

    def share_of(self, replica_id: str) -> Share | None:
        return self.executor.sharing.share_of(replica_id)

    def kill(self, replica_id: str) -> None:
        self.executor.lose_replica(replica_id)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_executor_of_long_traces(check) -> None:
    check(FluidWorld())


@pytest.mark.parametrize("check", POOL_CHECKS, ids=lambda check: check.__name__)
def test_executor_of_long_traces_with_pools(check) -> None:
    check(FluidWorld("inference"))


@pytest.mark.parametrize("check", SHARE_CHECKS, ids=lambda check: check.__name__)
def test_executor_of_long_traces_with_shares(check) -> None:
    check(FluidWorld())
