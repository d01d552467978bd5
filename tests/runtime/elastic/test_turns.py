"""Two optimizers that take turns, in real workers: deaths between two turns of a step repeat none of them."""

from __future__ import annotations

import collections

import pytest

from springtide.core.wire.workers import GroupBrokenReport
from springtide.runtime.elastic.meeting import MeetingPlace

EPOCHS = 8
NUM_STEPS = EPOCHS * 13

# Generator and discriminator, each with batch statistics and a scheduler, which is stepped whatever update() returns.
TURNS = """
import hashlib, os, time
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

def fit(ctx):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    generator, critic, of_generator, of_critic, *both = ctx.prepare(
        generator,
        critic,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        lambda of_generator, of_critic: schedulers.ExponentialLR(of_generator, 0.99),
        lambda of_generator, of_critic: schedulers.OneCycleLR(of_critic, 0.1, total_steps=300),
    )
    loss_of = nn.functional.binary_cross_entropy_with_logits
    file = open(os.path.join(os.path.dirname(__file__), f"lines-{os.getpid()}"), "a", buffering=1)
    line = ""
    for batch in ctx.batches(x):
        if line:
            file.write(line)
        time.sleep(float(os.environ["STEP_S"]))
        fake = generator(torch.randn(len(batch.x), 4))
        real, made = critic(batch.x), critic(fake.detach())
        #first
        ctx.backward(loss_of(real, torch.ones_like(real)) + loss_of(made, torch.zeros_like(made)), optimizer=of_critic)
        ctx.clip_grad_norm(0.5)
        was_first = ctx.update(of_critic)
        both[1].step()
        #second
        made = critic(fake)
        was_second = ctx.step(loss_of(made, torch.ones_like(made)), optimizer=of_generator)
        both[0].step()
        tensors = [*generator.state_dict().values(), *critic.state_dict().values()]
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
        rates = [scheduler.get_last_lr() for scheduler in both]
        line = f"{batch.step + 1}|{rates}|{digest}\\n" if was_second else ""
    file.write(line)
"""


def lines_of(plane):
    """By step, what workers saw after it: rates and digest."""
    seen = collections.defaultdict(list)
    for path in plane.work_dir.glob("lines-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, rates, digest = line.rstrip().split("|")
                seen[int(step)].append((rates, digest))
    return seen


@pytest.fixture
def undisturbed(make_plane):
    plane = make_plane(TURNS, num_epochs=EPOCHS, exact=False)
    plane.start_group("a")
    plane.wait_finished()
    assert [record["step"] for record in plane.steps()] == list(range(1, NUM_STEPS + 1))
    seen = lines_of(plane)
    return {step: seen[step][0][0] for step in seen}


def assert_alike(plane, expected):
    assert [record["step"] for record in plane.steps()] == list(range(1, NUM_STEPS + 1))
    seen = lines_of(plane)
    assert {step: {rates for rates, _ in values} for step, values in seen.items()} == {
        step: {rates} for step, rates in expected.items()
    }
    assert all(len({digest for _, digest in values}) == 1 for values in seen.values())
    assert sum(len(values) > 1 for values in seen.values()) > 8


@pytest.mark.slow
def test_joiners_leavers_and_deaths_change_no_rate_and_members_hold_the_same_bits(make_plane, undisturbed):
    plane = make_plane(TURNS, step_s=0.02, num_epochs=EPOCHS, exact=False)
    plane.start_group("a")
    plane.wait_step(5)
    plane.grow("b")
    place = MeetingPlace(plane.work_dir / "rendezvous" / f"g{plane.generation}", 10.0)
    assert not place.check(["sync"])
    plane.wait_step(len(plane.steps()) + 6)
    plane.kill("a")
    plane.form("b", forced=True)
    plane.wait_step(len(plane.steps()) + 4)
    plane.grow("c")
    plane.wait_step(len(plane.steps()) + 6)
    plane.form("c")
    plane.wait_finished()
    assert_alike(plane, undisturbed)


FAIL = """if ctx.step_number == 9 and ctx._trainer.rank == RANK and ctx._trainer.membership.generation == 2:
            reduce = ctx._trainer._reduce
            def fail(pending):
                del ctx._trainer._reduce
                WHEN
                from springtide.core.errors import PeerLost
                raise PeerLost("as if a member had died")
            ctx._trainer._reduce = fail"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_member_that_missed_a_turn_is_brought_to_where_the_others_are(make_plane, undisturbed, turn, rank):
    crash = FAIL.replace("RANK", str(rank)).replace("WHEN", "reduce(pending)")
    source = TURNS.replace(f"#{turn}", crash)
    assert source != TURNS
    plane = make_plane(source, step_s=0.02, num_epochs=EPOCHS, exact=False)
    plane.start_group("a", "b")
    # The other has the turn, and waits for the next one.
    plane.wait(lambda: plane.of(GroupBrokenReport, "ab"[rank]), "the failure")
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert_alike(plane, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("next_members", [("b", "c"), ("b", "d"), ("c",)])
def test_a_death_between_turns_repeats_the_first_nowhere(make_plane, undisturbed, next_members):
    crash = "if ctx.step_number == 9 and ctx._trainer.rank == 0 and ctx._trainer.membership.generation == 2:"
    source = TURNS.replace("#second", f"{crash}\n            os.kill(os.getpid(), 9)")
    plane = make_plane(source, step_s=0.01, num_epochs=EPOCHS, exact=False)
    plane.start("a", "b", "c", "d")
    plane.wait_ready("a", "b", "c", "d")
    plane.form("a", "b", "c")
    plane.wait(lambda: "a" in plane.exits, "the crash")
    # A new worker gets the state of the others, with the first turn made.
    plane.form(*next_members, forced=True)
    plane.wait_finished()
    assert_alike(plane, undisturbed)
