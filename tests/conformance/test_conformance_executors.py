"""Every executor keeps the contract of executors. Here: the one made of models."""

from __future__ import annotations

import pytest

from springtide.core.resources import make_node
from springtide.sim.clock import VirtualClock
from springtide.sim.executor import SimExecutor
from springtide.sim.invariants import complain
from springtide.sim.machine import Machine
from springtide.sim.models import Delays
from springtide.sim.workload import make_job, make_service
from springtide.testing.executor import CHECKS


class ModelWorld:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.machine = Machine(self.clock, Delays(), complain)
        node = make_node("node", 2)
        self.machine.add_node(node)
        self.devices = [device.device_id for device in node.devices]
        self.executor = SimExecutor(self.machine)
        self.long_job = make_job("long", num_samples=100_000, samples_per_s=100.0, workers=(1, 2))
        self.short_job = make_job("short", num_samples=100, samples_per_s=100.0)
        self.service = make_service("service")

    def restart(self) -> SimExecutor:
        self.machine.reconnect(None)
        self.executor = SimExecutor(self.machine)
        return self.executor

    def kill(self, replica_id: str) -> None:
        self.machine.die(self.machine.processes[replica_id], "killed")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_executor_of_models(check) -> None:
    check(ModelWorld())
