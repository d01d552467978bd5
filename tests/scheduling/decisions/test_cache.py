"""Decisions cached outside of the policy: the same as those of a policy that has never seen anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.simulation.sweeps import part
from springtide.control.controller import Controller
from springtide.core.actions import StartReplica
from springtide.core.decision import JobView, Plan, Policy, ServiceView, Snapshot
from springtide.core.events import LoadObserved, NodeJoined, ReplicaReady, ServiceDeployed
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, InferenceService, WorkloadId
from springtide.scheduling.decisions.cache import CacheablePolicy, DecisionCache, RowTable
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.registry import POLICY_NAMES, make_policy
from springtide.testing.policy import draw_snapshot, encode_plan

# The genetic algorithm of the real size would take a minute of the fast lane.
NAMES = [f"{name}:population=8:generations=3" if name == "pollux" else name for name in POLICY_NAMES]
COMPOSED = ("dilu/springtide", "tide/springtide", "tide/goodput", "two-way/fapes", "dilu/tide/edf")


def test_rows_are_in_the_order_of_the_snapshot_when_a_job_comes_back_to_its_place() -> None:
    snapshot = next(drawn for seed in range(20) if len((drawn := draw_snapshot(np.random.default_rng(seed))).jobs) > 2)
    table = RowTable[PromiseRow](lambda view, _: PromiseRow(view))
    table.read(snapshot)
    paused = snapshot.jobs[0].job.job_id
    table.read(replace(snapshot, jobs=snapshot.jobs[1:]))
    assert [row.job_id for row in table.gone] == [paused]
    table.read(snapshot)
    names = [view.job.job_id for view in snapshot.jobs]
    assert [row.job_id for row in table.rows] == list(table.by_id) == names
    assert [row.job_id for row in table.fresh] == [paused]
    assert not table.gone


@pytest.mark.parametrize("name", ["springtide", "goodput", "elasticflow", "edf+admission", "edf", *COMPOSED])
def test_these_have_something_to_keep(name: str) -> None:
    assert isinstance(make_policy(name), CacheablePolicy)


def changed(snapshot: Snapshot, plan: Plan, rng: np.random.Generator) -> Snapshot:
    """The snapshot some time later: the plan came true or not, jobs got on, were changed, came and went."""
    drawn = draw_snapshot(rng)
    jobs: list[JobView] = []
    for view in snapshot.jobs:
        fate = rng.integers(0, 10)
        if view.job.job_id in plan.rejected or fate == 0:
            continue
        if fate <= 2:
            view = with_fields(view, step=view.progress.step + int(rng.integers(0, 3)), progress_at_s=snapshot.now_s)
        elif fate == 3:
            view = with_fields(view, max_workers=view.bounds.min_workers + int(rng.integers(0, 3)))
        elif fate == 4:
            view = with_fields(view, num_restarts=view.restarts.num_restarts + 1, starts_at_s=snapshot.now_s + 3.0)
        if view.job.job_id in plan.admitted:
            view = with_fields(view, admitted_at_s=snapshot.now_s, promised_finish_s=plan.admitted[view.job.job_id])
        jobs.append(view)
    services: list[ServiceView] = [
        replace(view, in_flight=int(rng.integers(0, 5))) if rng.integers(0, 2) else view for view in snapshot.services
    ]
    now_s = snapshot.now_s + float(rng.choice([0.0, 0.5, 30.0, 700.0]))
    if rng.integers(0, 5) == 0:
        names = {view.job.job_id for view in jobs}
        jobs += [
            with_fields(view, submitted_at_s=now_s, admitted_at_s=None)
            for view in drawn.jobs
            if view.job.job_id not in names
        ][:2]
    cluster = drawn.cluster if rng.integers(0, 8) == 0 else snapshot.cluster
    if rng.integers(0, 8) == 0:
        # Equal nodes, another object.
        cluster = msgspec.structs.replace(cluster)
    return replace(
        snapshot,
        now_s=now_s,
        cluster=cluster,
        jobs=tuple(jobs),
        services=tuple(services),
        allocations=plan.allocations if rng.integers(0, 4) else snapshot.allocations,
        memory=plan.memory if rng.integers(0, 6) else msgspec.json.decode(msgspec.json.encode(plan.memory)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *COMPOSED])
@settings(max_examples=part(12, least=4), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_sequence_of_cached_decisions_is_that_of_fresh_policies(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cached = DecisionCache(make_policy(name))
    snapshot = draw_snapshot(rng)
    for _ in range(8):
        plan = cached.decide(snapshot)
        assert encode_plan(plan) == encode_plan(make_policy(name).decide(snapshot))
        snapshot = changed(snapshot, plan, rng)


# --- what a policy reads is what it declares ------------------------------------------------------------------------


def watched(kind: type[Any], allowed: frozenset[str]) -> Callable[[Any], Any]:
    """Views of this kind that cannot be asked for a field that is not in `allowed`: `name`, or `part.name`."""
    fields = frozenset(kind.__struct_fields__)
    parts = {path.partition(".")[0] for path in allowed if "." in path}
    open_names = allowed | parts

    class Watched(kind, frozen=True, kw_only=True):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            assert name not in fields or name in open_names, f"the policy reads {kind.__name__}.{name} undeclared"
            return super().__getattribute__(name)

    def watch(view: Any) -> Any:
        values = {field: getattr(view, field) for field in fields}
        for name in parts:
            inner = frozenset(path.partition(".")[2] for path in allowed if path.startswith(f"{name}."))
            values[name] = watched(type(values[name]), inner)(values[name])
        return Watched(**values)

    return watch


DECLARED = [name for name in POLICY_NAMES if hasattr(make_policy(name), "reads")]


@pytest.mark.parametrize("name", DECLARED)
@settings(max_examples=part(15, least=5), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_policy_reads_nothing_that_it_does_not_declare(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy: Any = make_policy(name)
    watch_job = watched(JobView, policy.reads.job_fields)
    watch_service = watched(ServiceView, policy.reads.service_fields)
    snapshot = draw_snapshot(rng)
    for _ in range(4):
        jobs, services = tuple(map(watch_job, snapshot.jobs)), tuple(map(watch_service, snapshot.services))
        plan = policy.decide(replace(snapshot, jobs=jobs, services=services))
        snapshot = changed(snapshot, plan, rng)


def test_an_undeclared_read_is_found() -> None:
    view = watched(JobView, frozenset({"job"}))(draw_snapshot(np.random.default_rng(0)).jobs[0])
    assert view.job
    with pytest.raises(AssertionError, match=r"JobView\.progress undeclared"):
        view.progress  # noqa: B018
    view = watched(JobView, frozenset({"progress.epoch"}))(draw_snapshot(np.random.default_rng(0)).jobs[0])
    assert view.progress.epoch == 0
    with pytest.raises(AssertionError, match=r"JobProgress\.step undeclared"):
        view.progress.step  # noqa: B018


def test_every_policy_with_fingerprints_declares_what_it_reads() -> None:
    assert [name for name in POLICY_NAMES if isinstance(make_policy(name), CacheablePolicy)] == DECLARED


@pytest.mark.parametrize("name", [*NAMES, *COMPOSED])
def test_a_policy_is_a_value(name: str) -> None:
    one, two = make_policy(name), make_policy(name)
    one.decide(draw_snapshot(np.random.default_rng(3)))
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)


# --- what fails, and what keeps nothing -----------------------------------------------------------------------------


class Failing:
    """A policy whose second decision fails half way."""

    def make_derived(self) -> list[float]:
        return []

    def decide(self, snapshot: Snapshot, derived: list[float] | None = None) -> Plan:
        assert derived is not None
        derived.append(snapshot.now_s)
        if snapshot.now_s == 2.0:
            raise ValueError
        return Plan(memory=list(derived))


def test_what_a_failed_decision_derived_is_dropped() -> None:
    cache = DecisionCache(Failing())
    at = [Snapshot(now_s=now_s, cluster=draw_snapshot(np.random.default_rng(0)).cluster) for now_s in (0.0, 1.0, 2.0)]
    assert cache.decide(at[0]).memory == [0.0]
    assert cache.decide(at[1]).memory == [0.0, 1.0]
    with pytest.raises(ValueError):
        cache.decide(at[2])
    assert cache.decide(at[1]).memory == [1.0]


class Stateless:
    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan(memory=snapshot.now_s)


def test_a_policy_that_keeps_nothing_needs_no_more_than_decide() -> None:
    policy: Policy = Stateless()
    assert DecisionCache(policy).decide(draw_snapshot(np.random.default_rng(1))).memory is not None


# --- changes of two services that cancel each other out -------------------------------------------------------------


def service(name: str) -> InferenceService:
    return InferenceService(
        service_id=WorkloadId(name),
        name=name,
        entrypoint=Entrypoint(source_path="a.py"),
        max_replicas=4,
        target_in_flight=1,
        idle_s=5.0,
    )


def load(name: str, in_flight: int, *, queued: int = 0, idle_s: float = 0.0) -> LoadObserved:
    return LoadObserved(
        service_id=WorkloadId(name), arrivals_per_s=0.0, in_flight=in_flight, queued=queued, idle_s=idle_s
    )


def controller_with_two_services(policy: str) -> Controller:
    controller = Controller(make_policy(policy))
    services = [ServiceDeployed(service=service(name)) for name in ("alpha", "omega")]
    controller.step(0.0, [NodeJoined(node=make_node("n0", 8)), *services])
    return controller


@pytest.mark.parametrize("policy", ["springtide", "elasticflow", "goodput", "edf"])
def test_two_services_that_exchange_their_load_exchange_replicas(policy: str) -> None:
    controller = controller_with_two_services(policy)
    step = controller.step(1.0, [load("alpha", 1), load("omega", 3)])
    ready = [
        ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id)
        for action in step.actions
        if isinstance(action, StartReplica)
    ]
    assert sorted(event.workload_id for event in ready) == ["alpha", "omega", "omega", "omega"]
    controller.step(2.0, ready)
    started = [
        action.workload_id
        for action in controller.step(3.0, [load("alpha", 3), load("omega", 1)]).actions
        if isinstance(action, StartReplica)
    ]
    assert started == ["alpha", "alpha"]


@pytest.mark.parametrize("policy", ["springtide", "elasticflow", "goodput", "edf"])
def test_a_first_request_is_served_though_another_service_falls_asleep_at_the_same_moment(policy: str) -> None:
    controller = controller_with_two_services(policy)
    step = controller.step(1.0, [load("alpha", 1)])
    controller.step(
        2.0,
        [
            ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id)
            for action in step.actions
            if isinstance(action, StartReplica)
        ],
    )
    controller.step(3.0, [load("alpha", 0)])
    step = controller.step(9.0, [load("alpha", 0, idle_s=6.0), load("omega", 0, queued=1)])
    assert [action.workload_id for action in step.actions if isinstance(action, StartReplica)] == ["omega"]
