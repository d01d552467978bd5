"""The GPU share daemon as a process, with programs under the stub driver: limits hold, whatever dies."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.native.gpu_daemon_kit import (
    HANGS_NS,
    LIMIT_S,
    MS,
    UUIDS,
    Client,
    Daemon,
    ask,
    entry,
    fork_asker,
    held,
    kill_asker,
    running_daemon,
    until,
)
from kits.native.native_build import Native
from springtide.backends.sharing.gpu.segments import (
    BAD,
    CLOSED,
    FULL,
    HELLO,
    LAYOUT,
    MAGIC,
    NUM_PROCESSES,
    OK,
    SEGMENT_BYTES,
    UNKNOWN,
    UNLIMITED,
)
from springtide.backends.sharing.gpu.table import EXIT_TAKEN, SOCKET_NAME, STATUS_NAME, TENANT_SOCKET_NAME, GpuTable
from springtide.core.wire.shares import SlotWriter, make_slots
from springtide.core.wire.workers import encode_frame

# They measure: see ALONE in the Makefile.
pytestmark = pytest.mark.xdist_group("gpu daemon")


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """For tests that leave it alive; what they did is undone."""
    yield shared_daemon
    shared_daemon.end_children()
    shared_daemon.connect()
    shared_daemon.send()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """For tests that it may not survive."""
    with running_daemon(tmp_path) as found:
        yield found


# --- who is who -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_gets_the_grant_of_its_replica_on_its_device_and_nothing_else(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid(), "r0"), entry(os.getpid(), "r0", device=1))
    first, again, other = held(daemon), held(daemon), held(daemon, UUIDS[1])
    assert (first.slot, first.segment_id) == (again.slot, again.segment_id)
    assert first.process("pid") == os.getpid()
    assert other.segment_id != first.segment_id
    # The grant cannot be written through what a tenant is given.
    with pytest.raises(PermissionError):
        mmap.mmap(first.descriptors[0], SEGMENT_BYTES)
    unknown = ask(daemon.address, UUIDS[2])
    assert unknown is not None
    assert (unknown.status, unknown.descriptors) == (UNKNOWN, [])
    assert unknown.retry_ms > 0
    for each in (first, again, other):
        each.close()


ASKS = """
import os, sys
from kits.native.gpu_daemon_kit import ask
if sys.argv[2] == "session": os.setsid()
if sys.argv[2] == "orphan" and os.fork(): os._exit(0)
while sys.argv[2] == "orphan" and os.getppid() == int(sys.argv[3]): pass
found = ask(sys.argv[1])
print(found.status, found.process("pid") if found.descriptors else 0, os.getpid(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["child", "session", "orphan"])
def test_children_and_orphans_of_a_replica_belong_to_it(daemon: Daemon, how: str) -> None:
    """By ancestors where these live, by the session where they do not."""
    code = "\n".join(
        [
            "import os, subprocess, sys, time",
            "input()",
            f"subprocess.Popen([sys.executable, '-c', {ASKS!r}, *sys.argv[1:], str(os.getpid())])",
            "time.sleep(600)",
        ]
    )
    stranger = daemon.leader()
    path = os.pathsep.join(sys.path)
    leader = daemon.leader(sys.executable, "-c", code, str(daemon.address), how, env=os.environ | {"PYTHONPATH": path})
    daemon.send(entry(leader.pid, "r0"), entry(stranger.pid, "other"))
    assert leader.stdin is not None
    assert leader.stdout is not None
    leader.stdin.write("\n")
    leader.stdin.flush()
    status, pid_in_slot, pid = map(int, leader.stdout.readline().split())
    assert (status, pid_in_slot) == (OK, pid)


@pytest.mark.slow
def test_whoever_is_in_nobodys_family_is_unknown_and_that_is_said(daemon: Daemon) -> None:
    daemon.send(entry(daemon.leader().pid))
    found = ask(daemon.address)
    assert found is not None
    assert found.status == UNKNOWN
    status = daemon.next_status()
    assert status.num_unknown == 1
    assert "1 processes that hold no share" in status.sharing.enforced


def test_a_process_cannot_name_itself_somebody_else(daemon: Daemon) -> None:
    """The question has no room for a name or a quota, and a replaced leader's number is not enough."""
    me = entry(os.getpid())
    daemon.send(me)
    other = replace(me, process=replace(me.process, start_ticks=me.process.start_ticks + 1))
    assert daemon.stream is not None
    daemon.stream.sendall(encode_frame(GpuTable(tenants=(other,))))
    until(lambda: not daemon.next_status().sharing.tenants, "the entry of a process that is gone is dropped")
    found = ask(daemon.address)
    assert found is not None
    assert found.status == UNKNOWN


# --- bad company ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"abc", b"\0" * HELLO.size, b"\0" * 5000, HELLO.pack(MAGIC, LAYOUT, bytes(16)) + b"x"]
)
def test_a_question_that_is_none_is_answered_by_closing(daemon: Daemon, data: bytes) -> None:
    daemon.send(entry(os.getpid()))
    assert ask(daemon.address, data=data) is None
    held(daemon).close()


