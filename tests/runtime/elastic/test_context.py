"""What user code calls: the halves of a step, clipping, prepared objects, and what is said to wrong calls."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from kits.runtime.runtime_plane import make_job
from springtide.core.errors import InvalidRequest
from springtide.runtime.local.inprocess import run_local

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def train(tmp_path):
    """Runs a training function in this process, on four steps of 16 samples."""

    def run(function, **fields):
        job = make_job(tmp_path, "", **{"num_epochs": 1, **fields})
        return run_local(function, job, tmp_path, lambda line: None)

    return run


def loss_of(model, batch):
    return 100 * (model(batch.x) - 1.0).square().mean()


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_is_backward_clip_and_update(train, exact):
    found = []

    def halves(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for batch in ctx.batches(X):
            ctx.backward(loss_of(model, batch))
            norm = ctx.clip_grad_norm(1.0)
            before = model.weight.detach().clone()
            is_done = ctx.update()
            assert math.isnan(norm) != is_done
            assert is_done != torch.equal(model.weight, before)
            # The rate times the bound.
            assert float((model.weight.detach() - before).norm()) <= 0.1 + 1e-6
        found.append((model.weight.tolist(), ctx.loss))

    def whole(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for batch in ctx.batches(X):
            ctx.step(loss_of(model, batch), clip_grad_norm=1.0)
        found.append((model.weight.tolist(), ctx.loss))

    def unclipped(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for batch in ctx.batches(X):
            ctx.step(loss_of(model, batch))
        found.append((model.weight.tolist(), ctx.loss))

    results = [train(function, exact=exact) for function in (halves, whole, unclipped)]
    assert found[0] == found[1] != found[2]
    assert [loss for _, loss in found] == [result.loss for result in results]


def test_objects_come_back_in_their_order_and_factories_get_the_optimizer(train):
    def fit(ctx):
        model = torch.nn.Linear(4, 1)
        average = AveragedModel(model)
        prepared = ctx.prepare(model, sgd, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), average)
        assert prepared[0] is model
        assert prepared[2].optimizer is prepared[1]
        assert prepared[3] is average
        for batch in ctx.batches(X):
            if ctx.step(loss_of(model, batch)):
                prepared[2].step()
        assert prepared[1].param_groups[0]["lr"] == pytest.approx(0.001)

    train(fit)


def test_a_micro_batch_cuts_a_batch_into_passes_of_one_step(train):
    seen = []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd, micro_batch=6)
        for batch in ctx.batches(X):
            seen.append((len(batch.x), ctx.step(loss_of(model, batch), clip_grad_norm=1.0), batch.shard))

    train(fit, exact=False)
    assert seen == [(5, False, 0), (5, False, 1), (6, True, 2)] * 4


def prepares(*objects):
    def fit(ctx):
        ctx.prepare(torch.nn.Linear(4, 1), sgd, *objects)

    return fit


def calls(act):
    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for batch in ctx.batches(X):
            act(ctx, loss_of(model, batch))

    return fit


def turns(act):
    def fit(ctx):
        first, second, *optimizers = ctx.prepare(torch.nn.Linear(4, 1), torch.nn.Linear(4, 1), sgd, sgd)
        for batch in ctx.batches(X):
            act(ctx, loss_of(first, batch) + loss_of(second, batch), optimizers)

    return fit


WRONG = {
    "no samples": (lambda ctx: ctx.prepare(torch.nn.Linear(4, 1), sgd, micro_batch=0), "at least 1, not 0"),
    "no state": (prepares(3), "got a int after the optimizer; give it state_dict"),
    "two optimizers": (prepares(sgd([torch.nn.Parameter(torch.zeros(1))])), "all optimizers right after the models"),
    "update alone": (calls(lambda ctx, loss: ctx.update()), r"ctx.update\(\) was called without a gradient"),
    "clip alone": (calls(lambda ctx, loss: ctx.clip_grad_norm(1.0)), "call ctx.backward"),
    "no update": (calls(lambda ctx, loss: ctx.backward(loss)), r"a batch was not trained on; call .*ctx.update\(\)"),
    "stranger": (
        calls(lambda ctx, loss: ctx.step(loss, optimizer=sgd([torch.nn.Parameter(torch.zeros(1))]))),
        r"not handed to ctx.prepare\(\)",
    ),
    "no turn": (turns(lambda ctx, loss, optimizers: ctx.step(loss)), "name the one whose turn it is"),
    "another's turn": (
        turns(lambda ctx, loss, optimizers: [ctx.backward(loss, optimizer=optimizers[0]), ctx.update(optimizers[1])]),
        "names another optimizer than",
    ),
    "backward twice": (calls(lambda ctx, loss: [ctx.backward(loss), ctx.backward(loss)]), "without a new batch"),
    "no bound": (calls(lambda ctx, loss: ctx.step(loss, clip_grad_norm=0.0)), "clipped to a positive number, not 0.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_told_what_to_do(train, name):
    function, told = WRONG[name]
    with pytest.raises(InvalidRequest, match=told):
        train(function, exact=False)


def test_a_scheduler_that_was_not_prepared_is_told_of(train, capsys):
    def fit(ctx, *objects):
        model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for batch in ctx.batches(X):
            ctx.step(loss_of(model, batch))
            scheduler.step()

    train(fit, exact=False)
    assert capsys.readouterr().err.count("a scheduler that was not prepared") == 1


@pytest.mark.parametrize("is_prepared", [True, False])
def test_an_average_that_was_not_prepared_is_told_of(train, capsys, is_prepared):
    def fit(ctx, *objects):
        model = torch.nn.Linear(4, 1)
        average = torch.optim.swa_utils.AveragedModel(model)
        model, _, *_ = ctx.prepare(model, sgd, *([average] if is_prepared else []))
        for batch in ctx.batches(X):
            ctx.step(loss_of(model, batch))
            average.update_parameters(model)

    gc.collect()
    train(fit, exact=False)
    assert capsys.readouterr().err.count("an AveragedModel that was not prepared") == (not is_prepared)


def test_optimizers_take_turns_on_a_batch_as_in_a_plain_loop(train):
    made = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    plain = copy.deepcopy(made)
    numbers = []

    def losses(first, second, x):
        # Each loss depends on both models.
        return lambda: 10 * (second(x) - first(x)).square().mean(), lambda: (first(x) + second(x) - 1.0).square().mean()

    def fit(ctx):
        first, second, one, two = ctx.prepare(*made, sgd, sgd)
        for batch in ctx.batches(X):
            of_one, of_two = losses(first, second, batch.x)
            told = of_one()
            assert ctx.step(told, optimizer=one, clip_grad_norm=0.5)
            assert ctx.loss == told.item()
            for _ in range(2):
                told = of_two()
                ctx.backward(told, optimizer=two)
                assert ctx.update(two)
                assert ctx.loss == told.item()
            numbers.append((ctx.step_number, batch.ids))

    result = train(fit, exact=False)
    assert [number for number, _ in numbers] == [0, 1, 2, 3]
    assert result.num_steps == 4
    optimizers = [sgd(model.parameters()) for model in plain]
    for _, ids in numbers:
        of_one, of_two = losses(*plain, X[torch.as_tensor(ids)])
        for place, loss in ((0, of_one), (1, of_two), (1, of_two)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss().backward()
            if place == 0:
                torch.nn.utils.clip_grad_norm_(plain[0].parameters(), 0.5)
            optimizers[place].step()
    for model, other in zip(made, plain, strict=True):
        assert torch.equal(model.weight, other.weight)
        assert torch.equal(model.bias, other.bias)


@pytest.mark.parametrize("fields", [{"exact": True}, {"exact": False, "micro_batch": 4}])
def test_turns_need_one_pass_over_a_batch(train, fields):
    micro_batch = fields.pop("micro_batch", None)

    def fit(ctx):
        ctx.prepare(torch.nn.Linear(4, 1), torch.nn.Linear(4, 1), sgd, sgd, micro_batch=micro_batch)

    with pytest.raises(InvalidRequest, match="take turns on one pass over a batch"):
        train(fit, **fields)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_loop_over_epochs_trains_as_one_loop_does(train, turns):
    def fit(ctx, make_loops):
        models = [torch.nn.Linear(4, 1) for _ in range(turns)]
        optimizers = [sgd(model.parameters()) for model in models]
        ctx.prepare(*models, *optimizers)
        seen = []
        for epoch, batches in make_loops(ctx):
            for batch in batches:
                for model, optimizer in zip(models, optimizers, strict=True):
                    ctx.step(loss_of(model, batch), optimizer=optimizer)
                seen.append((epoch, batch.epoch, batch.ids))
            # Its last step is committed before what follows an epoch.
            assert ctx.step_number == len(seen)
        return seen, [model.weight.tolist() for model in models]

    found = []
    train(lambda ctx: found.append(fit(ctx, lambda ctx: [(None, ctx.batches(X))])), num_epochs=2, exact=False)
    train(
        lambda ctx: found.append(fit(ctx, lambda ctx: ((e, ctx.batches(X)) for e in ctx.epochs()))),
        num_epochs=2,
        exact=False,
    )
    (one_loop, weights), (nested, nested_weights) = found
    assert [seen[1:] for seen in one_loop] == [seen[1:] for seen in nested]
    assert [seen[0] for seen in nested] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert weights == nested_weights


def test_an_epoch_is_one_complete_pass(train):
    def fit(body):
        def function(ctx):
            model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
            for _ in ctx.epochs():
                body(ctx, lambda batch: ctx.step(loss_of(model, batch)))

        return function

    def twice(ctx, step):
        for _ in range(2):
            for batch in ctx.batches(X):
                step(batch)

    def partly(ctx, step):
        step(next(iter(ctx.batches(X))))

    with pytest.raises(InvalidRequest, match="called twice in epoch 0"):
        train(fit(twice), num_epochs=2, exact=False)
    with pytest.raises(InvalidRequest, match="epoch 0 has ended without a complete pass"):
        train(fit(partly), num_epochs=2, exact=False)
    with pytest.raises(InvalidRequest, match="needs a model first"):
        train(lambda ctx: next(iter(ctx.epochs())))


@pytest.mark.parametrize("exact", [False, True])
def test_a_loop_sees_the_end_of_each_epoch(train, exact):
    found = []

    def fit(ctx):
        model, _, counts = ctx.prepare(torch.nn.Linear(4, 1), sgd, {"epochs": 0})
        for batch in ctx.batches(X[:50]):
            if ctx.step(loss_of(model, batch)) and batch.is_last:
                counts["epochs"] += 1
                found.append((ctx.step_number, batch.epoch, counts["epochs"]))

    train(fit, exact=exact)
    assert found == [(4, 0, 1)]


def test_a_loop_over_epochs_around_the_batches_is_refused_and_loses_nothing(train, tmp_path):
    seen = []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for epoch in range(2):
            seen.append(epoch)
            for batch in ctx.batches(X):
                ctx.step(loss_of(model, batch))

    with pytest.raises(InvalidRequest, match="One call goes through all epochs"):
        train(fit)
    assert seen == [0, 1]
    assert list(tmp_path.rglob("model.safetensors"))


def test_a_second_loop_goes_on_where_the_first_was_left(train):
    seen = []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for _ in range(2):
            for batch in ctx.batches(X):
                ctx.step(loss_of(model, batch))
                seen.append(ctx.step_number)
                if ctx.step_number == 2:
                    break

    train(fit, exact=False)
    assert seen == [1, 2, 3, 4]


def test_a_step_after_backward_is_told_to_be_an_update(train):
    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for batch in ctx.batches(X):
            ctx.backward(loss_of(model, batch))
            ctx.step()

    with pytest.raises(InvalidRequest, match=r"call ctx\.update\(\)"):
        train(fit, exact=False)


def test_a_loop_over_epochs_ends_where_another_worker_has_ended_the_training(train):
    seen = []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(4, 1), sgd)
        for epoch in ctx.epochs():
            for batch in ctx.batches(X):
                ctx.step(loss_of(model, batch))
                # As a trainer answers once it knows.
                ctx._trainer.next_shard = lambda: None
            seen.append(epoch)

    train(fit, num_epochs=2, exact=False)
    assert seen == [0]
