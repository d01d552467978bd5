"""A small GPT that learns to write Python, byte by byte, from the source of Python's own standard library.

springtide run examples/gpt.py --deadline 15m --param width=96
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import springtide as st

CONTEXT_BYTES = 64
NUM_HEADS = 4


class Block(nn.Module):
    """Attention, then a feed-forward network, each around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norms[0](x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        return x + self.feed(self.norms[1](x))


class Gpt(nn.Module):
    """Bytes (batch, length) to scores of the byte that follows each (batch, length, 256)."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(256, width), nn.Embedding(CONTEXT_BYTES, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        position = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.what(text) + self.where(position)))


def load_windows(num_bytes: int = 400_000) -> tuple[Tensor, Tensor]:
    """Windows of the library's text and the same windows one byte later, both (n, CONTEXT_BYTES)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    stream = torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()
    num_windows = (len(stream) - 1) // CONTEXT_BYTES
    used = num_windows * CONTEXT_BYTES
    return stream[:used].view(num_windows, -1), stream[1 : used + 1].view(num_windows, -1)


@st.train(deadline="15m", global_batch=32, epochs=4)
def gpt(ctx: st.TrainContext) -> None:
    """Train; `--param width=96 --param blocks=3` makes it larger."""
    model = Gpt(width=int(ctx.params.get("width", "64")), num_blocks=int(ctx.params.get("blocks", "2")))
    model, _ = ctx.prepare(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    for batch in ctx.batches(load_windows()):
        scores = model(batch.x)
        ctx.step(cross_entropy(scores.flatten(0, 1), batch.y.flatten()))
    ctx.save()