def test_another_layout_is_told_so(daemon: Daemon) -> None:
    found = ask(daemon.address, data=HELLO.pack(MAGIC, LAYOUT + 1, bytes(16)))
    assert found is not None
    assert found.status == BAD


def test_descriptors_that_a_process_sends_do_not_stay_with_the_daemon(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid()))
    held(daemon).close()
    num_files = daemon.num_files()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
            stream.connect(str(daemon.address))
            socket.send_fds(stream, [b"abc"], [0, 1, 2])
            stream.recv(100)
    until(lambda: daemon.num_files() == num_files, "it holds as many as before")


@pytest.mark.slow
def test_those_who_connect_and_say_nothing_keep_nobody_waiting(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid()))
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(300)]
    num_files = daemon.num_files()
    for stream in silent:
        stream.connect(str(daemon.address))
    held(daemon).close()
    assert daemon.num_files() - num_files < 150
    until(lambda: daemon.num_files() <= num_files + 1, "they are turned away")
    for stream in silent:
        stream.close()


@pytest.mark.slow
def test_without_descriptors_it_turns_people_away_and_recovers(tmp_path: Path) -> None:
    """Forty descriptors, and more who connect than that: it neither dies nor spins, and serves again."""
    with running_daemon(tmp_path, max_files=40) as daemon:
        daemon.send(entry(os.getpid()))
        held(daemon).close()
        num_files = daemon.num_files()
        with contextlib.ExitStack() as silent:
            for _ in range(100):
                stream = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stream.connect(str(daemon.address))
            # A tenant that comes now may not get files of its own before there are descriptors again.
            daemon.send(entry(os.getpid()), entry(daemon.leader().pid, "r1", device=1))
            assert daemon.num_files() < 30
        until(lambda: daemon.num_files() <= num_files + 3, "they are forgotten")
        held(daemon).close()
        until(lambda: "not enforced" not in daemon.tenant("r1").reason, "the other has its files")
        assert daemon.next_status().cpu_fraction < 0.5


@pytest.mark.slow
def test_whoever_has_no_pidfd_is_buried_as_well(tmp_path: Path) -> None:
    """Where descriptors are short, deaths are looked for."""
    with running_daemon(tmp_path, max_files=40) as daemon:
        daemon.send(entry(os.getpid()))
        askers = [fork_asker(daemon) for _ in range(30)]
        assert [status for _, status in askers] == [OK] * 30
        until(lambda: daemon.next_status().num_processes == 30, "all have a slot")
        for pid, _ in askers:
            kill_asker(pid)
        until(lambda: daemon.next_status().num_processes == 0, "all slots are free")


