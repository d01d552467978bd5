"""A job's search, step by step: what it begins with, what it tries, where it settles, and that its goal is kept."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from springtide.core.decision import JobView
from springtide.core.function_search import (
    BatchPhase,
    FunctionMeasurement,
    FunctionSearch,
    StreamView,
    WorkerModel,
)
from springtide.core.functions import MIB
from springtide.core.job_parts import JobBounds
from springtide.core.workload import Entrypoint, Goal, JobState, TrainingJob
from springtide.perf.functions.services import aws_lambda
from springtide.perf.functions.workers.model import space_of
from springtide.perf.functions.workers.surface import Surface, WorkSettings
from springtide.scheduling.functions.goal_phases import rest_of
from springtide.scheduling.functions.goal_search import search_menu, search_step
from springtide.scheduling.functions.reasons import goal_words, seconds_words

SERVICE = aws_lambda(concurrency=24)
MODEL = WorkerModel(parameter_bytes=20 * MIB, sample_s=0.05, fixed_s=0.02, sample_bytes=4 * MIB)
SEARCH = FunctionSearch(model=MODEL, space=space_of(SERVICE, MODEL))
BATCH, STEPS = 128, 400


def job_of(goal, **fields):
    menu = search_menu(SEARCH, SERVICE, BATCH, 3, STEPS)
    base = TrainingJob(
        job_id="j", name="j", entrypoint=Entrypoint(source_path="x"), goal=goal, global_batch_size=BATCH,
        total_steps=STEPS, menu=menu, search=SEARCH,
    )  # fmt: skip
    return replace(base, **fields)


def view_of(job, **fields):
    base = JobView(
        job=job,
        state=JobState.RUNNING,
        submitted_at_s=0.0,
        total_steps=job.total_steps,
        global_batch_size=job.global_batch_size,
        bounds=JobBounds(min_workers=1, max_workers=1),
    )
    return with_fields(base, **fields)


class World:
    """The truth is the model with computing and exchanging off by smooth factors; measurements have noise."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.bias, self.tilt = np.exp(self.rng.normal(0.0, 0.2, 2)), self.rng.normal(0.0, 0.06, 4)
        self.surfaces = {}

    def surface(self, batch):
        if batch not in self.surfaces:
            settings = WorkSettings(global_batch_size=batch, num_layers=3, workers=tuple(range(1, min(24, batch) + 1)))
            found = Surface(SERVICE, SEARCH.space, MODEL, settings)
            n, m = np.log2(found.workers)[:, None] - 2, np.log2(found.memory_mb)[None] - 11
            compute_s = found.compute_s * self.bias[0] * np.exp(self.tilt[0] * n + self.tilt[1] * m)
            sync_s = found.sync_s * self.bias[1] * np.exp(self.tilt[2] * n + self.tilt[3] * m)
            self.surfaces[batch] = found, compute_s, sync_s
        return self.surfaces[batch]

    def totals(self, batch=BATCH, steps=STEPS):
        found, compute_s, sync_s = self.surface(batch)
        step_s = compute_s + sync_s
        usd = found.step_base_usd + step_s * found.usd_per_s
        seconds = np.where(found.fits, found.start_s + steps * step_s, math.inf)
        return seconds, np.where(found.fits, found.start_usd + steps * usd, math.inf)

    def measure(self, plan, batch, num_steps):
        found, compute_s, sync_s = self.surface(batch)
        place = found.place(plan)
        noise = np.exp(0.03 * self.rng.standard_normal(2) / math.sqrt(num_steps))
        parts = float(compute_s[place] * noise[0]), float(sync_s[place] * noise[1])
        usd = float(found.step_base_usd[place] + sum(parts) * found.usd_per_s[place])
        return FunctionMeasurement(
            plan=plan, global_batch_size=batch, gradient_bytes=MODEL.parameter_bytes, num_steps=num_steps,
            step_s=sum(parts), deviation_s=0.03 * sum(parts), compute_s=parts[0], sync_s=parts[1], usd=usd,
        )  # fmt: skip


def play(job, world, batch_of=lambda step: BATCH, total=STEPS, goal_of=None):
    """Follow every step of the search to the job's end: seconds, dollars, and what was said.

    `goal_of` says what its owner wants from each step on, where that changes.
    """
    now_s = usd = 0.0
    step, plan, said, counts, measurements = 0, None, [], {}, ()
    while step < total:
        batch = batch_of(step)
        wanted = job if goal_of is None else replace(job, goal=goal_of(step))
        view = view_of(
            wanted, step=step, spent_usd=usd, measurements=measurements, global_batch_size=batch, progress_at_s=now_s,
            started_at_s=0.0 if plan else None,
        )  # fmt: skip
        found = search_step(view, SERVICE, now_s, plan)
        said.append(found)
        if found.next is not None:
            place = world.surface(batch)[0].place(found.next.plan)
            surface = world.surface(batch)[0]
            now_s += float(surface.start_s[place] if plan is None else 2.0 * surface.save_s[place])
            usd += float(surface.start_usd[place])
            plan = found.next.plan
        assert plan is not None
        key = (plan, batch)
        num_steps = counts.get(key, 4)
        num_steps = min(num_steps, next((s - step for s in range(step, total) if batch_of(s) != batch), total - step))
        counts[key] = counts.get(key, 0) + num_steps
        measured = world.measure(plan, batch, counts[key])
        now_s, usd, step = now_s + num_steps * measured.step_s, usd + num_steps * measured.usd, step + num_steps
        measurements = (*(one for one in measurements if not one.is_of_same(measured)), measured)
    return now_s, usd, said


