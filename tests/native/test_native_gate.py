"""The token bucket by itself: who goes, who waits, and that nobody ever waits longer than is said."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gate_scene import HANGS_NS, MS, UUID, Scene, open_scene, slowly, wait_for_waiting
from kits.native.native_build import Native
from springtide.backends.sharing.gpu.segments import UNLIMITED
from springtide.backends.sharing.gpu.tenants import STALE_AFTER_NS


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[Scene]:
    with open_scene(native, tmp_path) as found:
        yield found


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_launches_go_while_there_are_tokens(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 10_000
    answer = scene.ready(segment).say("launch 100 100 1")
    assert answer["charged"] == 100
    assert segment.used_ns == 10_000
    assert segment.process(0)[3] == 100
    assert segment.throttled_ns == 0
    assert segment.num_open == 0


def test_a_launch_without_tokens_waits_for_them(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    segment.granted_ns = 50  # exactly what is used: not enough for the next
    segment.wake()
    time.sleep(0.05)
    assert segment.process(0)[1] == 1
    segment.granted_ns = 51
    segment.wake()
    answer = probe.end()
    assert answer["longest_ns"] >= 50 * MS
    assert segment.process(0)[1] == 0
    assert segment.num_open == 0
    assert segment.throttled_ns >= 50 * MS
    assert segment.used_ns == 100


def test_waiting_is_in_the_order_of_arrival(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe, later = scene.ready(segment), scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 100 1")
    probe.begin("launch 1 100 1")
    wait_for_waiting(segment, 0, 1)
    later.begin("launch 1 100 1")
    wait_for_waiting(segment, 1, 1)
    segment.granted_ns = 101
    segment.wake()
    probe.end()
    assert segment.process(1)[1] == 1
    segment.granted_ns = 201
    segment.wake()
    later.end()
    assert segment.num_open == 0


def test_a_big_launch_goes_into_debt_which_the_next_pays(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    assert probe.say("launch 1 1000000 1")["longest_ns"] < HANGS_NS
    assert segment.num_open == 0
    probe.begin("launch 1 1 1")
    wait_for_waiting(segment, 0, 1)
    segment.granted_ns = 1_000_001
    segment.wake()
    probe.end()
    assert segment.num_open == 0


@pytest.mark.slow
def test_a_rate_of_tokens_is_a_rate_of_device_time(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    scene.daemon.rate = 0.5
    answer = scene.ready(segment).say("launch 100 1000000 4")
    assert segment.used_ns == 400 * MS
    # Half a device's time: 400 launches of 1 ms take 800 ms, but for the burst at the beginning and the last launches.
    assert answer["total_ns"] >= (400 * MS - scene.daemon.burst_ns - 4 * MS) / 0.5
    assert segment.num_open == 0


def test_threads_are_counted_exactly(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 2**62
    probes = [scene.ready(segment) for _ in range(2)]
    for probe in probes:
        probe.begin("launch 20000 3 8")
    for probe in probes:
        assert probe.end()["charged"] == 160_000
    assert segment.used_ns == 2 * 160_000 * 3
    assert segment.process(0)[3] + segment.process(1)[3] == 320_000
    assert [segment.process(slot)[1] for slot in (0, 1)] == [0, 0]


def test_a_launch_that_fails_is_given_back_and_holds_nobody(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    _other, probe = scene.ready(segment), scene.ready(segment)
    segment.granted_ns = 1
    probe.say("refund 1000000000")
    assert (segment.used_ns, segment.process(1)[3]) == (0, 0)
    # What waits behind a launch that fails afterwards began at a value that is never granted.
    segment.write_usage(64, 1_000_000_000)
    probe.begin("launch 1 10 1")
    wait_for_waiting(segment, 1, 1)
    segment.write_usage(64, 10)
    segment.granted_ns = 11
    segment.wake()
    assert probe.end()["longest_ns"] < HANGS_NS
    assert segment.num_open == 0


def test_unlimited_ends_waiting(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    segment.flags = UNLIMITED
    segment.wake()
    probe.end()
    probe.say("launch 5 50 1")
    assert segment.num_open == 0


def test_signals_do_not_end_waiting(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    probe.say("interrupt 2")
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    time.sleep(0.1)
    assert segment.process(0)[1] == 1
    segment.granted_ns = 51
    segment.wake()
    answer = probe.end()
    assert answer["signals"] > 10
    assert answer["keeps_errno"]
    assert segment.num_open == 0


def test_signals_do_not_end_a_question(scene: Scene) -> None:
    scene.daemon.add(UUID, 7)
    scene.daemon.answers = slowly(scene.daemon, 0.04)
    found = []
    for _ in range(5):  # a busy machine may be too late for some of them
        probe = scene.probe()
        probe.say("interrupt 2")
        found.append(probe.say("bucket")["segment"])
    assert 7 in found


# --- the stated bounds ----------------------------------------------------------------------------------------------


def test_a_frozen_daemon_holds_a_launch_no_longer_than_stated(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    scene.daemon.is_frozen = True
    scene.daemon.answers = lambda client, question: time.sleep(0.3)
    segment.bound(STALE_AFTER_NS)
    answer = probe.say("launch 1 50 1")
    assert answer["longest_ns"] < HANGS_NS
    assert segment.num_open == 1
    # From now on nothing is waited for at all: a thousand launches, and a question that nobody answers now and then.
    answer = probe.say("launch 1000 50 1")
    assert answer["total_ns"] < HANGS_NS
    assert segment.num_open == 1001


def test_a_dead_daemon_holds_nobody_and_is_followed_when_it_returns(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    scene.daemon.is_frozen = True
    scene.daemon.stop_answering()
    segment.bound(STALE_AFTER_NS)
    assert probe.say("launch 1000 50 4")["total_ns"] < HANGS_NS
    assert segment.num_open == 4000
    # It comes back, with the files as they were: its heartbeat is enough, nobody asks again.
    num_questions = scene.daemon.num_questions
    segment.granted_ns = segment.used_ns
    segment.bound()
    segment.beat()
    scene.daemon.is_frozen = False
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    segment.granted_ns += 1
    segment.wake()
    probe.end()
    assert segment.num_open == 4000
    assert scene.daemon.num_questions == num_questions


def test_a_living_daemon_that_grants_nothing_holds_a_launch_for_max_wait(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.bound(max_wait_ns=300 * MS)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    answer = probe.say("launch 1 50 1")
    assert 300 * MS <= answer["longest_ns"] < 300 * MS + HANGS_NS
    assert segment.num_open == 1


def test_a_heartbeat_of_another_clock_holds_nobody(scene: Scene) -> None:
    """As in a container with a time of its own: what is far in the future is as stale as what is long past."""
    segment = scene.daemon.add(UUID, 7)
    segment.granted_ns = 1
    probe = scene.ready(segment)
    scene.daemon.is_frozen = True
    time.sleep(0.02)  # a turn that had begun is over
    segment.bound(STALE_AFTER_NS)
    segment.write_grant(128, 2**63)
    assert probe.say("launch 2 50 1")["longest_ns"] < HANGS_NS
    assert segment.num_open == 1


@pytest.mark.slow
def test_whatever_the_grant_says_nobody_waits_for_ever(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    segment.bound(2**64 - 1, 2**64 - 1)
    segment.granted_ns = 1
    probe = scene.ready(segment)
    probe.say("launch 1 50 1")
    # A living daemon holds a launch for ten seconds at most, a dead one for five, whatever it wrote.
    assert probe.say("launch 1 50 1")["longest_ns"] < 20_000 * MS
    scene.daemon.is_frozen = True
    assert probe.say("launch 1 50 1")["longest_ns"] < 9_000 * MS
    assert segment.num_open == 2


def test_a_process_that_was_stopped_goes_on(scene: Scene) -> None:
    segment = scene.daemon.add(UUID, 7)
    probe = scene.ready(segment)
    segment.granted_ns = 1
    probe.say("launch 1 50 1")
    probe.begin("launch 1 50 1")
    wait_for_waiting(segment, 0, 1)
    probe.process.send_signal(signal.SIGSTOP)
    segment.granted_ns = 51
    segment.wake()
    time.sleep(0.1)
    probe.process.send_signal(signal.SIGCONT)
    assert probe.end()["longest_ns"] < HANGS_NS
    assert segment.num_open == 0
