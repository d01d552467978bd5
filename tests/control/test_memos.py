"""What is remembered of what was derived: each input, changed alone, is a miss, and warm and cold say the same.

The controller's memories are in a table with a change for each input; those of policies are asked with each field of
the snapshot changed alone. Caches of pure functions need no key of their own: the last test names them, so that a new
one is looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from kits.cheap_policies import cheap_names
from kits.scheduling.goodput_jobs import KNOWN, NOISE, view
from kits.simulation.sweeps import part
from springtide.control.controller import Controller
from springtide.control.incremental import HangWatch, WaitingReasons, Worklist
from springtide.control.records import StateReason
from springtide.control.snapshot_views import SnapshotViews
from springtide.core import events
from springtide.core.decision import Capacity, Drain, Overheads, Plan, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId, HostResources, NodeId, NodeRoom, Topology, make_node
from springtide.core.shares import Share
from springtide.core.tide import Tide
from springtide.core.workload import WorkloadId
from springtide.perf.tide import Forecaster
from springtide.scheduling.decisions.cache import CacheablePolicy, DecisionCache
from springtide.scheduling.families.family import FamilySpeed, JobFamily
from springtide.scheduling.registry import make_policy
from springtide.testing.policy import draw_snapshot, encode_plan

A = WorkloadId("a")
SOURCE = Path(__file__).parents[2] / "src/springtide"


class Memo(NamedTuple):
    """One memory: `ask` reads it, `cold` reads one that remembers nothing, `changes` change one input each."""

    ask: Callable[[], Any]
    cold: Callable[[], Any]
    changes: dict[str, Callable[[], None]]


# --- the controller ---------------------------------------------------------------------------------------------------


def hang_watch(stage: Any, job: Any, service: Any) -> Memo:
    stage.running("a", "0", stall_timeout_s=60.0)
    stage.want(a="0", s="1")
    stage.tell(events.ServiceDeployed(service=service("s", min_replicas=1, start_timeout_s=80.0)))
    # Late enough for both: the job stalls after a minute, the replica is late after 80 seconds.
    state, now = stage.controller.state, [85.0]
    watch = HangWatch(state)
    watch.mark_changed(["a", "s"])

    def ask(memory: HangWatch) -> Any:
        # The moments are those at which the loop is woken.
        return memory.news(now[0]), dict(memory.due_s)

    def cold() -> Any:
        fresh = HangWatch(state)
        fresh.mark_changed(["a", "s"])
        return ask(fresh)

    def change_job() -> None:
        stage.tell(events.ProgressReported(job_id="a", generation=1, step=1, total_steps=9, world_size=1), at_s=30.0)
        watch.mark_changed(["a"])

    def change_service() -> None:
        stage.tell(events.ReplicaReady(workload_id="s", replica_id="s.0"), at_s=30.0)
        watch.mark_changed(["s"])

    def change_watched_from() -> None:
        state.watched_from_s = 50.0

    def change_now() -> None:
        now[0] = 59.0

    return Memo(
        lambda: ask(watch),
        cold,
        {
            "record of the job": change_job,
            "record of the service": change_service,
            "watched from": change_watched_from,
            "now": change_now,
        },
    )


def worklist(stage: Any, job: Any, service: Any) -> Memo:
    wanted = PoolAllocation(device_ids=(DeviceId("n/0"),))
    asked: dict[str, Any] = {"plan": Plan(allocations={A: wanted}), "drains": {}}
    memory = Worklist()
    memory.pending(asked["plan"], asked["drains"])
    memory.mark_settled(A, wanted)

    def plan(**fields: Any) -> Callable[[], None]:
        return lambda: asked.update(plan=replace(asked["plan"], **fields))

    def given(**fields: Any) -> Callable[[], None]:
        return plan(allocations={A: replace(wanted, **fields)})

    drain = Drain(pool="inference", since_s=1.0, reason="", reclaim_since_s=2.0)
    return Memo(
        lambda: memory.pending(asked["plan"], asked["drains"]),
        # One that remembers nothing has everything checked.
        lambda: {A},
        {
            "record": lambda: memory.mark_changed([A]),
            "devices": given(device_ids=(DeviceId("n/1"),)),
            "batch": given(global_batch_size=8),
            "share": given(share=Share(request=0.5, limit=0.5, memory_mb=1)),
            "nothing given": plan(allocations={}),
            "admitted": plan(admitted={A: 1.0}),
            "drains": lambda: asked.update(drains={NodeId("n"): drain}),
        },
    )


def waiting_reasons(stage: Any, job: Any, service: Any) -> Memo:
    stage.want()
    stage.tell(events.JobSubmitted(job=job("a", min_workers=2, max_workers=8, num_virtual_shards=8)))
    state = stage.controller.state
    plan = [Plan(reasons={A: "others have the devices"})]
    memory = WaitingReasons()

    def told(reason: str) -> None:
        lifecycle = replace(stage.job("a").lifecycle, reason=StateReason(reason))
        state.jobs[A] = replace(stage.job("a"), lifecycle=lifecycle)
        memory.mark_changed([A])

    def news() -> Any:
        """What the record says once the news of the memory are told."""
        for reason in memory.news(state, plan[0])[0].values():
            told(reason)
        return stage.job("a").reason

    def cold() -> Any:
        return WaitingReasons().news(state, plan[0])[0].get(A, stage.job("a").reason)

    def shrink() -> None:
        state.nodes[NodeId("n")] = make_node("n", 1)

    def end() -> None:
        stage.tell(events.CancelRequested(workload_id="a"))
        memory.mark_changed([A])

    return Memo(
        news,
        cold,
        {
            "record": end,
            "reasons": lambda: plan.__setitem__(0, replace(plan[0], reasons={A: "promised deadlines need them"})),
            "no room": lambda: plan.__setitem__(0, replace(plan[0], no_room={A: "asks for 16 CPUs"})),
            "topology": shrink,
        },
    )


def snapshot_views(stage: Any, job: Any, service: Any) -> Memo:
    stage.running("a", "01")
    stage.tell(events.JobSubmitted(job=job("b")))
    state, views = stage.controller.state, SnapshotViews()

    def ask() -> Any:
        return views.jobs(state), views.allocations(state), list(views.allocations(state))

    def update(*happened: Any) -> Callable[[], None]:
        def change() -> None:
            stage.tell(*happened)
            for name in ("a", "b"):
                views.update(state, name)

        return change

    def cold() -> Any:
        fresh = SnapshotViews()
        for name in ("a", "b"):
            fresh.update(state, name)
        return fresh.jobs(state), fresh.allocations(state), list(fresh.allocations(state))

    for name in ("b", "a"):
        views.update(state, name)
    return Memo(
        ask,
        cold,
        {
            "progress": update(events.ProgressReported(job_id="a", generation=1, step=5, total_steps=9, world_size=2)),
            "who wants to run": update(events.PauseRequested(job_id="b")),
            "replicas": update(events.ReplicaLost(workload_id="a", replica_id="a.1", reason="killed")),
        },
    )


def learnt_overheads(stage: Any, job: Any, service: Any) -> Memo:
    controller = Controller(stage.policy, overheads=Overheads(change_s=1.0), learns_overheads=True)

    def cold() -> Any:
        fresh = Controller(stage.policy, overheads=Overheads(change_s=1.0), learns_overheads=True)
        fresh.state.change_times_s = controller.state.change_times_s
        return fresh.snapshot(1.0).overheads

    def change() -> None:
        controller.state.change_times_s = (30.0,) * 20

    return Memo(lambda: controller.snapshot(1.0).overheads, cold, {"times of changes": change})


def topology(stage: Any, job: Any, service: Any) -> Memo:
    nodes = stage.controller.state.nodes

    def relabel() -> None:
        nodes[NodeId("n")] = replace(nodes[NodeId("n")], pool="training")

    return Memo(
        nodes.topology,
        lambda: Topology(nodes=tuple(nodes.values())),
        {
            "a node joins": lambda: nodes.__setitem__(NodeId("m"), make_node("m", 1)),
            "a node is lost": lambda: nodes.__delitem__(NodeId("n")),
            "a label": relabel,
        },
    )


def room_fitter(stage: Any, job: Any, service: Any) -> Memo:
    """The room on nodes, kept around every policy."""
    stage.want(a="01")
    stage.tell(events.JobSubmitted(job=job("a", min_workers=2)))
    node = make_node("n", 4)
    one = HostResources(cpu_m=1000, memory_bytes=1, num_pods=1)
    four = HostResources(cpu_m=4000, memory_bytes=4, num_pods=4)
    wide = replace(node, room=NodeRoom(total=four, replica=one))
    asked = [replace(stage.controller.snapshot(1.0), cluster=Topology(nodes=(wide,)), allocations={})]
    cache = DecisionCache(stage.policy)

    def fill() -> None:
        full = replace(wide, room=replace(wide.room, others=replace(four, num_pods=0)))
        asked[0] = replace(asked[0], cluster=Topology(nodes=(full,)))

    def bound() -> None:
        asked[0] = replace(asked[0], jobs=())
        stage.want()

    return Memo(
        lambda: cache.decide(asked[0]),
        lambda: DecisionCache(stage.policy).decide(asked[0]),
        {"room of a node": fill, "jobs": bound},
    )


# --- the forecast -----------------------------------------------------------------------------------------------------


def forecaster(level: int | None) -> Memo:
    asked: dict[str, Any] = {
        "tide": Tide(day_s=96.0, bins_per_day=8, first_bin=0, peaks=(1, 2, 3, 4, 5, 6, 7, 8) * 2, peak=3, level=level),
        "now_s": 192.5,
        "horizon_s": 50.0,
        "reserve": 20.0,
    }
    memory = Forecaster()
    tide = asked["tide"]
    return Memo(
        lambda: memory.forecast(**asked),
        lambda: Forecaster().forecast(**asked),
        {
            "tide": lambda: asked.update(tide=replace(tide, peaks=(9, *tide.peaks[1:]))),
            "now": lambda: asked.update(now_s=205.0),
            "horizon": lambda: asked.update(horizon_s=80.0),
            "reserve": lambda: asked.update(reserve=3.0),
        },
    )


def batches_of_a_family() -> Memo:
    def pace() -> FamilySpeed:
        return FamilySpeed(JobFamily(steps=KNOWN), [1, 4, 8], 4, view("a").job)

    asked: dict[str, Any] = {"num_nodes": 1, "num_workers": 4, "noise": NOISE}
    memory = pace()
    return Memo(
        lambda: memory.batch_for(**asked),
        lambda: pace().batch_for(**asked),
        {
            "nodes": lambda: asked.update(num_nodes=2),
            "workers": lambda: asked.update(num_workers=8),
            "noise": lambda: asked.update(noise=replace(NOISE, grad_var=40.0 * NOISE.grad_var)),
        },
    )


MEMOS: dict[str, Callable[..., Memo]] = {
    "HangWatch": hang_watch,
    "Worklist": worklist,
    "WaitingReasons": waiting_reasons,
    "SnapshotViews": snapshot_views,
    "overheads of the controller": learnt_overheads,
    "topology of the nodes": topology,
    "RoomFitter": room_fitter,
    "Forecaster": lambda *_: forecaster(3),
    "Forecaster before any demand": lambda *_: forecaster(None),
    "best batches of a family": lambda *_: batches_of_a_family(),
}
INPUTS = {
    "HangWatch": ("record of the job", "record of the service", "watched from", "now"),
    "Worklist": ("record", "devices", "batch", "share", "nothing given", "admitted", "drains"),
    "WaitingReasons": ("record", "reasons", "no room", "topology"),
    "SnapshotViews": ("progress", "who wants to run", "replicas"),
    "overheads of the controller": ("times of changes",),
    "topology of the nodes": ("a node joins", "a node is lost", "a label"),
    "RoomFitter": ("room of a node", "jobs"),
    "Forecaster": ("tide", "now", "horizon", "reserve"),
    "Forecaster before any demand": ("tide", "now", "horizon", "reserve"),
    "best batches of a family": ("nodes", "workers", "noise"),
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, inputs in INPUTS.items() for change in inputs])
def test_an_input_that_changes_alone_is_a_miss(name: str, change: str, stage: Any, job: Any, service: Any) -> None:
    memo = MEMOS[name](stage, job, service)
    assert tuple(memo.changes) == INPUTS[name]
    before = memo.ask()
    assert memo.ask() == before, "asked again, it says the same"
    memo.changes[change]()
    after = memo.ask()
    assert after == memo.cold(), "it says what one says that remembers nothing"
    assert after != before, "the change makes a difference here"


# --- what policies derive ---------------------------------------------------------------------------------------------


def cacheable() -> list[str]:
    plain = cheap_names(round_s=60.0)
    composed = [f"{strategy}/{name}" for strategy in ("tide", "two-way") for name in ("springtide", "goodput", "edf")]
    return [name for name in (*plain, *composed, "dilu/springtide") if isinstance(make_policy(name), CacheablePolicy)]


def busy_tide(now_s: float) -> Tide:
    tide = Tide(day_s=400.0, bins_per_day=4)
    return replace(tide, first_bin=tide.bin_at(now_s) - 8, peaks=(5, 6, 7, 8) * 2, peak=9, level=9)


def changed_alone(snapshot: Snapshot) -> dict[str, Snapshot]:
    """The snapshot with each of its fields changed alone."""
    node, *others = snapshot.cluster.nodes
    held = dict(list(snapshot.allocations.items())[1:])
    return {
        "now_s": replace(snapshot, now_s=snapshot.now_s + 700.0),
        "cluster": replace(snapshot, cluster=Topology(nodes=(*others, node, make_node("further", 4)))),
        "jobs": replace(snapshot, jobs=snapshot.jobs[1:]),
        "services": replace(snapshot, services=snapshot.services[1:]),
        "allocations": replace(snapshot, allocations=held),
        "memory": replace(snapshot, memory=None),
        "overheads": replace(snapshot, overheads=Overheads(change_s=300.0)),
        "drains": replace(snapshot, drains={node.node_id: Drain(pool="inference", since_s=1.0, reclaim_since_s=2.0)}),
        "tide": replace(snapshot, tide=busy_tide(snapshot.now_s)),
        "capacity": replace(snapshot, capacity=(Capacity(from_s=snapshot.now_s + 10.0, num_devices=1),)),
        "num_parts_waiting": replace(snapshot, num_parts_waiting=1),
    }


@pytest.mark.parametrize("name", cacheable())
def test_a_policy_that_remembers_decides_like_one_that_does_not_whatever_changes_alone(name: str) -> None:
    for seed in range(part(12)):
        first = draw_snapshot(np.random.default_rng(seed))
        first = replace(first, memory=make_policy(name).decide(first).memory)
        assert set(changed_alone(first)) == set(Snapshot.__struct_fields__)
        for field, snapshot in changed_alone(first).items():
            cache = DecisionCache(make_policy(name))
            kept = cache.decide(first)
            assert encode_plan(cache.decide(first)) == encode_plan(kept)
            warm = encode_plan(cache.decide(snapshot))
            assert warm == encode_plan(make_policy(name).decide(snapshot)), (seed, field)


# --- caches of pure functions -----------------------------------------------------------------------------------------

# Their arguments are their key: functions of a module over frozen values, and properties of these. `pools.py` and
# `allocation_ledger.py` are made for one decision, `library.py` and `plugins.py` read what stays in a process, and
# `linear_by_shard.py` tries what torch computes, with seeded numbers.
PURE = {
    "backends/sharing/gpu/library.py": ["why_not_preloaded"],
    "core/containers.py": ["_amount"],
    "control/journal/ended.py": ["_decoded"],
    "core/plugins.py": ["offered"],
    "core/resources.py": [
        "_device_ids",
        "accelerator_of",
        "accelerators",
        "by_id",
        "device_set",
        "function_services",
        "has_pools",
        "has_rooms",
        "machines",
        "memory_of",
        "node_of",
    ],
    "perf/calibration.py": ["_knots"],
    "perf/communication/fabric.py": ["edges", "narrowest_bytes_per_s", "num_devices", "num_leaf_switches"],
    "perf/curve.py": ["_curve", "_curve_of", "_fit"],
    "perf/step_estimate.py": ["_fit", "fit_model"],
    "runtime/elastic/own_sockets.py": ["say_once"],
    "runtime/elastic/steps/linear_by_shard.py": ["ways_of"],
    "scheduling/loans/pools.py": ["by_id", "job_of", "maximum", "required", "wanted"],
    "scheduling/placement/allocation_ledger.py": ["_holders", "_least"],
    "scheduling/placement/layout.py": ["_bitmap", "_held_devices", "_layout", "_topology", "is_scattered", "shape_of"],
    "scheduling/policies/fapes/performance.py": [
        "_communication",
        "_exchanges",
        "_fitted_table",
        "_key",
        "_profiled_table",
        "best_rate",
        "compact_rates",
    ],
    "scheduling/families/candidates.py": ["size_grid"],
    "scheduling/families/family.py": ["_place_of", "_way", "rates"],
    "scheduling/sharing/board.py": ["_holder_of"],
    "scheduling/sharing/policy.py": ["_held_whole", "_without"],
    "scheduling/sharing/pool_nodes.py": ["_of_services", "_of_training", "_serving", "_training"],
    "scheduling/sharing/ledger.py": ["_columns_of"],
    "scheduling/sharing/outlook.py": ["_demands"],
    "storage/stores/memory.py": ["_objects_of"],
}


def cached_in(path: Path) -> list[str]:
    found = {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for each in node.decorator_list
        if re.search(r"\b(lru_cache|cache|cached_property)\b", ast.unparse(each))
    }
    return sorted(found)


@pytest.mark.slow
def test_caches_of_functions_read_nothing_but_their_arguments() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert {str(path.relative_to(SOURCE)): found for path in paths if (found := cached_in(path))} == PURE
