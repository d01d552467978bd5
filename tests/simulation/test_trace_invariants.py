"""The whole platform over drawn traces, under every policy: clusters, curves, bounds and goals of every shape.

The executor's own invariants watch each step (device-once, capacity, reasons, promises, one end); here comes what only
the whole run shows: that nobody moves for nothing, that everybody gets its work done, and that the journal is the same
under another hash seed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.cheap_policies import cheap_names, long_sweep
from kits.simulation.sweeps import part
from springtide.core.actions import PreemptJob, ResizeJob, StartReplica
from springtide.core.events import ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, Node, make_node
from springtide.core.workload import Entrypoint, Goal, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import ProfiledSpeeds, overhead_rule

# Jobs here take minutes.
POLICIES = cheap_names(round_s=60.0)
SOURCE = Entrypoint(source_path="main.py", object_name="main")
# These promise that an admitted deadline is met whatever changes cost; the papers' own reserve nothing for that.
KEEPS_EVERY_PROMISE = ("springtide",)
# Its search moves groups by chance; what that costs is in its own reckoning.
MOVES_BY_CHANCE = ("pollux",)
# Where nodes differ in size, one scattered group may end up beside where it was when several make way at once.
MOST_SIDEWAYS = 1
STANDS_WITHIN_S = 1.0
# No drawn case takes a tenth of this.
MOST_STEPS = 5000


class Case(msgspec.Struct, frozen=True):
    """One drawn platform: how many devices each node has, the arrivals, and the rule of overhead."""

    sizes: tuple[int, ...]
    arrivals: tuple[tuple[float, TrainingJob], ...]
    overhead: str

    def nodes(self) -> tuple[Node, ...]:
        return tuple(make_node(f"n{index}", size, kind="gpu") for index, size in enumerate(self.sizes))


class Story:
    """The journal of a run, kept to be asked questions."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def append(self, step: Step) -> int:
        self.steps.append(step)
        assert len(self.steps) < MOST_STEPS, f"it turns in place at {step.now_s} s, revisiting at {step.revisit_at_s} s"
        return len(self.steps)

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        return iter(())


# --- cases ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "linear": lambda n: n,
    "concave": lambda n: n**0.7,
    "superlinear": lambda n: n**1.3,
    "peaked": lambda n: n if n <= 4 else 16 / n,
    "flat": lambda n: 1,
    "stairs": lambda n: 1 + n // 2,
    "bumpy": lambda n: n * (1.0 if n % 3 else 0.4),
}


