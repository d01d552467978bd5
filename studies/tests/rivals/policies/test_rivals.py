"""What all rivals have in common: they stand by their plans, never give away more than there is, and end every job."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kits.scheduling.rival_platform import counts, look, make_view, play
from springtide.scheduling.placement.gangs import fixed_size
from springtide.scheduling.registry import make_policy

FIXED = [
    "fifo",
    "static",
    "sjf",
    "sjf:preemptive=yes",
    "tiresias",
    "tiresias:promotion_factor=2",
    "themis",
    "gandiva",
    "chronus",
]
ELASTIC = ["edf", "edf:caps=no", "optimus", "gandiva:grows=yes"]
SLOTS = 8


def draw(seed):
    """A dozen jobs that come within 20 minutes and ask for more than there is."""
    rng = np.random.default_rng(seed)
    views = []
    for number in range(12):
        at_s = float(rng.integers(0, 1200))
        steps = int(rng.integers(50, 4000))
        deadline_s = at_s + float(rng.uniform(100.0, 4000.0)) if rng.random() < 0.6 else None
        ask = int(2 ** rng.integers(0, 4))
        views.append(make_view(f"j{number:02}", at_s=at_s, steps=steps, ask=ask, deadline_s=deadline_s))
    return views


def make(name):
    if name.startswith("chronus"):
        pytest.importorskip("scipy", reason="the solver is an extra")
    return make_policy(name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*FIXED, *ELASTIC])
def test_every_job_ends_and_no_device_is_given_twice(name, seed):
    views = draw(seed)
    run = play(make(name), views, slots=SLOTS)
    assert set(run.finished_at_s) == {view.job.job_id for view in views}
    for moment in sorted({start for _, start, _, _ in run.spans}):
        assert sum(run.at(moment).values()) <= SLOTS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FIXED)
def test_the_fixed_ones_give_a_job_what_it_asked_for_or_nothing(name, seed):
    views = draw(seed)
    sizes = {view.job.job_id: fixed_size(view, SLOTS) for view in views}
    run = play(make(name), views, slots=SLOTS)
    assert all(count == sizes[who] for who, _, _, count in run.spans if count)


@pytest.mark.parametrize("name", ["fifo", "static", "sjf"])
def test_the_non_preemptive_ones_never_change_a_running_job(name):
    assert play(make(name), draw(1), slots=SLOTS).num_changes == 0


@pytest.mark.parametrize("name", [*FIXED, "edf", "optimus"])
def test_a_job_about_which_nothing_is_known_runs(name):
    view = make_view("a", ask=None, profile={})
    unknown = replace(view, total_steps=None, job=replace(view.job, total_steps=None))
    assert counts(look(make(name), [unknown])).get("a", 0) >= 1


@pytest.mark.parametrize("name", [*FIXED, "edf", "optimus"])
def test_who_waits_is_told_why(name):
    views = [make_view(f"j{number}", at_s=float(number), ask=8, least=8, steps=1000) for number in range(3)]
    plan = look(make(name), views, now_s=10.0)
    assert set(plan.reasons) == {"j0", "j1", "j2"}
    assert all(plan.reasons.values())
