"""FaPES: the filter, the priorities, the Board, and what makes a running job stay or go."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kits.job_parts import with_fields
from springtide.control.controller import check_plan
from springtide.core.decision import JobView, Overheads, PoolAllocation, Snapshot
from springtide.core.job_parts import GradientNoise, JobBounds, StepTime
from springtide.core.resources import Topology, make_node
from springtide.core.workload import (
    AdaptiveBatch,
    Entrypoint,
    GradientBucket,
    JobState,
    StepProfile,
    TrainingJob,
)
from springtide.perf.throughput import ThroughputModel
from springtide.scheduling.policies.fapes.board import Rounds, Seats, loads_of, now_of, servers_of
from springtide.scheduling.policies.fapes.filter import Candidate, Running, in_priority, select_running
from springtide.scheduling.policies.fapes.performance import Expectations, Settings, SpeedTable
from springtide.scheduling.policies.fapes.policy import Fapes
from springtide.scheduling.policies.fapes.reasons import Words
from springtide.solvers.schedule_planning import RoundDemand, Shapes
from springtide.testing.policy import check_policy

SOURCE = Entrypoint(source_path="a.py")
GPUS = Topology(nodes=tuple(make_node(f"n{i}", 8, kind="gpu", switches=(f"s{i // 2}", "core")) for i in range(4)))
RATES = {n: float(n) ** 0.8 for n in (1, 2, 4, 8, 16, 32)}


def job(name, *, total=2000, at_s=0.0, rates=None, low=1, high=32, **more):
    plain = TrainingJob(
        job_id=name,
        name=name,
        entrypoint=SOURCE,
        min_workers=low,
        max_workers=high,
        num_virtual_shards=64,
        total_steps=total,
        profile_steps_per_s=RATES if rates is None else rates,
        **more,
    )
    return JobView(
        job=plain,
        state=JobState.PENDING,
        submitted_at_s=at_s,
        total_steps=total,
        global_batch_size=plain.global_batch_size,
        bounds=JobBounds(min_workers=low, max_workers=high),
    )


def snapshot(*views, now_s=0.0, memory=None, held=None, cluster=GPUS):
    return Snapshot(
        now_s=now_s,
        cluster=cluster,
        jobs=tuple(views),
        allocations=held or {},
        memory=memory,
        overheads=Overheads(change_s=6.0),
    )


def running(view, *, step=0, at_s=0.0, started_s=0.0):
    return with_fields(
        view, state=JobState.RUNNING, step=step, progress_at_s=at_s, started_at_s=started_s, num_replicas=1
    )


def settings(**more):
    plain = {"unit": 2, "topology": True, "batch": True, "links": "v100", "communication": "", "round_s": 600.0}
    return Settings(**{**plain, **more})


def decide(policy, found):
    plan = policy.decide(found)
    check_plan(found, plan)
    return plan


def as_carried_out(found, plan, now_s):
    """The snapshot to which the plan leads, a little later."""
    views = []
    for view in found.jobs:
        has = plan.allocations.get(view.job.job_id)
        views.append(running(view, at_s=now_s, started_s=found.now_s) if has and has.device_ids else view)
    return msgspec.structs.replace(
        found, now_s=now_s, jobs=tuple(views), allocations=dict(plan.allocations), memory=plan.memory
    )


def test_a_plan_stands_while_it_is_carried_out_and_between_rounds():
    found = snapshot(job("a"), job("b", total=90_000))
    plan = decide(Fapes(), found)
    assert all(len(given.device_ids) % 2 == 0 for given in plan.allocations.values())
    for now_s in (0.0, 1.0, 300.0):
        later = as_carried_out(found, plan, now_s)
        again = decide(Fapes(), later)
        assert again.allocations == plan.allocations
        assert msgspec.json.decode(msgspec.json.encode(again.memory)) == again.memory


def test_the_board_is_told_and_ends_where_the_plan_says():
    found = snapshot(job("a", total=90_000))
    plan = decide(Fapes(), found)
    runs = plan.future["a"]
    assert runs[0].start_s == 0.0
    assert runs[0].num_devices == plan.allocations["a"].num_devices
    done = sum((run.end_s - run.start_s) * run.num_devices**0.8 for run in runs)
    assert done == pytest.approx(90_000, rel=0.25)


def test_an_arrival_between_rounds_starts_at_once_unless_starts_are_off():
    found = snapshot(job("a", total=90_000, high=8))
    for starts in (True, False):
        plan = decide(Fapes(starts=starts), found)
        later = as_carried_out(found, plan, 100.0)
        later = msgspec.structs.replace(later, jobs=(*later.jobs, job("b", at_s=100.0)))
        after = decide(Fapes(starts=starts), later)
        assert after.allocations["a"] == plan.allocations["a"]
        assert ("b" in after.allocations) is starts


def test_a_late_job_keeps_its_devices_and_an_early_one_leaves_the_board():
    found = snapshot(job("a", total=2000, high=8), job("b", total=2000, high=8))
    plan = decide(Fapes(), found)
    end_s = max(run.end_s for run in plan.future["a"])
    late_s = (int(end_s // 600) + 2) * 600.0
    # Nothing more is heard of a: it is late. b has ended early.
    later = as_carried_out(found, plan, late_s)
    only = tuple(with_fields(view, progress_at_s=late_s, step=1500) for view in later.jobs[:1])
    later = msgspec.structs.replace(later, jobs=only, allocations={"a": plan.allocations["a"]})
    after = decide(Fapes(filtering=True), later)
    assert set(plan.allocations["a"].device_ids) <= set(after.allocations["a"].device_ids) or (
        after.allocations["a"].num_devices < plan.allocations["a"].num_devices
    )
    assert "b" not in after.future


def test_a_lost_node_and_a_service_leave_a_possible_plan():
    found = snapshot(*[job(f"j{i}", total=50_000) for i in range(6)])
    plan = decide(Fapes(), found)
    for cut in (1, 3):
        later = as_carried_out(found, plan, 50.0)
        nodes = GPUS.nodes[:-cut]
        alive = {device.device_id for node in nodes for device in node.devices}
        held = {
            who: PoolAllocation(device_ids=tuple(d for d in given.device_ids if d in alive))
            for who, given in later.allocations.items()
        }
        smaller = msgspec.structs.replace(later, cluster=Topology(nodes=nodes), allocations=held)
        decide(Fapes(), smaller)


def outlook(best=1.0, sizes=(2, 4, 8, 16)):
    array = np.array(sizes)
    rates = np.repeat((array.astype(float) ** 0.7 * best)[:, None], 3, axis=1)
    return SpeedTable(
        sizes=array,
        unit=2,
        rates=rates,
        batches=np.ones(rates.shape, dtype=np.int64),
        work=1e4,
        total_work=1e4,
        is_known=True,
    )


def runner(achievement, *, num_held=8, left_s=5000.0, may_change=True):
    return Running(outlook=outlook(), num_held=num_held, achievement=achievement, left_s=left_s, may_change=may_change)


def select(jobs, waiting, num_idle=0):
    return select_running(jobs, waiting, num_idle, round_s=600.0, change_s=6.0)


def test_the_worst_goes_first_and_who_ends_soon_is_left_alone():
    jobs = [runner(0.9), runner(0.3), runner(0.1, left_s=500.0), runner(0.2, may_change=False)]
    assert select(jobs, [outlook()]) == [1]


def test_as_many_are_recycled_as_the_waiting_need():
    jobs = [runner(0.4 + 0.02 * index, num_held=6) for index in range(8)]
    chosen = select(jobs, [outlook(sizes=(4, 8))] * 3)
    # Shares below four devices are no use to those who wait.
    assert chosen == [0, 1, 2, 3, 4, 5]


def test_without_anything_to_gain_nobody_is_selected():
    assert select([runner(1.0, num_held=16), runner(1.0, num_held=16)], []) == []
    assert select([], [outlook()]) == []


def test_idle_devices_are_a_gain_for_the_worst():
    assert select([runner(0.4, num_held=4), runner(0.9, num_held=8)], [], num_idle=12) == [0]


def test_priorities():
    cohort = [
        Candidate(position=0, waited_s=0.0, is_new=False, achievement=0.2),
        Candidate(position=1, waited_s=0.0, is_new=False, achievement=0.8),
        Candidate(position=2, waited_s=100.0, is_new=True),
        Candidate(position=3, waited_s=700.0, is_new=True),
        Candidate(position=4, waited_s=900.0, is_new=False),
        Candidate(position=5, waited_s=1900.0, is_new=False),
    ]
    assert [found.position for found in in_priority(cohort, pop_up_s=1800.0)] == [5, 3, 2, 4, 1, 0]


def test_switches_become_levels():
    servers = servers_of(GPUS, GPUS.device_ids())
    assert servers.switches.tolist() == [[0, 0], [0, 0], [1, 0], [1, 0]]
    flat = Topology(nodes=(make_node("a", 2), make_node("b", 3)))
    assert servers_of(flat, flat.device_ids()).switches.tolist() == [[0], [0]]
    assert servers_of(flat, ("a/0",)).capacity.tolist() == [1, 0]


def test_loads_are_the_most_in_any_round_of_a_block():
    grid = Rounds(10, 6000.0, 600.0)
    loads = loads_of([[[10, 11, [[0, 4]], None], [25, 25, [[1, 2]], None]]], grid, 2)
    assert loads[:3, 0].tolist() == [4, 4, 0]
    assert loads[:, 1].max() == 2
    assert now_of([[10, 11, [[0, 4]], 64]], 11) == (((0, 4),), 64)
    assert now_of([[10, 11, [[0, 4]], 64]], 12) == ((), None)


def test_seats_keep_what_is_held_and_take_whole_pairs():
    seats = Seats(GPUS, GPUS.device_ids(), ("n0/6",), 2)
    chosen = seats.assign(
        {"a": ((0, 2),), "b": ((0, 2),), "c": ((0, 2),)}, {"a": ("n0/0", "n0/2", "n0/3"), "b": ("n0/5",)}
    )
    assert chosen["a"] == ("n0/2", "n0/3")
    assert chosen["b"][0] == "n0/5"
    # The pair 0-1 is whole; 4 is a half and 6 is held by somebody now.
    assert chosen["c"] == ("n0/0", "n0/1") or chosen["b"] == ("n0/5", "n0/0")


def rate_on(expectations, view, placed):
    found = expectations.of(view, 0)
    demand = RoundDemand(work=found.work, sizes=found.sizes, rates=found.rates, unit=found.unit)
    return Shapes(servers_of(GPUS, GPUS.device_ids()), demand).rate_of(placed)


def test_a_profiled_job_feels_where_it_is_and_without_topology_it_does_not():
    profile = StepProfile(
        local_batch_size=32,
        forward_s=0.05,
        backward_s=0.1,
        buckets=tuple(GradientBucket(ready_s=0.05 + 0.01 * i, num_bytes=25_000_000) for i in range(1, 11)),
    )
    view = job("p", step_profile=profile, rates={}, global_batch_size=256, total=1000)
    servers = servers_of(GPUS, GPUS.device_ids())
    feels = Expectations(snapshot(view), servers, settings())
    together = rate_on(feels, view, ((0, 8),))
    apart = rate_on(feels, view, ((0, 2), (1, 2), (2, 2), (3, 2)))
    assert together > apart > 0.0
    blind = Expectations(snapshot(view), servers, settings(topology=False))
    assert rate_on(blind, view, ((0, 8),)) == rate_on(blind, view, ((0, 2), (1, 2), (2, 2), (3, 2)))


def test_noise_makes_batches_larger_within_their_bounds_and_switching_it_off_keeps_them():
    truth = ThroughputModel(alpha_c=0.05, beta_c=0.001, alpha_n=0.1, beta_n=0.001, alpha_r=0.02, beta_r=0.001, gamma=2)
    steps = []
    for nodes, size, local in ((1, 1, 64), (1, 4, 64), (1, 8, 32), (2, 16, 64), (1, 2, 128)):
        step_s, sync_s = truth.step_s(nodes, size, local)
        placement = (size,) if nodes == 1 else (size // 2, size // 2)
        steps.append(StepTime(placement=placement, local_batch_size=local, step_s=float(step_s), sync_s=float(sync_s)))
    bounds = AdaptiveBatch(min_size=128, max_size=4096, max_local_size=256)
    view = with_fields(
        job("g", rates={}, batch=bounds, global_batch_size=128, length_unit="progress"),
        step_times=tuple(steps),
        noise=GradientNoise(grad_sqr=1.0, grad_var=20.0),
        total_equivalent_steps=2000.0,
    )
    servers = servers_of(GPUS, GPUS.device_ids())
    found = Expectations(snapshot(view), servers, settings()).of(view, 0)
    assert found.batches.max() <= 4096
    assert found.batches[-1, 0] > found.batches[0, 0] >= 128
    fixed = Expectations(snapshot(view), servers, settings(batch=False)).of(view, 0)
    assert set(fixed.batches[fixed.rates > 0.0].tolist()) == {128}
    assert fixed.best_rate < found.best_rate
    plan = decide(Fapes(), snapshot(view))
    assert 128 <= plan.allocations["g"].global_batch_size <= 4096


def test_a_job_of_unknown_length_is_planned_for_what_it_has_done():
    view = with_fields(running(job("u", total=None), step=5000), equivalent_steps=5000.0)
    found = Expectations(snapshot(view), servers_of(GPUS, GPUS.device_ids()), settings()).of(view, 8)
    assert found.work == 5000.0
    assert not found.is_known


def test_words():
    words = Words(0.0)
    assert words.changed((), ("a", "b"), 1800.0, True) == "starting on 2 devices, planned to end in 30 min"
    assert words.changed(("a", "b", "c"), ("a", "b"), 0.0, False) == "as planned: shrinks to 2 devices"
    assert words.waits(False, 1200.0, 4) == "waits: planned to start on 4 devices in 20 min"
    assert "lower --workers" in words.no_room(False, 9, 8)


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [{}, {"filtering": False, "topology": False, "batch": False, "starts": False}])
def test_any_state_is_survived(parameters):
    check_policy(lambda: Fapes(**parameters), num_snapshots=60, seed=3)
