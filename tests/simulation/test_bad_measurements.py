"""A job that is slow just while it is measured at a new size: how long until it is where it belongs, and at what cost.

The speeds are the truth throughout; only what is reported of them is wrong for a while.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kits.simulation.misread_plays import RULE, SLOW, Curve, Misread, Misreading, amdahl, make, play_drawn, slow_moments
from kits.simulation.sweeps import part
from kits.solvers.reservations import verify
from springtide.core.actions import ResizeJob
from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import JobState, TrainingJob
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.runs import FluidRun

RETRY_S = 300.0
TRIED_WITHIN_S = 60.0


class Changes:
    """A journal of which only the changes of groups are kept: when, whose, to how many, and why."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.all: list[tuple[float, str, int, str]] = []

    def append(self, step: Step) -> int:
        self.num_steps += 1
        assert self.num_steps < 20_000, f"it turns in place at {step.now_s} s"
        for action in step.actions:
            if isinstance(action, ResizeJob):
                self.all.append((step.now_s, action.job_id, len(action.replica_ids), action.reason))
        return self.num_steps

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        return iter(())

    def of(self, name: str) -> list[tuple[float, int]]:
        return [(at_s, count) for at_s, who, count, _ in self.all if who == name]


class Doubted:
    """Springtide, beside one that is made anew for every decision and knows nothing but the memory."""

    def __init__(self) -> None:
        self.policy = Springtide()
        self.derived = self.policy.make_derived()

    def decide(self, snapshot: Snapshot) -> Plan:
        memory = msgspec.json.decode(msgspec.json.encode(snapshot.memory))
        other = Springtide().decide(msgspec.structs.replace(snapshot, memory=memory))
        plan = self.policy.decide(snapshot, self.derived)
        assert (other.allocations, other.memory, other.reasons) == (plan.allocations, plan.memory, plan.reasons)
        assert other.revisit_at_s == plan.revisit_at_s
        state = self.derived.state
        assert state is not None
        # Who is only pursued is planned by what was measured, which changes from report to report.
        pursued = {key for key, entry in state.reservations.entries.items() if not entry.is_promised}
        assert not [fault for fault in verify(state.reservations) if fault.partition(":")[0] not in pursued]
        return plan


def on_two(
    policy: Policy, curve: Curve, misread: Misread, *, late: TrainingJob | None = None
) -> tuple[FluidRunResult, Changes]:
    """Two jobs have a device each for 200 s; then one ends, and the other is given its device."""
    changes = Changes()
    arrivals = [(0.0, make("a", 4000, 2)), (0.0, make("short", 200, 1))]
    played = play(
        policy,
        arrivals if late is None else [*arrivals, (550.0, late)],
        [make_node("n", 2)],
        rule=RULE,
        speeds=Misreading({"a": curve, "short": amdahl(1, 0.95), "late": amdahl(2, 0.95)}, misread),
        reports_progress=True,
        journal=changes,
    )
    return played, changes


def slow_at_first(length_s: float) -> Misread:
    """For so long after its first change to more than one device a job seems to run at a third of its speed."""
    first_s: dict[str, float] = {}

    def misread(run: FluidRun) -> float:
        if len(run.members) < 2:
            return 1.0
        began_s = first_s.setdefault(run.job.job_id, run.formed_s)
        return SLOW if run.formed_s == began_s and run.since_s < began_s + length_s else 1.0

    return misread


def policy_of(name: str) -> Policy:
    return Doubted() if name == "springtide" else make_policy(name)


@pytest.mark.parametrize("name", ["elastic", "springtide"])
def test_a_moment_takes_nothing_from_a_job(name: str) -> None:
    played, changes = on_two(policy_of(name), amdahl(2, 0.95), slow_at_first(6.0))
    assert [count for _, count in changes.of("a")] == [1, 2]
    # 200 s on one device, the rest on two.
    assert played.runs["a"].ended_s == pytest.approx(200.0 + 3800.0 / amdahl(2, 0.95)[2], rel=0.01)


@pytest.mark.parametrize("name", ["elastic", "springtide"])
def test_what_was_slow_while_it_was_measured_is_measured_again(name: str) -> None:
    played, changes = on_two(policy_of(name), amdahl(2, 0.95), slow_at_first(90.0))
    (_, _), (_, grown), (shrunk_s, shrunk), (again_s, again) = changes.of("a")
    assert (grown, shrunk, again) == (2, 1, 2)
    assert RETRY_S <= again_s - shrunk_s <= RETRY_S + TRIED_WITHIN_S
    why = next(why for at_s, _, _, why in changes.all if at_s == shrunk_s)
    assert "2 devices were no faster than 1:" in why
    assert "others" not in why
    # All in all it loses what it would have done in that time on the second device, and no more.
    best_s = 200.0 + 3800.0 / amdahl(2, 0.95)[2]
    assert played.runs["a"].ended_s is not None
    assert played.runs["a"].ended_s - best_s < RETRY_S / 2 + TRIED_WITHIN_S


@pytest.mark.parametrize("name", ["elastic", "springtide"])
def test_who_is_truly_slower_on_more_is_tried_ever_more_rarely(name: str) -> None:
    played, changes = on_two(policy_of(name), (0.0, 1.0, 0.67), lambda run: 1.0)
    grown_s = [at_s for at_s, count in changes.of("a") if count == 2]
    assert len(grown_s) == 4
    waits_s = np.diff(grown_s)
    assert all(later > 1.6 * sooner for sooner, later in itertools.pairwise(waits_s))
    # On one device all the time it takes 4,000 s: four looks at another size cost less than two per cent.
    assert played.runs["a"].state is JobState.SUCCEEDED
    assert played.runs["a"].ended_s == pytest.approx(4000.0, rel=0.02)


def test_a_trial_ends_at_once_when_somebody_comes() -> None:
    # It comes while the second device is tried again, and is promised a deadline that it makes on one device.
    late = make("late", 200, 1, profile=amdahl(1, 0.95), deadline_s=550.0 + 230.0)
    played, changes = on_two(Doubted(), amdahl(2, 0.95), slow_at_first(25.0), late=late)
    assert [count for _, count in changes.of("a")] == [1, 2, 1, 2, 1, 2]
    given_up_s = changes.of("a")[4][0]
    assert given_up_s == 550.0
    assert next(why for at_s, _, _, why in changes.all if at_s == given_up_s) == (
        "resized 2 -> 1 ('late' needs 1 device for a promised deadline)"
    )
    run = played.runs["late"]
    assert run.admitted_s == 550.0
    assert run.ended_s is not None
    assert run.ended_s <= 780.0
    # The trial that was cut off is no trial in vain: the next growth does not wait any longer for it.
    assert changes.of("a")[5][0] <= run.ended_s + RETRY_S + TRIED_WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(part(8, least=3)))
def test_promises_hold_and_nobody_flaps_whatever_is_misread(seed: int) -> None:
    changes = Changes()
    # Raises where a promise is broken or a job never ends.
    played = play_drawn(Doubted(), seed, slow_moments(seed), journal=changes)
    for name, run in played.runs.items():
        assert run.state.is_terminal
        assert run.ended_s is not None
        # A change or two for each who comes or goes, and two for each trial; these come ever more rarely.
        num_trials = 2 + int(np.log2(1.0 + (run.ended_s - run.submitted_s) / RETRY_S))
        assert run.num_resizes <= len(played.runs) + 2 * num_trials, f"{name}: {changes.of(name)}"