@st.composite
def jobs(draw: st.DrawFn, index: int, now_s: float, room: int) -> TrainingJob:
    """Any job that this cluster can run: rigid or elastic, any curve, any goal. (Others wait for nodes to join.)"""
    least = min(room, draw(st.sampled_from((1, 1, 1, 2, 3))))
    most = max(least, draw(st.sampled_from((1, 2, 4, 6, 8, 16))))
    elastic = draw(st.sampled_from((True, True, True, False)))
    if not elastic:
        most = min(most, room)
    speed = draw(st.sampled_from((0.5, 1.0, 3.7)))
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    counts = draw(st.sampled_from(((1, 2, 4, 8, 16), tuple(range(1, 17)), (2, 4, 8), (1,))))
    if min(most, room) < min(counts):
        counts = (1,)
    least = max(least, min(counts))
    lease_s = draw(st.sampled_from((None, 3.0, 20.0, 90.0, 400.0, 3000.0)))
    return TrainingJob(
        job_id=WorkloadId(f"job-{index}"),
        name=f"job-{index}",
        entrypoint=SOURCE,
        global_batch_size=64,
        min_workers=least,
        max_workers=most,
        num_virtual_shards=draw(st.sampled_from((16, 64))),
        elastic=elastic,
        goal=Goal(
            deadline_s=None if lease_s is None else now_s + lease_s,
            is_soft=lease_s is not None and draw(st.booleans()),
            waits=draw(st.booleans()),
        ),
        total_steps=draw(st.integers(1, 600)),
        profile_steps_per_s={count: speed * shape(count) for count in counts},
        requested_workers=draw(st.integers(least, most)),
        owner=draw(st.sampled_from(("", "ada", "bob"))),
        checkpoint_interval_s=30.0,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to ten jobs, some in one instant, on one to five nodes, all alike or not."""
    sizes = draw(
        st.one_of(
            st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 4, 8))).map(lambda shape: (shape[1],) * shape[0]),
            st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple),
        )
    )
    arrivals, now_s = [], 0.0
    for index in range(draw(st.integers(1, 10))):
        now_s += draw(st.sampled_from((0.0, 0.0, 0.5, 10.0, 120.0)))
        arrivals.append((now_s, draw(jobs(index, now_s, sum(sizes)))))
    return Case(sizes=sizes, arrivals=tuple(arrivals), overhead=draw(st.sampled_from(("elasticflow", "none"))))


# --- what must hold ---------------------------------------------------------------------------------------------------


def played(policy: str, case: Case) -> tuple[FluidRunResult, Story]:
    is_regular = len(set(case.sizes)) == 1
    story = Story()
    run = play(
        make_policy(policy),
        case.arrivals,
        case.nodes(),
        rule=overhead_rule(case.overhead, sum(case.sizes)),
        speeds=ProfiledSpeeds(
            devices_per_node=case.sizes[0], feels_placement=is_regular and policy in KEEPS_EVERY_PROMISE
        ),
        keeps_promises=policy in KEEPS_EVERY_PROMISE,
        journal=story,
    )
    return run, story


def check(policy: str, case: Case) -> None:
    run, story = played(policy, case)
    room = sum(case.sizes)
    for run_of_job in run.runs.values():
        assert run_of_job.state.is_terminal
        if run_of_job.state is JobState.SUCCEEDED:
            assert run_of_job.done_steps >= run_of_job.total_steps - 1e-3
    assert max(run.timeline.devices, default=0) <= room
    if policy.partition(":")[0] not in MOVES_BY_CHANCE:
        assert_nobody_moves_for_nothing(case, story)


def assert_nobody_moves_for_nothing(case: Case, story: Story) -> None:
    """Who goes to other devices at the same size comes together on fewer nodes, or makes way: others come there."""
    device_of: dict[ReplicaId, DeviceId] = {}
    group: dict[WorkloadId, frozenset[DeviceId]] = {}
    began_at: dict[WorkloadId, tuple[float, frozenset[DeviceId]]] = {}
    left: list[tuple[float, WorkloadId, frozenset[DeviceId]]] = []
    started: list[tuple[float, WorkloadId, DeviceId]] = []
    for step in story.steps:
        for event in step.events:
            if isinstance(event, ReplicaStopped):
                device_of.pop(event.replica_id, None)
        for action in step.actions:
            if isinstance(action, StartReplica):
                device_of[action.replica_id] = action.device_id
                started.append((step.now_s, action.workload_id, action.device_id))
            elif isinstance(action, PreemptJob):
                # Suspended, it starts anew some day, wherever there is room: that is no move.
                group.pop(action.job_id, None)
                began_at.pop(action.job_id, None)
            elif isinstance(action, ResizeJob):
                now = frozenset(device_of[replica_id] for replica_id in action.replica_ids)
                # A move takes more than one change; what counts is what it was before the first of them.
                first_s, before = began_at.get(action.job_id, (step.now_s, group.get(action.job_id, frozenset())))
                if step.now_s - first_s > STANDS_WITHIN_S:
                    first_s, before = step.now_s, group.get(action.job_id, frozenset())
                began_at[action.job_id] = (first_s, before)
                group[action.job_id] = now
                left = [entry for entry in left if entry[1] != action.job_id or entry[0] != first_s]
                comes_together = len({d.split("/")[0] for d in now}) < len({d.split("/")[0] for d in before})
                if len(now) == len(before) and now != before and not comes_together:
                    left.append((first_s, action.job_id, before - now))
    needless = [
        f"{job_id} moves at {moved_s:.3f} s away from {sorted(devices)}, and nobody comes there"
        for moved_s, job_id, devices in left
        if not any(d in devices and who != job_id and at_s >= moved_s - 1.0 for at_s, who, d in started)
    ]
    assert len(needless) <= (0 if len(set(case.sizes)) == 1 else MOST_SIDEWAYS), needless


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(case=cases())
@settings(max_examples=part(25, least=8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_policy_holds_what_the_platform_promises(policy: str, case: Case) -> None:
    check(policy, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", long_sweep(POLICIES))
@given(case=cases())
@settings(max_examples=part(400), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_policy_holds_what_the_platform_promises_for_long(policy: str, case: Case) -> None:
    check(policy, case)


def test_no_job_moves_for_a_lower_price_alone() -> None:
    def job(number: int, most: int, steps: int) -> TrainingJob:
        return TrainingJob(
            job_id=WorkloadId(f"job-{number}"),
            name=f"job-{number}",
            entrypoint=SOURCE,
            global_batch_size=64,
            max_workers=most,
            num_virtual_shards=16,
            total_steps=steps,
            profile_steps_per_s={1: 0.5, 2: 1.0},
            checkpoint_interval_s=30.0,
        )

    arrivals = ((0.0, job(0, 2, 181)), (0.0, job(1, 1, 1)), (120.0, job(2, 1, 1)))
    check("fapes:round_s=60", Case(sizes=(4, 4), arrivals=arrivals, overhead="elasticflow"))


# --- the same journal under every hash seed ---------------------------------------------------------------------------

CASE_OF_MANY = Case(
    sizes=(4, 8, 4),
    arrivals=tuple(
        (
            7.0 * (number // 3),
            TrainingJob(
                job_id=WorkloadId(f"job-{number}"),
                name=f"job-{number}",
                entrypoint=SOURCE,
                global_batch_size=64,
                max_workers=8,
                num_virtual_shards=16,
                goal=Goal(
                    deadline_s=None if number % 4 == 0 else 7.0 * (number // 3) + (30.0, 90.0, 400.0)[number % 3],
                    is_soft=number % 5 == 0,
                    waits=number % 2 == 0,
                ),
                total_steps=20 + 37 * number % 200,
                profile_steps_per_s={count: SHAPES[sorted(SHAPES)[number % 7]](count) for count in (1, 2, 4, 8)},
                requested_workers=1 + number % 8,
                owner=("", "ada", "bob")[number % 3],
            ),
        )
        for number in range(24)
    ),
    overhead="elasticflow",
)


def journals() -> list[str]:
    """A digest of every policy's journal for one busy trace."""
    lines = []
    for policy in POLICIES:
        _, story = played(policy, CASE_OF_MANY)
        digest = hashlib.sha256(b"\n".join(msgspec.json.encode(step) for step in story.steps))
        lines.append(f"{policy} {len(story.steps)} {digest.hexdigest()}")
    return lines


@pytest.mark.slow
def test_two_hash_seeds_write_the_same_journals() -> None:
    told = [
        subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "4242")
    ]
    assert told[0] == told[1]
    assert [line.split()[0] for line in told[0]] == list(POLICIES)
    assert all(int(line.split()[1]) > 30 for line in told[0])


if __name__ == "__main__":
    sys.stdout.write("\n".join(journals()) + "\n")
