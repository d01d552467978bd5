"""A command as a child of its replica, in a process group of its own that never outlives the replica."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from springtide.core.errors import InvalidRequest

_LOG = logging.getLogger("springtide.replica")
# A command that does not end after SIGTERM is killed; within the replica's grace, which may be shorter.
_STOP_S = 10.0
_POLL_S = 0.02
# Reads the end of the replica from a pipe that closes with it, however it ends, and kills the command's group.
_GUARD = 'read -r never; kill -s KILL -- "-$1" 2>/dev/null'


def words_of(make: Callable[..., Any], port: int, concurrency: int = 1) -> list[str]:
    """The words of the command that the function returns. Raises InvalidRequest, and what the function raises."""
    known = {"port": port, "concurrency": concurrency}
    given = make(**{name: known[name] for name in inspect.signature(make).parameters if name in known})
    if isinstance(given, str):
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise InvalidRequest(f"the command {given!r:.200} cannot be split into words ({error})") from None
    elif isinstance(given, Sequence):
        words = [str(word) for word in given]
    else:
        raise InvalidRequest(f"the function must return a command, a text or a list of words, not {given!r:.80}")
    if not words:
        raise InvalidRequest("the function returned an empty command")
    return [word.replace("{port}", str(port)) for word in words]


class RunningCommand:
    """The process of a command. Its output is the replica's. The constructor raises InvalidRequest if it cannot start.

    It gets the replica's environment, with PORT, and with the folder of the replica's Python first on PATH.
    """

    def __init__(self, words: Sequence[str], port: int) -> None:
        self.words = list(words)
        self._is_stopping = False
        path = os.environ.get("PATH", os.defpath)
        environment = {
            **os.environ,
            "PORT": str(port),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{path}",
            # Output that waits in a buffer would be lost with the process, and come late in the logs.
            "PYTHONUNBUFFERED": "1",
        }
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._process = subprocess.Popen(
                self.words, env=environment, stdin=subprocess.DEVNULL, process_group=0, shell=False
            )
        except FileNotFoundError:
            raise InvalidRequest(f"there is no program {self.words[0]!r:.200} where replicas run") from None
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the command {self.words[0]!r:.200} cannot be started: {error}") from None
        self.pid = self._process.pid
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "springtide-guard", str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _LOG.info("started %s as process %d", shlex.join(self.words), self.pid)

    @property
    def end(self) -> str:
        """How it ended, as the rest of a sentence; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
            return f"was ended by signal {-code}"
        return f"ended with exit code {code}"

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on another thread, with a sentence, if it ends before `stop`."""

        def wait() -> None:
            self._process.wait()
            if not self._is_stopping:
                on_end(f"the command {self.words[0]} {self.end}; what it wrote is in the replica's logs")

        threading.Thread(target=wait, name="springtide-command", daemon=True).start()

    def stop(self) -> None:
        """Ask it to end by SIGTERM, and kill what is left of its group after a while."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        until_s = time.monotonic() + _STOP_S
        while self._process.poll() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        if self._process.poll() is None:
            _LOG.warning("the command did not end within %g s of SIGTERM; killing it", _STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
