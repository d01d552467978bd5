"""The guard of an enforcer: a small process that lifts every limit and continues every sharer once its owner is gone.

It reads its standard input, whose other end only the owner has. Each line lists all that is to be undone; at the end of
the stream, whatever its cause, the last line is carried out. It imports almost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence


class LimitGuard:
    """The owner's side. `watch` sets what must be undone if this process dies; a dead guard is replaced."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""

    @property
    def pid(self) -> int:
        """The guard's process number (0: there is none yet)."""
        return self._process.pid if self._process is not None else 0

    def watch(self, files: Sequence[tuple[str, str]], groups: Iterable[tuple[int, int]]) -> None:
        """`files` are (path, value) to be written, `groups` (pid, start in ticks) of leaders of process groups."""
        line = json.dumps({"files": list(files), "groups": list(groups)}).encode() + b"\n"
        if line != self._line:
            self._line = line
            self._send()

    def ensure(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._release()
            self._send()

    def close(self) -> None:
        """Let the guard undo everything, and wait for its end."""
        if self._process is not None:
            self._release()

    def _send(self) -> None:
        for _ in range(2):
            if self._process is None:
                self._process = subprocess.Popen(
                    # Run as a file, with only the standard library, so that it is small and starts at once.
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(self._line)
                self._process.stdin.flush()
                return
            except OSError:
                self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait()


def undo(line: bytes) -> None:
    """Carry out a line: write the files, continue the process groups whose leaders are still the same processes."""
    if not line.strip():
        return
    orders = json.loads(line)
    for path, value in orders["files"]:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.write(descriptor, value.encode())
            finally:
                os.close(descriptor)
    for pid, start_ticks in orders["groups"]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if start_ticks_of(pid) == start_ticks:
                os.killpg(pid, signal.SIGCONT)


def start_ticks_of(pid: int) -> int:
    """When the process started, in ticks since boot. Raises OSError if it is gone."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        text = file.read()
    return int(text[text.rfind(")") + 2 :].split()[19])


def main() -> int:
    """Wait for the end of the stream, then undo."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ignore signals to the whole process group: the guard must outlive its owner.
        signal.signal(name, signal.SIG_IGN)
    last = b""
    for line in sys.stdin.buffer:
        last = line
    undo(last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
