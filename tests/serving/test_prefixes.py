"""Prompts go to the replica that knows their beginning, unless too much is in front of them there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.core.workload import ReplicaId
from springtide.serving.prefixes import BLOCK_BYTES, MAX_BLOCKS, CachedBlocks, PrefixRouter, prefix_blocks

ONE, TWO = ReplicaId("one"), ReplicaId("two")
PROMPTS = st.lists(st.integers(0, 9), max_size=6).map(
    lambda ends: tuple(hash((n, *ends[:n])) for n in range(len(ends)))
)


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=9))
def test_equal_blocks_are_equal_beginnings(one, two, begin):
    first, second = prefix_blocks(one, begin), prefix_blocks(two, begin)
    assert len(first) == len(one) // BLOCK_BYTES
    for number, (mine, other) in enumerate(zip(first, second, strict=False), 1):
        assert (mine == other) == (one[: number * BLOCK_BYTES] == two[: number * BLOCK_BYTES])


def test_the_work_for_a_prompt_is_bounded_and_tools_in_front_make_another_one():
    assert len(prefix_blocks(b"x" * (BLOCK_BYTES * MAX_BLOCKS + 10_000))) == MAX_BLOCKS
    assert prefix_blocks(b"x" * 600) != prefix_blocks(b"x" * 600, b"tools")


@given(st.lists(PROMPTS, max_size=30), st.integers(1, 12))
def test_a_cache_has_what_was_used_last_and_never_the_end_without_the_beginning(prompts, capacity):
    cache = CachedBlocks(capacity)
    for blocks in prompts:
        cache.use(blocks)
        assert cache.num_matched(blocks) == min(len(blocks), capacity)
        there = [cache.last_use(block) > 0 for block in blocks]
        assert there == sorted(there, reverse=True)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 2)), max_size=40))
def test_what_has_ended_is_no_wait(calls):
    router = PrefixRouter(1000)
    sent = [(router.sent((ONE, TWO)[number % 2], blocks), how) for number, (blocks, how) in enumerate(calls)]
    for prompt, how in sent:
        for _ in range(how):
            router.began(prompt)
        router.ended(prompt)
    for replica_id in (ONE, TWO):
        assert router.cost(replica_id, (1, 2, 3)) == 3.0


def test_a_known_beginning_wins_until_its_replica_has_too_much_to_do():
    router, blocks = PrefixRouter(1000), tuple(range(20))
    router.ended(router.sent(ONE, blocks))
    assert router.cost(ONE, blocks) == 0.0
    assert router.cost(TWO, blocks) == 20.0
    longer = (*blocks, *range(100, 340))
    router.sent(ONE, longer)
    assert router.cost(ONE, blocks) > router.cost(TWO, blocks), "240 blocks are in front of it"
    router.keep([TWO])
    assert router.cost(ONE, blocks) == 20.0, "a replica that has gone is forgotten"


def test_answers_that_are_written_are_load_for_prompts_that_all_begin_alike():
    router, common = PrefixRouter(1000), tuple(range(20))
    chosen = []
    for _ in range(60):
        replica_id = min((ONE, TWO), key=lambda each: router.cost(each, common))
        router.began(router.sent(replica_id, common))
        chosen.append(replica_id)
    assert 0.4 <= chosen.count(ONE) / len(chosen) <= 0.6


def test_a_replica_that_has_less_than_was_believed_has_forgotten_what_is_older():
    router = PrefixRouter(1000)
    old, middle, new = (tuple(range(first, first + 10)) for first in (0, 100, 200))
    for blocks in (old, middle, new):
        router.ended(router.sent(ONE, blocks))
    again = router.sent(ONE, middle)
    router.found(again, 0.6)
    assert router.cost(ONE, old) == 0.0, "more than half was there"
    router.found(again, 0.1)
    router.ended(again)
    assert [router.cost(ONE, blocks) for blocks in (old, middle, new)] == [10.0, 0.0, 0.0]
