"""Training whose batch may grow while it runs: the noisier its gradients get, the more samples a step is worth.

springtide up --policy goodput
springtide run examples/growing_batch.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import springtide as st

NUM_SAMPLES = 8192
# Chosen so that the run takes a minute or two on one worker.
WIDTH = 256


def make_data() -> tuple[Tensor, Tensor]:
    """Noisy values (n, 1) of a smooth function of sixteen numbers (n, 16)."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)
    clean = torch.sin(x @ torch.randn(16, 4, generator=generator)).sum(1, keepdim=True)
    return x, clean + 0.5 * torch.randn(NUM_SAMPLES, 1, generator=generator)


@st.train(global_batch=(32, 1024), max_local_batch=128, learning_rate="adascale", epochs=60)
def growing(ctx: st.TrainContext) -> None:
    layers = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model, optimizer = ctx.prepare(layers, lambda parameters: torch.optim.SGD(parameters, lr=0.02))
    for batch in ctx.batches(make_data()):
        # Steps on larger batches are fewer and count for more: a schedule goes by progress, not by steps.
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * 0.5 ** (ctx.progress // 4000)
        ctx.step(nn.functional.mse_loss(model(batch.x), batch.y))