@pytest.mark.parametrize("seed", range(4))
def test_cheapest_within_a_deadline_is_found_and_kept(seed):
    world = World(seed)
    seconds, usd = world.totals()
    deadline_s = 2.5 * float(seconds.min())
    took_s, cost_usd, said = play(job_of(Goal(deadline_s=deadline_s)), world)
    assert took_s <= deadline_s
    assert cost_usd <= 1.25 * float(usd[seconds <= deadline_s].min())
    assert said[-1].has_settled or said[-1].next is not None
    assert max(one.num_tried for one in said) <= 12


@pytest.mark.parametrize("seed", range(4))
def test_fastest_within_a_budget_is_found_and_kept(seed):
    world = World(10 + seed)
    seconds, usd = world.totals()
    budget_usd = 2.0 * float(usd.min())
    took_s, cost_usd, _ = play(job_of(Goal(budget_usd=budget_usd, is_fastest=True)), world)
    assert cost_usd <= budget_usd
    assert took_s <= 1.25 * float(seconds[usd <= budget_usd].min())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_another_deadline_is_aimed_for_from_where_it_is(seed):
    world = World(30 + seed)
    shortest_s = float(world.totals()[0].min())
    tight, loose, sooner = (Goal(deadline_s=factor * shortest_s) for factor in (1.6, 6.0, 3.0))
    _, tight_usd, _ = play(job_of(tight), world)
    took_s, usd, _ = play(job_of(tight), world, goal_of=lambda step: tight if step < 100 else loose)
    assert took_s <= loose.deadline_s
    assert usd < 0.95 * tight_usd, "time to spare is worth money"
    loose_s, _, _ = play(job_of(loose), world)
    took_s, _, _ = play(job_of(loose), world, goal_of=lambda step: loose if step < 100 else sooner)
    assert took_s <= sooner.deadline_s < loose_s


def test_fastest_at_any_price_comes_near_the_fastest_there_is():
    world = World(20)
    seconds, _ = world.totals()
    took_s, _, said = play(job_of(Goal(is_fastest=True)), world)
    assert took_s <= 1.15 * float(seconds.min())
    assert said[0].goal_words == "fastest"


def test_the_first_step_begins_with_what_the_model_says_and_the_menu_is_a_front():
    found = search_step(view_of(job_of(Goal(deadline_s=1000.0))), SERVICE, 0.0, None)
    assert found.next is not None
    assert found.running is None
    assert not found.is_probe
    assert found.why.startswith("begins with ")
    options = found.menu.options
    assert found.menu.num_layers == 3
    assert found.menu.error_fraction == SEARCH.error_fraction
    assert options[found.menu.recommended].plan == found.next.plan
    assert [one.step_usd for one in options] == sorted(one.step_usd for one in options)
    assert found.next.plan.stages[0].end_layer == 3


def test_the_running_plan_is_always_on_the_menu_and_its_measurement_is_believed():
    world = World(1)
    job = job_of(Goal(deadline_s=5000.0))
    plan = world.surface(BATCH)[0].plan(20, 3)
    measured = world.measure(plan, BATCH, 50)
    found = search_step(view_of(job, step=50, measurements=(measured,)), SERVICE, 60.0, plan)
    assert plan in [one.plan for one in found.menu.options]
    assert found.running is not None
    assert found.running.plan == plan
    assert found.running.step_s == pytest.approx(measured.step_s, rel=0.05)
    assert found.next is not None
    assert found == search_step(view_of(job, step=50, measurements=(measured,)), SERVICE, 60.0, plan)


def test_what_was_begun_is_measured_first_and_looked_at_again_if_nothing_comes():
    job = job_of(Goal(deadline_s=5000.0))
    plan = search_step(view_of(job), SERVICE, 0.0, None).next.plan
    found = search_step(view_of(job, step=1), SERVICE, 30.0, plan)
    assert found.next is None
    assert found.why.startswith("measures ")
    assert found.revisit_at_s is not None
    assert found.revisit_at_s > 30.0


def test_a_plan_from_elsewhere_is_left_for_one_of_the_grid():
    job = job_of(Goal(deadline_s=5000.0))
    plan = search_step(view_of(job), SERVICE, 0.0, None).next.plan
    strange = replace(plan, stages=(replace(plan.stages[0], memory_mb=1000),))
    found = search_step(view_of(job, step=5), SERVICE, 10.0, strange)
    assert found.running is None
    assert found.next is not None


