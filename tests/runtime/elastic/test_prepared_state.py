"""Schedulers and other prepared objects in real workers: as in the undisturbed run, whatever happens to the group."""

from __future__ import annotations

import collections
import itertools

import pytest

from springtide.core.wire.workers import CheckpointWritten, Preempt
from springtide.runtime.elastic.meeting import MeetingPlace

EPOCHS = 12
NUM_STEPS = EPOCHS * 13

SCHEDULED = """
import os, time
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

MAKERS = {
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=200),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=9), schedulers.MultiStepLR(optimizer, [9, 20, 90])],
        milestones=[11],
    ),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.99**step),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.9, threshold=0.05),
}

class Count:
    def __init__(self):
        self.by_epoch, self.sums = {}, torch.zeros(200, 100)

    def add(self, epoch):
        self.by_epoch[epoch] = self.by_epoch.get(epoch, 0) + 1
        self.sums += 1.0

    def state_dict(self):
        return {"by_epoch": self.by_epoch, "sums": self.sums}

    def load_state_dict(self, state):
        self.by_epoch, self.sums = dict(state["by_epoch"]), state["sums"].clone()

def fit(ctx):
    name = os.environ["SCHEDULE"]
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    model = nn.Linear(8, 3)
    model, optimizer, scheduler, count, average = ctx.prepare(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        MAKERS[name],
        Count(),
        AveragedModel(model),
    )
    file = open(os.path.join(os.path.dirname(__file__), f"lines-{os.getpid()}"), "a", buffering=1)
    for batch in ctx.batches((x, y)):
        time.sleep(float(os.environ["STEP_S"]))
        #place
        is_done = ctx.step(nn.functional.cross_entropy(model(batch.x), batch.y))
        # As loops do that know of no step that is done again; the parts of an exact job they have to know.
        if name != "plateau" or is_done:
            scheduler.step(*([ctx.loss] if name == "plateau" else []))
            count.add(batch.epoch)
            average.update_parameters(model)
        if is_done:
            group = optimizer.param_groups[0]
            values = (group["lr"], group["momentum"], scheduler.get_last_lr(), scheduler.last_epoch, count.by_epoch)
            file.write(f"{ctx.step_number}|{values} {float(count.sums.mean())} {int(average.n_averaged)}\\n")
"""


def lines_of(plane):
    """By step, what workers saw after it."""
    seen = collections.defaultdict(list)
    for path in plane.work_dir.glob("lines-*"):
        for line in path.read_text().splitlines(keepends=True):
            # A worker that was killed may have left a part of a line.
            if line.endswith("\n"):
                step, _, values = line.rstrip().partition("|")
                seen[int(step)].append(values)
    return seen


def undisturbed(make_plane, source, **options):
    plane = make_plane(source, num_epochs=EPOCHS, **options)
    plane.start_group("a")
    plane.wait_finished()
    seen = lines_of(plane)
    assert sorted(seen) == list(range(1, NUM_STEPS + 1))
    return {step: values for step, (values,) in seen.items()}


