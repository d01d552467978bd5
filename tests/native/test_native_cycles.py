"""Launch cycles: from the first launch after a synchronisation to the end of the next one, as the daemon reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.grant_stand_in import Segment, now_ns
from kits.native.memory_scene import MemoryProbe, MemoryScene, open_memory_scene
from kits.native.native_build import Native

MS = 1_000_000
NOT_READY = 600
_BEGUN_AT, _ENDED_AT, _STARTED_AT, _CYCLES_AT, _NUM_CYCLES = 4352, 4360, 4368, 4416, 16
WAITS = [
    *("context", "context_v2", "stream", "stream_per_thread", "event"),
    *("to_host", "to_host_per_thread", "array_to_host", "array_to_host_per_thread"),
    *("unified", "unified_per_thread", "2d", "2d_per_thread", "2d_unaligned", "2d_unaligned_per_thread", "3d"),
    *("3d_per_thread", "2d_unified", "3d_unified", "look", "look_per_thread"),
]
GOES_ON = ["inside", "2d_inside", "3d_inside", "to_device", "async", "event_query"]


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[MemoryScene]:
    with open_memory_scene(native, tmp_path) as found:
        yield found


def cycle_probe(scene: MemoryScene, **env: object) -> MemoryProbe:
    return scene.probe(source="cycle_probe", **env)


def counts(segment: Segment) -> tuple[int, int]:
    """Cycles begun and ended."""
    return segment.read_usage(_BEGUN_AT), segment.read_usage(_ENDED_AT)


def started_ns(segment: Segment) -> int:
    return segment.read_usage(_STARTED_AT)


def newest(segment: Segment) -> list[int]:
    """The lengths that the daemon finds, oldest first."""
    ended = counts(segment)[1]
    return [segment.read_usage(_CYCLES_AT + 8 * (k % _NUM_CYCLES)) for k in range(max(0, ended - _NUM_CYCLES), ended)]


@pytest.mark.parametrize("way", WAITS)
def test_waiting_for_results_ends_a_cycle(scene: MemoryScene, way: str) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    before_ns = now_ns()
    probe.do("launch")
    probe.do("launch")
    assert counts(segment) == (1, 0)
    assert before_ns <= started_ns(segment) <= now_ns()
    probe.do("wait", way)
    assert counts(segment) == (1, 1)
    assert started_ns(segment) == 0
    assert 0 < newest(segment)[0] <= now_ns() - before_ns
    probe.do("launch")
    assert counts(segment) == (2, 1)


@pytest.mark.parametrize("way", GOES_ON)
def test_what_does_not_wait_for_results_ends_none(scene: MemoryScene, way: str) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    probe.do("launch")
    probe.do("wait", way)
    assert counts(segment) == (1, 0)
    assert started_ns(segment) != 0


def test_looking_at_a_stream_that_still_works_ends_none(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene, STUB_CLOCK="real", STUB_COPY_NS=1)
    probe.do("launch_long")
    assert probe.ask("wait", "query")[0] == NOT_READY
    assert counts(segment) == (1, 0)


def test_waiting_without_a_launch_is_no_cycle(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    for way in WAITS:
        probe.do("wait", way)
    assert counts(segment) == (0, 0)


def test_a_failed_wait_ends_no_cycle(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene, STUB_FAIL="cuCtxSynchronize:0-0=600")
    probe.do("launch")
    assert probe.ask("wait", "context")[0] == 600
    assert counts(segment) == (1, 0)
    probe.do("wait", "context")
    assert counts(segment) == (1, 1)


def test_a_cycle_is_as_long_as_the_work_that_was_waited_for(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene, STUB_CLOCK="real", STUB_COPY_NS=1)
    probe.do("launch")
    probe.do("wait", "context")
    probe.do("launch_long")
    probe.do("wait", "context")
    assert newest(segment)[1] >= 30 * MS


def test_the_newest_cycles_are_kept(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    for _ in range(3 * _NUM_CYCLES + 5):
        probe.do("launch")
        probe.do("wait", "stream")
    number = 3 * _NUM_CYCLES + 5
    assert counts(segment) == (number, number)
    assert all(length > 0 for length in newest(segment))


def test_threads_that_wait_together_end_one_cycle(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    probe.do("many_wait", 400)
    assert counts(segment) == (400, 400)


def test_each_device_has_cycles_of_its_own(scene: MemoryScene) -> None:
    first, second = scene.limit(0, device=0), scene.limit(0, device=1)
    probe = cycle_probe(scene)
    probe.do("launch_on", 0)
    probe.do("device", 1)
    probe.do("launch_on", 1)
    assert (counts(first), counts(second)) == ((1, 0), (1, 0))
    probe.do("wait", "context")
    assert (counts(first), counts(second)) == ((1, 0), (1, 1))
    probe.do("device", 0)
    probe.do("wait", "context")
    assert (counts(first), counts(second)) == ((1, 1), (1, 1))


def test_capturing_begins_no_cycle(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    probe.do("capture")
    probe.do("launch_captured")
    probe.do("end_capture")
    assert counts(segment) == (0, 0)


def test_a_child_begins_cycles_of_its_own(scene: MemoryScene) -> None:
    segment = scene.limit(0)
    probe = cycle_probe(scene)
    probe.do("launch")
    scene.attach(probe, probe.do("fork"))
    probe.do("wait", "context")
    assert counts(segment) == (1, 0), "what the child waits for is not what its parent launched"
    probe.do("launch")
    probe.do("wait", "context")
    assert counts(segment) == (2, 1)
