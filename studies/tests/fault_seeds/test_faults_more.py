"""Every further kind of fault happens, changes the run, and breaks nothing; runs without them are what they were."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.core.events import CancelRequested, JobResized, JobSubmitted, ServiceDeployed
from springtide.core.resources import make_node
from springtide.core.workload import Checkpoint
from springtide.scheduling.registry import make_policy
from springtide_studies.fault_seeds.faults import FAULT_KINDS
from springtide_studies.fault_seeds.faults_more import MORE_FAULT_KINDS
from springtide_studies.fault_seeds.invariants import complain
from springtide_studies.fault_seeds.seeds import FaultRun, run_seed
from springtide_studies.fault_seeds.store import JobStore
from springtide_studies.fault_seeds.workload import OwnerRequest, Workload, make_job, make_service

NODES = (make_node("left", 2), make_node("right", 2))


def workload():
    jobs = [
        make_job(name, num_samples=4000, samples_per_s=50.0, workers=(1, 4), checkpoint_interval_s=2.0)
        for name in ("first", "second")
    ]
    requests = [OwnerRequest(at_s=float(at_s), event=JobSubmitted(job=job)) for at_s, job in enumerate(jobs)]
    service = make_service("answers", min_replicas=1, max_replicas=1)
    requests.append(OwnerRequest(at_s=2.0, event=ServiceDeployed(service=service)))
    requests.append(OwnerRequest(at_s=60.0, event=CancelRequested(workload_id=service.service_id)))
    return Workload(requests=tuple(requests))


def play(kinds=(), seed=1, tell=None):
    """Two jobs and a service under faults of these kinds alone, at moments that the seed draws."""
    run = FaultRun(3, lambda: make_policy("elastic"), num_faults=0.0, workload=workload(), nodes=NODES, tell=tell)
    run.faults.horizon_s = 40.0
    chosen = {kind: MORE_FAULT_KINDS[kind] for kind in kinds}
    run.faults.draw(chosen, np.random.SeedSequence(seed).spawn(len(chosen)), 5.0 * len(chosen))
    run.run()
    return run


def steps_of(run):
    return [step for _, step in run.journal.read()]


@pytest.mark.parametrize("kind", list(MORE_FAULT_KINDS))
def test_every_kind_happens_and_changes_what_is_decided(kind):
    plain = steps_of(play())
    hurt = play([kind])
    assert hurt.faults.counts[kind] >= 2
    assert steps_of(hurt) != plain


def test_a_clock_that_jumped_is_read_by_control_planes_alone():
    run = play(["clock jump"])
    moments = [step.now_s for step in steps_of(run)]
    assert moments == sorted(moments)
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) > 60.0
    assert run.machine.clock.now_s() < 400.0 < run.clock.now_s()
    assert run.clock.now_s() == run.machine.clock.now_s() + run.clock.ahead_s


def test_a_slow_disk_holds_up_decisions():
    told: list[str] = []
    moments = [step.now_s for step in steps_of(play(["slow disk"], tell=told.append))]
    assert "FAULT slow disk" in told
    assert len(moments) < len(steps_of(play()))


def test_a_group_that_finds_its_checkpoint_damaged_begins_at_an_older_one():
    run = play(["partial write"])
    resized = [e for step in steps_of(run) for e in step.events if isinstance(e, JobResized)]
    damaged = [job.store.manifests[path] for job in run.machine.runs.values() for path in job.store.damaged]
    assert any(
        damage.path.startswith(e.job_id) and damage.generation < e.generation and e.step < damage.step
        for damage in damaged
        for e in resized
    )
    assert all(job.store.num_steps == 125 for job in run.machine.runs.values())


def test_a_whole_checkpoint_is_taken_and_a_damaged_one_passed_over():
    store = JobStore("job", complain)
    first, second = (Checkpoint(generation=1, step=step, path=f"1-{step}") for step in (3, 6))
    for checkpoint in (first, second):
        store.write_blobs(checkpoint.path)
        store.write_manifest(checkpoint)
    assert store.intact(second) == second
    store.damaged.add(second.path)
    assert store.intact(second) == first
    store.damaged.add(first.path)
    assert store.intact(second) is None


def test_known_seeds_draw_none_of_them_and_others_say_so_in_their_command():
    plain, more = run_seed(7, "elastic"), run_seed(7, "elastic", has_more_faults=True)
    assert not plain.faults.keys() & MORE_FAULT_KINDS.keys()
    assert more.faults.keys() & MORE_FAULT_KINDS.keys()
    assert "--more-faults" not in plain.command
    assert more.command == "python -m springtide_studies.fault_seeds --seed 7 --policy elastic --more-faults"
    assert len(FAULT_KINDS | MORE_FAULT_KINDS) >= 25
