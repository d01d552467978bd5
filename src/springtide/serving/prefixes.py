"""Routing of prompts: to the replica that has computed most of one's beginning and has least to do before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from springtide.core.workload import ReplicaId

# Of a prompt's text; with the usual four bytes a token these are 64 tokens.
BLOCK_BYTES = 256
BYTES_PER_TOKEN = 4
# A replica says in this header of its answer what part of the prompt it had, from 0 to 1.
CACHED_HEADER = b"x-springtide-cached"
# Of one prompt so many blocks are known, 1 MiB of text, so that a request costs the gateway little.
MAX_BLOCKS = 4096
# What waiting weighs beside computing anew: work that is done twice delays all later requests as well, waiting only
# this one. Chosen on one half of a recorded trace (docs/results/2026-11-29-llm-routing.md).
WAIT_WEIGHT = 0.1
# An answer that is being written delays a prompt as if so many tokens of prompts were in front of it.
ANSWER_TOKENS = 512
# A replica that has computed anew more than this part of what it was believed to have has forgotten older blocks too.
_FORGOTTEN = 0.5


def prefix_blocks(text: bytes, begin: bytes = b"") -> tuple[int, ...]:
    """Hashes of the whole blocks of a prompt, each of all text up to its end: equal ones have a common beginning.

    `begin` stands in front of the text. The hashes hold within one process.
    """
    parent = hash(begin)
    found = []
    for start in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = hash((parent, text[start : start + BLOCK_BYTES]))
        found.append(parent)
    return tuple(found)


class CachedBlocks:
    """The blocks that a cache of `capacity` has if it forgets those first that were used longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # With the number of the prompt that has used them last.
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._num_prompts = 0

    def num_matched(self, blocks: Sequence[int]) -> int:
        """How many blocks at the beginning of a prompt are there."""
        return next((number for number, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use(self, blocks: Sequence[int]) -> None:
        """All blocks of a prompt are used now. Its beginning is kept longest: without it the rest is of no use."""
        self._num_prompts += 1
        for block in reversed(blocks):
            self._blocks[block] = self._num_prompts
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def last_use(self, block: int) -> int:
        """The number of the prompt that has used a block last; 0 if it is not there."""
        return self._blocks.get(block, 0)

    def forget(self, up_to: int) -> None:
        """Forget what no prompt after that number has used."""
        while self._blocks and next(iter(self._blocks.values())) <= up_to:
            self._blocks.popitem(last=False)


class RoutedPrompt:
    """A prompt at a replica: `matched` of its blocks are believed there, `unmatched` are to be computed."""

    __slots__ = ("is_begun", "last_use", "matched", "replica_id", "unmatched")

    def __init__(self, replica_id: ReplicaId, matched: int, unmatched: int, last_use: int) -> None:
        self.replica_id = replica_id
        self.matched, self.unmatched = matched, unmatched
        # The number of the prompt before that used what is matched.
        self.last_use = last_use
        self.is_begun = False


class _Believed:
    """What is believed of one replica."""

    def __init__(self, capacity: int) -> None:
        self.cache = CachedBlocks(capacity)
        self.num_waiting_blocks = 0
        self.num_answers = 0


class PrefixRouter:
    """What the caches of a service's replicas hold and what is in front of a prompt there, as far as requests tell.

    `capacity` is the number of blocks that a replica's cache holds. The wait at a replica is measured in
    blocks too: those that have to be computed before, and `answer_blocks` for each answer that is being written.
    """

    def __init__(
        self,
        capacity: int,
        *,
        wait_weight: float = WAIT_WEIGHT,
        answer_blocks: float = ANSWER_TOKENS * BYTES_PER_TOKEN / BLOCK_BYTES,
    ) -> None:
        self._capacity = capacity
        self._wait_weight = wait_weight
        self._answer_blocks = answer_blocks
        self._replicas: dict[ReplicaId, _Believed] = {}

    def cost(self, replica_id: ReplicaId, blocks: Sequence[int]) -> float:
        """What a prompt costs there, in blocks to compute: the least is to be chosen."""
        known = self._believed(replica_id)
        wait = known.num_waiting_blocks + self._answer_blocks * known.num_answers
        return self._wait_weight * wait + len(blocks) - known.cache.num_matched(blocks)

    def sent(self, replica_id: ReplicaId, blocks: Sequence[int]) -> RoutedPrompt:
        """A prompt was sent there; what comes of it is told by `began` and `ended`."""
        known = self._believed(replica_id)
        matched = known.cache.num_matched(blocks)
        last_use = known.cache.last_use(blocks[matched - 1]) if matched else 0
        prompt = RoutedPrompt(replica_id, matched, len(blocks) - matched, last_use)
        known.cache.use(blocks)
        known.num_waiting_blocks += prompt.unmatched
        return prompt

    def began(self, prompt: RoutedPrompt) -> None:
        """The first part of its answer has come."""
        known = self._replicas.get(prompt.replica_id)
        if known is not None and not prompt.is_begun:
            prompt.is_begun = True
            known.num_waiting_blocks -= prompt.unmatched
            known.num_answers += 1

    def found(self, prompt: RoutedPrompt, part: float) -> None:
        """The replica says that it had so large a part of the prompt. If that is far less than was believed, what it
        used before has gone as well.
        """
        known = self._replicas.get(prompt.replica_id)
        if known is not None and part * (prompt.matched + prompt.unmatched) < _FORGOTTEN * prompt.matched:
            known.cache.forget(prompt.last_use)

    def ended(self, prompt: RoutedPrompt) -> None:
        """Its answer is complete, or is not wanted any more."""
        self.began(prompt)
        if (known := self._replicas.get(prompt.replica_id)) is not None:
            known.num_answers -= 1

    def keep(self, replica_ids: Iterable[ReplicaId]) -> None:
        """Forget all replicas but these."""
        kept = set(replica_ids)
        self._replicas = {replica_id: known for replica_id, known in self._replicas.items() if replica_id in kept}

    def _believed(self, replica_id: ReplicaId) -> _Believed:
        if replica_id not in self._replicas:
            self._replicas[replica_id] = _Believed(self._capacity)
        return self._replicas[replica_id]
