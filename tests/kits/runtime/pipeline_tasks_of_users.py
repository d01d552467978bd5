"""Tasks of users that pipelines are tested with, small and of every kind, and a reference that trains them."""

from __future__ import annotations

import torch
from torch import nn

from springtide.client.functions import Task
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.perf.functions.pipeline.tasks import micro_batch_bounds
from springtide.runtime.data.shards import SampleSchedule


class Attention(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # The gradient of a bias of keys is zero but for rounding, which Adam would blow up to steps of full length.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.mask
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.mlp(x)


class Embedding(nn.Module):
    def __init__(self, words, width, length):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)

    def forward(self, ids):
        return self.words(ids) + self.places


class TinyGpt(nn.Module):
    def __init__(self, words=11, width=8, length=6):
        super().__init__()
        self.embedding = Embedding(words, width, length)
        self.blocks = nn.ModuleList(Attention(width, length) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def pipeline_layers(self):
        return [self.embedding, *self.blocks, self.norm, self.head]

    def forward(self, ids):
        for layer in self.pipeline_layers():
            ids = layer(ids)
        return ids


class Cell(nn.Module):
    """Takes two tensors and a mask of integers and hands on three: what cells of AmoebaNet do, and more."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = (x, x, (x[:, :1] > 0).to(torch.int64))
        before, now, mask = x
        return now, torch.tanh(self.one(before) + self.two(now)) * (1 + mask), mask


class Join(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        before, now, mask = x
        return self.head(before + now).squeeze(-1) * (2 - mask.squeeze(-1))


class CellModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), Cell(5), Cell(5), Cell(5), Join(5))


def mlp():
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(9, 8), nn.Tanh()), nn.Linear(8, 3)
    )


def convolutional():
    # Small batches under batch normalisation blow up rounding; with doubles an error would show beside it.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(64, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    ).double()  # fmt: skip


def dropping():
    return nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def vectors(num_samples=40):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_samples, 6, generator=generator), torch.randint(0, 3, (num_samples,), generator=generator)


def images():
    generator = torch.Generator().manual_seed(6)
    return torch.randn(40, 1, 6, 6, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (40,), generator=generator
    )


def sentences():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 11, (40, 7), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def values():
    x, y = vectors()
    return x, y.float()


def word_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def slow_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


TASKS = {
    "mlp": Task(model=mlp, dataset=vectors, loss=nn.functional.cross_entropy, optimizer=sgd),
    "convolutional": Task(model=convolutional, dataset=images, loss=nn.CrossEntropyLoss, optimizer=sgd),
    "gpt": Task(model=TinyGpt, dataset=sentences, loss=word_loss, optimizer=adam),
    "cells": Task(model=CellModel, dataset=values, loss=nn.functional.mse_loss, optimizer=slow_sgd),
    "dropping": Task(model=dropping, dataset=vectors, loss=nn.functional.cross_entropy, optimizer=adam),
}


def job_of(*, batch=8, epochs=4, seed=3, name="pipeline", source_path="task.py", object_name="task", **fields):
    return TrainingJob(
        job_id=WorkloadId("job-1"),
        name=name,
        entrypoint=Entrypoint(source_path=source_path, object_name=object_name),
        global_batch_size=batch,
        num_epochs=epochs,
        num_virtual_shards=1,
        seed=seed,
        **fields,
    )


def reference(parts, job, num_steps, *, num_replicas=1, micro_batch_size=None):
    """Losses and the model of plain training, one process, no pipeline: whole batches, or the same micro-batches.

    Every micro-batch begins with the buffers of the step's beginning; their changes are averaged by size.
    """
    model = parts.model
    optimizer = parts.make_optimizer(model.parameters())
    schedule = SampleSchedule(
        num_samples=parts.num_samples, global_batch_size=job.global_batch_size, num_epochs=job.num_epochs, seed=job.seed
    )
    losses, gradients = [], []
    for step in range(num_steps):
        batch = schedule.batch(step)
        bounds = [(0, len(batch.ids))]
        if micro_batch_size is not None:
            bounds = [
                bound
                for replica in range(num_replicas)
                for bound in micro_batch_bounds(len(batch.ids), replica, num_replicas, micro_batch_size)
            ]
        optimizer.zero_grad()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        moved = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in start.items()}
        total = 0.0
        for low, high in bounds:
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            x, y = parts.fetch(batch.ids[low:high].tolist())
            loss = parts.loss(model(x), y) * ((high - low) / len(batch.ids))
            loss.backward()
            total += float(loss.detach())
            for name, buffer in model.named_buffers():
                change = torch.where(buffer == start[name], 0.0, buffer.double() - start[name].double())
                moved[name] += change * ((high - low) / len(batch.ids))
        for name, buffer in model.named_buffers():
            exact = start[name] + moved[name]
            buffer.copy_(exact.round() if not buffer.is_floating_point() else exact)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()
        losses.append(total)
    return losses, gradients
