"""A model with every kind of state that an adapter has to keep, and samples for it."""

import torch


class Whole(torch.nn.Module):
    """A model that names no layers: normalises, has a branch that is never used, and one of its parts twice."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 3)
        self.unused = torch.nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]), persistent=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.inner(torch.tanh(self.inner(x)))))
        return self.out(x)


def samples():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(44, 6, generator=generator), torch.randint(0, 3, (44,), generator=generator)
