"""`python -m springtide.service.supervise ARGS`: keeps the control plane of this machine up.

A small parent without threads. It starts `python -m springtide.service ARGS`, and again when that process
dies, with growing pauses. Workers live on meanwhile, and the new control plane adopts them. What happened stands in the
platform's log and in `exits.jsonl` of the state directory. It ends when the platform is stopped in order, when it does
not come up the first time, or after five deaths at the same step of the journal, which another start would not mend.
It also keeps that log from growing for ever: strangers' requests can write to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

from springtide.control.journal.sqlite import newest_seq
from springtide.core.errors import StorageError
from springtide.storage.files import make_private, open_private, write_durable

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 60.0
# A control plane that lived for so long did not die of its start: the pauses begin anew.
SETTLED_S = 60.0
MAX_DEATHS_AT_A_STEP = 5
MAX_EXITS = 50
_LOOK_S = 0.2
_REVIEW_S = 30.0
# Written by the control plane and the zygote, which open them to append.
LOGS = ("platform.log", "zygote.log")
MAX_LOG_BYTES = 32 * 1024 * 1024
SUPERVISOR_FILE = "supervisor.json"
EXITS_FILE = "exits.jsonl"
# What the new control plane is told about the end of the one before.
RESTARTED = "SPRINGTIDE_RESTARTED"


class Supervisor:
    """One control plane at a time, until it ends in order."""

    def __init__(self, arguments: list[str], log: TextIO = sys.stderr) -> None:
        self._arguments = arguments
        self._state_dir = Path(_value_of(arguments, "--state"))
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ending = self._was_up = False
        self._restarted = ""

    def run(self) -> int:
        """Return the exit code: that of the control plane, or 1 if it is given up."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        make_private(self._state_dir)
        try:
            return self._keep_up()
        finally:
            if self._was_up:
                (self._state_dir / SUPERVISOR_FILE).unlink(missing_ok=True)

    def _keep_up(self) -> int:
        pause_s, deaths, last_seq = FIRST_PAUSE_S, 0, -1
        while True:
            began_s = time.monotonic()
            code = self._run_once()
            if code == 0 or self._is_ending or not self._was_up:
                return max(0, code)
            seq = newest_seq(self._state_dir / "journal.db")
            deaths = deaths + 1 if seq == last_seq else 1
            last_seq = seq
            why = cause_of(code)
            _append(self._state_dir / EXITS_FILE, {"at_unix_s": time.time(), "why": why, "code": code, "seq": seq})
            if deaths >= MAX_DEATHS_AT_A_STEP:
                self._say(f"it died {deaths} times at step {seq} of the journal, the last time by {why}; given up")
                return 1
            if time.monotonic() - began_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            self._say(f"it ended by {why} at step {seq} of the journal; starting again in {pause_s:g} s")
            self._restarted = f"ended by {why} at step {seq} of the journal"
            end_s = time.monotonic() + pause_s
            while not self._is_ending and time.monotonic() < end_s:
                time.sleep(0.05)
            if self._is_ending:
                return 0
            pause_s = min(LAST_PAUSE_S, pause_s * 2)

    def _run_once(self) -> int:
        environment = {**os.environ, **({RESTARTED: self._restarted} if self._restarted else {})}
        self._child = subprocess.Popen([sys.executable, "-m", "springtide.service", *self._arguments], env=environment)
        if self._is_ending:
            # The signal came while the process was started.
            self._child.send_signal(signal.SIGTERM)
        is_up = False
        while not is_up:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.wait(_LOOK_S)
            is_up = self._keep_port()
        if not self._was_up:
            # Not before: the control plane has ended by now if another one has the directory.
            write_durable(self._state_dir / SUPERVISOR_FILE, json.dumps({"pid": os.getpid()}).encode())
            self._was_up = True
        while True:
            for name in LOGS:
                limit_log(self._state_dir / name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.wait(_REVIEW_S)

    def _keep_port(self) -> bool:
        """Whether the control plane is up; then the next one takes the same ports."""
        try:
            written = json.loads((self._state_dir / "platform.json").read_bytes())
            addresses = {"--port": str(written["url"]), "--grpc-port": str(written.get("grpc", ""))}
            pid = int(written["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if self._child is None or pid != self._child.pid:
            return False
        for name, address in addresses.items():
            port = address.rpartition(":")[2].strip("/")
            if port.isdecimal() and name in self._arguments:
                self._arguments[self._arguments.index(name) + 1] = port
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def _say(self, sentence: str) -> None:
        self._log.write(f"springtide: the control plane: {sentence}\n")
        self._log.flush()


def limit_log(path: Path) -> None:
    """Move the content of a file above `MAX_LOG_BYTES` to one with `.1` at its end, in the place of what was there.

    Its writers have it open and go on at its new beginning; lines that they write in between are lost. Where the disk
    is full the content is dropped.
    """
    older = path.with_name(f"{path.name}.1")
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MAX_LOG_BYTES:
            return
        try:
            with path.open("rb") as source, open_private(older, "wb") as target:
                shutil.copyfileobj(source, target)
        except OSError:
            with contextlib.suppress(OSError):
                older.unlink()
        os.truncate(path, 0)


def cause_of(code: int) -> str:
    """`signal 11 (SIGSEGV)` or `exit code 1`, from the return code of a process."""
    if code >= 0:
        return f"exit code {code}"
    name = ""
    with contextlib.suppress(ValueError):
        name = f" ({signal.Signals(-code).name})"
    return f"signal {-code}{name}"


def _value_of(arguments: list[str], name: str) -> str:
    if name not in arguments[:-1]:
        raise SystemExit(f"springtide.service.supervise: {name} is missing")
    return arguments[arguments.index(name) + 1]


def _append(path: Path, entry: dict[str, object]) -> None:
    """Add a line and keep the newest ones. A disk that is full does not end the supervisor."""
    with contextlib.suppress(OSError, StorageError):
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        write_durable(path, ("\n".join([*known, json.dumps(entry)][-MAX_EXITS:]) + "\n").encode())


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
