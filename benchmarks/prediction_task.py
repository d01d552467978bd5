"""What predictions are checked on: eight equal layers, 4 MB of parameters and 0.25 MB of output each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import springtide as st

WIDTH, LENGTH, NUM_LAYERS, NUM_SAMPLES = 512, 32, 8, 128


class Layer(nn.Module):
    """A feed-forward block with a residual on (n, LENGTH, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Sequential:
    """Eight equal blocks."""
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (NUM_SAMPLES, LENGTH, WIDTH)."""
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(NUM_SAMPLES, LENGTH, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def optimizer(parameters: object) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


task = st.Task(
    model=build, dataset=samples, loss=nn.functional.mse_loss, optimizer=optimizer, name="prediction", global_batch=16
)