@pytest.mark.slow
def test_a_client_that_closes_before_the_answer_hurts_nobody(daemon: Daemon) -> None:
    """Whoever answers it writes to nobody, which must be no signal and no error."""
    daemon.send(entry(os.getpid()))
    os.kill(daemon.pid, signal.SIGSTOP)
    for _ in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
            stream.connect(str(daemon.address))
            stream.send(HELLO.pack(MAGIC, LAYOUT, bytes(16)))
    os.kill(daemon.pid, signal.SIGCONT)
    held(daemon).close()
    assert daemon.next_status().num_refused >= 100
    assert daemon.process is not None
    assert daemon.process.poll() is None


def test_the_platforms_connection_may_break_anywhere(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid()))
    for data in (b"\xff\xff\xff\xff", b"\0\0\0\4abcd", b"\0\0"):
        stream = daemon.connect()
        stream.sendall(data)
    daemon.disconnect()
    held(daemon).close()


@pytest.mark.slow
def test_a_tenant_can_hurt_nobody_but_itself(daemon: Daemon) -> None:
    """It writes nonsense everywhere it can write, cuts its file off and grows it: the other is served as before."""
    child = daemon.leader()
    daemon.send(entry(os.getpid(), "bad"), entry(child.pid, "good", device=0, is_slo=True))
    bad = held(daemon)
    for nonsense in (b"\xff", b"\x80", b"\x01"):
        os.pwrite(bad.descriptors[1], nonsense * 4544, 0)
        time.sleep(0.05)
        status = daemon.next_status()
        assert {tenant.replica_id for tenant in status.sharing.tenants} == {"bad", "good"}
    os.ftruncate(bad.descriptors[1], 0)
    until(lambda: bool(bad.granted("flags") & CLOSED), "its old files are given up")
    fresh = held(daemon)
    assert fresh.segment_id != bad.segment_id
    assert daemon.next_status().sharing.late_p99_s < 1.0


@pytest.mark.slow
def test_a_tenant_with_more_processes_than_slots_is_told_that_it_is_full(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid()))
    askers = [fork_asker(daemon) for _ in range(NUM_PROCESSES + 2)]
    assert [status for _, status in askers] == [OK] * NUM_PROCESSES + [FULL] * 2
    assert "more than 64 processes" in daemon.tenant("r0").reason
    for pid, _ in askers:
        kill_asker(pid)
    until(lambda: daemon.next_status().num_processes == 0, "their slots are free")
    held(daemon).close()


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_whoever_is_alone_with_the_whole_device_never_waits_and_whoever_has_a_limit_does(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid(), share=(0.5, 1.0)))
    mine = held(daemon)
    assert mine.granted("flags") == UNLIMITED
    assert mine.granted("granted_ns") >= mine.used() + 50 * MS
    daemon.send(entry(os.getpid(), share=(0.5, 0.8)))
    assert mine.granted("flags") == 0
    assert daemon.tenant("r0").granted == pytest.approx(0.8)
    mine.close()


@pytest.mark.slow
def test_nobody_saves_up(daemon: Daemon) -> None:
    """However long a tenant does nothing, it has the stock of a few turns and no more."""
    daemon.send(entry(os.getpid(), share=(0.3, 0.6)))
    mine = held(daemon)
    time.sleep(0.3)
    assert 0 < mine.granted("granted_ns") - mine.used() <= 0.6 * 10 * MS
    mine.close()


@pytest.mark.slow
def test_launches_are_held_to_the_limit_and_the_limit_can_change(daemon: Daemon, native: Native) -> None:
    client = Client(native, daemon)
    daemon.send(entry(client.pid, share=(0.2, 0.4)))
    client.say("launch 50")
    told = client.say("run 2000")
    used_s = told["launches"] / 1000
    assert used_s / (told["took_ns"] / 1e9) == pytest.approx(0.4, abs=0.04)
    daemon.send(entry(client.pid, share=(0.2, 0.8)))
    told = client.say("run 2000")
    assert told["launches"] / 1000 / (told["took_ns"] / 1e9) == pytest.approx(0.8, abs=0.06)
    tenant = daemon.tenant("r0")
    assert tenant.num_launches > 2000
    assert tenant.throttled_s > 1.0
    assert tenant.num_open == 0


