"""Sia chooses one of a few sizes for each job, by predicted goodput, and counts what restarts have cost."""

from __future__ import annotations

import msgspec
import pytest

from kits.job_parts import with_fields
from springtide.control.controller import check_plan
from springtide.core.decision import JobView, Overheads, PoolAllocation, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import GradientNoise, JobBounds, LearntSpeed, StepTime
from springtide.core.resources import Topology, make_node
from springtide.core.workload import AdaptiveBatch, Entrypoint, JobState, TrainingJob
from springtide.perf.goodput import best_batches
from springtide.perf.step_estimate import fit_model
from springtide.perf.throughput import ThroughputModel
from springtide_studies.bounds import highs
from springtide_studies.rivals.policies.sia import Sia, _configurations

SCALES = ThroughputModel(alpha_c=0.01, beta_c=0.002, alpha_n=0.005, beta_n=0.0, alpha_r=0.002, beta_r=0.0, gamma=1.0)
# Its exchange takes as long as ten passes: more workers make it slower.
STUCK = ThroughputModel(alpha_c=0.1, beta_c=0.0, alpha_n=3.0, beta_n=0.1, alpha_r=1.0, beta_r=0.1, gamma=1.0)
NOISE = GradientNoise(grad_sqr=1.0, grad_var=20.0)
BOUNDS = AdaptiveBatch(min_size=64, max_size=4096, min_local_size=16, max_local_size=256)
TABLE = Sia(solver="table")


def step_time(model, placement, local=64):
    step_s, sync_s = model.step_s(len(placement), sum(placement), local)
    return StepTime(placement=placement, local_batch_size=local, step_s=float(step_s), sync_s=float(sync_s))


def make_view(name, *, model=None, ran=(), at_s=0.0, least=1, most=64, elastic=True, batch=BOUNDS, state=None):
    job = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=Entrypoint(source_path="a.py"),
        global_batch_size=64,
        min_workers=least,
        max_workers=most,
        num_virtual_shards=256,
        elastic=elastic,
        batch=batch,
        length_unit="progress",
    )
    return JobView(
        job=job,
        state=state or (JobState.RUNNING if ran else JobState.PENDING),
        submitted_at_s=at_s,
        global_batch_size=64,
        bounds=JobBounds(min_workers=least, max_workers=most),
        learnt=LearntSpeed(
            step_times=tuple(step_time(model, placement, local) for placement in ran for local in (32, 64)),
            noise=NOISE if ran else None,
        ),
    )


CLUSTER = Topology(nodes=tuple(make_node(f"n{index}", 4) for index in range(4)))


def look(policy, views, *, held=None, now_s=0.0, memory=None, cluster=CLUSTER, change_s=0.0):
    snapshot = Snapshot(
        now_s=now_s,
        cluster=cluster,
        jobs=tuple(views),
        allocations={
            name: PoolAllocation(device_ids=tuple(devices), global_batch_size=64)
            for name, devices in (held or {}).items()
        },
        memory=memory,
        overheads=Overheads(change_s=change_s),
    )
    plan = policy.decide(snapshot)
    check_plan(snapshot, plan)
    return plan


def counts(plan):
    return {name: given.num_devices for name, given in plan.allocations.items()}


def on(*places):
    """Device ids: (node, how many from its first on)."""
    return tuple(f"n{node}/{index}" for node, count in places for index in range(count))


def later(plan, views, now_s, **kwargs):
    """The next round, when the plan has come true."""
    held = {name: given.device_ids for name, given in plan.allocations.items()}
    memory = msgspec.json.decode(msgspec.json.encode(plan.memory))
    return look(TABLE, views, held=held, now_s=now_s, memory=memory, **kwargs)


def test_sizes_are_powers_of_two_within_a_node_and_whole_nodes_beyond():
    assert _configurations(4, 64) == [1, 2, *range(4, 65, 4)]
    assert _configurations(8, 64) == [1, 2, 4, *range(8, 65, 8)]
    assert _configurations(6, 20) == [1, 2, 4, 6, 12, 18]
    assert _configurations(1, 3) == [1, 2, 3]
    assert _configurations(0, 8) == []


def test_a_newcomer_starts_on_one_device_even_on_an_empty_cluster():
    assert counts(look(TABLE, [make_view("a")])) == {"a": 1}


