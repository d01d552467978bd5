"""Whose process it is that asks for a share, where sharers are pods: by the names of real control groups."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gpu_daemon_kit import LIMIT_S, UUIDS, Daemon, ask, running_daemon, until
from springtide.backends.sharing.gpu.pods import pod_of, pods_seen, uids_of
from springtide.backends.sharing.gpu.segments import HELLO, LAYOUT, MAGIC, OK, UNKNOWN, WELCOME
from springtide.backends.sharing.gpu.table import TENANT_SOCKET_NAME, GpuTenantEntry, uuid_bytes
from springtide.core.shares import Share

ONE, OTHER = "11111111-2222-3333-4444-555555555501", "11111111-2222-3333-4444-555555555502"
HIERARCHIES = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
ASKER = """
import os, socket, sys
from springtide.backends.sharing.gpu.segments import HELLO, WELCOME
sys.stdin.readline()
for uuid in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        stream.connect(sys.argv[1])
        stream.send(bytes.fromhex(uuid))
        print(WELCOME.unpack(stream.recv(WELCOME.size))[2], flush=True)
sys.stdin.readline()
"""


def entry(name: str, pod_uid: str, *, device: int = 0, memory_mb: int = 0) -> GpuTenantEntry:
    return GpuTenantEntry(
        workload_id=f"w-{name}",
        replica_id=name,
        device_id=f"n/{device}",
        device_uuid=UUIDS[device],
        share=Share(request=0.3, limit=0.6, memory_mb=memory_mb),
        pod_uid=pod_uid,
        is_slo=True,
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as found:
        yield found


@pytest.fixture
def groups() -> Iterator[Path]:
    """A real control group of this test's own, in whichever hierarchy lets it make one; its processes end with it."""
    for hierarchy in HIERARCHIES:
        path = hierarchy / f"springtide-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        if not (path / "cgroup.procs").exists():
            path.rmdir()
            continue
        try:
            yield path
        finally:
            for found in sorted(path.glob("**/"), key=lambda each: len(each.parts), reverse=True):
                for pid in (found / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                until(lambda found=found: not (found / "cgroup.procs").read_text(), "the group is empty")
                found.rmdir()
        return
    pytest.skip("making control groups needs rights that this user does not have")


class Process:
    """A process in a control group, which asks for its share of each device when it is told to."""

    def __init__(self, daemon: Daemon, group: Path, *devices: int) -> None:
        group.mkdir(parents=True, exist_ok=True)
        questions = [HELLO.pack(MAGIC, LAYOUT, uuid_bytes(UUIDS[device])).hex() for device in devices or (0,)]
        command = [sys.executable, "-c", ASKER, str(daemon.directory / TENANT_SOCKET_NAME), *questions]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        (group / "cgroup.procs").write_text(str(self.process.pid))

    def ask(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.mark.parametrize(
    ("line", "uids"),
    [
        (f"4:memory:/kubepods/besteffort/pod{ONE}/0a1b", [ONE]),
        (f"0::/kubepods.slice/kubepods-burstable-pod{ONE.replace('-', '_')}.slice/x.scope", [ONE]),
        (f"0::/../../pod{ONE}/container", [ONE]),
        (f"0::/kubepods/pod{ONE}/c/pod{OTHER}/d", [ONE, OTHER]),
        (f"0::/system.slice/notpod{ONE}.service", []),
        (f"0::/kubepods/pod{ONE}x/c", []),
        ("0::/", []),
        ("9:name=systemd:/user.slice/pod123", []),
        ("nonsense", []),
    ],
)
def test_the_uids_of_pods_are_read_from_control_groups(line: str, uids: list[str]) -> None:
    assert uids_of(line) == uids


def test_the_outermost_pod_counts_and_two_are_none(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    groups = tmp_path / "7" / "cgroup"
    known = {ONE: None, OTHER: None}
    groups.write_text(f"1:cpu:/kubepods/pod{ONE}/c\n0::/\n")
    assert pod_of(7, known, tmp_path) == ONE
    groups.write_text(f"1:cpu:/kubepods/pod{ONE}/c/pod{OTHER}\n")
    assert pod_of(7, known, tmp_path) == ONE, "what a container makes below its own is its own"
    assert pod_of(7, {OTHER: None}, tmp_path) == OTHER, "a kubelet in a pod has pods below that"
    groups.write_text(f"1:cpu:/kubepods/pod{ONE}/c\n2:memory:/kubepods/pod{OTHER}/c\n")
    assert pod_of(7, known, tmp_path) is None, "nobody is in two pods"
    assert pod_of(8, known, tmp_path) is None


def test_pods_are_seen_by_any_of_their_processes(tmp_path: Path) -> None:
    for pid, groups in {"7": f"0::/kubepods/pod{ONE}/c\n", "8": f"0::/kubepods/pod{ONE}/d\n", "9": "0::/\n"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cgroup").write_text(groups)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"0::/kubepods/pod{OTHER}/c\n")
    (tmp_path / "10").mkdir()
    assert pods_seen(tmp_path) == {ONE}


@pytest.mark.slow
def test_every_process_of_a_pod_and_no_other_gets_its_share(daemon: Daemon, groups: Path) -> None:
    daemon.send(entry("a", ONE), entry("b", OTHER, device=1))
    first = Process(daemon, groups / "kubepods" / f"pod{ONE}" / "container")
    second = Process(daemon, groups / "kubepods" / f"pod{ONE}" / "container" / f"pod{OTHER}")
    third = Process(daemon, groups / "kubepods" / f"pod{OTHER}" / "container", 0)
    fourth = Process(daemon, groups / "elsewhere")
    try:
        assert first.ask() == OK
        assert second.ask() == OK, "it called itself by another pod's name, and is its own pod's all the same"
        assert third.ask() == UNKNOWN, "its pod has a share of another device"
        assert fourth.ask() == UNKNOWN
        assert ask(daemon.address).status == UNKNOWN
        status = daemon.next_status()
        assert status.num_processes == 2
        assert status.num_unknown >= 2
        # The pod's entry stays while its processes come and go, and the entry's end is theirs.
        first.close()
        until(lambda: daemon.next_status().num_processes == 1, "its slot is free")
        assert daemon.tenant("a").request == 0.3
        daemon.send(entry("b", OTHER, device=1))
        assert daemon.next_status().num_processes == 0
    finally:
        for process in (first, second, third, fourth):
            process.close()


@pytest.mark.slow
def test_a_killed_daemon_is_followed_by_one_that_knows_the_pods(daemon: Daemon, groups: Path) -> None:
    daemon.send(entry("a", ONE, memory_mb=10))
    process = Process(daemon, groups / f"pod{ONE}")
    try:
        assert process.ask() == OK
        daemon.kill()
        daemon.start(connect=False)
        status = daemon.next_status()
        assert (status.num_adopted, status.num_made, status.num_processes) == (1, 0, 1)
        assert daemon.tenant("a").memory_mb == 10
    finally:
        process.close()


def _take_number(pid: int, group: Path) -> subprocess.Popen[bytes] | None:
    """A process of the group with this very number, if nobody is faster; needs root."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    child = subprocess.Popen(["sleep", "600"])
    if child.pid != pid:
        child.kill()
        child.wait(LIMIT_S)
        return None
    (group / "cgroup.procs").write_text(str(pid))
    return child


@pytest.mark.slow
def test_a_reused_number_is_not_taken_for_who_connected(daemon: Daemon, groups: Path) -> None:
    """Somebody connects and ends; a sharer's process gets the number; whoever kept the socket asks with it."""
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        pytest.skip("taking a process number again needs root")
    probe, far = socket.socketpair()
    with probe, far:
        try:
            os.close(probe.getsockopt(socket.SOL_SOCKET, 77))
        except OSError:
            pytest.skip("this kernel does not tell whether who connected lives (SO_PEERPIDFD, Linux 6.5)")
    daemon.send(entry("a", ONE))
    victim = groups / f"pod{ONE}"
    victim.mkdir()
    for _ in range(200):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
            connecting = os.fork()
            if connecting == 0:
                with contextlib.suppress(OSError):
                    stream.connect(str(daemon.address))
                os._exit(0)
            os.waitpid(connecting, 0)
            taken = _take_number(connecting, victim)
            if taken is None:
                time.sleep(0.01)
                continue
            try:
                stream.settimeout(LIMIT_S)
                stream.send(HELLO.pack(MAGIC, LAYOUT, uuid_bytes(UUIDS[0])))
                answer, descriptors, _, _ = socket.recv_fds(stream, WELCOME.size, 4)
                assert WELCOME.unpack(answer)[2] == UNKNOWN
                assert not descriptors
                # The process that has the number now is the pod's: it is only not the one that connected.
                assert pod_of(taken.pid, {ONE: None}) == ONE
                return
            finally:
                taken.kill()
                taken.wait(LIMIT_S)
    pytest.skip("somebody else was always faster")
