"""Processes of this machine: their identity, their exits, and ending them with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from springtide.core.errors import BackendError

_DEAD_STATES = "ZX"
_TAIL_BYTES = 4096
_MAX_LINE_CHARACTERS = 200
_CONTROL_PLANE_VARIABLES = frozenset(
    {"SPRINGTIDE_STATE", "SPRINGTIDE_CRASH_AT", "SPRINGTIDE_UPKEEP_PACE", "SPRINGTIDE_TOKEN"}
)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process that cannot be confused with a later one of the same number: `start_ticks` since boot `boot_id`."""

    pid: int
    start_ticks: int
    boot_id: str


class ProcessStat(msgspec.Struct, frozen=True):
    """From /proc: a process's state letter, process group, and CPU time used and start time in ticks."""

    state: str
    process_group: int
    cpu_ticks: int
    start_ticks: int


def boot_id() -> str:
    """Return the id of this boot of the machine; process numbers and start times mean nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_stat(pid: int) -> ProcessStat | None:
    """Return the stat of `pid` from /proc, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may itself hold blanks and parentheses: count from the last one.
    fields = text[text.rfind(")") + 2 :].split()
    return ProcessStat(fields[0], int(fields[2]), int(fields[11]) + int(fields[12]), int(fields[19]))


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a live process, or None if it is gone."""
    stat = read_stat(pid)
    if stat is None or stat.state in _DEAD_STATES:
        return None
    return ProcessIdentity(pid, stat.start_ticks, boot_id())


def live_stat(identity: ProcessIdentity) -> ProcessStat | None:
    """Return the stat of exactly this process if it lives (a zombie does not), else None."""
    stat = read_stat(identity.pid)
    if stat is None or stat.state in _DEAD_STATES or stat.start_ticks != identity.start_ticks:
        return None
    return stat if identity.boot_id == boot_id() else None


def is_starved(identity: ProcessIdentity) -> bool:
    """Whether a thread of the process waits for a processor or the disk: then its silence proves nothing."""
    try:
        tasks = os.listdir(f"/proc/{identity.pid}/task")
    except OSError:
        return False
    for task in tasks:
        try:
            text = Path(f"/proc/{identity.pid}/task/{task}/stat").read_text(errors="replace")
        except OSError:
            continue
        if text[text.rfind(")") + 2] in "RD":
            return True
    return False


def process_clock_s(pid: int) -> float | None:
    """Return the CPU seconds that all threads of a process have used, to the nanosecond; None if it is gone.

    The clock id is the kernel's own encoding (clock_getcpuclockid), which Python does not offer for other processes.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """Return a descriptor that turns readable when exactly this process exits, or None if it already has."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    # The number may have been reused before the call; from then on the descriptor refers to one process.
    if live_stat(identity) is None:
        os.close(descriptor)
        return None
    return descriptor


def signal_group(identity: ProcessIdentity, number: int) -> bool:
    """Signal the process and, if it leads its process group, the group. Return whether anything was signalled.

    If the leader is gone, the rest of its group is signalled. A process that merely has the same number is never
    touched.
    """
    stat = read_stat(identity.pid)
    if identity.boot_id != boot_id() or (stat is not None and stat.start_ticks != identity.start_ticks):
        return False
    leads = stat is None or stat.process_group == identity.pid
    try:
        if leads:
            os.killpg(identity.pid, number)
        else:
            os.kill(identity.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(pid: int) -> int | None:
    """Collect the exit code of a child of this process that has ended (a signal is negative), else None."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped == pid else None


def spawn_detached(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> int:
    """Start a program in a session of its own, its output appended to `log_path`, and return its process number.

    It outlives this process. Raises BackendError.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        return os.posix_spawnp(
            command[0],
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
        )
    except OSError as error:
        raise BackendError(f"cannot start {command[0]}: {error.strerror}") from error


def worker_environment() -> dict[str, str]:
    """The environment that a process with user code inherits: all but the control plane's own variables."""
    return {name: value for name, value in os.environ.items() if name not in _CONTROL_PLANE_VARIABLES}


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank, shortened, or an empty string."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if line.strip():
            return "".join(c if c.isprintable() else " " for c in line.strip())[:_MAX_LINE_CHARACTERS]
    return ""


def bound_log(path: Path, limit_bytes: int, keep_bytes: int) -> bool:
    """Truncate a log that is over the limit, keeping its last `keep_bytes` in `<path>.1`. Return whether it was."""
    try:
        if path.stat().st_size <= limit_bytes:
            return False
        with path.open("r+b") as file:
            file.seek(-keep_bytes, os.SEEK_END)
            path.with_name(path.name + ".1").write_bytes(file.read(keep_bytes))
            # Writers append, so they continue at the new end.
            file.truncate(0)
    except OSError:
        return False
    return True


def describe_exit(exit_code: int | None, log_path: Path) -> str:
    """Return the sentence for users about a worker that ended unrequested."""
    if exit_code is None:
        text = "the worker process ended"
    elif exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        text = "the worker was killed by SIGKILL; unless a person did that, the kernel killed it for memory"
    elif exit_code < 0:
        name = str(-exit_code)
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
        text = f"the worker was killed by signal {name}"
    else:
        text = f"the worker exited with code {exit_code}"
    line = last_line(log_path)
    return f"{text}; the last line of its log: {line}" if line else text
