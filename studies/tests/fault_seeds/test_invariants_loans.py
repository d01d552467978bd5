"""Each invariant of loans complains of exactly what it is about, told by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.records import PlatformState, ServiceRecord, ServiceState
from springtide.core.actions import DrainNode, LabelNode, StartReplica
from springtide.core.decision import Drain
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.invariants_loans import DRAIN_SLACK_S, FLAPS, SHORT_FOR_EVER_S, LoanInvariants
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.workload import make_job, make_service

NODE = make_node("node", 2, pool="inference")


class Watched:
    """A machine with one node of inference, what the records say of it, and whoever watches both."""

    def __init__(self) -> None:
        self.machine = Machine(VirtualClock(), Delays(), complain)
        self.machine.add_node(NODE)
        self.state = PlatformState()
        self.state.nodes[NODE.node_id] = NODE
        self.watch = LoanInvariants(self.machine, complain, reaches=lambda node: True, is_quiet=False)

    def check(self, now_s: float = 0.0) -> None:
        self.watch.check(self.state, now_s, 0.0)

    def deploy(self, minimum: int) -> None:
        service = make_service("service", min_replicas=minimum, grace_s=1.0)
        self.state.services[service.service_id] = ServiceRecord(
            service=service,
            state=ServiceState.IDLE,
            reason="",
            deployed_at_s=0.0,
            min_replicas=minimum,
            max_replicas=4,
        )


def start(job_id: str, device: int = 0) -> StartReplica:
    job = make_job(job_id, num_samples=32, samples_per_s=1.0)
    return StartReplica(workload=job, replica_id=f"{job_id}.0", device_id=NODE.devices[device].device_id, generation=1)


def test_records_and_machines_have_to_agree_on_the_label_and_the_owner() -> None:
    watched = Watched()
    watched.check()
    watched.machine.label_node(NODE.node_id, "training")
    with pytest.raises(InvariantViolation, match="one-label"):
        watched.check()
    watched.state.nodes[NODE.node_id] = replace(NODE, pool="training")
    watched.check()
    watched.state.nodes[NODE.node_id] = replace(NODE, pool="training", home="training")
    with pytest.raises(InvariantViolation, match="belongs to"):
        watched.check()


def test_a_node_that_is_up_has_to_be_known_in_the_end() -> None:
    watched = Watched()
    watched.watch.check_end(watched.state)
    del watched.state.nodes[NODE.node_id]
    with pytest.raises(InvariantViolation, match="one-label"):
        watched.watch.check_end(watched.state)


def test_machines_refuse_a_worker_where_the_label_does_not_admit_it() -> None:
    watched = Watched()
    with pytest.raises(InvariantViolation, match="label-admits"):
        watched.machine.spawn(start("job"))
    watched.machine.label_node(NODE.node_id, "training")
    watched.machine.spawn(start("job"))
    with pytest.raises(InvariantViolation, match="label-admits"):
        watched.machine.label_node(NODE.node_id, "inference")
    with pytest.raises(InvariantViolation, match="label-admits"):
        watched.check()


def test_nothing_of_the_wrong_kind_starts_on_a_node_that_drains() -> None:
    watched = Watched()
    watched.watch.note_journaled(
        Step(now_s=0.0, actions=(DrainNode(node_id=NODE.node_id, pool="inference"),)), watched.state
    )
    with pytest.raises(InvariantViolation, match="drain-closes"):
        watched.watch.note_journaled(Step(now_s=1.0, actions=(start("job"),)), watched.state)
    called_off = LabelNode(node_id=NODE.node_id, pool="training")
    watched.watch.note_journaled(Step(now_s=2.0, actions=(called_off, start("job"))), watched.state)


def test_a_reclaim_has_an_end_and_time_without_a_control_plane_does_not_count() -> None:
    watched = Watched()
    watched.state.drains = {NODE.node_id: Drain(pool="training", since_s=0.0, reclaim_since_s=0.0)}
    watched.check(0.0)
    watched.check(DRAIN_SLACK_S)
    watched.watch.note_outage(15.0)
    watched.check(DRAIN_SLACK_S + 15.0)
    with pytest.raises(InvariantViolation, match="drain-ends"):
        watched.check(DRAIN_SLACK_S + 16.0)
    watched.state.drains = {NODE.node_id: Drain(pool="training", since_s=0.0)}
    watched.check(10_000.0)


@pytest.mark.parametrize(("minimum", "is_found"), [(2, True), (3, False), (0, False)])
def test_a_minimum_may_not_stay_short_where_there_are_servers_for_it(minimum: int, is_found: bool) -> None:
    watched = Watched()
    watched.deploy(minimum)
    watched.check(0.0)
    watched.check(SHORT_FOR_EVER_S)
    if is_found:
        with pytest.raises(InvariantViolation, match="minimum-kept"):
            watched.check(SHORT_FOR_EVER_S + 1.0)
    else:
        watched.check(SHORT_FOR_EVER_S + 1.0)


def test_a_node_that_turns_to_and_fro_is_found() -> None:
    watched = Watched()
    turn = Step(now_s=1.0, actions=(DrainNode(node_id=NODE.node_id, pool="training"),))
    for _ in range(FLAPS - 1):
        watched.watch.note_journaled(turn, watched.state)
    with pytest.raises(InvariantViolation, match="labels-settle"):
        watched.watch.note_journaled(turn, watched.state)
