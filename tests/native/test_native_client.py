"""Finding the daemon, and finding it again: wrong answers, no answers, and files that are given up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gate_scene import HANGS_NS, MS, UUID, Scene, ask_until, open_scene, slowly, wait_for_waiting
from kits.native.native_build import Native
from springtide.backends.sharing.gpu.segments import CLOSED, FULL, UNKNOWN, UNLIMITED
from springtide.backends.sharing.gpu.tenants import STALE_AFTER_NS


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[Scene]:
    with open_scene(native, tmp_path) as found:
        yield found


# --- finding the daemon ---------------------------------------------------------------------------------------------


def test_without_an_address_nothing_is_asked_and_nobody_held(scene: Scene) -> None:
    scene.daemon.add(UUID, 7)
    probe = scene.probe(address="")
    assert probe.say("launch 1000 50 4")["charged"] == 0
    assert probe.say("bucket") == {"segment": None, "attached": 0}
    assert scene.daemon.num_questions == 0


@pytest.mark.parametrize("address", ["/nowhere/at/all", "x" * 300])
def test_an_address_where_nobody_is_holds_nobody(scene: Scene, address: str) -> None:
    answer = scene.probe(address=address).say("launch 1000 50 4")
    assert (answer["charged"], answer["keeps_errno"]) == (0, True)
    assert answer["total_ns"] < HANGS_NS


def test_who_is_unknown_is_not_held_and_found_later(scene: Scene) -> None:
    probe = scene.probe()
    assert probe.say("launch 100 50 1")["charged"] == 0
    assert scene.daemon.num_questions == 1
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 2**62
    deadline_s = time.monotonic() + 10.0
    while not probe.say("launch 20 50 1")["charged"]:
        assert time.monotonic() < deadline_s
    assert probe.say("bucket")["attached"] == 1
    assert segment.process(0)[2] == 4096


def test_a_full_tenant_says_so_and_is_left_in_peace(scene: Scene) -> None:
    scene.daemon.answers = lambda client, question: scene.daemon.say_no(client, FULL, retry_ms=60_000)
    probe = scene.probe()
    assert probe.say("launch 1000 50 1")["charged"] == 0
    probe.say("sleep 150")
    probe.say("launch 1000 50 1")
    assert scene.daemon.num_questions == 1


@pytest.mark.slow
def test_a_daemon_that_never_answers_is_asked_less_and_less(scene: Scene) -> None:
    scene.daemon.answers = lambda client, question: time.sleep(0.2)
    probe = scene.probe()
    answer = probe.say("launch 1000 50 8")
    assert answer["charged"] == 0
    assert answer["longest_ns"] < HANGS_NS
    for _ in range(20):
        probe.say("sleep 50")
        probe.say("launch 32 50 1")
    assert scene.daemon.num_questions <= 5


def test_the_first_launches_of_all_threads_wait_for_the_first_answer(scene: Scene) -> None:
    scene.daemon.add(UUID, 7).granted_ns = 2**62
    scene.daemon.answers = slowly(scene.daemon, 0.03)
    # All or, where a busy machine answers too late, none; but never some.
    charged = [scene.probe().say("launch 1 50 16")["charged"] for _ in range(3)]
    assert set(charged) <= {0, 16}
    assert 16 in charged
    assert scene.daemon.num_questions == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    ["closed", "short answer", "long answer", "other magic", "no files", "one file", "five files", "small files",
     "other segment", "other device", "slot out of range"],
)  # fmt: skip
def test_a_wrong_answer_holds_nobody_and_costs_no_descriptor(scene: Scene, wrong: str) -> None:
    segment = scene.daemon.add(UUID, 7)
    other = scene.daemon.add(bytes(16), 8)
    for one in (segment, other):
        one.bound(max_wait_ns=5 * MS)  # so that a wrong one that is taken fails this test soon
    small = tuple(path.with_suffix(".small") for path in segment.paths)
    for whole, part in zip(segment.paths, small, strict=True):
        part.write_bytes(whole.read_bytes()[:4096])  # the usage goes on behind this

    def answer(client: socket.socket, question: bytes) -> None:
        if wrong == "short answer":
            client.send(b"abc")
        elif wrong == "long answer":
            client.send(bytes(4096))
        elif wrong == "other magic":
            client.send(bytes(32))
        elif wrong == "no files":
            scene.daemon.send_files(client, segment, 0, ())
        elif wrong == "one file":
            scene.daemon.send_files(client, segment, 0, segment.paths[:1])
        elif wrong == "five files":
            scene.daemon.send_files(client, segment, 0, segment.paths * 2 + segment.paths[:1])
        elif wrong == "small files":
            scene.daemon.send_files(client, segment, 63, small)
        elif wrong == "other segment":
            scene.daemon.send_files(client, segment, 0, (segment.paths[0], other.paths[1]))
        elif wrong == "other device":
            scene.daemon.send_files(client, other, 0)
        elif wrong == "slot out of range":
            scene.daemon.send_files(client, segment, 64)

    probe = scene.probe()
    scene.daemon.answers = answer
    assert probe.say("launch 100 50 1")["charged"] == 0
    before = probe.say("descriptors")["open"]
    for _ in range(3):
        probe.say("sleep 110")
        assert probe.say("launch 32 50 1")["charged"] == 0
    assert scene.daemon.num_questions >= 2
    assert probe.say("descriptors")["open"] == before
    assert segment.used_ns == 0
    # And the right one is taken afterwards.
    scene.daemon.answers = scene.daemon.answer
    segment.granted_ns = 2**62
    deadline_s = time.monotonic() + 10.0
    while not probe.say("launch 64 50 1")["charged"]:
        assert time.monotonic() < deadline_s


# --- new files ------------------------------------------------------------------------------------------------------


def test_closed_files_are_left_for_new_ones(scene: Scene) -> None:
    old = scene.daemon.add(UUID, 7)
    old.granted_ns = 2**62
    probe = scene.ready(old)
    probe.say("launch 10 50 2")
    fresh = scene.daemon.add(UUID, 8)
    fresh.granted_ns = 2**62
    old.flags = CLOSED
    probe.say("sleep 110")
    # A process that never has to wait looks once in 64 launches.
    deadline_s = time.monotonic() + 10.0
    while not fresh.used_ns:
        assert time.monotonic() < deadline_s
        probe.say("launch 128 50 1")
    assert probe.say("bucket") == {"segment": 8, "slot": 0, "attached": 2}
    used_ns = old.used_ns
    probe.say("launch 100 50 1")
    assert old.used_ns == used_ns
    assert fresh.used_ns >= 100 * 50
    assert fresh.process(0)[2] == 4096


def test_whoever_waits_is_let_go_when_the_files_are_closed(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    probe.begin("launch 1 50 4")
    wait_for_waiting(segment, 0, 4)
    segment.flags = CLOSED
    segment.wake()
    assert probe.end()["longest_ns"] < HANGS_NS
    del scene.daemon.segments[UUID]
    probe.say("sleep 110")
    assert probe.say("bucket")["segment"] is None


def test_a_daemon_that_does_not_know_us_yet_leaves_us_our_files(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 1
    probe = scene.ready(segment)
    probe.say("launch 1 50 1")
    probe.say("sleep 110")
    scene.daemon.is_frozen = True
    scene.daemon.answers = lambda client, question: scene.daemon.say_no(client, UNKNOWN)
    segment.bound(STALE_AFTER_NS)
    probe.say("launch 1 50 1")
    probe.say("sleep 110")
    probe.say("launch 100 50 1")
    assert scene.daemon.num_questions > 1
    segment.granted_ns = segment.used_ns
    segment.bound()
    segment.beat()
    scene.daemon.is_frozen = False
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    segment.granted_ns += 1
    segment.wake()
    probe.end()


@pytest.mark.slow
def test_lost_files_are_replaced_while_threads_launch(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 2**62
    probe = scene.ready(segment)
    probe.begin("launch 150000 1 4")
    for number in range(8, 12):
        old = segment
        segment = scene.daemon.add(UUID, number)
        segment.granted_ns = 2**62
        old.flags = CLOSED
        time.sleep(0.12)
    answer = probe.end()
    assert answer["longest_ns"] < HANGS_NS
    assert answer["keeps_errno"]
    assert probe.say("bucket")["segment"] in range(8, 12)


@pytest.mark.slow
def test_a_thousand_new_files_leave_no_descriptor_and_no_memory(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 1)
    segment.granted_ns = 2**62
    probe = scene.ready(segment)
    before = probe.say("descriptors")
    for number in range(2, 1002):
        old = scene.daemon.segments[UUID]
        scene.daemon.add(UUID, number).granted_ns = 2**62
        scene.daemon.drop(old)
        ask_until(probe, number)
    after = probe.say("descriptors")
    assert after["open"] == before["open"]
    # What stays of an old pair of files is room in the address space, side by side, and its small description.
    assert after["mappings"] <= before["mappings"] + 50
    assert after["resident_kib"] <= before["resident_kib"] + 2048


def test_a_thousand_answers_about_the_same_files_map_them_once(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 2**62
    probe = scene.ready(segment)
    before = probe.say("descriptors")
    scene.daemon.is_frozen = True
    segment.bound(stale_after_ns=1)
    for _ in range(1000):
        probe.say("patience")
        assert probe.say("bucket")["attached"] == 1
    assert scene.daemon.num_questions > 900
    after = probe.say("descriptors")
    assert (after["open"], after["mappings"]) == (before["open"], before["mappings"])


def test_two_devices_have_two_buckets(scene: Scene) -> None:
    other = bytes(range(16, 32))
    segments = scene.daemon.add(UUID, 7), scene.daemon.add(other, 8)
    for segment in segments:
        segment.granted_ns = 2**62
    probes = [scene.ready(segment) for segment in segments]
    threads = [threading.Thread(target=probe.say, args=("launch 100 50 1",)) for probe in probes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [segment.used_ns for segment in segments] == [5000, 5000]


def test_who_runs_ahead_without_a_limit_still_finds_new_files(scene: Scene) -> None:
    """Such a program is past its tokens all the time, and looks after its files in one launch of 64."""
    old = scene.daemon.add(UUID, 7)
    old.flags = UNLIMITED
    probe = scene.ready(old)
    probe.say("launch 1000 1000000 2")
    assert old.num_open == 0
    fresh = scene.daemon.add(UUID, 8)
    fresh.flags = UNLIMITED
    old.flags = UNLIMITED | CLOSED
    deadline_s = time.monotonic() + 10.0
    while not fresh.used_ns:
        assert time.monotonic() < deadline_s
        probe.say("launch 128 50 1")
