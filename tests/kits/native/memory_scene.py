"""Processes that get device memory line by line, as tenants of a stand-in daemon that gives them a memory limit."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from kits.native.grant_stand_in import GrantStandIn, Segment
from kits.native.native_build import Native

MIB = 1 << 20
OUT_OF_MEMORY = 2
PLENTY_NS = 1 << 60
ATTACH_S = 10.0
_UNATTACHED = 0xFEED
_HELLO_BYTES = 24
_LIMIT_AT = 96
_DENIED_AT = 88
_PROCESSES_AT, _PROCESS_BYTES, _BYTES_AT = 256, 64, 16


# How to get something, what it takes of the device, and how to free it.
WAYS = {
    "linear": (("alloc", 3 * MIB), 3 * MIB, "free"),
    "managed": (("managed", 3 * MIB), 3 * MIB, "free"),
    "pitched": (("pitch", 1000, 3000), 1024 * 3000, "free"),
    "oldest linear": (("old_alloc", 3 * MIB), 3 * MIB, "old_free"),
    "oldest pitched": (("old_pitch", 1000, 3000), 1024 * 3000, "old_free"),
    "array": (("array", 512, 512), 512 * 512 * 16, "free_array"),
    "oldest array": (("old_array", 1024, 1024), 1024 * 1024 * 4, "free_array"),
    "array of three dimensions": (("array_3d", 64, 64, 256), 64 * 64 * 256 * 4, "free_array"),
    "mipmapped": (("mipmapped", 1024, 1024, 3), 2 * (1024**2 + 512**2 + 256**2), "free_mipmapped"),
    "physical": (("create", 4 * MIB), 4 * MIB, "release"),
    "stream-ordered, freed at once": (("async", 4 * MIB), 4 * MIB, "free"),
    "stream-ordered": (("async", 4 * MIB), 4 * MIB, "free_async"),
    "stream-ordered twin": (("async_ptsz", 4 * MIB), 4 * MIB, "free_async_ptsz"),
}


def device_uuid(number: int) -> bytes:
    """What the stub driver says of the device with this physical number."""
    return uuid.UUID(f"53545542-0000-4000-8000-{number + 1:012x}").bytes


class MemoryProbe:
    """One process of native/tests/memory_probe.c, or of another program that obeys in the same way."""

    def __init__(self, native: Native, env: dict[str, object], *args: str, source: str = "memory_probe") -> None:
        # A child of a fork ends in the middle of what the parent still holds, which is no leak.
        around = native.environment({"STUB_FORK": "allow", **env})
        around["ASAN_OPTIONS"] = around.get("ASAN_OPTIONS", "").replace("detect_leaks=1", "detect_leaks=0")
        program = native.program(source)
        self.process = subprocess.Popen(
            [str(program), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=around
        )

    def send(self, word: str, *numbers: int | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join([word, *map(str, numbers)]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> tuple[int, int, int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the probe ended with {self.process.wait(5)}"
        result, value, more = json.loads(line)
        return result, value, more

    def ask(self, word: str, *numbers: int | str) -> tuple[int, int, int]:
        """The driver's result and two values."""
        self.send(word, *numbers)
        return self.receive()

    def do(self, word: str, *numbers: int | str) -> int:
        """What must succeed; the number of what was made."""
        result, value, _ = self.ask(word, *numbers)
        assert result == 0, f"{word} {numbers}: {result}"
        return value

    def held(self, device: int = 0) -> int:
        """What the stub driver has given to this process."""
        return self.ask("held", device)[1]

    def peak(self, device: int = 0) -> int:
        return self.ask("held", device)[2]

    def info(self) -> tuple[int, int]:
        """Free and total bytes, as the driver's answer reaches the program."""
        result, free, total = self.ask("info")
        assert result == 0
        return free, total

    def close(self) -> int:
        """End it; its exit code, which a sanitizer would have chosen."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class MemoryScene:
    """The stand-in daemon and its tenant's processes, which share one machine."""

    def __init__(self, native: Native, daemon: GrantStandIn) -> None:
        self.native = native
        self.daemon = daemon
        self.probes: list[MemoryProbe] = []
        self._asked: set[tuple[int, bytes]] = set()
        daemon.answers = self._answer
        self.environment: dict[str, object] = {
            "SPRINGTIDE_GPU_SOCKET": daemon.path,
            "STUB_SHARED": daemon.directory / "machine",
            "STUB_CLOCK": "virtual",
        }

    def limit(self, limit_bytes: int, device: int = 0) -> Segment:
        """Give the tenant this memory limit on a device, and launches without end."""
        segment = self.daemon.segments.get(device_uuid(device)) or self.daemon.add(device_uuid(device), 7 + device)
        segment.write_grant(_LIMIT_AT, limit_bytes)
        segment.granted_ns = PLENTY_NS
        return segment

    def probe(self, *args: str, source: str = "memory_probe", **env: object) -> MemoryProbe:
        probe = MemoryProbe(self.native, {**self.environment, **env}, *args, source=source)
        self.probes.append(probe)
        if "bare" not in args:
            self.attach(probe, probe.process.pid)
        return probe

    def attach(self, probe: MemoryProbe, pid: int) -> None:
        """Until the process has the files of every device: on a busy machine a question may be given up first."""
        deadline_s = time.monotonic() + ATTACH_S
        for segment in list(self.daemon.segments.values()):
            while (pid, segment.device_uuid) not in self._asked or (
                segment.process(self.daemon.slots[pid])[2] == _UNATTACHED
            ):
                assert time.monotonic() < deadline_s, "the process has not found the daemon"
                probe.ask("total", segment.device_uuid[-1] - 1)
                time.sleep(0.001)

    def _answer(self, client: socket.socket, question: bytes) -> None:
        """As the daemon does, with a mark in the slot that goes away as soon as the process counts in it."""
        device_uuid = question[_HELLO_BYTES - 16 :]
        segment = self.daemon.segments.get(device_uuid)
        pid = int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        if segment is not None and (pid, device_uuid) not in self._asked:
            slot = self.daemon.slots.setdefault(pid, len(self.daemon.slots) % 64)
            segment.write_usage(_PROCESSES_AT + _PROCESS_BYTES * slot + _BYTES_AT, _UNATTACHED)
            self._asked.add((pid, device_uuid))
        self.daemon.answer(client, question)


def slot_bytes(scene: MemoryScene, slot: int = 0, device: int = 0) -> int:
    segment = list(scene.daemon.segments.values())[device]
    return segment.process(slot)[2]


def num_denied(segment: Segment) -> int:
    return segment.read_usage(_DENIED_AT)


def clear_slot(segment: Segment, slot: int) -> None:
    """What the daemon does when a process has died."""
    for offset in range(0, _PROCESS_BYTES, 8):
        segment.write_usage(_PROCESSES_AT + _PROCESS_BYTES * slot + offset, 0)


@contextlib.contextmanager
def open_memory_scene(native: Native, directory: Path) -> Iterator[MemoryScene]:
    with GrantStandIn(directory) as daemon:
        scene = MemoryScene(native, daemon)
        codes: list[int] = []
        try:
            yield scene
        finally:
            codes = [probe.close() for probe in scene.probes]
        assert codes == [0] * len(codes), f"the processes ended with {codes}"
