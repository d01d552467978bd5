"""The share daemon as a process: whoever talks to it badly, dies or replaces it, the sharers are held or free."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from springtide.backends.processes import ProcessIdentity, identify, process_clock_s, read_stat
from springtide.backends.sharing.cpu.daemon import MachineLoad
from springtide.backends.sharing.table import (
    SOCKET_NAME,
    STATUS_NAME,
    DaemonStatus,
    SharerEntry,
    ShareTable,
    group_name,
    read_whole,
    slots_path,
)
from springtide.backends.sockets import socket_directory
from springtide.core.shares import Share
from springtide.core.wire.shares import SlotWriter, make_slots
from springtide.core.wire.workers import encode_frame

LIMIT_S = 60.0
SPIN = "while True: pass"


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


class Daemon:
    """A daemon of its own run directory, and this test in the place of the platform."""

    def __init__(self, directory: Path, mechanism: str = "") -> None:
        self.directory = directory
        self.slots = directory / "slots"
        if not self.slots.exists():
            make_slots(self.slots, 16)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "springtide.backends.sharing.cpu.daemon", str(directory)],
            env=os.environ | {"SPRINGTIDE_SHARE_MECHANISM": mechanism},
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.status_of_this() is not None, "the daemon says something")
        self.stream = self.connect()

    def status_of_this(self) -> DaemonStatus | None:
        status = read_whole(self.directory / STATUS_NAME, DaemonStatus)
        return status if status is not None and status.pid == self.process.pid else None

    def connect(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(str(self.directory / SOCKET_NAME))
        return stream

    def send(self, *entries: SharerEntry, stream: socket.socket | None = None) -> None:
        table = ShareTable(sharers=entries, slots_path=str(self.slots), device_cpus=1.0, sent_at_s=time.monotonic())
        (stream or self.stream).sendall(encode_frame(table))

    def tenants(self) -> set[str]:
        status = self.status_of_this()
        return {tenant.replica_id for tenant in status.sharing.tenants} if status is not None else set()

    def end(self) -> None:
        self.stream.close()
        self.process.terminate()
        self.process.wait(LIMIT_S)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return socket_directory(tmp_path)


@pytest.fixture
def spinners() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) for _ in range(2)]
    yield children
    for child in children:
        child.kill()
        child.wait()


def entry(child: subprocess.Popen[bytes], slot: int, share: Share, *, is_slo: bool = False) -> SharerEntry:
    process = identify(child.pid)
    assert process is not None
    return SharerEntry(
        workload_id=f"w{slot}",
        replica_id=f"r{slot}",
        device_id="local/0",
        share=share,
        slot=slot,
        process=process,
        is_slo=is_slo,
    )


def is_free(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state != "T"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["", "signals"])
def test_sharers_are_held_to_their_limits_and_free_at_the_end(
    directory: Path, spinners: list[subprocess.Popen[bytes]], mechanism: str
) -> None:
    daemon = Daemon(directory, mechanism)
    one, other = spinners
    daemon.send(
        entry(one, 1, Share(request=0.2, limit=0.25)), entry(other, 2, Share(request=0.2, limit=0.3), is_slo=True)
    )
    until(lambda: daemon.tenants() == {"r1", "r2"}, "both are told of")
    time.sleep(0.5)
    begin_s, before = time.monotonic(), [process_clock_s(child.pid) or 0.0 for child in spinners]
    time.sleep(3.0)
    after = [process_clock_s(child.pid) or 0.0 for child in spinners]
    elapsed_s = time.monotonic() - begin_s
    assert (after[0] - before[0]) / elapsed_s < 0.32
    assert (after[1] - before[1]) / elapsed_s < 0.37
    status = daemon.status_of_this()
    assert status is not None
    assert status.num_ticks > 10
    assert status.sharing.mechanism == mechanism or not mechanism
    daemon.end()
    assert all(is_free(child.pid) for child in spinners)
    assert not [path for path in Path("/sys/fs/cgroup").glob("*/*") if path.name == group_name(directory)]
    assert not (directory / SOCKET_NAME).exists()


@pytest.mark.slow
def test_a_platform_that_talks_garbage_is_dropped_and_the_next_is_served(
    directory: Path, spinners: list[subprocess.Popen[bytes]]
) -> None:
    daemon = Daemon(directory)
    sharer = entry(spinners[0], 1, Share(request=0.5, limit=0.5))
    daemon.send(sharer)
    until(lambda: daemon.tenants() == {"r1"}, "it is told of")
    garbage = daemon.connect()
    garbage.sendall(b"\xff" * 4096)
    assert garbage.recv(1) == b""
    garbage.close()
    # A platform that died in the middle of a word: what was said before stands.
    half = daemon.connect()
    half.sendall(encode_frame(ShareTable(sharers=(), slots_path="", device_cpus=1.0, sent_at_s=0.0))[:7])
    half.close()
    after = daemon.connect()
    daemon.send(sharer, entry(spinners[1], 2, Share(request=0.5, limit=0.5)), stream=after)
    until(lambda: daemon.tenants() == {"r1", "r2"}, "the next platform is served")
    after.close()
    daemon.end()


@pytest.mark.slow
def test_sharers_that_died_and_slots_that_were_cut_short_are_survived(
    directory: Path, spinners: list[subprocess.Popen[bytes]]
) -> None:
    daemon = Daemon(directory)
    writer = SlotWriter(str(daemon.slots), 1, time.monotonic)
    gone = SharerEntry(
        workload_id="w9",
        replica_id="r9",
        device_id="local/0",
        share=Share(request=0.1, limit=0.1),
        slot=9,
        process=ProcessIdentity(spinners[0].pid, 1, "another boot"),
        is_slo=False,
    )
    daemon.send(gone, *(entry(child, number, Share(request=0.4, limit=0.7)) for number, child in enumerate(spinners)))
    until(lambda: daemon.tenants() == {"r0", "r1"}, "those who live are told of")
    writer.begin(3)
    os.truncate(daemon.slots, 10)
    writer.close()
    spinners[0].kill()
    spinners[0].wait()
    until(lambda: daemon.tenants() == {"r1"}, "who died is forgotten")
    before = daemon.status_of_this()
    assert before is not None
    until(lambda: (now := daemon.status_of_this()) is not None and now.num_ticks > before.num_ticks, "it goes on")
    daemon.end()


@pytest.mark.slow
def test_a_daemon_that_was_replaced_ends(directory: Path) -> None:
    first = Daemon(directory)
    second = Daemon(directory)
    assert first.process.wait(LIMIT_S) == 0
    second.send()
    assert second.process.poll() is None
    first.stream.close()
    second.end()


@pytest.mark.slow
def test_a_daemon_that_nobody_needs_ends(directory: Path) -> None:
    daemon = Daemon(directory)
    daemon.stream.close()
    assert daemon.process.wait(LIMIT_S) == 0
    assert not (directory / STATUS_NAME).exists()


def test_places_of_different_platforms_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    assert group_name(one) != group_name(other)
    assert slots_path(one) != slots_path(other)
    assert group_name(one).startswith("springtide-")


def test_a_machine_that_is_busy_with_others_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([(100.0, 1000.0), (109.9, 1010.0), (110.0, 1020.0)])
    monkeypatch.setattr("springtide.backends.sharing.cpu.daemon._busy_and_total_s", lambda: next(seen))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    load = MachineLoad()
    assert load.others(0.0, 0.0) == ""
    assert "others use 3.0 of its 4 cores" in load.others(2.0, 2.0)
    assert "others use 3.0" in load.others(2.1, 2.1)
    assert load.others(2.2, 4.0) == ""
