"""Which gradients are exchanged before which update, and what is refused."""

from __future__ import annotations

import pytest
import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.libraries.loop import Exchanged
from springtide.runtime.libraries.turns import OptimizerTurns, watch_clipping


class LoopDouble:
    """Notes whose gradients are exchanged; the exchange makes them other tensors, as a real one does."""

    def __init__(self):
        self.places = []
        self.outcome = Exchanged.DONE

    def weigh_turn(self, number, loss, told):
        pass

    def exchange_turn(self, place):
        self.places.append(place)
        return self.outcome


@pytest.fixture
def models():
    return [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]


@pytest.fixture
def optimizers(models):
    return [torch.optim.SGD(model.parameters(), 0.1) for model in models]


@pytest.fixture
def loop():
    return LoopDouble()


@pytest.fixture
def turns(loop, optimizers):
    turns = OptimizerTurns(loop, optimizers, "go_back(loss)")
    turns.begin_step()
    return turns


def go_back(turns, *models):
    loss = sum(model(torch.ones(1, 2)).sum() for model in models)
    turns.before_backward(0, loss, 1.0)
    loss.backward()
    turns.after_backward()


def test_an_update_exchanges_its_own_gradients_once(turns, loop, models, optimizers):
    go_back(turns, *models)
    assert turns.before_update(optimizers[1]) is Exchanged.DONE
    turns.before_update(optimizers[1])
    turns.before_update(optimizers[0])
    assert loop.places == [1, 0]
    # Of none that this loop has.
    turns.before_update(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    # Without a new backward pass, and with one.
    optimizers[0].zero_grad()
    turns.before_update(optimizers[0])
    go_back(turns, models[0])
    turns.before_update(optimizers[0])
    assert loop.places == [1, 0, 0]


def test_clipping_exchanges_before_the_update_does(turns, loop, models, optimizers):
    go_back(turns, *models)
    turns.before_clip(models[1].parameters())
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
    assert loop.places == [1]
    turns.before_update(optimizers[1])
    assert loop.places == [1]
    loop.outcome = Exchanged.AGAIN
    assert turns.before_clip(models[0].parameters()) is Exchanged.AGAIN


def test_gradients_that_were_clipped_and_dropped_are_exchanged_again(turns, loop, models, optimizers):
    go_back(turns, *models)
    turns.before_clip([*models[0].parameters(), *models[1].parameters()])
    turns.before_update(optimizers[0])
    optimizers[1].zero_grad(set_to_none=False)
    go_back(turns, models[1])
    turns.before_update(optimizers[1])
    assert loop.places == [0, 1, 1]


def test_a_backward_pass_that_adds_to_clipped_gradients_is_refused(turns, models):
    go_back(turns, *models)
    turns.before_clip(models[1].parameters())
    with pytest.raises(InvalidRequest, match=r"clipped already.*--workers 1"):
        go_back(turns, *models)


def test_gradients_of_an_earlier_step_are_refused_unless_they_were_dropped(turns, loop, models, optimizers):
    for set_to_none in (True, False):
        go_back(turns, *models)
        turns.before_update(optimizers[0])
        turns.begin_step()
        optimizers[0].zero_grad(set_to_none=set_to_none)
        go_back(turns, *models)
        turns.before_update(optimizers[0])
        with pytest.raises(InvalidRequest, match=r"earlier batch.*--workers 1"):
            turns.before_update(optimizers[1])
        turns.begin_step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()


def test_gradients_that_came_in_another_way_are_refused(turns, models, optimizers):
    models[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(InvalidRequest, match=r"not of this batch.*go_back\(loss\)"):
        turns.before_update(optimizers[0])
    turns.begin_step()
    optimizers[0].zero_grad()
    go_back(turns, *models)
    models[1].weight.grad.mul_(2.0)
    with pytest.raises(InvalidRequest, match=r"changed after their backward pass.*go_back\(loss\)"):
        turns.before_update(optimizers[1])


def test_an_update_past_the_library_is_refused(turns, models, optimizers):
    go_back(turns, *models)
    turns.before_update(optimizers[0])
    optimizers[0].step()
    with pytest.raises(InvalidRequest, match="past the library"):
        optimizers[1].step()


def test_an_update_by_another_optimizer_of_the_same_parameters_is_refused(turns, models, optimizers):
    go_back(turns, *models)
    # As that of a method that goes up before it goes down.
    base = torch.optim.SGD(models[0].parameters(), 0.1)
    with pytest.raises(InvalidRequest, match=r"past the library.*--workers 1"):
        base.step()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()


def test_an_optimizer_that_has_its_loss_computed_again_is_refused(turns, loop, models):
    optimizer = torch.optim.LBFGS(models[0].parameters(), max_iter=4)
    turns = OptimizerTurns(loop, [optimizer], "go_back(loss)")
    turns.begin_step()

    def closure():
        optimizer.zero_grad()
        loss = (models[0](torch.ones(1, 2)) - 3.0).square().sum()
        turns.before_backward(0, loss, 1.0)
        loss.backward()
        turns.after_backward()
        turns.before_update(optimizer)
        return loss

    with pytest.raises(InvalidRequest, match=r"computed several times.*--workers 1"):
        optimizer.step(closure)
    assert loop.places == [0]


def test_torchs_functions_for_clipping_are_watched(monkeypatch, models):
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            monkeypatch.setattr(module, name, getattr(module, name))
    seen = []
    watch_clipping(seen.append)
    models[0](torch.ones(1, 2)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.5) > 1.0
    from torch.nn.utils.clip_grad import clip_grad_value_

    clip_grad_value_(models[0].weight, 0.1)
    assert [len(parameters) for parameters in seen] == [2, 1]
    assert float(models[0].weight.grad.max()) == pytest.approx(0.1)
    # Without any gradient, as where a step is given up.
    models[0].zero_grad()
    assert clip_grad_value_(list(models[0].parameters()), 0.1) is None
