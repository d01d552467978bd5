"""A small training job: a network learns which points lie inside a circle. The data are made here."""

from __future__ import annotations

import time

import torch

import springtide as st


def make_dataset(num_samples: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in a square, labelled by whether they lie inside the circle."""
    generator = torch.Generator().manual_seed(7)
    points = torch.rand(num_samples, 2, generator=generator) * 2 - 1
    return points, (points.square().sum(dim=1) < 0.6).long()


@st.train(global_batch=64, epochs=12, workers=1, name="hello")
def fit(ctx: st.TrainContext) -> None:
    """Train on one device; `params["pause"]` adds seconds to every 16 samples, to imitate a larger model."""
    pause_s = float(ctx.params.get("pause", "0"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model, _ = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in ctx.batches(make_dataset()):
        loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
        time.sleep(pause_s * len(batch.x) / 16)
        ctx.step(loss)
    ctx.save()
