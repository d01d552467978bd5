"""Whole trainings in real worker processes: the number of workers never shows in the result."""

from __future__ import annotations

import signal
import time

import pytest

from kits.simulation.sweeps import only_in_full
from springtide.core.wire import workers as wire
from springtide.core.wire.workers import CheckpointWritten, Failed, Left, Preempt, Switched
from springtide.storage.fence import Fence


@pytest.fixture
def static_hash(make_plane):
    """The result of one worker that nobody disturbs."""

    def run(**options):
        plane = make_plane(**options)
        plane.start_group("s0")
        plane.wait_finished()
        return plane.result_hash()

    return run


def test_one_worker_trains_to_the_end_and_logs_every_step(make_plane):
    plane = make_plane()
    plane.start_group("a")
    plane.wait_finished()
    steps = plane.steps()
    assert [record["step"] for record in steps] == list(range(1, 27))
    assert sum(record["num_samples"] for record in steps) == 2 * 200
    assert steps[-1]["loss"] < steps[0]["loss"]


COUNTING = """
import torch

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    told = []
    for batch in ctx.batches(torch.ones(64, 4)):
        told.append(ctx.step(model(batch.x).mean()))
        if told[-1]:
            scheduler.step()
    # Each step ends with a call that completes it; passes that are checked or measured come before it.
    assert told[-1] and sum(told) == 8, told
    assert abs(optimizer.param_groups[0]["lr"] - 0.01) < 1e-9, optimizer.param_groups[0]["lr"]
    assert ctx.step_number == 8
"""


def test_a_step_tells_when_it_completed_a_global_one_so_that_a_scheduler_can_follow(make_plane):
    # Eight steps with the rate cut by ten at the fifth: 0.01. A scheduler called for every shard would cut six times.
    plane = make_plane(COUNTING)
    plane.start_group("a")
    plane.wait_finished()


@pytest.mark.slow
def test_two_workers_give_the_same_bits_as_one(make_plane, static_hash):
    plane = make_plane()
    plane.start_group("a", "b")
    plane.wait_finished()
    assert plane.result_hash() == static_hash()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(3, marks=only_in_full), 4])
def test_more_workers_give_the_same_bits_as_one(make_plane, static_hash, world_size):
    plane = make_plane(num_virtual_shards=8)
    plane.start_group(*(f"w{rank}" for rank in range(world_size)))
    plane.wait_finished()
    assert plane.result_hash() == static_hash(num_virtual_shards=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "catchup"),
    [
        ("sgd", "0"),
        ("adamw", "1"),
        *(pytest.param(*rest, marks=only_in_full) for rest in [("sgd", "1"), ("adamw", "0")]),
    ],
)
def test_a_run_resized_1_3_2_4_gives_the_same_bits_as_a_static_one(make_plane, static_hash, optimizer, catchup):
    plane = make_plane(
        step_s=0.02, optimizer=optimizer, environment={"SPRINGTIDE_CATCHUP": catchup}, num_epochs=12, max_workers=4
    )
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b", "c")
    plane.wait_step(len(plane.steps()) + 3)
    plane.form("c", "a")
    plane.wait_exit("b")
    plane.wait_step(len(plane.steps()) + 3)
    plane.grow("d", "e")
    plane.wait_finished()
    assert [record["generation"] for record in plane.steps()][-1] == plane.generation
    assert [record["step"] for record in plane.steps()] == list(range(1, 12 * 13 + 1))
    assert plane.result_hash() == static_hash(optimizer=optimizer, num_epochs=12)


@pytest.mark.slow
def test_growing_and_shrinking_reports_switches_with_their_direction(make_plane):
    plane = make_plane(step_s=0.01, num_epochs=20)
    plane.start_group("a")
    plane.wait_step(3)
    plane.grow("b")
    plane.form("a")
    plane.wait_exit("b")
    assert [report.direction for report in plane.of(Switched, "a")] == ["start", "grow", "shrink"]
    assert plane.of(Left, "b")


