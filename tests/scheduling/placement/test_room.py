"""Plans within what nodes have beside their devices, whatever the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from kits.simulation.sweeps import part
from springtide.control.controller import Controller, check_plan
from springtide.control.parts import bounds_in_devices, job_in_devices, learnt_in_devices
from springtide.core import events
from springtide.core.containers import ContainerSettings
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.job_parts import NodeRefusal
from springtide.core.resources import HostResources, Node, NodeRoom, Topology, make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.placement.demand import Demand, demand_of
from springtide.scheduling.placement.room import RoomFitter
from springtide.scheduling.registry import POLICY_NAMES, make_policy
from springtide.testing.policy import draw_snapshot, encode_plan

SOURCE = Entrypoint(source_path="job.py", object_name="fit")
GIB = 1 << 30
COMPOSED = ("dilu/springtide", "tide/springtide", "two-way/fifo")


def node(
    name: str, num_devices: int = 2, *, cpu_m: int = 2000, memory: int = 8 * GIB, others_m: int = 0, foreign: int = 0
) -> Node:
    """A node; `foreign` of its devices are held by pods of others."""
    room = NodeRoom(
        total=HostResources(cpu_m=cpu_m, memory_bytes=memory, num_pods=110, num_devices=num_devices),
        others=HostResources(cpu_m=others_m, num_devices=foreign),
        replica=HostResources(num_pods=1, num_devices=1),
    )
    return replace(make_node(name, num_devices), room=room)


def job(name: str, cpu: str = "", *, memory: str = "", most: int = 4, **options) -> TrainingJob:
    container = ContainerSettings(cpu=cpu, memory=memory)
    return TrainingJob(
        **{"job_id": name, "name": name, "entrypoint": SOURCE, "max_workers": most, "container": container, **options}
    )


def play(policy: str, *happened: events.Event, turns: int = 4) -> Controller:
    """Let every worker be ready at once, for a few turns."""
    controller = Controller(make_policy(policy))
    step = controller.step(0.0, happened)
    for turn in range(1, turns):
        told: list[events.Event] = []
        for record in controller.state.live_records():
            for replica in record.replicas:
                if replica.state == "STARTING":
                    told.append(events.ReplicaReady(workload_id=record.workload_id, replica_id=replica.replica_id))
                elif replica.state == "STOPPING":
                    told.append(events.ReplicaStopped(workload_id=record.workload_id, replica_id=replica.replica_id))
        for running in controller.state.jobs.live.values():
            if running.group.members and not running.group.is_confirmed:
                told.append(
                    events.JobResized(
                        job_id=running.workload_id,
                        generation=running.group.generation,
                        world_size=running.world_size,
                        step=turn,
                        pause_s=0.0,
                        direction="grow",
                    )
                )
        step = controller.step(float(turn), told)
    assert not [action for action in step.actions if type(action).__name__ == "StartReplica"], "it settles"
    return controller


def placed(controller: Controller) -> dict[str, list[str]]:
    jobs = {name: sorted(r.device_id for r in record.replicas) for name, record in controller.state.jobs.items()}
    services = {n: sorted(r.device_id for r in record.replicas) for n, record in controller.state.services.items()}
    return jobs | services


@pytest.mark.parametrize("policy", [*POLICY_NAMES, *COMPOSED])
def test_a_node_takes_as_many_workers_as_it_has_processors_for(policy: str) -> None:
    submitted = events.JobSubmitted(job=job("a", "1500m"))
    controller = play(policy, events.NodeJoined(node=node("n")), submitted)
    assert placed(controller) == {"a": ["n/0"]}
    two = play(policy, events.NodeJoined(node=node("n")), events.NodeJoined(node=node("m")), submitted)
    on_nodes = [each[:1] for each in placed(two)["a"]]
    # Some policies give a second worker only to a job whose speed they know.
    assert on_nodes in (["n"], ["m", "n"])


@pytest.mark.parametrize("policy", [*POLICY_NAMES, *COMPOSED])
def test_a_job_that_fits_no_node_waits_says_so_and_lets_others_run(policy: str) -> None:
    joined = [events.NodeJoined(node=node(name)) for name in ("n", "m")]
    big, small = job("big", "16"), job("small", "500m", most=4)
    controller = play(policy, *joined, events.JobSubmitted(job=big), events.JobSubmitted(job=small))
    assert placed(controller)["big"] == []
    assert placed(controller)["small"], "it gets what the policy gives a job that is alone"
    assert controller.state.jobs["big"].reason == "asks for 16 CPUs per worker; the largest node has 2"
    assert controller.state.jobs["big"].state == "PENDING"
    controller.step(99.0, [events.NodeJoined(node=node("l", 1, cpu_m=16_000))])
    assert placed(controller)["big"] == ["l/0"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (job("a", memory="64Gi"), "asks for 64 GiB of memory per worker; the largest node has 8 GiB"),
        (
            job("a", "1500m", memory="1Gi"),
            "asks for 1.5 CPUs and 1 GiB of memory per worker; pods of others leave at most 1 CPU and 8 GiB of memory "
            "on a node",
        ),
        (job("a", "1", min_workers=2), "needs 2 workers of 1 CPU each; the nodes have room for 1"),
        (job("a", "1", most=2, elastic=False), "needs 2 workers of 1 CPU each; the nodes have room for 1"),
    ],
)
def test_the_reason_names_what_is_short(asked: TrainingJob, reason: str) -> None:
    controller = play("springtide", events.NodeJoined(node=node("n", others_m=1000)), events.JobSubmitted(job=asked))
    assert controller.state.jobs["a"].reason == reason
    controller.step(9.0, [events.NodeJoined(node=node("n", cpu_m=64_000, memory=128 * GIB))])
    assert len(placed(controller)["a"]) == 2, "the pods of others are gone, and the node is larger"


@pytest.mark.parametrize("policy", ["springtide", "fifo", "dilu/springtide"])
def test_devices_that_pods_of_others_hold_are_not_given(policy: str) -> None:
    submitted = events.JobSubmitted(job=job("a"))
    controller = play(policy, events.NodeJoined(node=node("n", foreign=1)), submitted)
    assert placed(controller) == {"a": ["n/0"]}
    none = play(policy, events.NodeJoined(node=node("n", foreign=2)), submitted)
    assert placed(none) == {"a": []}
    assert none.state.jobs["a"].reason == "needs 1 worker; pods of others hold 2 of the 2 devices"
    none.step(9.0, [events.NodeJoined(node=node("n"))])
    assert placed(none)["a"], "they are gone"


# --- several devices each ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["springtide", "fifo", "elastic", "edf", "goodput", "dilu/springtide"])
@pytest.mark.parametrize("foreign", [0, 1])
def test_a_node_with_three_free_devices_takes_one_worker_of_two(policy: str, foreign: int) -> None:
    """One device is left, for which there is no second, or which the pod of another has."""
    submitted = events.JobSubmitted(job=job("a", most=2, devices_each=2))
    controller = play(policy, events.NodeJoined(node=node("n", 3 + foreign, foreign=foreign)), submitted)
    (replica,) = controller.state.jobs["a"].replicas
    assert len(replica.device_ids) == 2
    beside = events.JobSubmitted(job=job("b", most=1))
    controller.step(9.0, [beside])
    (other,) = controller.state.jobs["b"].replicas
    assert other.device_id not in replica.device_ids


def test_processors_are_those_of_a_worker_and_not_of_its_devices() -> None:
    joined = [events.NodeJoined(node=node(name, 4, cpu_m=3000)) for name in ("n", "m")]
    controller = play("fifo", *joined, events.JobSubmitted(job=job("a", "1500m", devices_each=2)))
    assert [len(replica.device_ids) for replica in controller.state.jobs["a"].replicas] == [2, 2, 2, 2]
    fewer = [events.NodeJoined(node=node(name, 4, cpu_m=2000)) for name in ("n", "m")]
    controller = play("fifo", *fewer, events.JobSubmitted(job=job("a", "1500m", devices_each=2)))
    used = [{device.partition("/")[0] for device in each.device_ids} for each in controller.state.jobs["a"].replicas]
    assert used == [{"n"}, {"m"}] or used == [{"m"}, {"n"}]


def test_a_worker_with_two_devices_goes_whole_to_the_node_with_room() -> None:
    plain = node("a", 1)
    assert plain.room is not None
    uncounted = replace(plain, room=replace(plain.room, replica=HostResources(num_pods=1)))
    nodes = node("n", 2, others_m=1500), uncounted, node("m", 2)
    controller = Controller(make_policy("fifo"))
    joined = [events.NodeJoined(node=each) for each in nodes]
    controller.step(0.0, [*joined, events.JobSubmitted(job=job("a", "1", most=1, devices_each=2))])
    snapshot = controller.snapshot(1.0)
    wished = Plan(allocations={"a": PoolAllocation(device_ids=("n/0", "n/1"))})
    plan = RoomFitter().decide(lambda shown: wished, replace(snapshot, allocations={}))
    assert plan.allocations["a"].device_ids == ("m/0", "m/1")


@pytest.mark.parametrize(
    ("asked", "foreign", "reason"),
    [
        (
            job("a", devices_each=2),
            1,
            "needs 2 devices of one node per worker; pods of others leave at most 1 on a node",
        ),
        (job("a", devices_each=2), 2, "needs 1 worker of 2 devices; pods of others hold 4 of the 4 devices"),
        (job("a", devices_each=4), 0, "no node has 4 devices, which each of its workers needs; the largest has 2"),
        (
            job("a", "2", min_workers=2, devices_each=2),
            0,
            "needs 2 workers of 2 devices and 2 CPUs each; the nodes have room for 1",
        ),
    ],
)
def test_the_reason_of_a_job_with_several_devices_counts_its_workers(
    asked: TrainingJob, foreign: int, reason: str
) -> None:
    joined = [events.NodeJoined(node=node(name, foreign=foreign, others_m=500 * (name == "m"))) for name in ("n", "m")]
    controller = play("springtide", *joined, events.JobSubmitted(job=asked))
    assert placed(controller) == {"a": []}
    assert (str(controller.state.jobs["a"].state), controller.state.jobs["a"].reason) == ("PENDING", reason)
    controller.step(9.0, [events.NodeJoined(node=node(name, 4, cpu_m=9000)) for name in ("n", "m")])
    assert placed(controller)["a"], "larger nodes"


def test_sharers_of_one_device_take_it_once() -> None:
    """Two halves fit beside a pod of another that holds the other device; a third has no place."""
    shared = [job(name, most=1, share=Share(request=0.5, limit=0.5)) for name in ("a", "b", "c")]
    submitted = [events.JobSubmitted(job=each) for each in shared]
    controller = play("dilu/springtide", events.NodeJoined(node=node("n", foreign=1)), *submitted)
    assert sorted(placed(controller).values()) == [[], ["n/0"], ["n/0"]]


def test_a_service_that_fits_nowhere_says_so() -> None:
    container = ContainerSettings(cpu="16")
    service = InferenceService(service_id="s", name="s", entrypoint=SOURCE, min_replicas=1, container=container)
    controller = play("springtide", events.NodeJoined(node=node("n")), events.ServiceDeployed(service=service))
    record = controller.state.services["s"]
    assert (record.state, record.reason) == (
        "IDLE",
        "no replica: asks for 16 CPUs per replica; the largest node has 2",
    )


def test_what_runs_stays_when_others_take_the_room() -> None:
    controller = play("springtide", events.NodeJoined(node=node("n")), events.JobSubmitted(job=job("a", "1")))
    assert placed(controller) == {"a": ["n/0", "n/1"]}
    step = controller.step(9.0, [events.NodeJoined(node=node("n", others_m=1500))])
    assert step.actions == ()
    assert placed(controller) == {"a": ["n/0", "n/1"]}
    step = controller.step(10.0, [events.JobSubmitted(job=job("b", "1"))])
    assert placed(controller)["b"] == []


@pytest.mark.parametrize("policy", ["springtide", "elastic"])
def test_jobs_of_one_size_share_the_room_as_they_share_devices(policy: str) -> None:
    joined = [events.NodeJoined(node=node(name)) for name in ("n", "m")]
    both = [events.JobSubmitted(job=job(name, "1500m")) for name in ("a", "b")]
    assert [len(devices) for devices in placed(play(policy, *joined, *both)).values()] == [1, 1]


@pytest.mark.parametrize("policy", ["springtide", "elastic"])
def test_a_running_job_gives_way_to_the_least_of_a_newcomer_of_another_size(policy: str) -> None:
    joined = [events.NodeJoined(node=node(name)) for name in ("n", "m")]
    tiny = events.JobSubmitted(job=job("tiny", "100m", most=1))
    large = [events.JobSubmitted(job=job("a", "1500m")), events.JobSubmitted(job=job("b", "1400m"))]
    counts = {name: len(devices) for name, devices in placed(play(policy, *joined, tiny, *large, turns=8)).items()}
    assert counts == {"tiny": 1, "a": 1, "b": 1}


def test_a_node_that_refused_a_job_is_avoided_for_a_while() -> None:
    controller = Controller(make_policy("springtide"))
    joined = [events.NodeJoined(node=node(name, 1)) for name in ("n", "m")]
    controller.step(0.0, [*joined, events.JobSubmitted(job=job("a", most=1))])
    ((first,),) = list(placed(controller).values())
    lost = events.ReplicaLost(
        workload_id="a", replica_id="a.0", reason="node x refused the pod: OutOfcpu", is_fault=False, is_refused=True
    )
    controller.step(1.0, [lost])
    ((second,),) = list(placed(controller).values())
    assert {first, second} == {"n/0", "m/0"}, "it starts elsewhere at once"
    controller.step(1.1, [replace(lost, replica_id="a.1")])
    assert placed(controller) == {"a": []}
    assert controller.state.jobs["a"].reason == "node x refused the pod: OutOfcpu; tried there again after 1 s"
    assert controller.wakeup_at_s == pytest.approx(2.0)
    controller.step(2.0, [])
    assert placed(controller) == {"a": [first]}


def test_a_share_of_a_processor_is_what_its_pod_requests() -> None:
    share = Share(request=0.3, limit=0.6, memory_mb=0)
    found = demand_of(ContainerSettings(cpu="4"), share).on(node("n"), is_beside=True)
    assert found == HostResources(cpu_m=300, num_pods=1)
    gpus = replace(make_node("g", 1, kind="gpu"), room=node("n").room)
    found = demand_of(ContainerSettings(cpu="4"), share).on(gpus)
    assert found == HostResources(cpu_m=4000, num_pods=1, num_devices=1)
    assert demand_of(ContainerSettings(cpu="four"), None) == Demand()


def with_rooms(snapshot: Snapshot, rng: np.random.Generator) -> Snapshot:
    """The snapshot on nodes with little room, with workloads that ask for some of it."""
    nodes = tuple(
        replace(each, room=node("n", cpu_m=int(rng.integers(1, 6)) * 1000, others_m=int(rng.integers(0, 900))).room)
        for each in snapshot.cluster.nodes
    )
    asks = ("", "250m", "900m", "1500m", "3")

    def container() -> ContainerSettings:
        return ContainerSettings(cpu=str(rng.choice(asks)))

    jobs = []
    for view in snapshot.jobs:
        view = replace(view, job=replace(view.job, container=container()))
        if rng.random() < 0.2:
            refusal = NodeRefusal(node_id=nodes[0].node_id, count=1, until_s=snapshot.now_s + 1.0, reason="it said no")
            view = replace(view, restarts=replace(view.restarts, refusals=(refusal,)))
        jobs.append(view)
    services = [replace(view, service=replace(view.service, container=container())) for view in snapshot.services]
    return replace(snapshot, cluster=Topology(nodes=nodes), jobs=tuple(jobs), services=tuple(services))


def with_wide_jobs(snapshot: Snapshot, rng: np.random.Generator) -> Snapshot:
    """The snapshot on nodes of which pods of others hold devices, with jobs whose workers hold two or four."""
    nodes = []
    for index, each in enumerate(snapshot.cluster.nodes):
        count = len(each.devices)
        foreign = int(rng.integers(0, 2)) if count > 2 else 0
        room = node(f"n{index}", count, cpu_m=int(rng.integers(2, 6)) * 1000, foreign=foreign).room
        nodes.append(replace(each, room=room))
    jobs, allocations = [], dict(snapshot.allocations)
    for view in snapshot.jobs:
        each, given = int(rng.choice((1, 2, 4))), allocations.pop(view.job.job_id, None)
        workers = whole_parts(snapshot, () if given is None else given.device_ids, each)
        if workers:
            allocations[view.job.job_id] = PoolAllocation(device_ids=tuple(workers))
        least = min(view.bounds.min_workers, max(1, len(workers) // each))
        most = max(view.bounds.max_workers, len(workers) // each)
        job = replace(view.job, devices_each=each, min_workers=least, max_workers=most, num_virtual_shards=16)
        job = job_in_devices(replace(job, elastic=True, container=ContainerSettings(cpu=str(rng.choice(("", "1"))))))
        bounds = bounds_in_devices(replace(view.bounds, min_workers=least, max_workers=most), each)
        jobs.append(replace(view, job=job, bounds=bounds, learnt=learnt_in_devices(view.learnt, each)))
    return replace(snapshot, cluster=Topology(nodes=tuple(nodes)), jobs=tuple(jobs), allocations=allocations)


def whole_parts(snapshot: Snapshot, devices: tuple[str, ...], each: int) -> list[str]:
    """Those of the devices of which workers of one node can be made, by worker."""
    places: dict[str, list[str]] = {}
    for device in devices:
        places.setdefault(snapshot.cluster.node_of[device], []).append(device)
    return [device for found in places.values() for device in found[: len(found) // each * each]]


def overfull(snapshot: Snapshot, allocations: Mapping[str, PoolAllocation]) -> list[str]:
    """The nodes that are given more processors than they have by replicas that are not there yet."""
    workloads = {view.job.job_id: view.job for view in snapshot.jobs}
    workloads |= {view.service.service_id: view.service for view in snapshot.services}
    used: Counter[str] = Counter()
    gains = set()
    for name, given in allocations.items():
        held = snapshot.allocations.get(name)
        each = getattr(workloads[name], "devices_each", 1)
        for device in given.device_ids[::each]:
            where = snapshot.cluster.by_id[snapshot.cluster.node_of[device]]
            asked = demand_of(workloads[name].container, workloads[name].share).on(where)
            used[where.node_id] += asked.cpu_m
            if asked.cpu_m and (held is None or device not in held.device_ids):
                gains.add(where.node_id)
    return [name for name in gains if used[name] > snapshot.cluster.by_id[name].room.free.cpu_m]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_drawn_plans_fit_and_are_plans(policy: str) -> None:
    rng = np.random.default_rng(5)
    kept = DecisionCache(make_policy(policy))
    for _ in range(part(60, least=20)):
        snapshot = with_rooms(draw_snapshot(rng), rng)
        plan = kept.decide(snapshot)
        check_plan(snapshot, plan)
        assert overfull(snapshot, plan.allocations) == []
        assert encode_plan(plan) == encode_plan(DecisionCache(make_policy(policy)).decide(snapshot))
        for view in snapshot.jobs:
            given = plan.allocations.get(view.job.job_id)
            assert view.job.job_id not in plan.no_room or given is None
            if given is None or snapshot.allocations.get(view.job.job_id) is not None:
                continue
            least = view.bounds.min_workers if view.job.elastic else view.bounds.max_workers
            assert given.num_devices == 0 or given.num_devices >= least
            refused = {refusal.node_id for refusal in view.restarts.refusals}
            assert not refused & {snapshot.cluster.node_of[device] for device in given.device_ids}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_drawn_plans_of_whole_workers_fit_and_leave_workers_whole(policy: str) -> None:
    rng = np.random.default_rng(6)
    kept, num_wide = DecisionCache(make_policy(policy)), 0
    for _ in range(part(60, least=20)):
        snapshot = with_wide_jobs(draw_snapshot(rng), rng)
        for _ in range(2):
            plan = kept.decide(snapshot)
            check_plan(snapshot, plan)
            assert overfull(snapshot, plan.allocations) == []
            for view in snapshot.jobs:
                each, given = view.job.devices_each, plan.allocations.get(view.job.job_id)
                held = snapshot.allocations.get(view.job.job_id)
                there = workers_of(held.device_ids, each) if held is not None else set()
                for worker in workers_of(given.device_ids, each) if given is not None else ():
                    assert worker in there or not any(worker & other for other in there)
                    num_wide += each > 1
            snapshot = replace(snapshot, allocations=plan.allocations)
    assert num_wide > 20


def workers_of(devices: tuple[str, ...], each: int) -> set[frozenset[str]]:
    return {frozenset(devices[at : at + each]) for at in range(0, len(devices), each)}


def test_what_is_kept_between_turns_follows_each_of_its_inputs() -> None:
    fitter, seen = RoomFitter(), []

    def ask(snapshot: Snapshot) -> Plan:
        seen.append(snapshot)
        return Plan()

    def shown(snapshot: Snapshot) -> tuple[int, int]:
        fitter.decide(ask, snapshot)
        kept = seen[-1]
        RoomFitter().decide(ask, snapshot)
        assert encode_plan(kept) == encode_plan(seen[-1])
        return len(kept.cluster.device_ids()), kept.jobs[0].bounds.max_workers

    controller = Controller(make_policy("fifo"))
    controller.step(0.0, [events.NodeJoined(node=node("n")), events.JobSubmitted(job=job("a", "1500m"))])
    controller.step(0.0, [events.CancelRequested(workload_id="a")])
    controller.step(0.0, [events.JobSubmitted(job=job("b", "1500m"))])
    snapshot = replace(controller.snapshot(1.0), allocations={})
    (view,) = snapshot.jobs
    assert shown(snapshot) == (1, 1)
    larger = replace(snapshot, cluster=Topology(nodes=(node("n", cpu_m=4000),)))
    assert shown(larger) == (2, 4), "another topology"
    assert shown(snapshot) == (1, 1)
    smaller = replace(view, job=replace(view.job, container=ContainerSettings(cpu="900m")))
    assert shown(replace(snapshot, jobs=(smaller,))) == (2, 4), "another demand"
    bound = replace(view, bounds=replace(view.bounds, max_workers=1))
    assert shown(replace(snapshot, jobs=(bound,))) == (1, 1), "another view"
    held = {view.job.job_id: PoolAllocation(device_ids=snapshot.cluster.device_ids())}
    assert shown(replace(snapshot, allocations=held)) == (2, 4), "other devices are held"


def test_where_no_node_tells_its_room_the_policy_is_asked_once_about_the_same_snapshot() -> None:
    asked: list[Snapshot] = []

    class Asked:
        def decide(self, snapshot: Snapshot) -> Plan:
            asked.append(snapshot)
            return plan

    plan, snapshot = Plan(), draw_snapshot(np.random.default_rng(1))
    assert DecisionCache(Asked()).decide(snapshot) is plan
    assert len(asked) == 1
    assert asked[0] is snapshot
