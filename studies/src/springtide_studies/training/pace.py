"""How the bench `training` holds the loops that it measures: steps on command, and what they cost."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

_MIB = 1024


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps of one process: seconds of its processors and of the clock, and the most memory until now, in MiB."""

    cpu_s: float
    wall_s: float
    peak_mib: float


class Pace:
    """The bench's hand on a training loop: `turn` after each step waits where the steps asked for are done."""

    def __init__(self, address: str, variant: str) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(address)
        self._link.sendall(f"{variant}\n".encode())
        self._commands = self._link.makefile("r")
        self._num_left = 0
        self._await_command()

    def turn(self) -> None:
        """Note that a step is done."""
        self._num_left -= 1
        if self._num_left:
            return
        cost = Cost(
            cpu_s=time.process_time() - self._cpu_s, wall_s=time.monotonic() - self._wall_s, peak_mib=_peak_mib()
        )
        self._link.sendall(msgspec.json.encode(cost) + b"\n")
        self._await_command()

    def _await_command(self) -> None:
        command = self._commands.readline()
        if not command:
            # Threads of gloo must not wake up in an interpreter that shuts down.
            os._exit(0)
        self._num_left = int(command)
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()


def _peak_mib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / _MIB
