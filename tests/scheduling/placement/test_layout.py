"""A cluster of which other devices are shown is another cluster, also where there are as many of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from springtide.core.decision import JobView, Plan, PoolAllocation, Snapshot
from springtide.core.job_parts import JobBounds
from springtide.core.resources import Node, Topology, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob
from springtide.scheduling.placement.layout import held_devices, layout_of, shape_of
from springtide.scheduling.registry import POLICY_NAMES, make_policy

NODE = make_node("n", 3)


def shown(*numbers: int) -> Node:
    """The node without the devices that others hold parts of."""
    return replace(NODE, devices=tuple(NODE.devices[number] for number in numbers))


def test_a_shape_names_the_devices_where_some_are_missing():
    assert shape_of(NODE) == "3"
    # The first ones of a node are what a smaller node would be.
    assert shape_of(shown(0)) == "1"
    parts = [shape_of(shown(*numbers)) for numbers in ((1,), (2,), (0, 2), (1, 2), (0, 1, 2), (0,), (0, 1))]
    assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_nobody_remembers_devices_that_are_not_shown_any_more(name):
    job = TrainingJob(
        job_id="a",
        name="a",
        entrypoint=Entrypoint(source_path="a.py"),
        goal=Goal(deadline_s=10_000.0),
        total_steps=1000,
        profile_steps_per_s={1: 1.0},
        num_virtual_shards=1,
    )
    view = JobView(
        job=job,
        state=JobState.PENDING,
        submitted_at_s=0.0,
        total_steps=1000,
        bounds=JobBounds(min_workers=1, max_workers=1),
    )
    plan: Plan | None = None
    policy = make_policy(name)
    for number in range(3):
        snapshot = Snapshot(
            now_s=0.0,
            cluster=Topology(nodes=(shown(number),)),
            jobs=(view,),
            memory=None if plan is None else plan.memory,
        )
        plan = policy.decide(snapshot)
        for allocation in plan.allocations.values():
            assert set(allocation.device_ids) <= snapshot.cluster.device_set
        if plan.admitted:
            view = with_fields(view, admitted_at_s=0.0, promised_finish_s=5_000.0)


def test_what_is_held_is_read_once_for_the_same_allocations_and_without_dead_devices():
    layout = layout_of(Topology(nodes=(NODE, make_node("m", 2))))
    allocations = {
        "a": PoolAllocation(device_ids=("n/0", "n/2")),
        "b": PoolAllocation(device_ids=("m/1", "gone/0")),
        "c": PoolAllocation(device_ids=()),
    }
    held = held_devices(layout, allocations)
    assert {who: layout.devices_of(mine) for who, mine in held.of.items()} == {
        "a": ("n/0", "n/2"),
        "b": ("m/1",),
        "c": (),
    }
    assert held.all == held.of["a"] | held.of["b"]
    assert held_devices(layout, allocations) is held
    # Equal ones are another mapping, and may be changed apart.
    other = {**allocations, "c": PoolAllocation(device_ids=("n/1",))}
    assert layout.devices_of(held_devices(layout, other).all) == ("n/0", "n/1", "n/2", "m/1")
