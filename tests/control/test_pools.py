"""Loans and reclaims as the control plane carries them out: labels follow what is held, and a grace has an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from springtide.control.controller import Controller, check_plan
from springtide.core.actions import DrainNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.decision import Plan, PoolAllocation, Relabel, Snapshot
from springtide.core.errors import PolicyError
from springtide.core.events import (
    JobResized,
    JobSubmitted,
    LoadObserved,
    NodeJoined,
    NodeLost,
    ReplicaReady,
    ReplicaStopped,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, NodeId, make_node
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, TrainingJob, WorkloadId

JOB, SERVICE = WorkloadId("job"), WorkloadId("service")
LENT, OWN = NodeId("lent"), NodeId("own")


class Dictated:
    """A policy that wants what the test says."""

    def __init__(self) -> None:
        self.plan = Plan()

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return what was dictated."""
        return self.plan

    def want(self, held: Mapping[str, tuple[str, ...]], pools: Mapping[str, str] | None = None) -> None:
        """Dictate who holds what, and labels."""
        self.plan = Plan(
            allocations={
                WorkloadId(who): PoolAllocation(device_ids=tuple(map(DeviceId, devices)))
                for who, devices in held.items()
            },
            pools={
                NodeId(node): Relabel(pool=pool, reason=f"wanted for {pool}", cost_s=3.0)  # type: ignore[arg-type]
                for node, pool in (pools or {}).items()
            },
        )


class Platform:
    """A controller with two nodes of two devices, one of them owned by inference, a job and a service."""

    def __init__(self, **job_changes: Any) -> None:
        self.policy = Dictated()
        self.controller = Controller(self.policy)
        self.now_s = 0.0
        source = Entrypoint(source_path="fit.py", object_name="fit")
        job = {"min_workers": 1, "max_workers": 4, "total_steps": 100, "grace_s": 5.0} | job_changes
        self.job = TrainingJob(job_id=JOB, name="job", entrypoint=source, **job)
        self.service = InferenceService(service_id=SERVICE, name="service", entrypoint=source, max_replicas=4)
        self.say(
            NodeJoined(node=make_node("lent", 2, pool="inference")),
            NodeJoined(node=make_node("own", 2, pool="training")),
            JobSubmitted(job=self.job),
            ServiceDeployed(service=self.service),
        )

    def say(self, *events: Any, at_s: float | None = None) -> Step:
        """Take a step."""
        self.now_s = self.now_s + 1.0 if at_s is None else at_s
        return self.controller.step(self.now_s, events)

    def run_job(self, *devices: str, pools: Mapping[str, str] | None = None) -> None:
        """Let the job train on these devices."""
        self.policy.want({"job": devices}, pools)
        started = [a for a in self.say().actions if isinstance(a, StartReplica)]
        assert [str(a.device_id) for a in started] == list(devices)
        step = self.say(*[ReplicaReady(workload_id=JOB, replica_id=a.replica_id) for a in started])
        (formed,) = [a for a in step.actions if isinstance(a, ResizeJob)]
        self.confirm(formed)

    def confirm(self, resize: ResizeJob) -> Step:
        """The group has switched."""
        return self.say(
            JobResized(
                job_id=JOB,
                generation=resize.generation,
                world_size=len(resize.replica_ids),
                step=1,
                pause_s=0.1,
                direction="start",
            )
        )

    def label(self, node: NodeId) -> str:
        """What a node is labelled for."""
        return self.controller.state.nodes[node].pool

    def replica_on(self, device: str) -> ReplicaId:
        """Who holds a device."""
        (holder,) = self.controller.state.holders()[DeviceId(device)]
        return holder


def kinds(step: Step) -> list[str]:
    """The names of a step's actions."""
    return [type(action).__name__ for action in step.actions]


def test_an_idle_server_is_loaned_and_used_in_one_step() -> None:
    platform = Platform()
    platform.policy.want({"job": ("lent/0", "lent/1")}, {"lent": "training"})
    step = platform.say()
    assert kinds(step) == ["LabelNode", "StartReplica", "StartReplica"]
    assert platform.controller.state.nodes[LENT].is_loaned
    assert step.actions[0].reason == "wanted for training"


def test_a_loaned_server_is_reclaimed_by_shrinking_and_then_serves() -> None:
    platform = Platform()
    platform.run_job("own/0", "lent/0", "lent/1", pools={"lent": "training"})
    platform.policy.want({"job": ("own/0",), "service": ("lent/0", "lent/1")}, {"lent": "inference"})
    step = platform.say()
    assert kinds(step) == ["DrainNode", "ResizeJob"]
    drain = step.actions[0]
    assert isinstance(drain, DrainNode)
    assert drain.is_reclaim
    assert drain.cost_s == 3.0
    assert platform.label(LENT) == "training"
    assert platform.controller.state.drains[LENT].reclaim_since_s == platform.now_s
    resize = step.actions[1]
    assert isinstance(resize, ResizeJob)
    leavers = [platform.replica_on("lent/0"), platform.replica_on("lent/1")]
    platform.confirm(resize)
    step = platform.say(*[ReplicaStopped(workload_id=JOB, replica_id=leaver) for leaver in leavers])
    assert kinds(step) == ["LabelNode", "StartReplica", "StartReplica"]
    assert platform.label(LENT) == "inference"
    assert not platform.controller.state.drains
    assert not platform.controller.state.nodes[LENT].is_loaned