@pytest.mark.slow
def test_a_killed_worker_costs_no_sample_and_no_bit(make_plane, static_hash):
    plane = make_plane(step_s=0.02, num_epochs=12)
    plane.start_group("a", "b", "c")
    plane.wait_step(5)
    plane.kill("a")
    plane.form("b", "c", forced=True)
    plane.wait_step(len(plane.steps()) + 3)
    plane.kill("c")
    plane.form("b", forced=True)
    plane.wait_finished()
    assert [record["step"] for record in plane.steps()] == list(range(1, 12 * 13 + 1))
    assert plane.result_hash() == static_hash(num_epochs=12)


@pytest.mark.slow
def test_a_stopped_member_does_not_hold_the_survivors_and_is_fenced_when_it_wakes(make_plane, static_hash):
    plane = make_plane(step_s=0.02, num_epochs=12)
    plane.start_group("a", "b", "c")
    plane.wait_step(5)
    plane.signal("a", signal.SIGSTOP)
    # Had it the order to leave in its ear when it wakes, it could be gone in good order before it hears of the fence.
    plane.form("b", "c", forced=True, untold=("a",))
    plane.signal("a", signal.SIGCONT)
    plane.order(wire.FenceOrder(), "a")
    plane.wait_exit("a", code=3)
    plane.wait_finished()
    assert plane.result_hash() == static_hash(num_epochs=12)


@pytest.mark.slow
def test_members_that_find_the_fence_raised_wait_for_the_order_that_raised_it(make_plane, static_hash):
    plane = make_plane(step_s=0.02, num_epochs=12)
    plane.start_group("a", "b")
    plane.wait_step(5)
    # A joiner died while it was being taken in: the group is whole and commits steps until it hears of the new one.
    Fence(plane.work_dir).raise_to(plane.generation + 1)
    time.sleep(0.5)
    assert not plane.exits
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert [record["step"] for record in plane.steps()] == list(range(1, 12 * 13 + 1))
    assert plane.result_hash() == static_hash(num_epochs=12)


@pytest.mark.slow
def test_preempted_at_three_workers_and_resumed_at_two_gives_the_same_bits(make_plane, static_hash, tmp_path):
    plane = make_plane(step_s=0.02, num_epochs=12)
    plane.start_group("a", "b", "c")
    plane.wait_step(20)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation), "a", "b", "c")
    plane.wait_exit("a", "b", "c")
    (written,) = plane.of(CheckpointWritten)
    assert written.checkpoint.generation == plane.generation
    assert written.checkpoint.step == plane.steps()[-1]["step"]
    resumed = make_plane(step_s=0.02, num_epochs=12, work_dir=plane.work_dir)
    resumed.start_group("d", "e")
    assert resumed.of(Switched, "d")[0].direction == "resume"
    resumed.wait_finished()
    assert [record["step"] for record in resumed.steps()] == list(range(1, 12 * 13 + 1))
    assert resumed.result_hash() == static_hash(num_epochs=12)


def test_an_error_in_user_code_is_one_sentence_with_its_line(make_plane):
    plane = make_plane("def fit(ctx):\n    raise ValueError('no such thing')\n")
    plane.start("a")
    plane.wait_exit("a", code=1)
    (failed,) = plane.of(Failed)
    assert failed.error == "ValueError: no such thing (user_code.py:2)"
    assert "Traceback" in plane.logs()


THAWING = """
import torch

def fit(ctx):
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    net[0].requires_grad_(False)
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in ctx.batches(torch.ones(64, 4)):
        if ctx.step_number == 2:
            net[0].requires_grad_(True)
        ctx.step(model(batch.x).mean())
"""


@pytest.mark.parametrize("max_workers", [1, 2])
def test_a_parameter_that_is_trained_later_is_no_part_of_what_workers_exchange(make_plane, max_workers):
    plane = make_plane(THAWING, max_workers=max_workers, exact=False)
    plane.start_group("a")
    plane.wait_exit("a", code=max_workers - 1)
    # No step is made with it.
    assert len(plane.steps()) == (8 if max_workers == 1 else 2)
    errors = [failed.error for failed in plane.of(Failed)]
    assert ["0.weight was frozen when the training began" in error for error in errors] == [True] * (max_workers - 1)
