"""A GPU share daemon as a process, in front of it this test in the place of the platform, and tenants that ask it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kits.native.native_build import Native
from springtide.backends.processes import identify
from springtide.backends.sharing.gpu.segments import (
    GRANT_FIELDS,
    HELLO,
    LAYOUT,
    MAGIC,
    OK,
    PROCESS,
    PROCESS_FIELDS,
    SEGMENT_BYTES,
    SOCKET_VARIABLE,
    USAGE_FIELDS,
    WELCOME,
    offsets_of,
    segment_directory,
)
from springtide.backends.sharing.gpu.table import (
    SOCKET_NAME,
    STATUS_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
    GpuTenantEntry,
    uuid_bytes,
)
from springtide.backends.sharing.table import read_whole
from springtide.core.shares import Share
from springtide.core.status.shares import TenantStatus
from springtide.core.wire.workers import encode_frame

LIMIT_S = 30.0
_PARENT_DEATH_SIGNAL = 1
MS = 1_000_000
# Far more than the stated bound on a launch's wait, and far less than for ever: a busy machine may add what it likes.
HANGS_NS = 1_500 * MS
# The stub driver's devices.
UUIDS = tuple(f"GPU-53545542-0000-4000-8000-{number:012x}" for number in range(1, 9))
_GRANT, _USAGE, _PROCESS = offsets_of(GRANT_FIELDS), offsets_of(USAGE_FIELDS), offsets_of(PROCESS_FIELDS)


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not in {limit_s:g} s: {what}"
        time.sleep(0.005)


class Daemon:
    """A daemon of its own directory. `restart` after `kill` is what the platform does."""

    def __init__(self, directory: Path, *, max_files: int = 0) -> None:
        self.directory = directory
        self._max_files = max_files
        self.address = directory / TENANT_SOCKET_NAME
        self.process: subprocess.Popen[bytes] | None = None
        self.stream: socket.socket | None = None
        self.children: list[subprocess.Popen[str]] = []
        self.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def place(self) -> Path:
        return segment_directory(self.directory)

    def start(self, *, connect: bool = True) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "SPRINGTIDE_SHARE_CONTROL"}
        command = [sys.executable, "-m", "springtide.backends.sharing.gpu.daemon", str(self.directory)]
        if self._max_files:
            command = ["sh", "-c", f'ulimit -n {self._max_files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            until(lambda: self.status() is not None, "the daemon says something")
        except AssertionError:
            self.kill()
            raise
        if connect:
            self.connect()

    def connect(self) -> socket.socket:
        self.disconnect()
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.connect(str(self.directory / SOCKET_NAME))
        return self.stream

    def disconnect(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def send(self, *entries: GpuTenantEntry, slots_path: str = "") -> None:
        """Tell the table and wait until it is in force."""
        assert self.stream is not None
        table = GpuTable(tenants=entries, slots_path=slots_path, sent_at_s=time.monotonic())
        self.stream.sendall(encode_frame(table))
        told = {(entry.replica_id, entry.device_id, entry.share) for entry in entries}
        until(lambda: self._told() == told, "the table is in force")

    def _told(self) -> set[tuple[str, str, Share]]:
        status = self.status()
        return {
            (each.replica_id, each.device_id, Share(request=each.request, limit=each.limit, memory_mb=each.memory_mb))
            for each in (status.sharing.tenants if status is not None else ())
        }

    def status(self) -> GpuDaemonStatus | None:
        """What this very daemon said last."""
        status = read_whole(self.directory / STATUS_NAME, GpuDaemonStatus)
        return status if status is not None and status.pid == self.pid else None

    def next_status(self) -> GpuDaemonStatus:
        """What it says from now on: everything that has happened before is in it."""
        before_s = time.monotonic()
        until(lambda: (told := self.status()) is not None and told.written_at_s > before_s, "it goes on telling")
        status = self.status()
        assert status is not None
        return status

    def tenant(self, replica_id: str) -> TenantStatus:
        return next(each for each in self.next_status().sharing.tenants if each.replica_id == replica_id)

    def leader(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A process that leads a session, as a replica's does; by default one that does nothing. Ended with this."""
        child = subprocess.Popen(
            arguments or ("sleep", "600"),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def kill(self) -> None:
        """As if the machine's memory had run out."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT_S)
        self.disconnect()

    def end_children(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            child.wait(LIMIT_S)
        self.children.clear()

    def end(self) -> None:
        assert self.process is not None
        self.disconnect()
        self.process.terminate()
        self.process.wait(LIMIT_S)


@contextlib.contextmanager
def running_daemon(directory: Path, *, max_files: int = 0) -> Iterator[Daemon]:
    """With at most so many descriptors (0: as they come). Nothing is left behind in shared memory."""
    daemon = Daemon(directory, max_files=max_files)
    try:
        yield daemon
    finally:
        daemon.end_children()
        daemon.disconnect()
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.end()
        place = segment_directory(directory)
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def entry(
    pid: int,
    name: str = "r0",
    *,
    device: int = 0,
    share: tuple[float, float] = (0.3, 0.6),
    memory_mb: int = 0,
    is_slo: bool = False,
    uuid: str = "",
    slot: int = -1,
) -> GpuTenantEntry:
    process = identify(pid)
    assert process is not None
    return GpuTenantEntry(
        workload_id=f"w-{name}",
        replica_id=name,
        device_id=f"local/{device}",
        device_uuid=uuid or UUIDS[device],
        share=Share(request=share[0], limit=share[1], memory_mb=memory_mb),
        process=process,
        is_slo=is_slo,
        slot=slot,
    )


class Held:
    """What a process is told that asks, and the two files as it sees them."""

    def __init__(self, data: bytes, descriptors: list[int]) -> None:
        _, _, self.status, self.slot, self.segment_id, self.retry_ms, _ = WELCOME.unpack(data)
        self.descriptors = descriptors
        if descriptors:
            grant, usage = descriptors
            self.grant = mmap.mmap(grant, SEGMENT_BYTES, prot=mmap.PROT_READ)
            self.usage = mmap.mmap(usage, SEGMENT_BYTES)

    def granted(self, name: str) -> int:
        size = 4 if name in ("flags", "wake") else 8
        return int.from_bytes(self.grant[_GRANT[name] : _GRANT[name] + size], "little")

    def used(self, name: str = "used_ns") -> int:
        return int.from_bytes(self.usage[_USAGE[name] : _USAGE[name] + 8], "little")

    def use(self, number: int, name: str = "used_ns") -> None:
        self.usage[_USAGE[name] : _USAGE[name] + 8] = number.to_bytes(8, "little")

    def process(self, name: str, slot: int | None = None) -> int:
        at = _USAGE["processes"] + PROCESS.size * (self.slot if slot is None else slot) + _PROCESS[name]
        size = 4 if name in ("pid", "num_waiting") else 8
        return int.from_bytes(self.usage[at : at + size], "little")

    def set_process(self, name: str, number: int) -> None:
        at = _USAGE["processes"] + PROCESS.size * self.slot + _PROCESS[name]
        size = 4 if name in ("pid", "num_waiting") else 8
        self.usage[at : at + size] = number.to_bytes(size, "little")

    def close(self) -> None:
        if self.descriptors:
            self.grant.close()
            self.usage.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def ask(address: Path, uuid: str = UUIDS[0], data: bytes | None = None) -> Held | None:
    """Ask as the library does; None: the daemon closed without an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        stream.settimeout(LIMIT_S)
        stream.connect(str(address))
        stream.send(HELLO.pack(MAGIC, LAYOUT, uuid_bytes(uuid)) if data is None else data)
        try:
            answer, descriptors, _, _ = socket.recv_fds(stream, WELCOME.size, 4)
        except ConnectionResetError:
            return None
        return Held(answer, list(descriptors)) if answer else None


def held(daemon: Daemon, uuid: str = UUIDS[0]) -> Held:
    """What this process holds of the device, which has to be something."""
    found = ask(daemon.address, uuid)
    assert found is not None
    assert found.status == OK
    return found


def fork_asker(daemon: Daemon, memory_bytes: int = 0) -> tuple[int, int]:
    """A child of this process that asks once and then does nothing. Returns its number and what it was told."""
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        status = 99
        with contextlib.suppress(BaseException):
            # It never outlives the test, however that ends.
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            found = ask(daemon.address)
            status = found.status if found is not None else 98
            if found is not None and found.descriptors and memory_bytes:
                found.set_process("memory_bytes", memory_bytes)
        with contextlib.suppress(BaseException):
            os.write(write, bytes([status]))
            while os.getppid() == parent:
                time.sleep(0.1)
        os._exit(0)
    os.close(write)
    answer = os.read(read, 1)
    os.close(read)
    return child, answer[0] if answer else 97


def kill_asker(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Client:
    """A program of a tenant (native/tests/share_client.c) under the stub driver, with the library preloaded."""

    def __init__(
        self,
        native: Native,
        daemon: Daemon,
        *,
        device: int = 0,
        kernel: str = "layer@1000000",
        env: Mapping[str, object] | None = None,
    ) -> None:
        environment = native.environment({SOCKET_VARIABLE: daemon.address, "STUB_CLOCK": "virtual", **(env or {})})
        self._daemon = daemon
        # It waits for its first order, so that it can be put into the table before it uses the device.
        self.process = daemon.leader(str(native.program("share_client")), str(device), kernel, env=environment)
        self.pid: int = self.end()["pid"]

    def begin(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait(LIMIT_S)}"
        found: dict[str, int] = json.loads(line)
        return found

    def say(self, order: str) -> dict[str, int]:
        self.begin(order)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def forget(self) -> None:
        """It has ended: keep no pipe of it."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._daemon.children.remove(self.process)

    def close(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(LIMIT_S)
