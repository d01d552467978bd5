"""The memory limit among threads and processes, over the daemon's life, and what a program is told of its memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.grant_stand_in import now_ns
from kits.native.memory_scene import (
    ATTACH_S,
    MIB,
    OUT_OF_MEMORY,
    WAYS,
    MemoryProbe,
    MemoryScene,
    clear_slot,
    num_denied,
    open_memory_scene,
    slot_bytes,
)
from kits.native.native_build import Native

_TURN_AT = 112
PATIENCE_NS = 500_000_000


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[MemoryScene]:
    with open_memory_scene(native, tmp_path) as found:
        yield found


# --- several at once --------------------------------------------------------------------------------------------------


def test_threads_never_pass_the_limit(scene: MemoryScene) -> None:
    segment = scene.limit(4 * MIB)
    probe = scene.probe()
    refused = probe.do("storm", 8, MIB, 400)
    assert probe.peak() <= 4 * MIB
    assert slot_bytes(scene) == probe.held() == 0
    assert num_denied(segment) == refused


def test_threads_are_not_refused_where_there_is_room(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    assert probe.do("storm", 8, MIB, 400) == 0


def test_two_processes_share_one_limit(scene: MemoryScene) -> None:
    segment = scene.limit(8 * MIB)
    first, second = scene.probe(), scene.probe()
    first.do("alloc", 5 * MIB)
    assert second.ask("alloc", 4 * MIB)[0] == OUT_OF_MEMORY
    number = second.do("alloc", 3 * MIB)
    assert (slot_bytes(scene, 0), slot_bytes(scene, 1)) == (5 * MIB, 3 * MIB)
    assert first.info() == second.info() == (0, 8 * MIB)
    second.do("free", number)
    first.do("alloc", 3 * MIB)
    assert num_denied(segment) == 1


def test_two_processes_at_once_never_pass_the_limit(scene: MemoryScene) -> None:
    segment = scene.limit(2 * MIB)
    # Twice as much does not fit the device either, which would refuse what we let through.
    probes = [scene.probe(STUB_MEMORY_MB=3), scene.probe(STUB_MEMORY_MB=3)]
    for probe in probes:
        probe.send("storm", 1, 2 * MIB, 20000)
    refused = [probe.receive()[1] for probe in probes]
    assert num_denied(segment) == sum(refused) < 40000
    assert [slot_bytes(scene, slot) for slot in (0, 1)] == [0, 0]
    assert segment.read_usage(_TURN_AT) == 0, "nobody adds up any more"


def test_nobody_is_refused_because_of_one_who_is_refused(scene: MemoryScene) -> None:
    """What a process asks for in vain is never in the way of another one, not even for the moment of asking."""
    segment = scene.limit(2 * MIB)
    greedy, modest = scene.probe(), scene.probe()
    greedy.send("storm", 1, 3 * MIB, 100_000)
    while num_denied(segment) < 90_000:
        assert modest.do("storm", 1, MIB, 2000) == 0
    assert greedy.receive()[1] == 100_000


def test_memory_of_another_process_counts_where_it_was_made(scene: MemoryScene, tmp_path: Path) -> None:
    scene.limit(8 * MIB)
    scene.environment["PROBE_HANDLE"] = tmp_path / "handle"
    owner, guest = scene.probe(), scene.probe()
    owner.do("ipc_give", owner.do("alloc", 5 * MIB))
    guest.do("alloc", MIB)
    number = guest.do("ipc_take")
    assert (slot_bytes(scene, 0), slot_bytes(scene, 1)) == (5 * MIB, MIB)
    guest.do("ipc_close", number)
    assert (slot_bytes(scene, 0), slot_bytes(scene, 1)) == (5 * MIB, MIB)


def test_one_who_died_while_adding_up_holds_nobody_up(scene: MemoryScene) -> None:
    segment = scene.limit(8 * MIB)
    probe = scene.probe()
    probe.do("alloc", MIB)
    before_ns = now_ns()
    for left_by_the_dead in (*[64] * 12, 2**64 - 1):
        segment.write_usage(_TURN_AT, left_by_the_dead)
        probe.do("free", probe.do("alloc", MIB))
        assert segment.read_usage(_TURN_AT) == 0
    assert now_ns() - before_ns < 10 * PATIENCE_NS


@pytest.mark.slow
def test_one_who_was_stopped_while_adding_up_is_waited_for_once(scene: MemoryScene) -> None:
    segment = scene.limit(8 * MIB)
    stopped, probe = scene.probe(), scene.probe()
    stopped.do("alloc", MIB)
    probe.do("alloc", MIB)
    segment.write_usage(_TURN_AT, 1)
    before_ns = now_ns()
    probe.do("alloc", MIB)
    assert now_ns() - before_ns >= PATIENCE_NS
    assert segment.read_usage(_TURN_AT) == 0
    probe.do("alloc", MIB)
    assert (slot_bytes(scene, 0), slot_bytes(scene, 1)) == (MIB, 3 * MIB)


def test_what_a_killed_process_held_is_free_again(scene: MemoryScene) -> None:
    segment = scene.limit(8 * MIB)
    victim = MemoryProbe(scene.native, scene.environment)
    scene.attach(victim, victim.process.pid)
    heir = scene.probe()
    victim.do("alloc", 6 * MIB)
    victim.process.kill()
    victim.process.wait()
    assert heir.ask("alloc", 6 * MIB)[0] == OUT_OF_MEMORY
    clear_slot(segment, 0)
    heir.do("alloc", 6 * MIB)
    victim.close()


# --- the daemon -------------------------------------------------------------------------------------------------------


def test_what_was_allocated_before_the_daemon_came_counts_then(scene: MemoryScene) -> None:
    probe = scene.probe()
    probe.do("alloc", 3 * MIB)
    scene.limit(4 * MIB)
    assert wait_for_bytes(scene, probe, 3 * MIB)
    assert probe.ask("alloc", 2 * MIB)[0] == OUT_OF_MEMORY


def wait_for_bytes(scene: MemoryScene, probe: MemoryProbe, size: int) -> bool:
    """Until the library has asked again, which it does no more often than it was told."""
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        probe.ask("info")
        if slot_bytes(scene) == size:
            return True
        time.sleep(0.02)
    return False


def test_a_limit_can_change_at_any_time(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    number = probe.do("alloc", 6 * MIB)
    scene.limit(4 * MIB)
    assert probe.info() == (0, 4 * MIB)
    assert probe.ask("alloc", MIB)[0] == OUT_OF_MEMORY
    scene.limit(16 * MIB)
    probe.do("alloc", 10 * MIB)
    probe.do("free", number)
    assert probe.info() == (6 * MIB, 16 * MIB)


def test_without_a_daemon_nothing_is_counted_and_nothing_changed(native: Native) -> None:
    probe = MemoryProbe(native, {"STUB_MEMORY_MB": 64})
    total = probe.info()[1]
    probe.do("alloc", 40 * MIB)
    assert probe.info() == (total - 40 * MIB, total)
    assert probe.ask("alloc", 40 * MIB)[0] == OUT_OF_MEMORY  # the driver's own answer
    assert probe.close() == 0


def test_a_child_begins_with_nothing(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    probe.do("alloc", 5 * MIB)
    scene.attach(probe, probe.do("fork"))  # from here on the child answers
    probe.do("primary", 0)
    assert probe.ask("alloc", 4 * MIB)[0] == OUT_OF_MEMORY, "its parent still holds 5"
    probe.do("alloc", 2 * MIB)
    assert (slot_bytes(scene, 0), slot_bytes(scene, 1)) == (5 * MIB, 2 * MIB)


@pytest.mark.parametrize("driver", ["old_stub_dir", "ancient_stub_dir"])
def test_old_drivers_are_limited_too(scene: MemoryScene, driver: str) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe(LD_LIBRARY_PATH=getattr(scene.native, driver))
    for get, size, free in WAYS.values():
        number = probe.do(*get)
        assert slot_bytes(scene) == size
        probe.do(free, number)
        probe.do("sync")
    assert probe.ask("alloc", 9 * MIB)[0] == OUT_OF_MEMORY
    assert slot_bytes(scene) == probe.held() == 0


def test_another_program_in_the_same_process_begins_with_nothing(scene: MemoryScene) -> None:
    scene.limit(8 * MIB)
    probe = scene.probe()
    probe.do("alloc", 5 * MIB)
    probe.send("exec")
    assert wait_for_bytes(scene, probe, 0)
    probe.do("alloc", 7 * MIB)
    assert slot_bytes(scene) == 7 * MIB


# --- what a program is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["info", "old_info", "nvml", "nvml_v2"])
def test_the_limit_is_all_the_memory_there_is(scene: MemoryScene, word: str) -> None:
    scene.limit(64 * MIB)
    probe = scene.probe()
    probe.do("alloc", 24 * MIB)
    assert probe.ask(word) == (0, 40 * MIB, 64 * MIB)


def test_the_size_of_the_device_is_the_limit(scene: MemoryScene) -> None:
    scene.limit(64 * MIB)
    probe = scene.probe()
    assert probe.do("total", 0) == 64 * MIB
    assert probe.do("total", 1) > 64 * MIB


def test_a_limit_beyond_the_device_changes_nothing(scene: MemoryScene) -> None:
    scene.limit(1 << 50)
    probe = scene.probe(STUB_MEMORY_MB=64)
    free, total = probe.info()
    assert free == total < 1 << 50
    assert probe.ask("nvml")[1:] == (free, total)


def test_others_on_the_device_leave_less_than_the_limit(scene: MemoryScene) -> None:
    scene.limit(60 * MIB)
    stranger = MemoryProbe(scene.native, {**scene.environment, "SPRINGTIDE_GPU_SOCKET": "/none", "STUB_MEMORY_MB": 64})
    stranger.do("alloc", 30 * MIB)
    probe = scene.probe(STUB_MEMORY_MB=64)
    free, total = probe.info()
    assert total == 60 * MIB
    assert free < 40 * MIB
    assert stranger.close() == 0


NVML_LINKED = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
extern int nvmlInit_v2(void);
extern int nvmlDeviceGetHandleByIndex_v2(unsigned int, void **);
extern int nvmlDeviceGetMemoryInfo(void *, memory_t *);
int main(int argc, char **argv) {
    void *device;
    memory_t memory = {0};
    int result = nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device);
    for (int i = 0; i < 1000 && result == 0; i++) { /* until the daemon was found */
        result = nvmlDeviceGetMemoryInfo(device, &memory);
        if (argc < 2 || memory.total == strtoull(argv[1], NULL, 10)) {
            break;
        }
        usleep(10000);
    }
    printf("[%d, %llu, %llu, %llu]\\n", result, memory.total, memory.free, memory.used);
    return 0;
}
"""


