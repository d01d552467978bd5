"""Ends every function when the emulator has gone, even by kill -9: reads the emulator's pipe until it breaks.

Lines on its input: `+ID PROCESS_GROUP CPU_GROUP_DIR` (a dash for none) and `-ID`. Only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

_ATTEMPTS = 50
_PAUSE_S = 0.02


def follow(lines: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Read until the end; return what was begun and not ended: id -> (process group, CPU group's directory)."""
    living: dict[str, tuple[int, str]] = {}
    for line in lines:
        fields = line.split()
        if line.startswith("+") and len(fields) == 3 and fields[1].lstrip("-").isdigit():
            living[fields[0][1:]] = (int(fields[1]), "" if fields[2] == "-" else fields[2])
        elif line.startswith("-") and len(fields) == 1:
            living.pop(fields[0][1:], None)
    return living


def end_group(process_group: int, cpu_group: str) -> None:
    """Kill a process group and the processes in the CPU group, and remove that group."""
    if process_group > 1:
        try:
            os.killpg(process_group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    for _ in range(_ATTEMPTS if cpu_group else 0):
        try:
            with open(os.path.join(cpu_group, "cgroup.procs")) as file:
                members = [int(line) for line in file]
            for member in members:
                # 0 is a process of another namespace, and for os.kill the sweeper's own group.
                if member > 1:
                    os.kill(member, signal.SIGKILL)
            os.rmdir(cpu_group)
            return
        except FileNotFoundError:
            return
        except OSError:
            # The group cannot be removed until its members have died, which takes a moment.
            time.sleep(_PAUSE_S)


def main() -> None:
    """Wait for the emulator's end, then end the processes that it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Nested groups are announced later, and must be removed first.
    for process_group, cpu_group in reversed(follow(sys.stdin).values()):
        end_group(process_group, cpu_group)


if __name__ == "__main__":
    main()
