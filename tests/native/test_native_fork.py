"""What a child of a fork has of its parent's share: nothing. It asks for itself, and waits for none of its locks."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gate_scene import UUID as GATE_UUID
from kits.native.gate_scene import DeviceScene, Scene, open_devices, open_scene, stub_uuid, wait_for_waiting
from kits.native.native_build import Native

HANGS_S = 1.5


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[DeviceScene]:
    with open_devices(native, tmp_path) as found:
        yield found


@pytest.fixture
def gate(native: Native, tmp_path: Path) -> Iterator[Scene]:
    with open_scene(native, tmp_path) as found:
        yield found


def test_a_child_asks_for_itself(scene: DeviceScene) -> None:
    probe = scene.probe(STUB_FORK="allow")
    parent = probe.say("create a 0")["pid"]
    scene.settle(probe, 0)
    probe.say("launch 10 2")
    child = probe.say("fork")["pid"]
    assert child != parent
    assert probe.say("create b 0")["result"] == 0
    scene.settle(probe, 0)
    assert probe.say("launch 5 2")["result"] == 0
    segment = scene.segments[0]
    assert [segment.process(slot)[0] for slot in range(2)] == [parent, child]
    assert [segment.process(slot)[3] for slot in range(2)] == [20, 10]


def test_a_child_may_use_another_device(scene: DeviceScene) -> None:
    probe = scene.probe(STUB_FORK="allow", CUDA_VISIBLE_DEVICES="0,1")
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("launch 3 1")
    probe.say("fork")
    probe.say("create b 1")
    scene.settle(probe, 1)
    probe.say("launch 4 1")
    assert (scene.num_launches(0), scene.num_launches(1)) == (3, 4)


def test_a_parent_without_cuda_forks_children_with_it(scene: DeviceScene) -> None:
    """As a server does that forks its workers before it has touched the device."""
    probe = scene.probe()
    probe.say("fork")
    assert probe.say("create a 0")["result"] == 0
    scene.settle(probe, 0)
    assert probe.say("launch 6 1")["result"] == 0
    assert scene.num_launches(0) == 6


def test_a_child_that_the_driver_refuses_is_told_so(scene: DeviceScene) -> None:
    """CUDA does not survive a fork: the child gets the driver's own error, at once."""
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("launch 10 1")
    used_ns = scene.segments[0].used_ns
    probe.say("fork")
    answer = probe.say("launch 1 1")
    assert answer["result"] == 3
    assert answer["longest_s"] < HANGS_S
    assert scene.segments[0].used_ns == used_ns
    assert scene.num_launches(0) == 10


def test_a_childs_memory_is_its_own(scene: DeviceScene) -> None:
    probe = scene.probe(STUB_FORK="allow")
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("alloc 4000000")
    held = scene.segments[0].process(0)[2]
    assert held >= 4_000_000
    probe.say("fork")
    probe.say("create b 0")
    scene.settle(probe, 0)
    probe.say("alloc 1000000")
    assert scene.segments[0].process(0)[2] == held
    assert 1_000_000 <= scene.segments[0].process(1)[2] < held


def test_a_program_that_replaces_itself_keeps_its_slot_and_none_of_its_memory(scene: DeviceScene) -> None:
    probe = scene.probe()
    parent = probe.say("create a 0")["pid"]
    scene.settle(probe, 0)
    probe.say("alloc 4000000")
    probe.say("launch 2 1")
    segment = scene.segments[0]
    segment.write_usage(256 + 4, 3, ctypes.c_uint32)  # threads that waited when another replaced the program
    probe.begin("exec")
    assert probe.say("create a 0")["pid"] == parent
    deadline_s = time.monotonic() + 10.0
    while segment.process(0)[3] < 5:
        assert time.monotonic() < deadline_s
        probe.say("launch 1 1")
    assert segment.process(0)[:3] == (parent, 0, 0)
    assert segment.process(1)[0] == 0


def test_other_programs_are_started_in_peace(scene: DeviceScene) -> None:
    probe = scene.probe()
    probe.say("create a 0")
    scene.settle(probe, 0)
    num_questions = scene.daemon.num_questions
    assert probe.say("spawn")["number"] == 1
    assert scene.daemon.num_questions == num_questions


def test_children_at_any_moment_never_hang(scene: DeviceScene) -> None:
    """Other threads of the parent launch all the while, so that a child may be born in the middle of anything."""
    scene.daemon.segments[stub_uuid(0)].granted_ns = 2**62
    probe = scene.probe(STUB_FORK="allow")
    parent = probe.say("create a 0")["pid"]
    scene.settle(probe, 0)
    probe.begin("forks 40")
    assert probe.end()["number"] == 40
    segment = scene.segments[0]
    children = [slot for slot in range(64) if segment.process(slot)[0] not in (0, parent)]
    # A child that a busy machine answers too late launches once without a bucket; none launches on another's account.
    counts = [segment.process(slot)[3] for slot in children]
    assert set(counts) <= {0, 1}
    assert sum(counts) >= 20


def test_a_child_is_born_while_its_parent_waits(scene: DeviceScene) -> None:
    """Waiting threads are the parent's; the child has none of them and takes none of their tokens."""
    segment = scene.segments[0]
    segment.granted_ns = 1
    probe = scene.probe(STUB_FORK="allow")
    probe.say("create a 0")
    scene.settle(probe, 0)
    probe.say("launch 1 1")
    probe.begin("forks 3")
    wait_for_waiting(segment, 0, 2)
    segment.granted_ns = 2**62
    segment.wake()
    assert probe.end()["number"] == 3
    assert segment.process(0)[1] == 0
    assert segment.num_open == 0


def test_a_child_leaves_its_parents_count(gate: Scene) -> None:
    segment = gate.daemon.add(GATE_UUID, 7)
    segment.granted_ns = 2**62
    probe = gate.probe()
    probe.say("launch 10 50 1")
    child = probe.say("fork")["pid"]
    probe.say("launch 5 50 3")
    assert segment.process(0)[3] == 10
    assert segment.process(1)[0] == child
    assert segment.process(1)[3] == 15
    assert probe.say("bucket")["slot"] == 1


def test_children_of_children_do_not_pile_up_their_parents_files(gate: Scene) -> None:
    gate.daemon.add(GATE_UUID, 7).granted_ns = 2**62
    probe = gate.probe()
    probe.say("launch 1 50 1")
    before = probe.say("descriptors")
    for slot in range(1, 20):
        probe.say("fork")
        assert probe.say("bucket")["slot"] == slot
    after = probe.say("descriptors")
    assert after["open"] == before["open"]
    assert after["virtual_kib"] < before["virtual_kib"] + 64
