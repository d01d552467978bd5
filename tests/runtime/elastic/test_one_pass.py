"""Whole trainings by the default way, in real worker processes: one pass a worker, exchanged while it runs."""

from __future__ import annotations

import collections

import pytest

from kits.runtime.runtime_plane import TRAIN
from springtide.core.wire.workers import Switched
from springtide.runtime.data.shards import SampleSchedule

EPOCHS = 6
NUM_STEPS = EPOCHS * 13

# Every worker writes a digest of its model, buffers included, after each step.
DIGESTS = TRAIN.replace(
    "        ctx.step(loss)",
    """        ctx.step(loss)
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
        with open(os.path.join(os.path.dirname(__file__), f"digests-{os.getpid()}"), "a") as file:
            file.write(f"{ctx.step_number} {digest.hexdigest()}\\n")""",
).replace("import os, time", "import hashlib, os, time")
# Nothing that depends on how a batch is cut: no dropout, no noise, no statistics of a part.
PLAIN = (
    TRAIN.replace("nn.BatchNorm1d(16), ", "")
    .replace("nn.Dropout(0.2), ", "")
    .replace(" + 0.01 * torch.randn_like(batch.x)", "")
)
assert len({TRAIN, DIGESTS, PLAIN}) == 3


def assert_exactly_once(plane):
    """Every step once, in order, with exactly the samples of the schedule."""
    schedule = SampleSchedule(num_samples=200, global_batch_size=16, num_epochs=EPOCHS, seed=7)
    records = plane.steps()
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert [record["ids_digest"] for record in records] == [
        schedule.batch(step).ids_digest for step in range(NUM_STEPS)
    ]


TELLING = """
import torch

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    sizes = []
    for batch in ctx.batches(torch.ones(64, 4)):
        sizes.append(len(batch.x))
        assert ctx.step(model(batch.x).mean())
        scheduler.step()
    assert sizes == [16] * 8, sizes
    assert abs(optimizer.param_groups[0]["lr"] - 0.01) < 1e-9, optimizer.param_groups[0]["lr"]
"""


def test_one_worker_gets_whole_batches_and_every_call_completes_a_step(make_plane):
    plane = make_plane(TELLING, exact=False)
    plane.start_group("a")
    plane.wait_finished()


@pytest.mark.slow
def test_members_hold_the_same_bits_through_joins_departures_and_a_death(make_plane):
    plane = make_plane(DIGESTS, step_s=0.02, num_epochs=EPOCHS, exact=False, optimizer="adamw")
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b", "c")
    plane.wait_step(len(plane.steps()) + 4)
    plane.form("c", "a")
    plane.wait_exit("b")
    plane.wait_step(len(plane.steps()) + 4)
    plane.kill("a")
    plane.form("c", forced=True)
    plane.wait_step(len(plane.steps()) + 4)
    plane.grow("d")
    plane.wait_finished()
    assert_exactly_once(plane)
    assert plane.of(Switched, "b")[0].direction == "grow"
    digests = collections.defaultdict(list)
    for path in plane.work_dir.glob("digests-*"):
        for line in path.read_text().splitlines():
            digests[line.split()[0]].append(line.split()[1])
    assert sum(len(of_step) > 1 for of_step in digests.values()) > NUM_STEPS // 3
    assert all(len(set(of_step)) == 1 for of_step in digests.values())


@pytest.mark.slow
def test_a_resized_run_loses_as_the_undisturbed_one_does(make_plane):
    still = make_plane(PLAIN, num_epochs=EPOCHS, exact=False)
    still.start_group("a")
    still.wait_finished()
    plane = make_plane(PLAIN, step_s=0.02, num_epochs=EPOCHS, exact=False)
    plane.start_group("a", "b", "c")
    plane.wait_step(5)
    plane.form("c", "b")
    plane.wait_exit("a")
    plane.wait_step(len(plane.steps()) + 4)
    plane.kill("c")
    plane.form("b", forced=True)
    plane.wait_finished()
    assert_exactly_once(plane)
    expected = [record["loss"] for record in still.steps()]
    assert [record["loss"] for record in plane.steps()] == pytest.approx(expected, rel=2e-6)


DEATHS = {
    "forward": (9, "os.kill(os.getpid(), 9)"),
    "amid the backward pass": (9, "model[0].bias.register_hook(lambda _: os.kill(os.getpid(), 9))"),
    "before the exchange": (9, "ctx._trainer._reduce = lambda _: os.kill(os.getpid(), 9)"),
    "between the gradients and the tail": (
        9,
        "from springtide.runtime.elastic.steps.tail import Tail\n"
        "            Tail.exchange = lambda *_: (time.sleep(0.5), os.kill(os.getpid(), 9))",
    ),
    "after the exchange, before the commit": (8, "ctx._trainer._commit = lambda _: os.kill(os.getpid(), 9)"),
    "after the commit, before the log": (8, "ctx._trainer._step_log.write = lambda _: os.kill(os.getpid(), 9)"),
}


@pytest.mark.slow
def test_a_leader_that_dies_at_any_place_of_a_step_leaves_the_same_bits(make_plane):
    results = {}
    for place, (step, crash) in DEATHS.items():
        source = TRAIN.replace(
            "        if pause_s:",
            f"        if ctx.step_number == {step} and ctx._trainer.rank == 0 and "
            f"ctx._trainer.membership.generation == 2:\n            {crash}\n        if pause_s:",
        )
        plane = make_plane(source, num_epochs=EPOCHS, exact=False)
        plane.start_group("a", "b", "c")
        plane.wait(lambda plane=plane: "a" in plane.exits, f"the crash: {place}")
        plane.form("b", "c", forced=True)
        plane.wait_finished()
        assert_exactly_once(plane)
        results[place] = plane.result_hash()
    # Three members did nine steps in each of them.
    assert len(set(results.values())) == 1, results


# An exact job whose shards share a pass: dropout and noise of their own, clipping, no statistics of a part.
SHARED = TRAIN.replace("nn.BatchNorm1d(16), ", "").replace("ctx.step(loss)", "ctx.step(loss, clip_grad_norm=0.5)")


@pytest.mark.slow
def test_an_exact_job_in_one_pass_has_the_same_bits_through_joins_departures_and_a_death(make_plane):
    hashes = set()
    for members in (("a",), ("a", "b"), ("a", "b", "c", "d")):
        plane = make_plane(SHARED, num_epochs=EPOCHS, exact=True)
        plane.start_group(*members)
        plane.wait_finished()
        hashes.add(plane.result_hash())
    plane = make_plane(SHARED, step_s=0.02, num_epochs=EPOCHS, exact=True)
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b", "c")
    plane.wait_step(len(plane.steps()) + 4)
    plane.kill("a")
    plane.form("c", "b", forced=True)
    plane.wait_step(len(plane.steps()) + 4)
    plane.grow("d", "e")
    plane.wait_finished()
    assert_exactly_once(plane)
    assert len(hashes | {plane.result_hash()}) == 1
