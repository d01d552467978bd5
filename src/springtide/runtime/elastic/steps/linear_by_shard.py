"""A linear layer over several virtual shards at once, whose gradients are those of a pass for each, added as a tree.

How a library multiplies matrices may depend on their sizes. So each size is tried once with random numbers, and what
would give other bits over all shards is done for each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

# So many elements of the weight's gradient are added up at once, whole rows of them, so that they stay in the
# processor's cache.
_TILE_ELEMENTS = 1 << 19


@dataclass(frozen=True, slots=True)
class Ways:
    """What gives the bits of a pass for each shard: the products over all shards, and how gradients are added.

    `tile` is a number of rows of the weight, `adds` whether a product may be added to another one within the library.
    """

    forward: bool
    backward: bool
    tile: int
    adds: bool


@lru_cache(maxsize=1024)
def ways_of(shape: tuple[int, int, int, int], dtype: torch.dtype, has_bias: bool, num_threads: int) -> Ways:
    """Try a layer of (shards, rows of a shard, inputs, outputs). `num_threads` are torch's, as results depend on it."""
    num_shards, rows, inputs, outputs = shape
    drawn = torch.Generator().manual_seed(1)
    x, given = (torch.randn(num_shards * rows, size, generator=drawn).to(dtype) for size in (inputs, outputs))
    weight = torch.randn(outputs, inputs, generator=drawn).to(dtype)
    bias = torch.randn(outputs, generator=drawn).to(dtype) if has_bias else None
    whole, by_shard = functional.linear(x, weight, bias), _linear_by_shard(x, weight, bias, rows)
    backward = torch.equal(given @ weight, torch.cat([part @ weight for part in torch.split(given, rows)]))
    expected, found = torch.empty_like(weight), torch.empty_like(weight)
    pairs = list(zip(torch.split(given, rows), torch.split(x, rows), strict=True))
    _add_products(expected, pairs, outputs, adds=False)
    tile = max(1, _TILE_ELEMENTS // inputs)
    for adds in (True, False):
        _add_products(found, pairs, tile, adds=adds)
        if torch.equal(expected, found):
            return Ways(torch.equal(whole, by_shard), backward, tile, adds)
    return Ways(torch.equal(whole, by_shard), backward, outputs, adds=False)


@dataclass(slots=True)
class LayerUse:
    """One use of a layer in a pass. `out` is where the sum of the weight's gradients goes, if it is to go there."""

    num_shards: int
    ways: Ways
    dtype: torch.dtype
    out: torch.Tensor | None = None
    is_added: bool = False


class LinearByShard(torch.autograd.Function):
    """`functional.linear`, whose weight and bias are given once for each shard; each of these gets its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: LayerUse, *shared: torch.Tensor) -> torch.Tensor:
        """`shared` are the weights of the shards, and after them their biases, if there are any."""
        weight, bias = shared[0], shared[layer.num_shards] if len(shared) > layer.num_shards else None
        ctx.layer, ctx.has_bias = layer, bias is not None
        ctx.save_for_backward(x, weight)
        if layer.ways.forward:
            return functional.linear(x, weight, bias)
        return _linear_by_shard(x, weight, bias, len(x) // layer.num_shards)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """The gradients of the input and of each shard's weight and bias."""
        x, weight = ctx.saved_tensors
        layer: LayerUse = ctx.layer
        outputs, inputs = weight.shape
        flat, given = x.reshape(-1, inputs), given.reshape(-1, outputs)
        rows = len(flat) // layer.num_shards
        parts = torch.split(given, rows)
        of_input = None
        if ctx.needs_input_grad[0]:
            products = given @ weight if layer.ways.backward else torch.cat([part @ weight for part in parts])
            of_input = products.view(x.shape)
        pairs = list(zip(parts, torch.split(flat, rows), strict=True))
        of_weights: list[torch.Tensor | None] = [None] * layer.num_shards
        if layer.out is not None:
            _add_products(layer.out, pairs, layer.ways.tile, adds=layer.ways.adds)
            layer.is_added = True
        else:
            of_weights = [part.t() @ inputs_of for part, inputs_of in pairs]
        of_biases = [part.sum(0) for part in parts] if ctx.has_bias else []
        return of_input, None, *of_weights, *of_biases


def sum_into(out: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
    """Write the sum of a power of two of leaves, added as a binary tree; None is a leaf of zeros."""
    if len(leaves) == 1:
        (leaf,) = leaves
        out.zero_() if leaf is None else out.copy_(leaf)
        return
    half, other = len(leaves) // 2, torch.empty_like(out)
    sum_into(out, leaves[:half])
    sum_into(other, leaves[half:])
    out += other


def _linear_by_shard(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_samples: int
) -> torch.Tensor:
    return torch.cat([functional.linear(part, weight, bias) for part in torch.split(x, num_samples)])


def _add_products(
    out: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], tile: int, *, adds: bool
) -> None:
    """Write the sum of `given.t() @ x` of all pairs, added as a binary tree."""
    others = [torch.empty(min(tile, len(out)), out.shape[1], dtype=out.dtype) for _ in range(len(pairs).bit_length())]
    for first in range(0, len(out), tile):
        rows = slice(first, first + tile)
        _add_tile(out[rows], [(given[:, rows].t(), x) for given, x in pairs], others, adds=adds)


def _add_tile(
    out: torch.Tensor,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    others: Sequence[torch.Tensor],
    *,
    adds: bool,
) -> None:
    if len(pairs) == 1:
        torch.mm(*pairs[0], out=out)
        return
    half = len(pairs) // 2
    _add_tile(out, pairs[:half], others[1:], adds=adds)
    if half == 1 and adds:
        out.addmm_(*pairs[1])
        return
    other = others[0][: len(out)]
    _add_tile(other, pairs[half:], others[1:], adds=adds)
    out += other