def test_nvml_is_limited_where_it_is_linked(scene: MemoryScene) -> None:
    scene.limit(64 * MIB)
    links = ("-lnvidia-ml",)
    limited = scene.native.run(NVML_LINKED, 64 * MIB, env=scene.environment, links=links)
    assert limited.json() == [0, 64 * MIB, 64 * MIB, 0]
    bare = scene.native.run(NVML_LINKED, env={}, links=links)
    assert bare.json()[1] > 64 * MIB


def test_nvml_is_limited_before_the_driver_is_initialised(scene: MemoryScene) -> None:
    scene.limit(64 * MIB)
    probe = scene.probe("bare")
    deadline_s = time.monotonic() + ATTACH_S
    while probe.ask("nvml") != (0, 64 * MIB, 64 * MIB):
        assert time.monotonic() < deadline_s, probe.ask("nvml")
        time.sleep(0.01)
    probe.do("init")
    probe.do("primary", 0)
    scene.attach(probe, probe.process.pid)
    probe.do("alloc", 24 * MIB)
    assert probe.ask("nvml") == (0, 40 * MIB, 64 * MIB)


# --- everything together ----------------------------------------------------------------------------------------------


def run_at_random(scene: MemoryScene, seed: int, num_steps: int) -> None:
    """Any order of getting and freeing: what counts is what the driver has given, and never more than the limit."""
    draw = random.Random(seed)
    limit = 40 * MIB
    scene.limit(limit)
    probe = scene.probe()
    held: list[tuple[str, int]] = []
    for _ in range(num_steps):
        if held and draw.random() < 0.45:
            free, number = held.pop(draw.randrange(len(held)))
            probe.do(free, number)
        else:
            get, _size, free = draw.choice(list(WAYS.values()))
            result, number, _ = probe.ask(*get)
            assert result in (0, OUT_OF_MEMORY)
            if result == 0:
                held.append((free, number))
        if draw.random() < 0.2:
            probe.do("sync")
            assert slot_bytes(scene) == probe.held()
    assert probe.peak() <= limit
    while held:
        probe.do(*held.pop())
    probe.do("sync")
    assert slot_bytes(scene) == probe.held() == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_getting_and_freeing(scene: MemoryScene, seed: int) -> None:
    run_at_random(scene, seed, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_any_order_of_getting_and_freeing_for_longer(scene: MemoryScene, seed: int) -> None:
    run_at_random(scene, seed, 4000)


@pytest.mark.slow
def test_any_order_under_the_sanitizers(native_asan: Native, tmp_path: Path) -> None:
    with open_memory_scene(native_asan, tmp_path) as scene:
        run_at_random(scene, 3, 2000)
        scene.limit(4 * MIB)
        scene.probe().do("storm", 8, MIB, 400)