@pytest.mark.slow
def test_two_who_want_everything_get_by_their_shares_and_another_device_is_not_touched(
    daemon: Daemon, native: Native
) -> None:
    clients = [Client(native, daemon), Client(native, daemon), Client(native, daemon, device=1)]
    entries = [
        entry(clients[0].pid, "r0", share=(0.25, 1.0)),
        entry(clients[1].pid, "r1", share=(0.75, 1.0)),
        entry(clients[2].pid, "r2", device=1, share=(0.5, 1.0)),
    ]
    daemon.send(*entries)
    for client in clients:
        client.say("launch 20")
    for client in clients:
        client.begin("run 2000")
    told = [client.end() for client in clients]
    rates = [each["launches"] / 1000 / (each["took_ns"] / 1e9) for each in told]
    assert rates[0] == pytest.approx(0.25, abs=0.05)
    assert rates[1] == pytest.approx(0.75, abs=0.08)
    # It has the device for itself, and the stub's launches take no time.
    assert rates[2] > 5.0


@pytest.mark.slow
def test_a_service_in_trouble_is_granted_its_limit_at_once(daemon: Daemon, tmp_path: Path) -> None:
    """It says through its slot that an iteration takes too long: the job beside it gives way in the same turns."""
    slots = tmp_path / "slots"
    make_slots(slots, 4)
    service = entry(os.getpid(), "service", share=(0.3, 0.6), is_slo=True, slot=1)
    daemon.send(service, entry(daemon.leader().pid, "job", share=(0.4, 0.9)), slots_path=str(slots))
    mine = held(daemon)
    writer = SlotWriter(str(slots), 1, time.monotonic)
    for _ in range(5):
        writer.begin(4)
        time.sleep(0.01)
        writer.end()
    time.sleep(0.2)
    writer.begin(4)

    def is_in_trouble() -> bool:
        # It computes as fast as it is allowed to.
        mine.use(max(mine.used(), mine.granted("granted_ns")))
        status = daemon.status()
        return status is not None and status.sharing.tenants[0].state == "EMERGENCY"

    until(is_in_trouble, "the iteration takes too long")
    assert mine.granted("rate_ppm") == 600_000
    writer.end()
    writer.close()
    mine.close()


@pytest.mark.slow
def test_a_memory_limit_is_in_the_grant_and_can_change(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid(), memory_mb=100))
    mine = held(daemon)
    assert mine.granted("memory_limit_bytes") == 100_000_000
    daemon.send(entry(os.getpid(), memory_mb=200))
    assert mine.granted("memory_limit_bytes") == 200_000_000
    mine.set_process("memory_bytes", 1_500_001)
    assert daemon.tenant("r0").memory_used_mb == 2
    mine.close()


# --- what dies ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_killed_client_held_is_free_at_once(daemon: Daemon, native: Native) -> None:
    keeper = daemon.leader()
    client = Client(native, daemon)
    other = Client(native, daemon)
    daemon.send(entry(client.pid, memory_mb=100), entry(other.pid, "r1"), entry(keeper.pid, "r2", device=1))
    assert client.say("alloc 80")["result"] == 0
    assert client.say("alloc 80")["result"] == 2
    assert daemon.tenant("r0").memory_used_mb == 80
    num_files = daemon.num_files()
    client.kill()
    until(lambda: {tenant.replica_id for tenant in daemon.next_status().sharing.tenants} == {"r1", "r2"}, "it is gone")
    assert daemon.num_files() < num_files
    assert len(list(daemon.place.iterdir())) == 4