def test_who_is_on_a_cordoned_server_stays_until_it_ends() -> None:
    platform = Platform()
    platform.run_job("lent/0", "lent/1", pools={"lent": "training"})
    platform.policy.want({"job": ("lent/0", "lent/1")}, {"lent": "inference"})
    step = platform.say()
    assert kinds(step) == ["DrainNode"]
    assert platform.controller.state.drains[LENT].reclaim_since_s is None
    assert kinds(platform.say()) == []
    # The same wish, but now they have to go: the grace counts from here.
    platform.policy.want({}, {"lent": "inference"})
    step = platform.say()
    assert kinds(step) == ["DrainNode", "PreemptJob"]
    drain = platform.controller.state.drains[LENT]
    assert drain.since_s < (drain.reclaim_since_s or 0.0) == platform.now_s


def test_a_drain_that_is_no_longer_wanted_is_called_off() -> None:
    platform = Platform()
    platform.run_job("lent/0", pools={"lent": "training"})
    platform.policy.want({"job": ("lent/0",)}, {"lent": "inference"})
    platform.say()
    platform.policy.want({"job": ("lent/0",)})
    step = platform.say()
    assert kinds(step) == ["LabelNode"]
    assert platform.label(LENT) == "training"
    assert not platform.controller.state.drains


def test_a_worker_that_outstays_the_grace_of_a_reclaim_is_stopped_and_the_others_go_on() -> None:
    platform = Platform()
    platform.run_job("own/0", "lent/0", pools={"lent": "training"})
    platform.policy.want({"job": ("own/0",)}, {"lent": "inference"})
    platform.say()
    since_s = platform.now_s
    overstayer = platform.replica_on("lent/0")
    # The switch never comes.
    assert platform.controller.wakeup_at_s == since_s + 5.0
    assert kinds(platform.say(at_s=since_s + 4.9)) == []
    step = platform.say(at_s=since_s + 5.0)
    assert kinds(step) == ["StopReplica", "ResizeJob"]
    stop, resize = step.actions
    assert isinstance(stop, StopReplica)
    assert stop.grace_s == 0.0
    assert stop.replica_id == overstayer
    assert isinstance(resize, ResizeJob)
    assert resize.forced
    assert len(resize.replica_ids) == 1
    step = platform.say(ReplicaStopped(workload_id=JOB, replica_id=overstayer))
    assert kinds(step) == ["LabelNode"]


def test_a_rigid_job_on_a_reclaimed_server_is_preempted_within_what_is_left_of_its_grace() -> None:
    platform = Platform(elastic=False, min_workers=2, max_workers=2)
    platform.run_job("own/0", "lent/0", pools={"lent": "training"})
    platform.policy.want({}, {"lent": "inference"})
    step = platform.say()
    assert kinds(step) == ["DrainNode", "PreemptJob"]
    preempt = step.actions[1]
    assert isinstance(preempt, PreemptJob)
    assert preempt.grace_s == 5.0
    assert len(preempt.replica_ids) == 2


def test_a_job_that_would_have_to_move_off_a_reclaimed_server_is_preempted_at_once() -> None:
    platform = Platform()
    platform.run_job("lent/0", pools={"lent": "training"})
    platform.policy.want({"job": ("own/0",)}, {"lent": "inference"})
    assert kinds(platform.say()) == ["DrainNode", "PreemptJob"]


def test_a_job_that_ends_on_a_cordoned_server_is_no_reclaim() -> None:
    from springtide.core.events import JobFinished

    platform = Platform()
    platform.run_job("lent/0", pools={"lent": "training"})
    platform.policy.want({"job": ("lent/0",)}, {"lent": "inference"})
    platform.say()
    platform.policy.want({}, {"lent": "inference"})
    generation = platform.controller.state.jobs[JOB].group.generation
    step = platform.say(JobFinished(job_id=JOB, generation=generation, step=100))
    assert "DrainNode" not in kinds(step)
    replica = platform.replica_on("lent/0")
    assert kinds(platform.say(ReplicaStopped(workload_id=JOB, replica_id=replica))) == ["LabelNode"]


def test_a_node_lost_while_draining_leaves_no_drain_and_comes_back_with_the_label_that_it_had() -> None:
    platform = Platform()
    platform.run_job("own/0", "lent/0", pools={"lent": "training"})
    platform.policy.want({"job": ("own/0",)}, {"lent": "inference"})
    platform.say()
    platform.policy.want({"job": ("own/0",)})
    platform.say(NodeLost(node_id=LENT))
    assert not platform.controller.state.drains
    assert platform.controller.standing().labels[LENT] == "training"
    platform.say(NodeJoined(node=make_node("lent", 2, pool="inference")))
    assert platform.label(LENT) == "training"
    assert platform.controller.state.nodes[LENT].is_loaned


