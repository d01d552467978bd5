"""Losses that count for a number of tokens: the same training on any number of workers, in any parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kits.runtime.runtime_plane import TRAIN, make_job
from springtide.core.errors import InvalidRequest
from springtide.runtime.local.inprocess import run_local

# Samples of one to eight tokens; some batches have parts without any.
WEIGHTED = (
    TRAIN.replace("nn.BatchNorm1d(16), ", "")
    .replace("nn.Dropout(0.2), ", "")
    .replace(
        "        loss = nn.functional.cross_entropy(model(batch.x + 0.01 * torch.randn_like(batch.x)), batch.y)",
        """        is_token = batch.x > (0.9 if ctx.step_number % 5 else 2.9)
        logits = model(batch.x)[:, None, :].expand(-1, 8, -1)
        loss = nn.functional.cross_entropy(logits[is_token], batch.y[:, None].expand(-1, 8)[is_token])""",
    )
    .replace("ctx.step(loss)", "ctx.step(loss, weight=is_token.sum())")
)
EPOCHS = 4


def plain_losses():
    """What one plain loop over whole batches loses."""
    from springtide.runtime.data.shards import SampleSchedule, seed_everything

    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    seed_everything(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = SampleSchedule(num_samples=200, global_batch_size=16, num_epochs=EPOCHS, seed=7)
    losses = []
    for step in range(schedule.total_steps):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + 0.01 * step)
        ids = torch.as_tensor(schedule.batch(step).ids)
        is_token = x[ids] > (0.9 if step % 5 else 2.9)
        logits = model(x[ids])[:, None, :].expand(-1, 8, -1)
        loss = nn.functional.cross_entropy(logits[is_token], y[ids][:, None].expand(-1, 8)[is_token])
        if is_token.any():
            loss.backward()
        # A batch without tokens leaves no gradients, and the optimizer does nothing.
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if is_token.any() else 0.0)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_a_resized_run_loses_as_a_plain_loop_does(make_plane, exact):
    plane = make_plane(WEIGHTED, step_s=0.02, num_epochs=EPOCHS, exact=exact)
    plane.start_group("a", "b")
    plane.wait_step(5)
    plane.grow("c")
    plane.wait_step(len(plane.steps()) + 5)
    plane.form("c", "b")
    plane.wait_exit("a")
    plane.wait_step(len(plane.steps()) + 5)
    plane.kill("c")
    plane.form("b", forced=True)
    plane.wait_finished()
    expected = plain_losses()
    assert 0.0 in expected
    assert [record["loss"] for record in plane.steps()] == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_an_exact_job_has_the_same_bits_on_any_number_of_workers(make_plane):
    hashes = set()
    for members in (("a",), ("a", "b", "c", "d")):
        plane = make_plane(WEIGHTED, num_epochs=1, exact=True)
        plane.start_group(*members)
        plane.wait_finished()
        hashes.add(plane.result_hash())
    assert len(hashes) == 1


def gradient(tmp_path, weights, *, scaler=None, micro_batch=None, **fields):
    """The change of a weight in one step over the samples 0 to 3, and the loss that the step then had."""
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    found = []

    def fit(ctx):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        objects = () if scaler is None else (scaler,)
        model, *_ = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=1.0), *objects, micro_batch=micro_batch)
        for batch in ctx.batches(x):
            weight = None if weights is None else sum(weights[index] for index in batch.ids)
            parts = [(model(x[index]) + x[index]) * (1.0 if weights is None else weights[index]) for index in batch.ids]
            total = torch.stack(parts).sum()
            loss = total / (len(parts) if weight is None else weight)
            if ctx.step(loss, weight=weight):
                found.append((-model.weight.item(), ctx.loss))

    job = make_job(tmp_path, "", global_batch_size=4, num_epochs=1, **fields)
    run_local(fit, job, tmp_path / "out", lambda line: None)
    return found[0]


@pytest.mark.parametrize("fields", [{"exact": False}, {"exact": False, "micro_batch": 2}, {"exact": True}])
def test_parts_count_for_their_weights(tmp_path, fields):
    assert gradient(tmp_path, None, **fields) == pytest.approx((3.75, 3.75))
    # Parts that count for nothing among them: their loss is NaN.
    for weights in ([1, 2, 3, 4], [0, 0, 1, 1], [0.5, 0, 0, 0]):
        expected = sum(w * x for w, x in zip(weights, (1, 2, 4, 8), strict=True)) / sum(weights)
        given = [torch.tensor(weight) for weight in weights]
        assert gradient(tmp_path, given, **fields) == pytest.approx((expected, expected))


def test_a_batch_that_counts_for_nothing_changes_nothing(tmp_path):
    assert gradient(tmp_path, [0, 0, 0, 0], exact=False) == (0.0, 0.0)


def test_weights_go_together_with_a_scaler(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    change, _ = gradient(tmp_path, [1, 2, 3, 4], scaler=scaler, exact=False)
    assert change == pytest.approx(4.9)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", torch.ones(2)])
def test_what_is_no_weight_is_refused(tmp_path, weight):
    def fit(ctx):
        model, _ = ctx.prepare(nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for batch in ctx.batches(torch.ones(4, 1)):
            ctx.step(model(batch.x).mean(), weight=weight)

    with pytest.raises(InvalidRequest, match="the weight of a loss"):
        run_local(fit, make_job(tmp_path, "", num_epochs=1), tmp_path / "out", lambda line: None)


@pytest.mark.parametrize("fields", [{"exact": False, "micro_batch": 4}, {"exact": True}])
def test_a_mean_over_weights_of_classes_counts_for_these(tmp_path, fields, capsys):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y, classes = (x[:, 0] > 0.6).long(), torch.tensor([0.1, 5.0])

    def losses(model):
        logits = model(x)
        return nn.functional.cross_entropy(logits, y, weight=classes), logits.square().mean()

    def gradient(with_other):
        found = []

        def fit(ctx):
            model = nn.Linear(4, 2)
            nn.init.ones_(model.weight)
            nn.init.zeros_(model.bias)
            expected, other = losses(model)
            (expected + other if with_other else expected).backward()
            expected = model.weight.grad.clone(), expected.item()
            model.zero_grad()
            model, _ = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=1.0), micro_batch=fields.get("micro_batch"))
            for batch in ctx.batches((x, y)):
                logits = model(batch.x)
                loss = nn.functional.cross_entropy(logits, batch.y, weight=classes)
                if ctx.step(loss + logits.square().mean() if with_other else loss):
                    found.append((1.0 - model.weight.detach(), ctx.loss, *expected))

        job = make_job(tmp_path, "", global_batch_size=16, num_epochs=1, exact=fields["exact"])
        run_local(fit, job, tmp_path / "out", lambda line: None)
        return found[0]

    change, loss, expected, expected_loss = gradient(False)
    torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert "weight=" not in capsys.readouterr().err
    gradient(True)
    assert capsys.readouterr().err.count("step(loss, weight=(labels") == 1


def test_a_loss_that_parts_do_not_add_up_to_is_told_of_once(tmp_path, capsys):
    def fit(ctx):
        model, _ = ctx.prepare(nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for batch in ctx.batches(torch.ones(16, 1)):
            ctx.step(model(batch.x).square().mean().sqrt())

    run_local(
        fit, make_job(tmp_path, "", global_batch_size=8, num_epochs=2, exact=False), tmp_path / "out", lambda line: None
    )
    assert capsys.readouterr().err.count("the loss is no sum over samples") == 1
