"""The tree of blocks: layout of regular and irregular clusters, best fit, buddies, and the blocks to take and give."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.simulation.sweeps import part
from springtide.core.resources import Topology, make_node
from springtide.scheduling.placement.layout import Layout, addresses, block_at, layout_of
from springtide.scheduling.placement.topology import Blocks, Census, fewest_suffice, fits_compactly

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=7)


def layout_for(*sizes: int) -> Layout:
    return layout_of(Topology(nodes=tuple(make_node(f"n{index}", size) for index, size in enumerate(sizes))))


def bits(*chosen: int) -> int:
    return sum(1 << address for address in chosen)


def test_a_node_is_a_block_and_its_halves_are_blocks() -> None:
    layout = layout_for(8, 8)
    assert layout.device_at[:8] == tuple(f"n0/{index}" for index in range(8))
    assert layout.size == 16
    assert layout.largest_block == 16
    six = layout_for(6)
    assert six.device_at == ("n0/0", "n0/1", "n0/2", None, "n0/3", "n0/4", "n0/5", None)
    assert six.largest_block == 2
    five = layout_for(5)
    assert five.device_at == ("n0/0", "n0/1", "n0/2", "n0/3", "n0/4", None, None, None)


def test_wide_nodes_lie_first_so_that_every_node_is_aligned() -> None:
    layout = layout_for(2, 8, 1, 4, 8)
    assert layout.node_starts == (0, 8, 16, 20, 22)
    assert layout.device_at[0] == "n1/0"
    assert layout.device_at[22] == "n2/0"
    assert layout.runs == ((3, 0, 16), (2, 16, 20), (1, 20, 22), (0, 22, 23))
    assert [layout.nodes_needed(count) for count in (1, 8, 9, 16, 17, 20, 21, 23)] == [1, 1, 2, 2, 3, 3, 4, 5]


def test_a_cluster_without_devices_is_a_layout_too() -> None:
    layout = layout_of(Topology())
    assert layout.present == 0
    assert Census(layout, layout.present).compact(1) == 0
    assert layout_for(0, 0).largest_block == 0


def test_the_layout_is_kept_while_the_nodes_are_the_same() -> None:
    nodes = tuple(make_node(f"n{index}", 8) for index in range(4))
    assert layout_of(Topology(nodes=nodes)) is layout_of(Topology(nodes=(*nodes,)))
    assert layout_of(Topology(nodes=nodes[:3])) is not layout_of(Topology(nodes=nodes))
    again = tuple(make_node(f"n{index}", 8) for index in range(4))
    assert layout_of(Topology(nodes=again)).device_at == layout_of(Topology(nodes=nodes)).device_at


@settings(max_examples=part(200, least=66), deadline=None)
@given(sizes=SIZES, data=st.data())
def test_counts_and_blocks_are_what_counting_says(sizes: list[int], data: st.DataObject) -> None:
    layout = layout_for(*sizes)
    idle = data.draw(st.integers(0, (1 << layout.size) - 1)) & layout.present
    census = Census(layout, idle)
    for level in range(layout.num_levels):
        starts = range(0, layout.size, 1 << level)
        counted = [sum(idle >> address & 1 for address in range(start, start + (1 << level))) for start in starts]
        assert list(census.counts(level)) == counted
        full = [start for start, count in zip(starts, counted, strict=True) if count == 1 << level]
        assert addresses(census.full(level)) == full
    on_nodes = [(idle & layout.node_block(node)).bit_count() for node in range(len(layout.node_starts))]
    # With all blocks counted, and without.
    assert list(census.idle_of_nodes()) == on_nodes
    assert list(Census(layout, idle).idle_of_nodes()) == on_nodes


@settings(max_examples=part(300, least=100), deadline=None)
@given(sizes=SIZES, data=st.data(), count=st.integers(1, 40))
def test_compact_is_on_the_fewest_nodes(sizes: list[int], data: st.DataObject, count: int) -> None:
    layout = layout_for(*sizes)
    idle = data.draw(st.integers(0, (1 << layout.size) - 1)) & layout.present
    chosen = Census(layout, idle).compact(count)
    if idle.bit_count() < count:
        assert chosen == 0
        return
    assert chosen & ~idle == 0
    assert chosen.bit_count() == count
    free = [(idle & layout.node_block(node)).bit_count() for node in range(len(layout.node_starts))]
    is_aligned = count & (count - 1) == 0 and chosen == block_at(addresses(chosen)[0], count.bit_length() - 1)
    assert len(layout.nodes_of(chosen)) == fewest(free, count) or is_aligned


def fewest(free: Sequence[int], count: int) -> int:
    for number in range(1, len(free) + 1):
        if any(sum(some) >= count for some in itertools.combinations(free, number)):
            return number
    return 0


@settings(max_examples=part(300, least=100), deadline=None)
@given(sizes=SIZES, data=st.data(), count=st.integers(1, 12))
def test_growing_never_lies_wider_than_starting_beside(sizes: list[int], data: st.DataObject, count: int) -> None:
    layout = layout_for(*sizes)
    mask = st.integers(0, (1 << layout.size) - 1)
    own, idle = data.draw(mask) & layout.present, data.draw(mask) & layout.present
    idle &= ~own
    if not own:
        return
    more = Census(layout, idle).extend(own, count)
    if idle.bit_count() < count:
        assert more == 0
        return
    assert more & ~idle == 0
    assert more.bit_count() == count
    at_home = idle & sum(layout.node_block(node) for node in layout.nodes_of(own))
    if at_home.bit_count() >= count:
        assert more & ~at_home == 0


def test_best_fit_looks_at_the_nearest_surroundings_first() -> None:
    layout = layout_for(8, 8)
    # Single holes at 1 (its half has one more idle), 9 (its half is full otherwise), but its node has more.
    idle = bits(1, 2, 9, 12, 13, 14)
    assert Census(layout, idle).best_block(0) == bits(9)
    assert Census(layout, idle).best_block(1) == bits(12, 13)
    assert Census(layout, idle).best_block(2) == 0


# --- the same questions, answered block by block ----------------------------------------------------------------------


def tightest(census: Census, starts: Sequence[int], level: int) -> int:
    while len(starts) > 1 and level < census.layout.num_levels:
        around = [(census.idle & block_at(start >> level << level, level)).bit_count() for start in starts]
        starts = [start for start, idle in zip(starts, around, strict=True) if idle == min(around)]
        level += 1
    return starts[0]


def idle_on(census: Census, node: int) -> int:
    return (census.idle & census.layout.node_block(node)).bit_count()


def num_needed(census: Census, nodes: Sequence[int], count: int) -> int:
    idle = sorted((idle_on(census, node) for node in nodes), reverse=True)
    return next((n for n in range(1, len(idle) + 1) if sum(idle[:n]) >= count), 0)


def plain_block(census: Census, level: int) -> int:
    layout = census.layout
    whole = [
        {start for start in range(0, layout.size, 1 << k) if block_at(start, k) & ~census.idle == 0}
        for k in range(layout.num_levels)
    ]
    for upper in range(level, layout.num_levels):
        inside = {start + half for start in whole[upper + 1] for half in (0, 1 << upper)} if whole[upper + 1 :] else ()
        starts = sorted(whole[upper].difference(inside))
        if starts:
            return block_at(tightest(census, starts, upper + 1), level)
    return 0


def plain_compact(census: Census, count: int) -> int:
    """What `compact` says of a number that is no power of two."""
    layout, nodes = census.layout, range(len(census.layout.node_starts))
    if not 0 < count <= census.num_idle:
        return 0
    fewest = num_needed(census, nodes, count)
    for level in range(layout.num_levels):
        starts = range(0, layout.size, 1 << level)
        roomy = [
            (idle, start) for start in starts if (idle := (census.idle & block_at(start, level)).bit_count()) >= count
        ]
        if fewest == 1:
            inside = [
                (idle, start)
                for idle, start in roomy
                if any(not block_at(start, level) & ~layout.node_block(n) for n in nodes)
            ]
            if inside:
                start = tightest(census, [start for idle, start in inside if idle == min(inside)[0]], level + 1)
                return census._pick(start, level, count)
            continue
        for _, start in sorted(roomy):
            mine = [node for node in nodes if not layout.node_block(node) & ~block_at(start, level)]
            if num_needed(census, mine, count) == fewest:
                return plain_fill(census, mine, count)
    raise AssertionError


def plain_fill(census: Census, nodes: Sequence[int], count: int) -> int:
    chosen, left = 0, sorted(nodes, key=lambda node: (-idle_on(census, node), node))
    while count:
        able = [node for node in left if idle_on(census, node) >= count]
        if able:
            tight = min(able, key=lambda node: (idle_on(census, node), node))
            return chosen | Census(census.layout, census.idle & census.layout.node_block(tight)).compact(count)
        chosen |= census.idle & census.layout.node_block(left[0])
        count -= idle_on(census, left.pop(0))
    return chosen


@settings(max_examples=part(300, least=100), deadline=None)
@given(sizes=SIZES, data=st.data())
def test_places_are_those_that_are_found_block_by_block(sizes: list[int], data: st.DataObject) -> None:
    layout = layout_for(*sizes)
    idle = data.draw(st.integers(0, (1 << layout.size) - 1)) & layout.present
    count = data.draw(st.integers(1, 40))
    census = Census(layout, idle)
    needed = num_needed(census, range(len(layout.node_starts)), count)
    assert census.fewest_nodes(count) == needed
    assert fewest_suffice(census, count) == (0 < needed <= layout.nodes_needed(count))
    for level in range(layout.num_levels):
        assert census.best_block(level) == plain_block(census, level)
    if count & (count - 1):
        assert census.compact(count) == plain_compact(census, count)


def test_blocks_are_taken_and_given_back() -> None:
    layout = layout_for(8, 8)
    blocks = Blocks(layout)
    assert blocks.largest_block() == 16
    first = blocks.take(2)
    assert first == (0, 1)
    assert blocks.take(2, beside=first) == (2, 3)
    assert blocks.take(3) == (4, 5, 6)
    assert blocks.take(1) == (7,)
    apart = blocks.copy()
    assert apart.take(8) == tuple(range(8, 16))
    assert apart.num_idle == 0
    assert apart.largest_block() == 0
    assert blocks.num_idle == 8
    blocks.give(first)
    assert (blocks.num_idle, blocks.largest_block()) == (10, 8)
    assert addresses(blocks.idle) == [0, 1, *range(8, 16)]
    with pytest.raises(ValueError, match="11 devices wanted, 10 idle"):
        blocks.take(11)


def test_blocks_say_what_fits_compactly() -> None:
    layout = layout_for(8, 8)
    blocks = Blocks(layout, bits(0, 1, 2, 4, 5, 6, 8, 9, 10, 12))
    assert [count for count in range(1, 12) if blocks.fits(count)] == [1, 2, 3, 5, 6, 9, 10]
    irregular = Blocks(layout_for(6, 6))
    assert [count for count in range(1, 14) if irregular.fits(count)] == list(range(1, 13))
    assert not fits_compactly(Census(irregular.layout, bits(0, 1, 4, 8, 9)), 4)
    assert Blocks(layout, 1 << 20).num_idle == 0