def test_a_job_in_danger_moves_to_a_faster_configuration():
    world = World(2)
    job = job_of(Goal(deadline_s=900.0))
    surface = world.surface(BATCH)[0]
    plan = surface.plan(0, 5)
    found = search_step(
        view_of(job, step=4, measurements=(world.measure(plan, BATCH, 3),), progress_at_s=60.0), SERVICE, 60.0, plan
    )
    assert found.next is not None
    assert found.next.step_s < 0.7 * found.running.step_s


def test_phases_of_a_schedule_are_planned_together():
    phases = (
        BatchPhase(from_epoch=0, global_batch_size=16),
        BatchPhase(from_epoch=2, global_batch_size=64),
        BatchPhase(from_epoch=4, global_batch_size=256),
    )
    job = job_of(
        Goal(deadline_s=1500.0), batch_schedule=phases, num_samples=1024, num_epochs=6, global_batch_size=16,
        total_steps=2 * 64 + 2 * 16 + 2 * 4,
    )  # fmt: skip
    rest = rest_of(view_of(job))
    assert [(one.global_batch_size, one.num_steps) for one in rest.stretches] == [(16, 128.0), (64, 32.0), (256, 8.0)]
    assert [one.num_steps for one in rest_of(view_of(job, step=140)).stretches] == [20.0, 8.0]
    assert rest_of(view_of(replace(job, num_samples=None))).stretches == rest.stretches
    assert rest_of(view_of(job, step=168)).num_steps == 1.0

    def batch_of(step):
        return 16 if step < 128 else 64 if step < 160 else 256

    took_s, _, said = play(job, World(3), batch_of, 168)
    assert took_s <= 1500.0
    assert all(one.is_within for one in said)


def test_streams_keep_up_for_the_least_money():
    slow = job_of(Goal(), stream="clicks", total_steps=None)
    calm, busy = (
        search_step(
            view_of(slow, total_steps=None, stream=StreamView(name="clicks", num_samples=9, arrivals_per_s=rate)),
            SERVICE,
            0.0,
            None,
        )
        for rate in (20.0, 60.0)
    )
    assert BATCH / calm.next.step_s >= 1.2 * 20.0
    assert BATCH / busy.next.step_s >= 1.2 * 60.0
    assert calm.next.step_usd < busy.next.step_usd
    assert calm.goal_words == "cheapest that keeps up with what arrives"
    assert "expected" not in calm.why
    unknown = search_step(view_of(slow, total_steps=None), SERVICE, 0.0, None)
    assert unknown.next is not None
    closed = StreamView(name="clicks", num_samples=10 * BATCH, is_closed=True)
    left = rest_of(view_of(slow, total_steps=None, step=4, stream=closed))
    assert (left.is_known, left.num_steps) == (True, 6.0)


def test_without_a_length_it_runs_as_recommended_and_tries_nothing():
    world = World(5)
    job = job_of(Goal(deadline_s=10.0), total_steps=None)
    begun = search_step(view_of(job, total_steps=None), SERVICE, 0.0, None)
    measured = world.measure(begun.next.plan, BATCH, 20)
    found = search_step(
        view_of(job, total_steps=None, step=20, measurements=(measured,)), SERVICE, 1e6, begun.next.plan
    )
    assert not found.is_probe
    assert found.is_within


def test_at_least_so_many_workers_where_the_owner_says_so():
    bounded = replace(SEARCH, space=replace(SEARCH.space, min_workers=5, max_workers=9))
    job = job_of(Goal(deadline_s=1e6), search=bounded)
    found = search_step(view_of(job), SERVICE, 0.0, None)
    assert {one.plan.num_replicas for one in found.menu.options} <= set(range(5, 10))
    assert found.next.plan.num_replicas == 5


def test_earlier_runs_of_the_same_function_are_begun_from():
    world = World(6)
    surface, compute_s, sync_s = world.surface(BATCH)
    earlier = tuple(world.measure(surface.plan(row, 10), BATCH, 30) for row in (1, 3, 7))
    warm = search_menu(replace(SEARCH, earlier=earlier), SERVICE, BATCH, 3, STEPS)
    cold = search_menu(SEARCH, SERVICE, BATCH, 3, STEPS)

    def off(menu):
        places = [surface.place(one.plan) for one in menu.options]
        return np.mean([abs(math.log(one.step_s / float(compute_s[place] + sync_s[place]) / 1.03))
                        for one, place in zip(menu.options, places, strict=True)])  # fmt: skip

    assert off(warm) < off(cold)
    assert warm.error_fraction != cold.error_fraction


def test_words_are_for_people():
    assert [seconds_words(each) for each in (2.345, 42.0, 190.0, 7500.0, math.inf)] == [
        "2.3 s",
        "42 s",
        "3m10s",
        "2h05m",
        "for ever",
    ]
    assert goal_words(Goal(deadline_s=1.0, budget_usd=2.0), False) == "cheapest that makes the deadline within $2.00"
    assert goal_words(Goal(budget_usd=2.0), False) == "fastest within $2.00"
    assert goal_words(Goal(), False) == "speed that is worth its cost"
