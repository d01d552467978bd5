"""The models of the bench `training`, each with its batch, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_NUM_SAMPLES = 1024
_VOCABULARY, _POSITIONS, _WIDTH = 4096, 64, 320


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.into, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(self.norms[0](x)).unflatten(-1, (3, 8, _WIDTH // 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = attended + self.wide(self.norms[1](attended))
        return out


class _Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_POSITIONS, _WIDTH)
        self.blocks = nn.Sequential(*(_Attention() for _ in range(6)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.tokens(ids) + self.places.weight))
        return out


def _mlp() -> nn.Module:
    widths = [512, 2048, 2048, 2048]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 48, 1), (48, 96, 2), (96, 192, 2), (192, 288, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(288, 10))


def _images(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(_NUM_SAMPLES, *shape, generator=drawn), torch.randint(10, (_NUM_SAMPLES,), generator=drawn)


def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    text = torch.randint(_VOCABULARY, (_NUM_SAMPLES, _POSITIONS + 1), generator=drawn)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class BenchModel:
    """One model, with its samples and what trains it: `batch` samples in a step, over all workers."""

    make: Callable[[], nn.Module]
    samples: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    batch: int
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss of these samples."""
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def bench_model(name: str) -> BenchModel:
    """The model of this name: mlp, cnn or gpt."""
    if name == "mlp":
        return BenchModel(_mlp, lambda: _images(512), 64, _momentum)
    if name == "cnn":
        return BenchModel(_cnn, lambda: _images(3, 32, 32), 64, _momentum)
    return BenchModel(_Gpt, _texts, 8, _adamw)


def batches_of_rank(model: BenchModel, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches, shuffled anew in each pass: the rank's part of each."""
    x, y = model.samples()
    size = model.batch // world_size
    drawn = torch.Generator().manual_seed(2)
    while True:
        order = torch.randperm(_NUM_SAMPLES, generator=drawn)
        for first in range(0, _NUM_SAMPLES, model.batch):
            ids = order[first + rank * size : first + (rank + 1) * size]
            yield x[ids], y[ids]
