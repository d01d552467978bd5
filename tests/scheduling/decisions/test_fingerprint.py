"""Fingerprints: whatever a policy declares to read tells two snapshots apart, and nothing else does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import PARTS
from kits.simulation.sweeps import part
from springtide.core.decision import JobView, ServiceView, Snapshot
from springtide.core.job_parts import DeadlinePromise, GroupChanges, JobBounds, JobProgress, JobRestarts, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, Goal, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.decisions import recall
from springtide.scheduling.decisions.fingerprint import SERVICES, Fingerprints, Reads, nodes_fingerprint
from springtide.scheduling.policies.goodput import policy as goodput
from springtide.scheduling.policies.springtide import rows as springtide
from springtide_studies.rivals.policies import elastic_jobs

SOURCE = Entrypoint(source_path="a.py")
# The fields of a view, those of its parts with the part's name.
PLAIN = JobView(
    job=TrainingJob(job_id=WorkloadId("a"), name="a", entrypoint=SOURCE),
    state=JobState.PENDING,
    submitted_at_s=0.0,
    bounds=JobBounds(min_workers=1, max_workers=1),
)
FIELDS = [
    f"{name}.{inner}" if name in PARTS else name
    for name in JobView.__struct_fields__
    for inner in (getattr(PLAIN, name).__struct_fields__ if name in PARTS else ("",))
]
# How each policy's jobs come to its projections, as it makes them itself.
ROWS: dict[str, tuple[Reads, Any]] = {
    "recall": (recall.MATERIAL, lambda view: view),
    "springtide": (springtide.READS, springtide.PromiseRow),
    "elasticflow": (elastic_jobs.READS, lambda view: elastic_jobs.ElasticRow(view, 0, only_doublings=True)),
    "goodput": (
        goodput.READS,
        lambda view: goodput.JobNews(
            view.job.job_id, view, bool(view.learnt.step_times), goodput.is_waiting(view, 5.0)
        ),
    ),
}

# One more device of the same node, another node, the same nodes in another order, some of the devices.
CLUSTERS = [
    Topology(nodes=nodes)
    for nodes in (
        (make_node("a", 2), make_node("b", 2)),
        (make_node("a", 3), make_node("b", 2)),
        (make_node("b", 2), make_node("a", 2)),
        (make_node("a", 2), make_node("c", 2)),
        (make_node("a", 2),),
        (make_node("a", 2), replace(make_node("b", 4), devices=make_node("b", 4).devices[::2])),
    )
]


@st.composite
def job_views(draw: st.DrawFn, name: str) -> JobView:
    most = draw(st.integers(1, 8))
    job = TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=SOURCE,
        max_workers=8,
        num_virtual_shards=8,
        elastic=draw(st.booleans()),
        goal=Goal(deadline_s=draw(st.sampled_from([None, 100.0, 200.0])), is_soft=draw(st.booleans())),
        profile_steps_per_s=draw(st.sampled_from([{}, {1: 1.0, 2: 1.8, 4: 3.0}, {1: 2.0, 8: 9.0}])),
    )
    return JobView(
        job=job,
        state=draw(st.sampled_from([JobState.PENDING, JobState.RUNNING])),
        submitted_at_s=draw(st.sampled_from([0.0, 1.0])),
        total_steps=draw(st.sampled_from([None, 10, 11])),
        num_replicas=draw(st.integers(0, most)),
        bounds=JobBounds(min_workers=draw(st.integers(1, most)), max_workers=most, num_edits=draw(st.integers(0, 2))),
        progress=JobProgress(step=draw(st.integers(0, 3)), progress_at_s=draw(st.sampled_from([0.0, 30.0]))),
        learnt=LearntSpeed(throughput_samples_per_s=draw(st.sampled_from([{}, {1: 32.0}, {1: 40.0, 2: 70.0}]))),
        promise=DeadlinePromise(admitted_at_s=draw(st.sampled_from([None, 1.0]))),
        restarts=JobRestarts(starts_at_s=draw(st.sampled_from([0.0, 7.0])), num_restarts=draw(st.integers(0, 2))),
        changes=GroupChanges(resized_at_s=draw(st.sampled_from([None, 0.0, 20.0]))),
    )


@st.composite
def service_views(draw: st.DrawFn, name: str) -> ServiceView:
    service = InferenceService(
        service_id=WorkloadId(name), name=name, entrypoint=SOURCE, max_replicas=8, target_in_flight=1, idle_s=5.0
    )
    return ServiceView(
        service=service,
        min_replicas=draw(st.integers(0, 2)),
        max_replicas=draw(st.integers(3, 8)),
        num_ready=draw(st.integers(0, 3)),
        in_flight=draw(st.integers(0, 9)),
        queued=draw(st.integers(0, 2)),
        idle_s=draw(st.sampled_from([0.0, 9.0])),
        wanted_replicas=draw(st.sampled_from([None, 1, 4])),
    )


def snapshot_of(jobs: list[JobView], services: list[ServiceView] = [], cluster: Topology = CLUSTERS[0]) -> Snapshot:  # noqa: B006
    return Snapshot(now_s=5.0, cluster=cluster, jobs=tuple(jobs), services=tuple(services))


def fingerprint(reads: Reads, row_of: Any, snapshot: Snapshot) -> str:
    return Fingerprints(reads).of(snapshot, [row_of(view) for view in snapshot.jobs])


def values(reads: Reads, row: Any) -> list[object]:
    return [projection.value(row) for projection in reads.jobs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=part(200, least=66), deadline=None)
@given(st.data())
def test_jobs_have_one_fingerprint_exactly_if_all_projections_agree(name: str, data: st.DataObject) -> None:
    reads, row_of = ROWS[name]
    other = data.draw(job_views("other"))
    one, two = data.draw(job_views("job")), data.draw(job_views("job"))
    same = values(reads, row_of(one)) == values(reads, row_of(two))
    first, second = (fingerprint(reads, row_of, snapshot_of([view, other])) for view in (one, two))
    assert (first == second) == same


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=part(200, least=66), deadline=None)
@given(st.data())
def test_a_change_of_one_projection_gives_another_fingerprint(name: str, data: st.DataObject) -> None:
    """From one drawn view to another, field by field, so that few projections change at a time."""
    reads, row_of = ROWS[name]
    view, aim = data.draw(job_views("job")), data.draw(job_views("job"))
    for field in data.draw(st.permutations(FIELDS)):
        part, _, name = field.rpartition(".")
        value = getattr(getattr(aim, part) if part else aim, name)
        after = replace(view, **({part: replace(getattr(view, part), **{name: value})} if part else {name: value}))
        changed = values(reads, row_of(view)) != values(reads, row_of(after))
        first, second = (fingerprint(reads, row_of, snapshot_of([each])) for each in (view, after))
        assert (first != second) == changed, field
        if changed:
            assert field in reads.job_fields, f"a projection is made from {field} without declaring it"
        view = after


@settings(max_examples=part(300, least=100), deadline=None)
@given(st.data())
def test_services_have_one_fingerprint_exactly_if_their_demand_agrees(data: st.DataObject) -> None:
    one, two = data.draw(service_views("service")), data.draw(service_views("service"))
    same = all(projection.value(one) == projection.value(two) for projection in SERVICES)
    first, second = (Fingerprints(recall.MATERIAL).of(snapshot_of([], [view])) for view in (one, two))
    assert (first == second) == same


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=part(100, least=33), deadline=None)
@given(st.data())
def test_an_exchange_of_two_gives_another_fingerprint(name: str, data: st.DataObject) -> None:
    reads, row_of = ROWS[name]
    jobs = [data.draw(job_views(job)) for job in ("a", "b")]
    swapped = [
        replace(other, job=replace(other.job, job_id=mine.job.job_id, name=mine.job.name))
        for mine, other in zip(jobs, reversed(jobs), strict=True)
    ]
    differ = values(reads, row_of(jobs[0])) != values(reads, row_of(jobs[1]))
    assert (fingerprint(reads, row_of, snapshot_of(jobs)) != fingerprint(reads, row_of, snapshot_of(swapped))) == differ
    services = [data.draw(service_views(service)) for service in ("alpha", "omega")]
    exchanged = [replace(other, service=mine.service) for mine, other in zip(services, reversed(services), strict=True)]
    differ = [p.value(services[0]) for p in SERVICES] != [p.value(services[1]) for p in SERVICES]
    one, two = (fingerprint(reads, row_of, snapshot_of(jobs, each)) for each in (services, exchanged))
    assert (one != two) == differ


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=part(50, least=16), deadline=None)
@given(st.data())
def test_the_order_of_views_does_not_matter(name: str, data: st.DataObject) -> None:
    reads, row_of = ROWS[name]
    jobs = [data.draw(job_views(f"job-{number}")) for number in range(4)]
    services = [data.draw(service_views(f"service-{number}")) for number in range(3)]
    turned = snapshot_of(data.draw(st.permutations(jobs)), data.draw(st.permutations(services)))
    assert fingerprint(reads, row_of, snapshot_of(jobs, services)) == fingerprint(reads, row_of, turned)


@pytest.mark.slow
@settings(max_examples=part(100, least=33), deadline=None)
@given(st.data())
def test_kept_digests_give_what_new_ones_give(data: st.DataObject) -> None:
    """Jobs and services come, go, change and come back; the object that saw it all agrees with one that saw nothing."""
    kept = Fingerprints(recall.MATERIAL, "rule")
    jobs: dict[str, JobView] = {}
    services: dict[str, ServiceView] = {}
    for _ in range(6):
        for number in data.draw(st.sets(st.integers(0, 3))):
            jobs[f"job-{number}"] = data.draw(job_views(f"job-{number}"))
            services[f"service-{number}"] = data.draw(service_views(f"service-{number}"))
        for number in data.draw(st.sets(st.integers(0, 3), max_size=2)):
            jobs.pop(f"job-{number}", None)
            services.pop(f"service-{number}", None)
        cluster = data.draw(st.sampled_from(CLUSTERS))
        snapshot = snapshot_of(list(jobs.values()), list(services.values()), cluster)
        assert kept.of(snapshot) == Fingerprints(recall.MATERIAL, "rule").of(snapshot)


def test_clusters_differ_by_nodes_devices_and_their_order() -> None:
    assert len({nodes_fingerprint(cluster) for cluster in CLUSTERS}) == len(CLUSTERS)
    assert nodes_fingerprint(Topology(nodes=CLUSTERS[0].nodes)) == nodes_fingerprint(CLUSTERS[0])


def test_a_job_is_not_a_service_and_a_rule_is_another_policy() -> None:
    job = JobView(
        job=TrainingJob(job_id=WorkloadId("a"), name="a", entrypoint=SOURCE),
        state=JobState.PENDING,
        submitted_at_s=0.0,
        bounds=JobBounds(min_workers=1, max_workers=1),
    )
    service = ServiceView(
        service=InferenceService(service_id=WorkloadId("a"), name="a", entrypoint=SOURCE),
        min_replicas=1,
        max_replicas=1,
    )
    snapshots = [snapshot_of([job]), snapshot_of([], [service]), snapshot_of([job], [service]), snapshot_of([])]
    found = {Fingerprints(recall.MATERIAL, rule).of(snapshot) for rule in ("", "other") for snapshot in snapshots}
    assert len(found) == 8
    assert all(len(text) == 32 and math.isfinite(int(text, 16)) for text in found)
