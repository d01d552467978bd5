"""Sets up a new function process before its own code: session, limits, group, and death with its parent.

It imports little of the standard library, because each process runs it first (`python -S cage.py ...`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MAX_OPEN_FILES = 1024
# Exit code for "could not be set up"; awslambdaric itself uses 1, 64 and 65.
EXIT_NOT_CAGED = 70


def enter(parent_pid: int, group_procs: str) -> None:
    """Lead a session of its own, die with the parent, join the CPU group (`cgroup.procs`, or empty for none).

    Raises OSError where the group cannot be joined, RuntimeError if the parent has died already.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the line above no longer causes a signal.
    if os.getppid() != parent_pid:
        raise RuntimeError("the emulator has ended")
    if group_procs:
        with open(group_procs, "w") as file:
            file.write(str(os.getpid()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # If the machine runs out of memory, the kernel should kill a function before the platform.
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("600")
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """`parent_pid group_procs program [argument...]`: set up the process and execute the program."""
    try:
        enter(int(arguments[0]), arguments[1])
        os.execv(arguments[2], arguments[2:])
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"the function cannot start: {error}\n")
        sys.exit(EXIT_NOT_CAGED)


if __name__ == "__main__":
    main(sys.argv[1:])
