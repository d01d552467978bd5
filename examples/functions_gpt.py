"""A small GPT as a list of layers, which can be cut into a pipeline of functions; it learns to write Python.

springtide run examples/functions_gpt.py                    on the machines of the cluster
springtide run examples/functions_gpt.py --on functions     on functions (springtide up --functions emulator)
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import springtide as st

CONTEXT_BYTES = 64
WIDTH = 64
NUM_HEADS = 4
NUM_BLOCKS = 4


class Embed(nn.Module):
    """Bytes (batch, length) to what and where they are (batch, length, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT_BYTES, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.what(text) + self.where(torch.arange(text.shape[1], device=text.device))


class Attention(nn.Module):
    """Each byte looks at those before it, around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.project(mixed)


class Feed(nn.Module):
    """A feed-forward network around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


def make_model() -> nn.Sequential:
    """Scores of the byte that follows each one, as one list of layers: any of its borders may become a cut."""
    blocks = [layer for _ in range(NUM_BLOCKS) for layer in (Attention(), Feed())]
    return nn.Sequential(Embed(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def load_windows(num_bytes: int = 96 * 1024) -> tuple[Tensor, Tensor]:
    """Windows of the library's text and the same windows one byte later, both (n, CONTEXT_BYTES)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > num_bytes:
            break
    stream = torch.frombuffer(text[: num_bytes + 1], dtype=torch.uint8).long()
    num_windows = (len(stream) - 1) // CONTEXT_BYTES
    used = num_windows * CONTEXT_BYTES
    return stream[:used].view(num_windows, -1), stream[1 : used + 1].view(num_windows, -1)


def next_byte_loss(scores: Tensor, following: Tensor) -> Tensor:
    """The mean cross-entropy, in nats a byte."""
    return cross_entropy(scores.flatten(0, -2), following.flatten())


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)  # type: ignore[arg-type]


functions_gpt = st.Task(
    model=make_model,
    dataset=load_windows,
    loss=next_byte_loss,
    optimizer=make_optimizer,
    name="functions-gpt",
    global_batch=64,
    epochs=3,
)
