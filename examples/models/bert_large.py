"""BERT-Large's 24 blocks (303 million parameters, 1,154 MiB with an alphabet of bytes) as a sequence of layers.

springtide profile examples/models/bert_large.py --layers
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import springtide as st

NUM_BLOCKS, WIDTH, NUM_HEADS, LENGTH, ALPHABET, MASK = 24, 1024, 16, 64, 257, 256


class Embedding(nn.Module):
    """Tokens (n, length) to vectors (n, length, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.norm(self.what(tokens) + self.where(place)))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm after it (Devlin and others 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
        self.norms, self.drop = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(x).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        mixed = (self.drop(weights) @ value).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.drop(self.project(mixed)))
        return self.norms[1](x + self.feed(x))


def bert_large() -> nn.Sequential:
    """Tokens (n, length) to scores of each token (n, length, ALPHABET), in 26 layers."""
    return nn.Sequential(Embedding(), *(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, ALPHABET))


def masked_text(num_texts: int = 16) -> tuple[Tensor, Tensor]:
    """Random bytes with one in seven hidden, and all of them as they were."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(256, (num_texts, LENGTH), generator=generator)
    hidden = torch.rand(num_texts, LENGTH, generator=generator) < 0.15
    return text.masked_fill(hidden, MASK), text


def loss(scores: Tensor, text: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), text.flatten())


task = st.Task(
    model=bert_large,
    dataset=masked_text,
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    name="bert-large",
    global_batch=16,
)
