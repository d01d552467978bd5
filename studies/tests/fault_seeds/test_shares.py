"""Machines of models whose devices are held in parts: how fast jobs are there, and what must never be."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.core.actions import SetShare
from springtide.core.decision import Plan, PoolAllocation
from springtide.core.events import JobSubmitted, LoadObserved, NodeJoined, ServiceDeployed
from springtide.core.resources import make_node
from springtide.core.shares import make_share
from springtide.core.workload import JobState
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.testing.executor import resize_of, start_of
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.invariants import Invariants, complain
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.workload import (
    LoadProfile,
    ModelledGateway,
    OwnerRequest,
    Workload,
    make_job,
    make_service,
    with_shares,
)


class Rig:
    """One node of one device, an executor without a control plane, and a clock that is driven by hand."""

    def __init__(self, memory_mb: int = 0) -> None:
        self.clock = VirtualClock()
        self.machine = Machine(self.clock, Delays(), complain)
        self.machine.add_node(make_node("node", 1, memory_mb=memory_mb))
        self.executor = SimExecutor(self.machine)

    def start(self, workload, share, number: int = 0):
        action = replace(start_of(workload, "node/0", number), share=share)
        self.executor.start(action)
        return self.machine.processes[action.replica_id]

    def wait(self, duration_s: float) -> None:
        until_s = self.clock.now_s() + duration_s
        while self.clock.now_s() < until_s:
            self.executor.acknowledge(self.executor.wait(until_s))

    def step_of(self, job) -> int:
        run = self.machine.runs[job.job_id]
        run.settle(run.group)
        return run.group.step


def train(rig: Rig, name: str, share):
    """A job of a hundred steps a second where it has the device to itself, at work."""
    job = make_job(name, num_samples=10**7, samples_per_s=100.0, batch_size=1)
    rig.start(job, share)
    rig.wait(1.0)
    rig.executor.start(resize_of(job, 1, 0))
    rig.wait(0.5)
    return job


def steps_in(rig: Rig, job, duration_s: float) -> int:
    before = rig.step_of(job)
    rig.wait(duration_s)
    return rig.step_of(job) - before


def test_alone_a_job_runs_at_its_limit_and_beside_others_between_request_and_limit():
    rig = Rig()
    first = train(rig, "first", make_share(0.3, 0.8))
    assert steps_in(rig, first, 10.0) == pytest.approx(800, abs=1)
    second = train(rig, "second", make_share(0.5, 0.7))
    # What is left of the device, 0.2, is divided 3 : 5.
    assert steps_in(rig, first, 10.0) == pytest.approx(375, abs=1)
    assert steps_in(rig, second, 10.0) == pytest.approx(625, abs=1)
    rig.executor.start(SetShare(workload_id="second", replica_id="second.0", share=make_share(0.1, 0.1)))
    assert steps_in(rig, first, 10.0) == pytest.approx(800, abs=1)
    assert steps_in(rig, second, 10.0) == pytest.approx(100, abs=1)


def test_who_stands_still_leaves_its_part_to_others():
    rig = Rig()
    first = train(rig, "first", make_share(0.5, 0.75))
    second = train(rig, "second", make_share(0.5, 0.75))
    assert steps_in(rig, first, 10.0) == pytest.approx(500, abs=1)
    rig.machine.stall(rig.machine.processes["second.0"], 1.5)
    assert steps_in(rig, first, 1.0) == pytest.approx(75, abs=1)
    rig.wait(1.0)
    assert steps_in(rig, second, 10.0) == pytest.approx(500, abs=1)
    rig.machine.die(rig.machine.processes["second.0"], "killed")
    assert steps_in(rig, first, 10.0) == pytest.approx(750, abs=1)


def test_what_is_done_of_a_step_is_kept_when_the_pace_changes():
    rig = Rig()
    slow = make_job("slow", num_samples=10**6, samples_per_s=0.1, batch_size=1)
    rig.start(slow, make_share(0.5, 1.0))
    rig.wait(1.0)
    rig.executor.start(resize_of(slow, 1, 0))
    rig.wait(0.5)
    group = rig.machine.runs["slow"].group
    began_s = group.began_s
    rig.wait(began_s + 9.0 - rig.clock.now_s())
    # Nine tenths of the first step are done; the last tenth takes twice as long beside another.
    rig.executor.start(SetShare(workload_id="slow", replica_id="slow.0", share=make_share(0.5, 0.5)))
    assert rig.step_of(slow) == 0
    rig.wait(1.9)
    assert rig.step_of(slow) == 0
    rig.wait(0.2)
    assert rig.step_of(slow) == 1


def test_a_service_answers_as_much_as_its_part_of_the_device_allows():
    rig = Rig()
    service = make_service("answers")
    rig.start(service, make_share(0.25, 0.5))
    load = LoadProfile(
        service_id="answers",
        start_s=0.0,
        end_s=100.0,
        base_per_s=20.0,
        wave_per_s=0.0,
        period_s=60.0,
        service_time_s=0.1,
    )
    seen = []
    gateway = ModelledGateway(rig.machine, [load], 1.0)
    gateway.executor = rig.executor
    rig.executor.post = lambda event, then=None: seen.append(event) if isinstance(event, LoadObserved) else None
    rig.machine.agenda.run_until(5.0)
    # Two requests at once on average: half of what a whole device answers, which is its limit.
    assert (seen[-1].in_flight, seen[-1].queued) == (2, 0)
    assert rig.machine.sharing.rate("answers.0") == 0.5
    rig.start(make_service("other"), make_share(0.75, 0.75), 0)
    rig.machine.sharing.set_demand(["other.0"], 1.0)
    rig.machine.agenda.run_until(10.0)
    assert (seen[-1].in_flight, seen[-1].queued) == (1, 1)
    rig.machine.agenda.run_until(101.0)
    assert (seen[-1].in_flight, seen[-1].queued) == (0, 0)
    assert rig.machine.sharing.rate("other.0") == 0.75


@pytest.mark.parametrize(
    ("held", "asked", "memory_mb"),
    [
        (None, make_share(0.1), 0),
        (make_share(0.1), None, 0),
        (make_share(0.6), make_share(0.5), 0),
        (make_share(0.5, 1.0), make_share(0.3, 0.6), 0),
        (make_share(0.1, None, 600), make_share(0.1, None, 600), 1000),
    ],
)
def test_a_start_beside_others_without_room_is_a_violation(held, asked, memory_mb):
    rig = Rig(memory_mb)
    rig.start(make_service("first"), held)
    with pytest.raises(InvariantViolation, match="device-once"):
        rig.start(make_service("second"), asked)


def test_a_change_without_room_is_a_violation():
    rig = Rig()
    rig.start(make_service("first"), make_share(0.5, 0.5))
    rig.start(make_service("second"), make_share(0.5, 0.5))
    with pytest.raises(InvariantViolation, match="requests"):
        rig.executor.start(SetShare(workload_id="first", replica_id="first.0", share=make_share(0.6)))


def test_the_books_of_the_control_plane_are_watched(monkeypatch):
    rig = Rig()
    monkeypatch.setattr("springtide.control.grants.has_room", lambda *_, **__: True)
    monkeypatch.setattr("springtide.control.controller.has_room", lambda *_, **__: True)

    class Careless:
        def decide(self, snapshot):
            return Plan(
                allocations={
                    view.service.service_id: PoolAllocation(device_ids=("node/0",), share=view.service.share)
                    for view in snapshot.services
                }
            )

    controller = Controller(Careless())
    services = [make_service(name, share=make_share(0.7), min_replicas=1) for name in ("first", "second")]
    events = [NodeJoined(node=make_node("node", 1)), *(ServiceDeployed(service=service) for service in services)]
    controller.step(0.0, events)
    with pytest.raises(InvariantViolation, match=r"requests on it add up to 1\.4"):
        Invariants(rig.machine).check(controller, [])


def test_shares_are_drawn_beside_what_a_seed_draws():
    job, service = make_job("a", num_samples=10, samples_per_s=1.0), make_service("s")
    plain = Workload(
        requests=tuple(
            [OwnerRequest(at_s=float(n), event=JobSubmitted(job=replace(job, job_id=f"a-{n}"))) for n in range(60)]
            + [
                OwnerRequest(at_s=60.0 + n, event=ServiceDeployed(service=replace(service, max_queue=n)))
                for n in range(20)
            ]
        )
    )
    shared = with_shares(plain, np.random.default_rng(1))
    assert shared == with_shares(plain, np.random.default_rng(1))
    jobs = [job for _, job in shared.jobs()]
    assert [replace(job, share=None) for job in jobs] == [job for _, job in plain.jobs()]
    assert 20 < sum(job.share is not None for job in jobs) < 55
    deployed = [r.event.service for r in shared.requests if isinstance(r.event, ServiceDeployed)]
    assert [s.max_queue for s in deployed] == list(range(20))
    assert 2 < len({s.share for s in deployed}) < 20


def test_jobs_with_shares_end_under_the_unchanged_loop():
    clock = VirtualClock()
    machine = Machine(clock, Delays(), complain)
    node = make_node("node", 1)
    machine.add_node(node)
    executor, journal = SimExecutor(machine), MemoryJournal()

    class Together:
        def decide(self, snapshot):
            return Plan(
                allocations={
                    view.job.job_id: PoolAllocation(device_ids=("node/0",), share=view.job.share)
                    for view in snapshot.jobs
                }
            )

    controller = Controller(Together())
    executor.post(NodeJoined(node=node))
    for name, share in (("small", make_share(0.2, 0.4)), ("large", make_share(0.6, 1.0))):
        executor.post(JobSubmitted(job=make_job(name, num_samples=4000, samples_per_s=100.0, share=share)))
    loop.run(
        controller,
        executor,
        clock,
        journal,
        until=lambda: executor.is_over or (bool(controller.state.jobs) and controller.is_idle),
    )
    jobs = controller.state.jobs
    assert {name: job.state for name, job in jobs.items()} == dict.fromkeys(("small", "large"), JobState.SUCCEEDED)
    # Beside each other 0.25 and 0.75 of the device, then alone at its limit.
    assert jobs["large"].lifecycle.ended_at_s == pytest.approx(4000 / 75.0, abs=2.0)
    assert jobs["small"].lifecycle.ended_at_s == pytest.approx(4000 / 75.0 + (4000 - 4000 / 3) / 40.0, abs=3.0)
    assert jobs["large"].learnt.throughput_samples_per_s[1] == pytest.approx(75.0, rel=0.05)