@pytest.mark.slow
def test_launches_go_on_while_the_daemon_stands_still_and_are_held_again_when_it_does_not(
    daemon: Daemon, native: Native
) -> None:
    """Stopped, not dead: nobody answers and nobody ends the wait. What ran meanwhile is forgiven."""
    client = Client(native, daemon)
    daemon.send(entry(client.pid, share=(0.1, 0.2)))
    client.say("launch 50")
    os.kill(daemon.pid, signal.SIGSTOP)
    told = client.say("run 700")
    os.kill(daemon.pid, signal.SIGCONT)
    assert told["longest_ns"] < HANGS_NS
    assert told["launches"] > 500
    daemon.next_status()
    told = client.say("run 1000")
    assert told["longest_ns"] < HANGS_NS
    assert told["launches"] / 1000 / (told["took_ns"] / 1e9) == pytest.approx(0.2, abs=0.05)
    assert daemon.tenant("r0").num_open > 0


@pytest.mark.slow
def test_nobody_stops_when_the_daemon_is_killed_and_the_next_one_goes_on_where_it_stopped(
    own_daemon: Daemon, native: Native
) -> None:
    daemon = own_daemon
    client = Client(native, daemon)
    mine = entry(client.pid, share=(0.2, 0.4), memory_mb=100)
    daemon.send(mine)
    assert client.say("alloc 60")["result"] == 0
    client.say("launch 200")
    files = {path.name: path.stat().st_ino for path in daemon.place.iterdir()}
    before = daemon.tenant("r0")
    client.begin("run 3000")
    time.sleep(0.3)
    daemon.kill()
    time.sleep(0.5)
    # It knows its tenants before anybody has told it.
    daemon.start(connect=False)
    status = daemon.next_status()
    assert (status.num_adopted, status.num_made, status.num_processes) == (1, 0, 1)
    told = client.end()
    assert told["longest_ns"] < HANGS_NS
    assert {path.name: path.stat().st_ino for path in daemon.place.iterdir()} == files
    after = daemon.tenant("r0")
    assert after.memory_used_mb == 60
    assert after.num_launches >= before.num_launches + told["launches"]
    assert after.num_open > 0
    # Held again, as the platform said to the one before.
    told = client.say("run 1000")
    assert told["launches"] / 1000 / (told["took_ns"] / 1e9) == pytest.approx(0.4, abs=0.05)


@pytest.mark.slow
def test_whoever_dies_while_there_is_no_daemon_is_found_by_the_next_one(own_daemon: Daemon) -> None:
    daemon = own_daemon
    daemon.send(entry(os.getpid()))
    pid, status = fork_asker(daemon, 7_000_000)
    assert status == OK
    assert daemon.tenant("r0").memory_used_mb == 7
    daemon.kill()
    kill_asker(pid)
    daemon.start()
    told = daemon.next_status()
    assert (told.num_processes, told.num_deaths) == (0, 1)
    assert daemon.tenant("r0").memory_used_mb == 0


@pytest.mark.slow
def test_asked_to_end_it_lets_everybody_go_and_leaves_nothing(own_daemon: Daemon) -> None:
    daemon = own_daemon
    daemon.send(entry(os.getpid()))
    mine = held(daemon)
    place = daemon.place
    daemon.end()
    assert mine.granted("flags") == UNLIMITED | CLOSED
    assert mine.granted("granted_ns") > 10**18
    assert not place.exists()
    assert sorted(path.name for path in daemon.directory.iterdir()) == ["gpu.lock"]
    mine.close()


@pytest.mark.slow
def test_a_second_daemon_leaves_the_first_one_alone(daemon: Daemon) -> None:
    daemon.send(entry(os.getpid()))
    command = [sys.executable, "-m", "springtide.backends.sharing.gpu.daemon", str(daemon.directory)]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=LIMIT_S).returncode == EXIT_TAKEN
    held(daemon).close()


@pytest.mark.slow
def test_a_daemon_whose_socket_is_somebody_elses_ends(own_daemon: Daemon) -> None:
    daemon = own_daemon
    assert daemon.process is not None
    (daemon.directory / TENANT_SOCKET_NAME).unlink()
    assert daemon.process.wait(LIMIT_S) == 0
    assert not (daemon.directory / SOCKET_NAME).exists()
    assert not (daemon.directory / STATUS_NAME).exists()
