"""Tensors of a batch's size that a program uses in the next one are found, and left as they were."""

from __future__ import annotations

import sys

import pytest
import torch

from springtide.runtime.libraries.carried import CarriedTensors

SAMPLES = 6


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRU(3, 4, batch_first=True)
        self.places = torch.randn(SAMPLES, 5)
        self.hidden = self.last = None

    def forward(self, x, *, carries):
        x = x + self.places[:, :, None]
        out, hidden = self.cell(x, self.hidden if carries else None)
        self.hidden, self.last = hidden.detach(), out
        return out.mean()


def carried_in(model, **options):
    carried = CarriedTensors()
    found = []
    for num_samples in (0, SAMPLES, SAMPLES):
        carried.watch(model, [], num_samples)
        model(torch.randn(SAMPLES, 5, 3), **options)
        found.append(carried.used())
    return found


def test_a_hidden_state_that_is_used_again_is_found():
    model = Recurrent()
    assert carried_in(model, carries=True) == ["", "hidden", "hidden"]
    assert type(model.hidden) is type(model.last) is torch.Tensor


def test_what_is_kept_and_not_used_is_none_and_neither_is_what_stays():
    model = Recurrent()
    assert carried_in(model, carries=False) == ["", "", ""]
    assert type(model.hidden) is type(model.places) is torch.Tensor


@pytest.mark.parametrize("carries", [True, False])
def test_a_state_in_a_variable_of_a_loop_is_found(carries):
    cell, carried, found = torch.nn.LSTM(3, 4), CarriedTensors(), []
    state = None
    for num_samples in (0, SAMPLES, SAMPLES):
        carried.watch(cell, [sys._getframe()], num_samples)
        out, (hidden, memory) = cell(torch.randn(5, SAMPLES, 3), state)
        found.append(carried.used())
        if carries:
            state = (hidden.detach(), memory.detach())
    assert found == (["", "state", "state"] if carries else ["", "", ""])
    assert type(out) is type(hidden) is torch.Tensor
    assert carries == (state is not None)
