"""Each invariant of labels and drains finds what it is there for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from springtide.core.actions import Action, DrainNode, EndJob, LabelNode, StartReplica
from springtide.core.events import Event, JobSubmitted, NodeJoined, NodeLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, InferenceService, JobState, TrainingJob
from springtide.simulator.fluid.invariants import FluidInvariants, InvariantViolation

SOURCE = Entrypoint(source_path="trace")
JOB = TrainingJob(job_id="a", name="a", entrypoint=SOURCE, grace_s=10.0)
SERVICE = InferenceService(service_id="s", name="s", entrypoint=SOURCE, grace_s=5.0)
NODES = [make_node("train", 2, pool="training"), make_node("serve", 2, pool="inference"), make_node("both", 2)]
JOINED: tuple[Event, ...] = (*[NodeJoined(node=node) for node in NODES], JobSubmitted(job=JOB))
RECLAIM = DrainNode(node_id="train", pool="inference", is_reclaim=True)
Story = tuple[float, Sequence[Event], Sequence[Action]]


def train(device: str) -> StartReplica:
    return StartReplica(workload=JOB, replica_id=f"a@{device}", device_id=device, generation=1)


def serve(device: str) -> StartReplica:
    return StartReplica(workload=SERVICE, replica_id=f"s@{device}", device_id=device, generation=1)


def label(node: str, pool: str) -> LabelNode:
    return LabelNode(node_id=node, pool=pool)


def gone(replica: str) -> ReplicaStopped:
    return ReplicaStopped(workload_id=replica[0], replica_id=replica)


def check(*steps: Story) -> FluidInvariants:
    invariants = FluidInvariants(NODES, command="springtide simulate --study loaning --seed 3")
    invariants.note(Step(now_s=0.0, events=JOINED))
    for now_s, events, actions in steps:
        invariants.note(Step(now_s=now_s, events=tuple(events), actions=tuple(actions)))
    return invariants


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("right-pool", [(0.0, [], [train("serve/0")])]),
        ("right-pool", [(0.0, [], [serve("train/0")])]),
        ("right-pool", [(0.0, [], [train("train/0")]), (1.0, [], [label("train", "inference")])]),
        ("right-pool", [(0.0, [], [serve("both/0")]), (1.0, [], [label("both", "training")])]),
        ("cordon", [(0.0, [], [DrainNode(node_id="train", pool="inference"), train("train/0")])]),
        ("cordon", [(0.0, [], [DrainNode(node_id="both", pool="training"), serve("both/1")])]),
        ("one-label", [(0.0, [], [label("nowhere", "training")])]),
        ("one-label", [(0.0, [NodeLost(node_id="train")], [RECLAIM])]),
        ("one-label", [(0.0, [NodeLost(node_id="train")], []), (1.0, [], [label("train", "inference")])]),
        (
            "one-label",
            [(0.0, [], [label("train", "inference")]), (1.0, [NodeLost(node_id="train"), JOINED[0]], [])],
        ),
        ("drain-ends", [(0.0, [], [train("train/0"), RECLAIM]), (11.5, [], [])]),
        ("drain-ends", [(0.0, [], [train("train/0"), RECLAIM]), (5.0, [], [RECLAIM]), (11.5, [], [])]),
        ("device-once", [(0.0, [], [train("both/0"), serve("both/0")])]),
        ("nothing-left", [(99.0, [], [train("train/0"), EndJob(job_id="a", state=JobState.SUCCEEDED)])]),
    ],
)
def test_it_is_found(name: str, steps: list[Story]) -> None:
    with pytest.raises(InvariantViolation, match="run it again: springtide simulate --study loaning") as found:
        check(*steps).check_end(99.0)
    assert found.value.name == name


def test_what_is_right_passes() -> None:
    invariants = check(
        (0.0, [], [train("train/0"), serve("serve/0"), train("both/0"), serve("both/1")]),
        (5.0, [], [DrainNode(node_id="train", pool="inference")]),
        (500.0, [], [RECLAIM]),
        (510.0, [gone("a@train/0")], [label("train", "inference"), serve("train/0")]),
        (520.0, [NodeLost(node_id="train")], []),
        (530.0, [NodeJoined(node=make_node("train", 2, pool="inference"))], [serve("train/1")]),
        (540.0, [], [DrainNode(node_id="both", pool="inference", is_reclaim=True)]),
        (541.0, [], [label("both", "shared")]),
        (900.0, [gone("a@both/0")], [EndJob(job_id="a", state=JobState.SUCCEEDED)]),
    )
    invariants.check_end(900.0)
