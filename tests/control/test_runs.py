"""A run of like events or actions changes the truth exactly as the same ones in turn do."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from springtide.control.edits import put
from springtide.control.effects import apply_action
from springtide.control.records import (
    GroupMembership,
    JobRecord,
    Lifecycle,
    PlatformState,
    ReplicaRecord,
    ReplicaState,
    StateReason,
)
from springtide.control.runs import apply_actions, apply_events
from springtide.control.transitions import apply_event
from springtide.core.actions import StartReplica, StopReplica
from springtide.core.events import ReplicaReady, ReplicaStopped
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Entrypoint, JobState, TrainingJob


def drawn_state(seed: int) -> PlatformState:
    """One job in a random situation, mid-change as often as not."""
    rng = np.random.default_rng(seed)
    job = TrainingJob(job_id="a", name="a", entrypoint=Entrypoint(source_path="x.py"), max_workers=8)
    states = list(ReplicaState)
    replicas = tuple(
        ReplicaRecord(
            replica_id=f"a.{n}",
            device_id=f"n/{n}",
            state=states[rng.integers(len(states))],
            started_at_s=float(rng.uniform(0, 5)),
            held_up_by="pulls its image" if rng.random() < 0.3 else "",
        )
        for n in range(rng.integers(1, 7))
    )
    names = [replica.replica_id for replica in replicas]
    state = PlatformState()
    record = JobRecord(
        job=job,
        replicas=replicas,
        next_replica=len(replicas),
        lifecycle=Lifecycle(state=list(JobState)[rng.integers(4)], reason=StateReason(""), submitted_at_s=0.0),
        bounds=JobBounds(min_workers=1, max_workers=8, is_paused=bool(rng.random() < 0.2)),
        group=GroupMembership(
            generation=int(rng.integers(1, 3)),
            members=tuple(name for name in names if rng.random() < 0.5),
            previous_members=tuple(name for name in names if rng.random() < 0.5),
            state_holders=tuple(name for name in names if rng.random() < 0.5),
        ),
    )
    put(state, record)
    return state


@pytest.mark.parametrize("kind", [partial(ReplicaReady, device_seen="MIG-7a"), ReplicaStopped])
@pytest.mark.parametrize("block", range(4))
def test_events_in_a_run(kind, block):
    for seed in range(block * 100, block * 100 + 100):
        together, in_turn = drawn_state(seed), drawn_state(seed)
        rng = np.random.default_rng(seed + 7)
        events = [
            kind(workload_id="a" if rng.random() < 0.9 else "b", replica_id=f"a.{n}") for n in rng.integers(0, 8, 5)
        ]
        apply_events(events, together, 9.0)
        for event in events:
            apply_event(event, in_turn, 9.0)
        assert together == in_turn, f"seed {seed}"


@pytest.mark.parametrize("block", range(4))
def test_actions_in_a_run(block):
    for seed in range(block * 100, block * 100 + 100):
        together, in_turn = drawn_state(seed), drawn_state(seed)
        record = together.jobs["a"]
        rng = np.random.default_rng(seed + 7)
        starts = [
            StartReplica(
                workload=record.job,
                replica_id=f"a.{record.next_replica + n}",
                device_id=f"m/{n}",
                generation=record.group.generation + (seed % 2),
                reason=f"reason {n}",
            )
            for n in range(3)
        ]
        stops = [StopReplica(workload_id="a", replica_id=f"a.{n}") for n in rng.integers(0, 8, 4)]
        for actions in (starts, stops):
            apply_actions(actions, together, 9.0)
            for action in actions:
                apply_action(action, in_turn, 9.0)
        assert together == in_turn, f"seed {seed}"
