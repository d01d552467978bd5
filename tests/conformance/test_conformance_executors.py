"""Every executor keeps the contract of executors. Here: the one made of models."""

from __future__ import annotations

import pytest

from springtide.core.actions import LabelNode
from springtide.core.resources import NodeId, Pool, make_node
from springtide.core.shares import Share
from springtide.simulator.clock import VirtualClock
from springtide.testing.executor import CHECKS, POOL_CHECKS, SHARE_CHECKS
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.workload import make_job, make_service


class ModelWorld:
    def __init__(self, pool: Pool = "shared") -> None:
        self.clock = VirtualClock()
        self.machine = Machine(self.clock, Delays(), complain)
        node = make_node("node", 2, pool=pool)
        self.machine.add_node(node)
        self.pooled_node = node.node_id
        self.devices = [device.device_id for device in node.devices]
        self.executor = SimExecutor(self.machine)
        self.long_job = make_job("long", num_samples=100_000, samples_per_s=100.0, workers=(1, 2))
        self.short_job = make_job("short", num_samples=100, samples_per_s=100.0)
        self.service = make_service("service")

    def restart(self) -> SimExecutor:
        self.machine.reconnect(None)
        self.executor = SimExecutor(self.machine)
        return self.executor

    def label_of(self, node_id: NodeId) -> Pool:
        return self.machine.known_nodes[node_id].pool

    def share_of(self, replica_id: str) -> Share | None:
        return self.machine.sharing.share_of(replica_id)

    def kill(self, replica_id: str) -> None:
        self.machine.die(self.machine.processes[replica_id], "killed")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_executor_of_models(check) -> None:
    check(ModelWorld())


@pytest.mark.parametrize("check", POOL_CHECKS, ids=lambda check: check.__name__)
def test_executor_of_models_with_pools(check) -> None:
    check(ModelWorld("inference"))


@pytest.mark.parametrize("check", SHARE_CHECKS, ids=lambda check: check.__name__)
def test_executor_of_models_with_shares(check) -> None:
    check(ModelWorld())


def test_a_node_that_went_down_comes_back_with_its_label() -> None:
    world = ModelWorld("inference")
    world.machine.nodes.clear()
    world.executor.start(LabelNode(node_id=world.pooled_node, pool="training"))
    world.machine.add_node(make_node("node", 2, pool="inference"))
    node = world.machine.nodes[world.pooled_node]
    assert (node.pool, node.owner) == ("training", "inference")
