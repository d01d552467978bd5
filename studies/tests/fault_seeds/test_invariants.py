"""What the invariants of one run allow and what they find, by policies that decide as they are told."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from springtide.control.controller import Controller
from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.events import JobResized, JobSubmitted, NodeJoined, ReplicaLost, ReplicaReady
from springtide.core.job_parts import JobBounds
from springtide.core.resources import Topology, make_node
from springtide.core.shares import make_share
from springtide.core.workload import JobState
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide_studies.fault_seeds.invariants import ClaimsChecked, Invariants, complain
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.workload import make_job

PART = make_share(0.4, 0.8)
DEVICES = ("n/0", "n/1")


class AllForOne:
    """Gives both devices to the pair as long as it holds both, then to the other job."""

    def decide(self, snapshot: Snapshot) -> Plan:
        held = snapshot.allocations.get("pair")
        pair = {"pair": PoolAllocation(device_ids=DEVICES, share=PART)}
        return Plan(allocations=pair if held is None or held.num_devices == 2 else {})


@pytest.mark.parametrize(("deadline_s", "is_allowed"), [(900.0, True), (None, False)])
def test_the_others_of_a_lost_worker_on_parts_give_way_to_stronger_claims_alone(deadline_s, is_allowed):
    controller = Controller(AllForOne())
    invariants = Invariants(Machine(VirtualClock(), Delays(), complain))
    facts = {"num_samples": 10**6, "samples_per_s": 10.0}
    pair = make_job("pair", workers=(2, 2), share=PART, **facts)
    other = make_job("other", workers=(2, 2), deadline_s=deadline_s, **facts)

    def tell(now_s, *events):
        invariants.note_journaled(controller.step(now_s, events), controller)

    tell(0.0, NodeJoined(node=make_node("n", 2)), JobSubmitted(job=pair), JobSubmitted(job=other))
    tell(1.0, *[ReplicaReady(workload_id="pair", replica_id=f"pair.{rank}") for rank in range(2)])
    started = {"job_id": "pair", "step": 0, "pause_s": 0.1}
    tell(2.0, JobResized(generation=1, world_size=2, direction="start", **started))
    tell(3.0, ReplicaLost(workload_id="pair", replica_id="pair.1", reason="killed"))
    with nullcontext() if is_allowed else pytest.raises(InvariantViolation, match="survivors-go-on"):
        tell(3.1, JobResized(generation=2, world_size=1, direction="recover", **started))
    assert controller.state.jobs["pair"].state is JobState.PREEMPTING


@pytest.mark.parametrize(("is_elastic", "given"), [(True, 1), (False, 2), (False, 0), (False, 1)])
def test_a_job_on_parts_that_cannot_be_resized_keeps_all_of_its_devices_or_none(is_elastic, given):
    class Careless:
        def decide(self, snapshot: Snapshot) -> Plan:
            return Plan(allocations={"pair": PoolAllocation(device_ids=DEVICES[:given])} if given else {})

    view = JobView(
        job=make_job("pair", num_samples=10, samples_per_s=1.0, elastic=is_elastic, workers=(2, 2)),
        state=JobState.RUNNING,
        submitted_at_s=0.0,
        bounds=JobBounds(min_workers=1, max_workers=2),
    )
    snapshot = Snapshot(
        now_s=1.0,
        cluster=Topology(nodes=(make_node("n", 2),)),
        jobs=(view,),
        allocations={"pair": PoolAllocation(device_ids=DEVICES, share=PART)},
    )
    is_wrong = given == 1 and not is_elastic
    with pytest.raises(InvariantViolation, match="size-kept") if is_wrong else nullcontext():
        ClaimsChecked(Careless()).decide(snapshot)
