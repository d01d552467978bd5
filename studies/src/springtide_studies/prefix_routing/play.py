"""Prompts of a trace, routed to modelled replicas by the product's rule and by others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from springtide.core.workload import ReplicaId
from springtide.serving.prefixes import ANSWER_TOKENS, WAIT_WEIGHT, PrefixRouter, RoutedPrompt
from springtide.serving.router import ReplicaLoad, pick_replica
from springtide_studies.prefix_routing.engine import ModelledEngine, StepTimes
from springtide_studies.prefix_routing.trace import TOKENS_PER_BLOCK, RecordedPrompt

# As many answers as a replica of a service may write at a time without one of its slots being missed.
_NO_LIMIT = 1 << 30
RULES = ("random", "load", "session hash", "longest match")


class RoutingRule(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica is chosen: `prefixes` with its two weights, or one of RULES."""

    name: str = "prefixes"
    wait_weight: float = WAIT_WEIGHT
    answer_tokens: float = ANSWER_TOKENS
    # Whether replicas say how much of each prompt they had.
    is_corrected: bool = True


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one rule. Shares are of the replica that has most, `load` is the mean part of the time at work."""

    num_hits: int
    num_blocks: int
    share_of_requests: float
    share_of_work: float
    load: float
    first_token_s: tuple[float, ...]

    def first_token_quantile_s(self, part: float) -> float:
        """The time to the first token that so large a part of the requests keeps."""
        return sorted(self.first_token_s)[min(len(self.first_token_s) - 1, int(part * len(self.first_token_s)))]


def play(
    prompts: Sequence[RecordedPrompt],
    rule: RoutingRule,
    *,
    capacity: int,
    believed: int | None = None,
    stretch: float,
    seed: int = 0,
    num_replicas: int = 2,
    counted_from: int = 0,
) -> Played:
    """Route all prompts to replicas with caches of `capacity` blocks, which the router takes for ones of `believed`.

    `stretch`: times between arrivals are so many times as long. Prompts before `counted_from` fill the caches only.
    """
    ids = [ReplicaId(f"r{number}") for number in range(num_replicas)]
    weight, each = (0.0, 0.0) if rule.name == "longest match" else (rule.wait_weight, rule.answer_tokens)
    router = PrefixRouter(believed or capacity, wait_weight=weight, answer_blocks=each / TOKENS_PER_BLOCK)
    arrived_s = [prompt.timestamp * 1e-3 * stretch for prompt in prompts]
    open_at: dict[int, int] = {}
    routed: dict[int, RoutedPrompt] = {}
    first_s = [0.0] * len(prompts)

    def began(number: int, at_s: float, part_found: float) -> None:
        first_s[number] = at_s - arrived_s[number]
        router.began(routed[number])
        if rule.is_corrected:
            router.found(routed[number], part_found)

    def ended(number: int) -> None:
        del open_at[number]
        router.ended(routed.pop(number))

    engines = [ModelledEngine(capacity, StepTimes(), began, ended) for _ in ids]
    choose = _chooser(rule, router, ids, random.Random(seed), open_at)
    before = [(0, 0, 0.0)] * num_replicas
    for number, prompt in enumerate(prompts):
        for engine in engines:
            engine.advance(arrived_s[number])
        if number == counted_from:
            before = [(engine.num_hits, engine.num_requests, engine.busy_s) for engine in engines]
        chosen = choose(prompt)
        open_at[number] = chosen
        routed[number] = router.sent(ids[chosen], prompt.hash_ids)
        engines[chosen].add(number, prompt)
    for engine in engines:
        engine.finish()
    hits, requests, work = zip(
        *(
            (engine.num_hits - was[0], engine.num_requests - was[1], engine.busy_s - was[2])
            for engine, was in zip(engines, before, strict=True)
        ),
        strict=True,
    )
    span_s = max(engine.now_s for engine in engines) - arrived_s[counted_from]
    return Played(
        num_hits=sum(hits),
        num_blocks=sum(len(prompt.hash_ids) for prompt in prompts[counted_from:]),
        share_of_requests=max(requests) / sum(requests),
        share_of_work=max(work) / sum(work),
        load=sum(work) / span_s / num_replicas,
        first_token_s=tuple(first_s[counted_from:]),
    )


def _chooser(
    rule: RoutingRule, router: PrefixRouter, ids: Sequence[ReplicaId], rng: random.Random, open_at: dict[int, int]
) -> Callable[[RecordedPrompt], int]:
    """The rule as a function from a prompt to the number of a replica."""

    def by_load(prompt: RecordedPrompt) -> int:
        outstanding = list(open_at.values())
        loads = [
            ReplicaLoad(replica_id=replica_id, num_outstanding=outstanding.count(number))
            for number, replica_id in enumerate(ids)
        ]
        chosen = pick_replica(loads, max_outstanding=_NO_LIMIT)
        return 0 if chosen is None else ids.index(chosen)

    def by_prefixes(prompt: RecordedPrompt) -> int:
        costs = [router.cost(replica_id, prompt.hash_ids) for replica_id in ids]
        return costs.index(min(costs))

    if rule.name == "random":
        return lambda prompt: rng.randrange(len(ids))
    if rule.name == "load":
        return by_load
    if rule.name == "session hash":
        # Nearly all prompts of the trace begin with the same block: the second one tells conversations apart.
        salt = rng.random()
        return lambda prompt: hash((salt, prompt.hash_ids[min(1, len(prompt.hash_ids) - 1)])) % len(ids)
    return by_prefixes
