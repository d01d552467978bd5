"""One process with the token bucket in it, and the stand-in daemon that it asks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kits.native.grant_stand_in import GrantStandIn, Segment
from kits.native.native_build import PROGRAM_FLAGS, PROGRAMS, SANITIZE, Native
from springtide.backends.sharing.gpu.build import build_library

UUID = bytes(range(16))
VARIABLE = "SPRINGTIDE_GPU_SOCKET"
MS = 1_000_000
# Far more than any stated bound, and far less than waiting for ever: what a busy machine may add is between the two.
HANGS_NS = 1_500 * MS
SILENCE_S = 30.0


class Probe:
    """One process that is told what to do line by line, and answers each line with one of JSON."""

    def __init__(self, program: Path, environment: Mapping[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [str(program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
        )

    def begin(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, int]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], SILENCE_S)[0]:
            self.process.kill()
            raise AssertionError(f"the probe has said nothing for {SILENCE_S:.0f} s")
        answer = self.process.stdout.readline()
        assert answer, f"the probe ended with {self.process.wait(5)}"
        found: dict[str, int] = json.loads(answer)
        return found

    def say(self, line: str) -> dict[str, int]:
        self.begin(line)
        return self.end()

    def close(self) -> None:
        """End it, and a child that goes on in its place: that reads the same lines and ends with them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Scene:
    """A stand-in daemon and the processes that ask it."""

    def __init__(self, program: Path, daemon: GrantStandIn) -> None:
        self.program = program
        self.daemon = daemon
        self.probes: list[Probe] = []

    def probe(self, *, address: Path | str | None = None, device_uuid: bytes = UUID) -> Probe:
        """A process whose environment names the stand-in, or another address, "" for none."""
        environment = {"PATH": os.environ["PATH"], VARIABLE: str(self.daemon.path if address is None else address)}
        probe = Probe(self.program, environment, device_uuid.hex())
        self.probes.append(probe)
        return probe

    def ready(self, segment: Segment) -> Probe:
        """A process that has its bucket. On a busy machine the first answer may come too late, and tests that count
        launches must not begin before one came."""
        probe = self.probe(device_uuid=segment.device_uuid)
        ask_until(probe, segment.segment_id)
        return probe


def ask_until(probe: Probe, segment_id: int) -> None:
    """Let the probe ask until it has these files."""
    deadline_s = time.monotonic() + SILENCE_S
    while probe.say("bucket")["segment"] != segment_id:
        assert time.monotonic() < deadline_s, f"the probe never had the files {segment_id}"
        probe.say("patience")


def slowly(daemon: GrantStandIn, pause_s: float) -> Callable[[socket.socket, bytes], None]:
    """The daemon's answers, each this much later."""

    def answer(client: socket.socket, question: bytes) -> None:
        time.sleep(pause_s)
        daemon.answer(client, question)

    return answer


def build_probe(native: Native) -> Path:
    """The gate and the client with native/tests/gate_probe.c around them: no driver."""
    target = native.folder / "programs" / "gate_probe"
    if not target.exists():
        names = ("gate.c", "client.c")
        build_library(
            target,
            sources=[PROGRAMS / "gate_probe.c", *(native.native / "src" / name for name in names)],
            headers=[native.native / "include", native.native / "src", native.headers],
            flags=[*PROGRAM_FLAGS, *(SANITIZE if native.sanitize else ())],
        )
    return target


@contextlib.contextmanager
def open_scene(native: Native, directory: Path) -> Iterator[Scene]:
    with GrantStandIn(directory) as daemon:
        found = Scene(build_probe(native), daemon)
        try:
            yield found
        finally:
            for probe in found.probes:
                probe.close()


def wait_for_waiting(segment: Segment, slot: int, number: int) -> None:
    deadline_s = time.monotonic() + 5.0
    while segment.process(slot)[1] != number:
        assert time.monotonic() < deadline_s, f"{segment.process(slot)[1]} threads wait, not {number}"
        time.sleep(0.001)


def stub_uuid(number: int) -> bytes:
    """The UUID of the stub driver's device with this number on the machine, whatever a process calls it."""
    return bytes.fromhex("53545542000040008000") + (number + 1).to_bytes(6, "big")


class DeviceScene:
    """The whole library on the stub driver, and a stand-in daemon that gives out both of the machine's devices."""

    def __init__(self, native: Native, daemon: GrantStandIn) -> None:
        self.native = native
        self.daemon = daemon
        self.probes: list[Probe] = []
        self.segments = [daemon.add(stub_uuid(number), 10 + number) for number in range(2)]
        for segment in self.segments:
            segment.granted_ns = 2**62

    def probe(self, **environment: object) -> Probe:
        around = {VARIABLE: self.daemon.path, "STUB_CLOCK": "off", **environment}
        probe = Probe(self.native.program("device_probe"), self.native.environment(around))
        self.probes.append(probe)
        return probe

    def settle(self, probe: Probe, number: int) -> None:
        """Let the process, whose current context is on this device of the machine, ask until it has its bucket."""
        segment, pid = self.segments[number], probe.say("pid")["pid"]
        deadline_s = time.monotonic() + SILENCE_S
        while not any(segment.process(slot)[0] == pid and segment.process(slot)[2] > 0 for slot in range(64)):
            assert time.monotonic() < deadline_s, f"device {number} never counted what the probe allocates"
            probe.say("alloc 1")
            time.sleep(0.005)

    def num_launches(self, number: int) -> int:
        """Launches on a device of the machine, of all processes."""
        return sum(self.segments[number].process(slot)[3] for slot in range(64))


@contextlib.contextmanager
def open_devices(native: Native, directory: Path) -> Iterator[DeviceScene]:
    with GrantStandIn(directory) as daemon:
        found = DeviceScene(native, daemon)
        try:
            yield found
        finally:
            for probe in found.probes:
                probe.close()
