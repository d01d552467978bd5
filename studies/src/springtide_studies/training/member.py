"""One process of the bench `training`: it trains as many steps as it is told, and says what they cost.

A plain loop and DistributedDataParallel run as `python -m springtide_studies.training.member`; the platform's workers
load this file and run `fit`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from springtide_studies.training.models import batches_of_rank, bench_model
from springtide_studies.training.pace import Pace


def fit(ctx: Any) -> None:
    """The training function, which the platform's workers run."""
    chosen = bench_model(ctx.params["model"])
    samples = chosen.samples()
    model, _ = ctx.prepare(chosen.make(), chosen.optimizer)
    pace: Pace | None = None
    for batch in ctx.batches(samples):
        if not ctx.step(chosen.loss(model, batch.x, batch.y)):
            continue
        if pace is None:
            # After the first step: with it a group says that it has formed.
            pace = Pace(ctx.params["address"], ctx.params["variant"])
        else:
            pace.turn()


def train(name: str, variant: str, address: str, rank: int, world_size: int, meeting: str) -> None:
    """Train without the platform: a plain loop, or DistributedDataParallel with its defaults."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = bench_model(name)
    model = chosen.make()
    if world_size > 1:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = chosen.optimizer(model.parameters())
    pace = Pace(address, variant)
    for x, y in batches_of_rank(chosen, rank, world_size):
        torch.autograd.backward(chosen.loss(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        pace.turn()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
