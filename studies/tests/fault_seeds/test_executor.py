"""The executor made of models under the unchanged loop, with a first-come policy of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.events import JobSubmitted, NodeJoined
from springtide.core.resources import make_node
from springtide.core.workload import JobState, TrainingJob
from springtide.simulator.clock import VirtualClock
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays, job_model
from springtide_studies.fault_seeds.workload import make_job, with_adaptive_batch


class FirstCome:
    """Everybody keeps what he holds; the rest goes to the first who waits."""

    def decide(self, snapshot: Snapshot) -> Plan:
        wanting = {view.job.job_id for view in snapshot.jobs}
        held = {device for allocation in snapshot.allocations.values() for device in allocation.device_ids}
        given = {job_id: held for job_id, held in snapshot.allocations.items() if job_id in wanting}
        free = set(snapshot.cluster.device_ids()) - held
        for view in snapshot.jobs:
            if view.job.job_id not in given and len(free) >= view.bounds.min_workers:
                chosen = tuple(sorted(free)[: view.bounds.max_workers])
                given[view.job.job_id] = PoolAllocation(device_ids=chosen)
                free -= set(chosen)
        return Plan(allocations=given)


def run_jobs(
    jobs: list[TrainingJob],
    disturb: Callable[[Machine], None] = lambda machine: None,
    make_policy: Callable[[], FirstCome] = FirstCome,
):
    clock = VirtualClock()
    machine = Machine(clock, Delays(), complain)
    executor, controller, journal = SimExecutor(machine), Controller(make_policy()), MemoryJournal()
    node = make_node("node", 2)
    machine.add_node(node)
    executor.post(NodeJoined(node=node))
    for job in jobs:
        executor.post(JobSubmitted(job=job))
    disturb(machine)
    loop.run(
        controller,
        executor,
        clock,
        journal,
        until=lambda: executor.is_over or (bool(controller.state.jobs) and controller.is_idle),
    )
    assert loop.verify(Controller(make_policy()), journal) > 0
    return controller, machine


def test_jobs_run_one_after_the_other_and_commit_every_step_once() -> None:
    jobs = [make_job(f"job-{n}", num_samples=320, samples_per_s=64.0, workers=(1, 2)) for n in range(2)]
    controller, machine = run_jobs(jobs)
    assert [record.state for record in controller.state.jobs.values()] == [JobState.SUCCEEDED] * 2
    for run in machine.runs.values():
        assert [step for _, first, end in run.store.commits for step in range(first, end)] == list(range(10))
    assert machine.clock.now_s() > 5.0
    assert not machine.alive


def test_crashed_worker_is_survived_without_losing_a_step() -> None:
    job = make_job("job", num_samples=640, samples_per_s=32.0, workers=(2, 2))

    def disturb(machine: Machine) -> None:
        machine.agenda.at(5.0, lambda: machine.die(machine.processes["job.1"], "killed"))

    controller, machine = run_jobs([job], disturb)
    record = controller.state.jobs[job.job_id]
    assert record.state is JobState.SUCCEEDED
    assert record.restarts.crashes_at_s == ()
    assert len(record.restarts.losses_at_s) == 1
    assert {generation for generation, _, _ in machine.runs[job.job_id].store.commits} >= {1, 2}


def test_late_writer_is_refused() -> None:
    job = make_job("job", num_samples=3200, samples_per_s=32.0, workers=(2, 2))

    def disturb(machine: Machine) -> None:
        machine.agenda.at(5.0, lambda: machine.stall(machine.processes["job.0"], 6.0, is_unkillable=True))

    controller, machine = run_jobs([job], disturb)
    assert controller.state.jobs[job.job_id].state is JobState.SUCCEEDED
    assert machine.runs[job.job_id].store.num_refused == 2


def test_poison_job_fails_after_its_restarts() -> None:
    job = make_job("job", num_samples=320, samples_per_s=64.0, poison="crash", max_restarts=2)
    controller, machine = run_jobs([job])
    record = controller.state.jobs[job.job_id]
    assert record.state is JobState.FAILED
    assert len(machine.processes) == 3


class GrowingBatch(FirstCome):
    """First come, and every job's batch doubles with the time that it has run, to the end of its bounds."""

    def decide(self, snapshot: Snapshot) -> Plan:
        plan = super().decide(snapshot)
        given = dict(plan.allocations)
        for view in snapshot.jobs:
            if view.job.batch is not None and view.job.job_id in given:
                size = view.job.global_batch_size << int(min(3.0, view.equivalent_steps // 4))
                given[view.job.job_id] = replace(given[view.job.job_id], global_batch_size=size)
        return replace(plan, allocations=given)


@pytest.mark.parametrize("num_crashes", [0, 1])
def test_a_batch_that_grows_uses_every_sample_once_and_comes_through_a_loss(num_crashes: int) -> None:
    # 300 samples an epoch: no batch divides it, so every epoch has a short last one.
    job = with_adaptive_batch(
        make_job("job", num_samples=300, num_epochs=3, samples_per_s=32.0, batch_size=16, workers=(2, 2))
    )

    def disturb(machine: Machine) -> None:
        for crash in range(num_crashes):
            machine.agenda.at(14.0 + crash, lambda: machine.die(machine.processes["job.1"], "killed"))

    controller, machine = run_jobs([job], disturb, GrowingBatch)
    record, run = controller.state.jobs[job.job_id], machine.runs[job.job_id]
    assert record.state is JobState.SUCCEEDED
    assert record.batch_size == 128
    assert run.store.seen_at[run.store.num_steps] == 900
    assert run.store.num_steps < 57
    assert record.learnt.noise is not None
    assert record.learnt.noise.grad_var / record.learnt.noise.grad_sqr == 2.0
    assert record.progress.total_equivalent_steps == 900 / 16
    assert len(record.learnt.step_times) >= 2


def test_steps_and_samples_of_a_model_agree_whatever_the_batch() -> None:
    model = job_model(make_job("job", num_samples=300, num_epochs=2, samples_per_s=32.0, batch_size=16))
    for batch_size in (1, 16, 128, 300, 1000):
        num_seen, num_steps = 0, 0
        while left := model.num_steps_left(num_seen, batch_size):
            assert model.num_seen_after(0, num_steps, batch_size) == num_seen
            assert left + num_steps == model.num_steps_left(0, batch_size)
            epoch_end = (num_seen // 300 + 1) * 300
            num_seen, num_steps = min(num_seen + batch_size, epoch_end), num_steps + 1
        assert num_seen == model.total_samples