def test_a_node_without_an_owner_is_shared_whatever_it_was_labelled_for() -> None:
    platform = Platform()
    platform.run_job("lent/0", pools={"lent": "training"})
    platform.policy.want({})
    platform.say(NodeLost(node_id=LENT))
    platform.say(NodeJoined(node=make_node("lent", 2)))
    assert platform.label(LENT) == "shared"
    platform.say(NodeJoined(node=make_node("lent", 2, pool="inference")))
    assert platform.label(LENT) == "inference"


def test_a_node_that_says_again_who_it_is_keeps_its_label() -> None:
    platform = Platform()
    platform.run_job("lent/0", pools={"lent": "training"})
    platform.say(NodeJoined(node=make_node("lent", 2, pool="inference")))
    assert platform.label(LENT) == "training"
    assert platform.controller.state.nodes[LENT].is_loaned


@pytest.mark.parametrize(
    ("held", "pools"),
    [
        ({"job": ("lent/0",)}, {}),
        ({"service": ("own/0",)}, {}),
        ({"job": ("own/0",)}, {"own": "inference"}),
        ({}, {"nowhere": "training"}),
    ],
)
def test_a_plan_that_ignores_labels_is_refused(held: dict[str, tuple[str, ...]], pools: dict[str, str]) -> None:
    platform = Platform()
    platform.policy.want(held, pools)
    with pytest.raises(PolicyError):
        check_plan(platform.controller.snapshot(platform.now_s), platform.policy.plan)


def test_labels_drains_and_tide_survive_a_restart() -> None:
    platform = Platform()
    steps: list[Step] = []
    take = platform.controller.step
    platform.controller.step = lambda now_s, events: steps.append(take(now_s, events)) or steps[-1]  # type: ignore[method-assign,func-returns-value]
    fresh = Controller(platform.policy)
    fresh.restore(
        Step(
            now_s=1.0,
            events=(
                NodeJoined(node=make_node("lent", 2, pool="inference")),
                NodeJoined(node=make_node("own", 2, pool="training")),
                JobSubmitted(job=platform.job),
                ServiceDeployed(service=platform.service),
            ),
        )
    )
    platform.run_job("own/0", "lent/0", pools={"lent": "training"})
    platform.say(LoadObserved(service_id=SERVICE, arrivals_per_s=9.0, in_flight=17, queued=0, idle_s=0.0))
    platform.policy.want({"job": ("own/0",)}, {"lent": "inference"})
    platform.say(at_s=3600.0)
    for step in steps:
        fresh.restore(step)
    assert fresh.state == platform.controller.state
    assert fresh.state.drains
    assert fresh.state.tide.peaks == (3, 3, 3, 3)
    assert fresh.standing().labels == {LENT: "training", OWN: "training"}


def test_a_reclaim_is_over_with_those_whom_it_asked_to_go_and_the_next_has_a_grace_of_its_own() -> None:
    platform = Platform()
    platform.run_job("own/0", "lent/0", "lent/1", pools={"lent": "training"})
    platform.policy.want({"job": ("own/0", "lent/1")}, {"lent": "inference"})
    step = platform.say()
    assert kinds(step) == ["DrainNode", "ResizeJob"]
    resize = step.actions[1]
    assert isinstance(resize, ResizeJob)
    leaver = platform.replica_on("lent/0")
    platform.confirm(resize)
    step = platform.say(ReplicaStopped(workload_id=JOB, replica_id=leaver))
    assert kinds(step) == ["DrainNode"]
    assert platform.controller.state.drains[LENT].reclaim_since_s is None
    platform.policy.want({"job": ("own/0",)}, {"lent": "inference"})
    step = platform.say(at_s=60.0)
    assert kinds(step) == ["DrainNode", "ResizeJob"]
    assert platform.controller.wakeup_at_s == 65.0


def test_a_lost_machine_is_no_fault_of_the_service_on_it() -> None:
    platform = Platform()
    platform.policy.want({"service": ("lent/0", "lent/1")})
    started = [action for action in platform.say().actions if isinstance(action, StartReplica)]
    platform.say(*[ReplicaReady(workload_id=SERVICE, replica_id=action.replica_id) for action in started])
    for _ in range(3):
        platform.policy.want({})
        platform.say(NodeLost(node_id=LENT))
        platform.policy.want({"service": ("lent/0", "lent/1")})
        step = platform.say(NodeJoined(node=make_node("lent", 2, pool="inference")))
        assert kinds(step) == ["StartReplica", "StartReplica"]
    record = platform.controller.state.services[SERVICE]
    assert record.is_served
    assert not record.crashes_at_s