def was_streamed(plane):
    place = MeetingPlace(plane.work_dir / "rendezvous" / f"g{plane.generation}", 10.0)
    return not place.check(["sync"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one cycle", "sequential", "lambda", "plateau"])
def test_rates_are_those_of_the_undisturbed_run_on_every_worker(make_plane, name):
    options = {"environment": {"SCHEDULE": name}, "exact": name == "plateau"}
    expected = undisturbed(make_plane, SCHEDULED, **options)
    assert len({values.partition(",")[0] for values in expected.values()}) > 3, "the schedule changes nothing"
    options |= {"step_s": 0.02, "num_epochs": EPOCHS, "checkpoint_interval_s": 0.1}
    plane = make_plane(SCHEDULED, **options)

    def go_on(num_steps=4):
        plane.wait_step(len(plane.steps()) + num_steps)

    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b")
    assert was_streamed(plane)
    go_on()
    plane.kill("a")
    plane.form("b", forced=True)
    go_on()
    plane.grow("c")
    go_on()
    plane.kill("c")
    plane.form("b", forced=True)
    go_on()
    # The joiner leads from here on.
    plane.start("d")
    plane.wait_ready("d")
    plane.form("d", "b")
    go_on()
    plane.form("d")
    plane.wait_exit("b")
    plane.wait(lambda: plane.of(CheckpointWritten, "d"), "a checkpoint")
    plane.kill("d")
    again = make_plane(SCHEDULED, work_dir=plane.work_dir, **options)
    again.start_group("e", "f")
    again.wait_step(len(again.steps()) + 4)
    again.generation += 1
    again.order(Preempt(generation=again.generation), "e", "f")
    again.wait_exit("e", "f")
    last = make_plane(SCHEDULED, work_dir=plane.work_dir, **options)
    last.start_group("g")
    last.wait_finished()
    seen = lines_of(plane)
    assert sorted(seen) == list(range(1, NUM_STEPS + 1))
    assert {step: set(values) for step, values in seen.items()} == {step: {v} for step, v in expected.items()}
    assert sum(len(values) > 1 for values in seen.values()) > 8, "no step had two workers"


# The second member fails once the others have the step: it is one step behind them, and takes their state.
BEHIND = SCHEDULED.replace(
    "#place",
    """if ctx.step_number == 9 and ctx._trainer.rank == 1 and ctx._trainer.membership.generation == 2:
            reduce = ctx._trainer._reduce
            def fail(pending):
                del ctx._trainer._reduce
                reduce(pending)
                from springtide.core.errors import PeerLost
                raise PeerLost("as if a member had died after the exchange")
            ctx._trainer._reduce = fail""",
)
assert BEHIND != SCHEDULED


@pytest.mark.slow
def test_a_member_that_missed_a_step_steps_nothing_twice(make_plane):
    options = {"environment": {"SCHEDULE": "one cycle"}, "exact": False}
    expected = undisturbed(make_plane, SCHEDULED, **options)
    plane = make_plane(BEHIND, step_s=0.02, num_epochs=EPOCHS, **options)
    plane.start_group("a", "b")
    plane.wait_step(10)
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    seen = lines_of(plane)
    assert [len(seen[step]) for step in (9, 10, 11)] == [2, 1, 2]
    assert {step: set(values) for step, values in seen.items()} == {step: {v} for step, v in expected.items()}


# Half precision with a scaler whose scale is halved by overflows, clipping, and a digest of all state after each step.
SCALED = """
import hashlib, os, time
import torch
from torch import nn

def fit(ctx):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    model, optimizer, scaler = ctx.prepare(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3),
    )
    file = open(os.path.join(os.path.dirname(__file__), f"lines-{os.getpid()}"), "a", buffering=1)
    for batch in ctx.batches((x, y)):
        time.sleep(0.02)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(batch.x), batch.y)
        ctx.backward(loss)
        norm = ctx.clip_grad_norm(0.3)
        if ctx.update():
            states = [optimizer.state[parameter] for parameter in model.parameters()]
            tensors = [*model.state_dict().values(), *(state[key] for state in states for key in sorted(state))]
            digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
            file.write(f"{ctx.step_number}|{scaler.get_scale()} {norm} {digest}\\n")
"""


@pytest.mark.slow
def test_members_clip_scale_and_skip_alike_and_joiners_have_their_bits(make_plane):
    plane = make_plane(SCALED, num_epochs=EPOCHS, exact=False)
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b", "c")
    assert was_streamed(plane)
    plane.wait_step(len(plane.steps()) + 4)
    plane.kill("a")
    plane.form("b", "c", forced=True)
    plane.wait_step(len(plane.steps()) + 4)
    plane.grow("d")
    plane.wait_finished()
    seen = lines_of(plane)
    assert sorted(seen) == list(range(1, NUM_STEPS + 1))
    assert all(len(set(values)) == 1 for values in seen.values())
    assert sum(len(values) > 1 for values in seen.values()) > NUM_STEPS // 3
    norms = [float(values[0].split()[1]) for values in seen.values()]
    assert sum(norm > 0.3 for norm in norms) > 10, "nothing was clipped"
    scales = [float(seen[step][0].split()[0]) for step in sorted(seen)]
    num_halved = sum(after < before for before, after in itertools.pairwise(scales))
    assert num_halved > 5, "no step was skipped"


STRAY = """
import torch

def fit(ctx):
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    model, optimizer = ctx.prepare(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    for batch in ctx.batches(torch.ones(64, 4)):
        ctx.step(model(batch.x).mean())
        scheduler.step()
"""


def test_a_scheduler_that_was_not_prepared_and_batch_normalisation_are_told_of_once(make_plane):
    plane = make_plane(STRAY, max_workers=2, exact=False)
    plane.start_group("a")
    plane.wait_finished()
    assert plane.logs().count("a scheduler that was not prepared") == 1
    assert plane.logs().count("the model has batch normalisation") == 1


# What many loops do: something at the end of an epoch, and a count of epochs. #end says how the loop finds the end.
BY_EPOCH = """
import os, time
import torch

def fit(ctx):
    x = torch.randn(203, 4, generator=torch.Generator().manual_seed(1))
    model, optimizer, scheduler, seen = ctx.prepare(
        torch.nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 7], 0.5),
        {"best": 1e9, "bad": 0},
    )
    file = open(os.path.join(os.path.dirname(__file__), f"lines-{os.getpid()}"), "a", buffering=1)
    epoch = 0
    for batch in ctx.batches(x):
        time.sleep(float(os.environ["STEP_S"]))
        #before
        if ctx.step((model(batch.x) - x.sum()).square().mean()):
            file.write(f"{ctx.step_number}|{optimizer.param_groups[0]['lr']} {seen['bad']}\\n")
            #end
"""
BY_LAST = BY_EPOCH.replace(
    "#end",
    """if batch.is_last:
                scheduler.step()
                is_better = ctx.step_number % 3 == 0
                seen["bad"] = 0 if is_better else seen["bad"] + 1""",
)
BY_OWN_COUNT = BY_EPOCH.replace(
    "#before",
    """if batch.epoch > epoch:
            epoch = batch.epoch
            scheduler.step()""",
)
TOLD = "set lr=0.05 in the optimizer, and that of the worker with rank 0 0.1"


@pytest.mark.slow
def test_what_a_loop_does_at_the_end_of_an_epoch_is_done_alike(make_plane):
    options = {"exact": False, "num_epochs": 9, "checkpoint_interval_s": 0.1}
    expected = undisturbed_by_epoch(make_plane, BY_LAST, **options)
    plane = make_plane(BY_LAST, step_s=0.02, **options)
    plane.start_group("a")
    plane.wait_step(30)
    plane.grow("b")
    plane.wait_step(45)
    plane.kill("a")
    plane.form("b", forced=True)
    plane.wait_finished()
    seen = lines_of(plane)
    assert {step: set(values) for step, values in seen.items()} == {step: {v} for step, v in expected.items()}
    assert len({value.split()[0] for value in expected.values()}) == 3
    assert len({value.split()[1] for value in expected.values()}) > 2
    assert "in the optimizer" not in plane.logs()


def undisturbed_by_epoch(make_plane, source, **options):
    plane = make_plane(source, **options)
    plane.start_group("a")
    plane.wait_finished()
    return {step: values for step, (values,) in lines_of(plane).items()}


@pytest.mark.slow
def test_rates_that_one_worker_sets_alone_are_told_of_once(make_plane):
    plane = make_plane(BY_OWN_COUNT, exact=False, num_epochs=9, step_s=0.06)
    plane.start_group("a")
    # In the third epoch: the joiner steps once for all epochs before, and is a milestone ahead one epoch later.
    plane.wait_step(30)
    plane.grow("b")
    plane.wait_finished()
    assert plane.logs().count(TOLD) == 1


BREAKS = """
import os, time
import torch

def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    num_here = 0
    for batch in ctx.batches(torch.ones(64, 4)):
        time.sleep(0.02)
        ctx.step(model(batch.x).mean())
        num_here += 1
        if num_here == 200:
            break
"""


@pytest.mark.slow
def test_a_loop_that_one_worker_leaves_ends_on_all(make_plane):
    plane = make_plane(BREAKS, exact=False, num_epochs=100)
    plane.start_group("a")
    plane.wait_step(4)
    plane.grow("b")
    # The first has counted more steps, and leaves alone.
    plane.wait_finished()
    assert len(plane.steps()) == 200
    assert plane.logs().count("the training function has returned on another worker after step 200") == 1