def test_a_job_at_most_doubles_in_a_round():
    views, plan, seen = [make_view("a")], look(TABLE, [make_view("a")]), []
    for number in range(1, 6):
        size = plan.allocations["a"].num_devices
        seen.append(size)
        placement = (size,) if size <= 4 else (4,) * (size // 4)
        known = {(step.placement, step.local_batch_size): step for view in views for step in view.learnt.step_times}
        ran = sorted({key[0] for key in known} | {placement})
        views = [make_view("a", model=SCALES, ran=ran)]
        plan = later(plan, views, 60.0 * number)
    assert seen == [1, 2, 4, 8, 16]


def test_as_many_jobs_run_as_there_are_devices():
    views = [make_view(f"j{number:02}", at_s=float(number)) for number in range(20)]
    plan = look(TABLE, views, now_s=60.0)
    assert counts(plan) == {view.job.job_id: 1 for view in views if view.job.job_id in plan.allocations}
    assert len(plan.allocations) == 16
    assert all(plan.reasons[view.job.job_id] for view in views if view.job.job_id not in plan.allocations)


def test_devices_go_to_those_who_make_more_of_them():
    views = [
        make_view("scales", model=SCALES, ran=[(1,), (2,), (4,), (4, 4)]),
        make_view("stuck", model=STUCK, ran=[(1,), (2,), (4,), (4, 4)], batch=None),
    ]
    plan = look(TABLE, views, now_s=60.0)
    assert counts(plan) == {"scales": 12, "stuck": 1}


def test_devices_are_whole_nodes_and_the_batch_is_the_best_there():
    view = make_view("a", model=SCALES, ran=[(1,), (2,), (4,), (4, 4)])
    plan = look(TABLE, [view, make_view("b")], now_s=60.0)
    given = plan.allocations["a"]
    assert given.num_devices == 12
    assert len({device.split("/")[0] for device in given.device_ids}) == 3
    model = fit_model(view.learnt.step_times)
    assert given.global_batch_size == best_batches(model, NOISE, [(3, 12)], BOUNDS, 64).global_batch_size[0]
    assert BOUNDS.min_size < given.global_batch_size <= BOUNDS.max_size


def test_a_job_that_has_restarted_often_keeps_its_size():
    ran = [(1,), (2,)]
    view = make_view("a", model=SCALES, ran=ran)
    plan = later(look(TABLE, [make_view("a")]), [view], 600.0, change_s=30.0)
    assert counts(plan)["a"] > 1, "600 s old: one more restart is worth it"
    first = look(TABLE, [make_view("a")])
    memory = msgspec.json.decode(msgspec.json.encode(first.memory))
    memory["state"]["restarts"]["a"] = 15
    held = {"a": first.allocations["a"].device_ids}
    assert counts(look(TABLE, [view], held=held, now_s=600.0, memory=memory, change_s=30.0)) == {"a": 1}


def test_a_job_that_is_restarting_is_left_alone():
    first = look(TABLE, [make_view("a")], change_s=90.0)
    view = make_view("a", model=SCALES, ran=[(1,), (2,)])
    second = later(first, [view], 60.0, change_s=90.0)
    assert counts(second) == {"a": 1}
    assert counts(later(second, [view], 120.0, change_s=90.0))["a"] > 1


def test_a_minimum_that_is_no_such_size_is_offered_as_it_is():
    assert counts(look(TABLE, [make_view("a", least=3, most=3)])) == {"a": 3}
    assert counts(look(TABLE, [make_view("a", least=3)])) == {"a": 3}
    assert counts(look(TABLE, [make_view("a", least=17)])) == {}


def test_a_job_that_cannot_change_its_number_runs_on_it_to_its_end():
    script = make_view("script", least=4, most=4, elastic=False, batch=None)
    first = look(TABLE, [script])
    assert counts(first) == {"script": 4}
    crowd = [msgspec.structs.replace(script, state=JobState.RUNNING), *(make_view(f"j{n:02}") for n in range(20))]
    second = later(first, crowd, 60.0)
    assert second.allocations["script"].device_ids == first.allocations["script"].device_ids
    assert len(second.allocations) == 13


def test_a_job_that_waits_out_a_crash_gets_nothing_yet():
    view = with_fields(make_view("a"), starts_at_s=100.0)
    first = look(TABLE, [view])
    assert counts(first) == {}
    assert counts(later(first, [view], 120.0)) == {"a": 1}


def test_of_one_about_whom_nothing_is_known_what_it_holds_is_kept():
    view = make_view("a", state=JobState.RUNNING)
    assert counts(look(TABLE, [view], held={"a": on((0, 2))})) == {"a": 2}


def test_both_solvers_decide_alike_where_there_is_no_tie():
    pytest.importorskip("scipy", reason="the solver is an extra")
    views = [
        make_view("scales", model=SCALES, ran=[(1,), (2,), (4,), (4, 4)]),
        make_view("stuck", model=STUCK, ran=[(1,), (2,)], batch=None),
        make_view("new"),
    ]
    assert counts(look(Sia(), views, now_s=60.0)) == counts(look(TABLE, views, now_s=60.0))


def test_without_the_solver_it_refuses_to_start(monkeypatch):
    monkeypatch.setattr(highs, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="solver=table"):
        Sia()
    assert counts(look(Sia(solver="table"), [make_view("a")])) == {"a": 1}


def test_a_power_that_would_turn_the_aim_around_is_refused():
    with pytest.raises(InvalidRequest, match="power"):
        Sia(power=0.5)
