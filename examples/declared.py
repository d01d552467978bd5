"""A training job that is declared instead of written: a model, a dataset, a loss and an optimizer.

springtide run examples/declared.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import springtide as st


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def make_dataset(num_points: int = 4096) -> tuple[Tensor, Tensor]:
    """Points of the plane (n, 2) and the height of a wave above each of them (n, 1)."""
    points = torch.rand(num_points, 2, generator=torch.Generator().manual_seed(3)) * 4 - 2
    return points, torch.sin(3 * points[:, :1]) * torch.cos(2 * points[:, 1:])


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)  # type: ignore[arg-type]


wave = st.Task(
    model=make_model,
    dataset=make_dataset,
    loss=nn.functional.mse_loss,
    optimizer=make_optimizer,
    name="wave",
    deadline="5m",
    global_batch=128,
    epochs=60,
)
