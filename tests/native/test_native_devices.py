"""Launches are charged to the device that they run on, known by its UUID, whatever a process calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gate_scene import DeviceScene, open_devices
from kits.native.native_build import Native


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[DeviceScene]:
    with open_devices(native, tmp_path) as found:
        yield found


def test_each_device_has_a_bucket_of_its_own(scene: DeviceScene) -> None:
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("create b 1")
    scene.settle(probe, 1)
    assert probe.say("launch 10 1")["result"] == 0
    probe.say("use a")
    assert probe.say("launch 30 1")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (30, 10)
    assert scene.segments[0].used_ns > 0


def test_a_thread_that_changes_its_device_with_every_launch(scene: DeviceScene) -> None:
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("primary b 1")
    scene.settle(probe, 1)
    assert probe.say("alternate 1001 a b")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (501, 500)


def test_contexts_that_are_pushed_and_popped(scene: DeviceScene) -> None:
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("create b 1")
    scene.settle(probe, 1)
    probe.say("use a")
    probe.say("push b")
    probe.say("alternate 10 b b")
    probe.say("pop a")
    probe.say("launch 7 1")
    assert (scene.num_launches(0), scene.num_launches(1)) == (7, 10)


@pytest.mark.parametrize("visible", ["1", "GPU-53545542-0000-4000-8000-000000000002"])
def test_a_visible_device_keeps_its_uuid(scene: DeviceScene, visible: str) -> None:
    """The first device of such a process is the machine's second."""
    probe = scene.probe(CUDA_VISIBLE_DEVICES=visible)
    probe.say("create a 0")
    scene.settle(probe, 1)
    assert probe.say("launch 12 2")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (0, 24)


def test_two_processes_that_both_call_their_device_the_first(scene: DeviceScene) -> None:
    probes = [scene.probe(CUDA_VISIBLE_DEVICES=str(number)) for number in range(2)]
    for number, probe in enumerate(probes):
        probe.say("primary a 0")
        scene.settle(probe, number)
        probe.say(f"launch {5 + number} 1")
    assert (scene.num_launches(0), scene.num_launches(1)) == (5, 6)


def test_a_dead_contexts_address_may_be_another_devices(scene: DeviceScene) -> None:
    """The stub driver, as a real one may, gives the address of a destroyed context to the next."""
    probe = scene.probe()
    addresses = set()
    for turn in range(20):
        addresses.add(probe.say(f"create a {turn % 2}")["context"])
        probe.say("use a")
        if turn < 2:
            scene.settle(probe, turn)
        assert probe.say("alternate 3 a a")["result"] == 0
        assert probe.say("destroy a")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (30, 30)
    assert len(addresses) < 20, "no address was used twice: this test shows nothing"


def test_a_primary_context_that_is_reset_or_released(scene: DeviceScene) -> None:
    probe = scene.probe()
    for turn in range(6):
        probe.say(f"primary a {turn % 2}")
        if turn < 2:
            scene.settle(probe, turn)
        assert probe.say("alternate 5 a a")["result"] == 0
        assert probe.say(f"{'reset' if turn < 3 else 'release'} {turn % 2}")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (15, 15)


def test_what_a_context_held_is_free_when_it_ends(scene: DeviceScene) -> None:
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("alloc 1000000")
    held = scene.segments[0].process(0)[2]
    assert held >= 1_000_000
    probe.say("create b 1")  # another is current when it ends
    assert probe.say("destroy a")["result"] == 0
    assert scene.segments[0].process(0)[2] == 0


def test_without_a_context_nothing_is_charged(scene: DeviceScene) -> None:
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
        probe = scene.probe(**environment)
        probe.say("create a 0")
        scene.settle(probe, 0)
        before = scene.num_launches(0), scene.segments[0].used_ns
        probe.say("use 0")
        assert probe.say("launch 3 2")["result"] != 0
        assert (scene.num_launches(0), scene.segments[0].used_ns) == before


def test_many_threads_find_their_device_at_once(scene: DeviceScene) -> None:
    counts = []
    for _ in range(3):  # a busy machine may answer too late for some of them
        before = scene.num_launches(1)
        probe = scene.probe()
        probe.say("create a 1")
        assert probe.say("launch 500 16")["result"] == 0
        counts.append(scene.num_launches(1) - before)
    assert 8_000 in counts
    assert max(counts) == 8_000


def test_a_device_that_nobody_shares_is_not_held(scene: DeviceScene) -> None:
    del scene.daemon.segments[scene.segments[1].device_uuid]
    probe = scene.probe()
    probe.say("create a 1")
    assert probe.say("launch 100 2")["result"] == 0
    probe.say("create b 0")
    scene.settle(probe, 0)
    assert probe.say("launch 100 2")["result"] == 0
    assert (scene.num_launches(0), scene.num_launches(1)) == (200, 0)
