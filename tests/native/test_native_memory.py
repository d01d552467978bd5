"""The memory limit, on every way to get memory and to free it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.memory_scene import MIB, OUT_OF_MEMORY, WAYS, MemoryScene, num_denied, open_memory_scene, slot_bytes
from kits.native.native_build import Native


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[MemoryScene]:
    with open_memory_scene(native, tmp_path) as found:
        yield found


# --- every way to get memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("get", "size", "free"), WAYS.values(), ids=WAYS)
def test_what_is_held_counts_and_counts_no_longer(
    scene: MemoryScene, get: tuple[str, int], size: int, free: str
) -> None:
    segment = scene.limit(10 * size)
    probe = scene.probe()
    number = probe.do(*get)
    assert probe.held() == size
    assert slot_bytes(scene) == size
    probe.do(free, number)
    probe.do("sync")
    assert probe.held() == 0
    assert slot_bytes(scene) == 0
    assert num_denied(segment) == 0


@pytest.mark.parametrize(("get", "size", "free"), WAYS.values(), ids=WAYS)
def test_nobody_gets_more_than_the_limit(scene: MemoryScene, get: tuple[str, int], size: int, free: str) -> None:
    segment = scene.limit(2 * size)
    probe = scene.probe()
    first, _second = probe.do(*get), probe.do(*get)
    assert probe.ask(*get)[0] == OUT_OF_MEMORY
    assert probe.peak() == 2 * size, "the driver was asked although there was no room"
    assert num_denied(segment) == 1
    probe.do(free, first)
    probe.do("sync")
    probe.do(*get)
    assert slot_bytes(scene) == 2 * size


@pytest.mark.parametrize(("get", "size", "free"), WAYS.values(), ids=WAYS)
def test_what_the_driver_refuses_is_not_counted(scene: MemoryScene, get: tuple[str, int], size: int, free: str) -> None:
    scene.limit(100 * size)
    probe = scene.probe(STUB_MEMORY_MB=1 + size // 1_000_000)
    probe.do(*get)
    assert probe.ask(*get)[0] == OUT_OF_MEMORY
    assert slot_bytes(scene) == size
    assert num_denied(scene.limit(100 * size)) == 0


def test_sizes_beyond_all_bounds_do_not_wrap_around(scene: MemoryScene) -> None:
    scene.limit(64 * MIB)
    probe = scene.probe()
    probe.do("alloc", MIB)
    gets = [("alloc", 2**64 - MIB), ("pitch", 2**40, 2**40), ("array_3d", 2**33, 2**33, 2**33), ("async", 2**64 - MIB)]
    for get in gets:
        assert probe.ask(*get)[0] == OUT_OF_MEMORY
    assert slot_bytes(scene) == MIB
    assert probe.ask("free", 1)[0] != OUT_OF_MEMORY  # nothing was made, nothing is lost


def test_without_a_limit_memory_is_counted_and_nobody_refused(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = scene.probe(STUB_MEMORY_MB=64)
    total = probe.info()[1]
    probe.do("alloc", 40 * MIB)
    assert slot_bytes(scene) == 40 * MIB
    assert probe.info() == (total - 40 * MIB, total)
    assert num_denied(segment) == 0


def test_memory_of_other_interfaces_counts(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    number = probe.do("import", 5 * MIB)
    assert slot_bytes(scene) == 5 * MIB
    assert probe.ask("import", 5 * MIB)[0] == OUT_OF_MEMORY
    probe.do("free_import", number)
    assert slot_bytes(scene) == 0


def test_arrays_without_memory_of_their_own_do_not_count(scene: MemoryScene) -> None:
    """Sparse arrays and those that are mapped later get their memory by cuMemCreate, where it counts."""
    sparse, deferred = 0x40, 0x80
    scene.limit(MIB)
    probe = scene.probe()
    for flags in (sparse, deferred):
        probe.do("array_3d", 1024, 1024, 1, flags)
    assert slot_bytes(scene) == 0


# --- frees of what is not ours ----------------------------------------------------------------------------------------


def test_what_we_have_not_seen_is_freed_without_a_word(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    probe.do("alloc", MIB)
    assert probe.ask("free_address", 0)[0] == 0
    assert probe.ask("free_address", 0xDEAD000)[0] != 0  # as the driver says
    assert slot_bytes(scene) == MIB


def test_freeing_twice_gives_back_once(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    kept, freed = probe.do("alloc", MIB), probe.do("alloc", 2 * MIB)
    probe.do("free", freed)
    assert probe.ask("free", freed)[0] != 0
    assert slot_bytes(scene) == MIB
    probe.do("free", kept)
    assert slot_bytes(scene) == 0


def test_thousands_of_pieces_are_each_found_again(scene: MemoryScene) -> None:
    scene.limit(64 * MIB)
    probe = scene.probe()
    draw = random.Random(5)
    sizes = [512 * draw.randrange(1, 60) for _ in range(1500)]
    numbers = [probe.do("alloc", size) for size in sizes]
    assert slot_bytes(scene) == probe.held() == sum(sizes)
    draw.shuffle(numbers)
    for number in numbers[:1000]:
        probe.do("free", number)
    assert slot_bytes(scene) == probe.held() > 0
    for number in numbers[1000:]:
        probe.do("free", number)
    assert slot_bytes(scene) == probe.held() == 0


def test_what_could_not_be_freed_still_counts(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe(STUB_FAIL="cuMemFree_v2:0-0=719")
    number = probe.do("alloc", MIB)
    assert probe.ask("free", number)[0] == 719
    assert slot_bytes(scene) == MIB
    probe.do("free", number)
    assert slot_bytes(scene) == 0


# --- memory that is mapped --------------------------------------------------------------------------------------------


def test_physical_memory_counts_until_handle_and_mappings_are_gone(scene: MemoryScene) -> None:
    scene.limit(16 * MIB)
    probe = scene.probe()
    place, handle = probe.do("reserve", 8 * MIB), probe.do("create", 4 * MIB)
    probe.do("map", place, 0, handle, 4 * MIB)
    probe.do("release", handle)
    assert slot_bytes(scene) == probe.held() == 4 * MIB, "it is still mapped"
    retained = probe.do("retain", place, MIB)
    probe.do("unmap", place, 0, 4 * MIB)
    assert slot_bytes(scene) == probe.held() == 4 * MIB, "it still has a handle"
    probe.do("release", retained)
    assert slot_bytes(scene) == probe.held() == 0


def test_several_mappings_go_at_once(scene: MemoryScene) -> None:
    scene.limit(16 * MIB)
    probe = scene.probe()
    place = probe.do("reserve", 8 * MIB)
    for i in range(4):
        handle = probe.do("create", 2 * MIB)
        probe.do("map", place, i * 2 * MIB, handle, 2 * MIB)
        probe.do("release", handle)
    assert slot_bytes(scene) == 8 * MIB
    probe.do("unmap", place, 0, 8 * MIB)
    assert slot_bytes(scene) == probe.held() == 0


def test_memory_of_the_host_is_nobodys_concern(scene: MemoryScene) -> None:
    scene.limit(2 * MIB)
    probe = scene.probe()
    probe.do("release", probe.do("create_host", 8 * MIB))
    assert slot_bytes(scene) == 0


def test_physical_memory_counts_on_its_own_device(scene: MemoryScene) -> None:
    scene.limit(2 * MIB, device=0)
    scene.limit(8 * MIB, device=1)
    probe = scene.probe()
    probe.do("create", 6 * MIB, 1)
    assert slot_bytes(scene, device=1) == probe.held(1) == 6 * MIB
    assert slot_bytes(scene, device=0) == 0


# --- pools ------------------------------------------------------------------------------------------------------------


def test_what_a_pool_keeps_counts_until_it_is_given_back(scene: MemoryScene) -> None:
    scene.limit(16 * MIB)
    probe = scene.probe()
    pool = probe.do("default_pool", 0)
    probe.do("threshold", pool, 1 << 40)
    probe.do("free_async", probe.do("async", 8 * MIB))
    probe.do("sync")
    assert slot_bytes(scene) == probe.held() == 8 * MIB, "the pool still has it"
    probe.do("trim", pool, 2 * MIB)
    assert slot_bytes(scene) == probe.held() == 2 * MIB


def test_what_a_pool_keeps_unused_makes_room_for_others(scene: MemoryScene) -> None:
    segment = scene.limit(16 * MIB)
    probe = scene.probe()
    probe.do("threshold", probe.do("default_pool", 0), 1 << 40)
    probe.do("free_async", probe.do("async", 12 * MIB))
    probe.do("alloc", 12 * MIB)
    assert slot_bytes(scene) == probe.held() == 12 * MIB
    assert num_denied(segment) == 0


def test_a_pool_is_used_again_without_counting_twice(scene: MemoryScene) -> None:
    scene.limit(16 * MIB)
    probe = scene.probe()
    probe.do("threshold", probe.do("default_pool", 0), 1 << 40)
    for _ in range(20):
        probe.do("free_async", probe.do("async", 12 * MIB))
    assert slot_bytes(scene) == probe.held() == 12 * MIB


@pytest.mark.parametrize("word", ["from_pool", "from_pool_ptsz"])
def test_pools_of_the_program_count_on_their_device(scene: MemoryScene, word: str) -> None:
    scene.limit(4 * MIB, device=0)
    scene.limit(8 * MIB, device=1)
    probe = scene.probe()
    pool = probe.do("pool", 1)
    number = probe.do(word, pool, 6 * MIB)
    assert probe.ask(word, pool, 4 * MIB)[0] == OUT_OF_MEMORY
    assert slot_bytes(scene, device=1) == probe.held(1) == 6 * MIB
    assert slot_bytes(scene, device=0) == 0
    probe.do("free_pool", pool)
    assert slot_bytes(scene, device=1) == 6 * MIB, "what was allocated outlives the pool"
    probe.do("free_async", number)
    assert slot_bytes(scene, device=1) == 0


def test_the_pool_of_a_stream_on_another_device(scene: MemoryScene) -> None:
    scene.limit(4 * MIB, device=0)
    scene.limit(8 * MIB, device=1)
    probe = scene.probe()
    first = probe.do("primary", 0)
    probe.do("primary", 1)
    stream = probe.do("stream")
    probe.do("current", first)
    probe.do("async_on", stream, 6 * MIB)
    assert slot_bytes(scene, device=1) == probe.held(1) == 6 * MIB
    assert slot_bytes(scene, device=0) == 0


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_what_is_allocated_while_capturing_counts_when_the_graph_runs(scene: MemoryScene) -> None:
    segment = scene.limit(8 * MIB)
    probe = scene.probe()
    stream = probe.do("stream")
    probe.do("begin_capture", stream)
    probe.do("async_on", stream, 4 * MIB)
    graph = probe.do("end_capture", stream)
    assert slot_bytes(scene) == probe.held() == 0
    probe.do("launch_graph", probe.do("instantiate", graph))
    probe.do("sync")
    assert slot_bytes(scene) == probe.held() == 4 * MIB
    assert probe.ask("alloc", 6 * MIB)[0] == OUT_OF_MEMORY
    assert num_denied(segment) == 1


def test_what_a_graph_has_counts_before_anybody_waits(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    graph = probe.do("graph")
    probe.do("graph_alloc", graph, 6 * MIB)
    probe.do("launch_graph", probe.do("instantiate", graph))
    assert probe.ask("alloc", 4 * MIB)[0] == OUT_OF_MEMORY
    assert slot_bytes(scene) == probe.held() == 6 * MIB


@pytest.mark.parametrize("word", ["graph_alloc", "graph_alloc_any"])
def test_a_graph_that_can_never_fit_is_refused(scene: MemoryScene, word: str) -> None:
    segment = scene.limit(8 * MIB)
    probe = scene.probe()
    graph = probe.do("graph")
    assert probe.ask(word, graph, 9 * MIB)[0] == OUT_OF_MEMORY
    assert num_denied(segment) == 1
    assert probe.ask(word, graph, 7 * MIB)[0] == 0


def test_allocating_does_not_disturb_a_capture(scene: MemoryScene) -> None:
    """Asking the driver about pools while a stream captures could end a capture that does nothing wrong."""
    scene.limit(8 * MIB)
    probe = scene.probe()
    stream = probe.do("stream")
    probe.do("free_async", probe.do("async", MIB))
    probe.do("begin_capture", stream)
    probe.do("async_on", stream, MIB)
    probe.ask("info")
    probe.do("end_capture", stream)


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_a_context_takes_its_memory_with_it(scene: MemoryScene) -> None:
    scene.limit(32 * MIB)
    probe = scene.probe()
    probe.do("alloc", MIB)
    context = probe.do("context", 0)
    for _ in range(700):
        probe.do("alloc", 4096)
    probe.do("array", 64, 64)
    probe.do("free_context", context)
    assert slot_bytes(scene) == probe.held() == MIB


def test_the_primary_context_takes_its_memory_with_it(scene: MemoryScene) -> None:
    scene.limit(32 * MIB)
    probe = scene.probe()
    context = probe.do("context", 0)
    probe.do("alloc", MIB)
    primary = probe.do("primary", 0)
    probe.do("current", primary)
    probe.do("alloc", 2 * MIB)
    probe.do("reset", 0)
    probe.do("current", context)
    assert slot_bytes(scene) == probe.held() == MIB
