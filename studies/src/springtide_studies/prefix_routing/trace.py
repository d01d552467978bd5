"""Recorded prompts in the form of Mooncake's traces, and the hits that one cache for all of them would have."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.serving.prefixes import CachedBlocks

TOKENS_PER_BLOCK = 512


class RecordedPrompt(msgspec.Struct, frozen=True):
    """One request: `timestamp` in ms from the beginning, lengths in tokens, `hash_ids` of its blocks of 512 tokens;
    equal ids stand for the same text up to the end of the block.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_prompts(path: Path) -> list[RecordedPrompt]:
    """The requests of a file, one in each line. Raises InvalidRequest."""
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=RecordedPrompt) for line in lines if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path.name} is no trace in Mooncake's form: {error}") from None


def hits_of_one_cache(prompts: Sequence[RecordedPrompt], capacity: int) -> int:
    """The blocks found by one cache of `capacity` blocks that forgets what was used longest ago."""
    cache, hits = CachedBlocks(capacity), 0
    for prompt in prompts:
        hits += cache.num_matched(prompt.hash_ids)
        cache.use(prompt.hash_ids)
    return hits


def hits_of_belady(prompts: Sequence[RecordedPrompt], capacity: int) -> int:
    """The blocks found by one cache that knows the future and forgets what is used again last (Belady, 1966)."""
    next_use: list[list[int]] = [[] for _ in prompts]
    seen: dict[int, int] = {}
    for index in range(len(prompts) - 1, -1, -1):
        blocks = prompts[index].hash_ids
        next_use[index] = [seen.get(block, len(prompts)) for block in blocks]
        seen.update(dict.fromkeys(blocks, index))
    cached: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    hits = 0
    for prompt, uses in zip(prompts, next_use, strict=True):
        blocks = prompt.hash_ids
        hits += next((number for number, block in enumerate(blocks) if block not in cached), len(blocks))
        for block, use in zip(blocks, uses, strict=True):
            cached[block] = use
            heapq.heappush(order, (-use, block))
        while len(cached) > capacity:
            use, block = heapq.heappop(order)
            if cached.get(block) == -use:
                del cached[block]
    return hits
