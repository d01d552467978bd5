"""The parent's side of measurements that run in child processes, which are started by entry point and never outlive it.

Each measurement has a temporary folder, in which its processes (members) report progress, errors and results as small
files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.quantities import format_duration
from springtide.storage.files import open_private

_POLL_S = 0.05
# Progress lines follow each other no faster than people read.
_PROGRESS_INTERVAL_S = 1.0
# When one member fails, the others fail for want of their peer: how long to wait for the error of the first.
_CAUSE_WAIT_S = 1.0
_LOG_CHARACTERS = 600


class MemberError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a member failed.

    `is_refused`: the request is invalid, not the run. `is_cause` False: the member only lost its peers.
    """

    sentence: str
    is_refused: bool = False
    is_cause: bool = True


class MemberFiles:
    """The files in the measurement's folder through which one member reports."""

    def __init__(self, directory: Path, name: str) -> None:
        self.progress = directory / f"{name}.progress"
        self.error = directory / f"{name}.error.json"
        self.result = directory / f"{name}.result.json"
        self.log = directory / f"{name}.log"

    def report_progress(self, text: str) -> None:
        """Set the line that says what the member is doing; the parent shows the newest one."""
        _replace(self.progress, text.encode())

    def fail(self, error: MemberError) -> None:
        _replace(self.error, msgspec.json.encode(error))

    def finish(self, value: object) -> None:
        _replace(self.result, msgspec.json.encode(value))


def _replace(path: Path, data: bytes) -> None:
    """Write by rename: the parent reads at any moment and must never see a partial file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


class MeasurementProcesses:
    """The child processes of one measurement. A context manager: all of them are killed at its exit."""

    def __init__(self, *, deadline_s: float, on_progress: Callable[[str], None]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="springtide-measurement-", ignore_cleanup_errors=True)
        self.directory = Path(self._folder.name)
        self._allowed_s = deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._on_progress = on_progress
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._shown: dict[str, str] = {}
        self._next_progress_s = 0.0

    def __enter__(self) -> MeasurementProcesses:
        """Return the object; no process runs before `start`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that still run with their children, and remove the folder."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._folder.cleanup()

    def files(self, name: str) -> MemberFiles:
        return MemberFiles(self.directory, name)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        """Start `PREFIX python -m springtide.runtime ARGUMENTS` as the leader of a process group."""
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SPRINGTIDE_MEASUREMENT_PARENT": str(os.getpid()),
            **(environment or {}),
        }
        with open_private(self.files(name).log, "wb") as log:
            self._processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "springtide.runtime", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=cwd,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until every member has exited with 0.

        Raises InvalidRequest if a member refused the request, BackendError if one failed or the deadline passed; both
        with one sentence.
        """
        failed_at_s: float | None = None
        while True:
            codes = {name: process.poll() for name, process in self._processes.items()}
            self._show_progress()
            if all(code == 0 for code in codes.values()):
                return
            if any(codes.values()):
                failed_at_s = time.monotonic() if failed_at_s is None else failed_at_s
                has_cause = any(error.is_cause for error in self._errors())
                if has_cause or None not in codes.values() or time.monotonic() - failed_at_s > _CAUSE_WAIT_S:
                    self._raise(codes)
            if time.monotonic() > self._end_s:
                raise BackendError(
                    f"it was not done after {format_duration(self._allowed_s)} and was ended{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _show_progress(self) -> None:
        if time.monotonic() < self._next_progress_s:
            return
        for name in self._processes:
            with contextlib.suppress(OSError):
                text = self.files(name).progress.read_text()
                if text and self._shown.get(name) != text:
                    self._shown[name] = text
                    self._next_progress_s = time.monotonic() + _PROGRESS_INTERVAL_S
                    self._on_progress(text)

    def _errors(self) -> Iterator[MemberError]:
        for name in self._processes:
            with contextlib.suppress(OSError):
                yield decode_json(self.files(name).error.read_bytes(), MemberError)

    def _raise(self, codes: Mapping[str, int | None]) -> None:
        errors = sorted(self._errors(), key=lambda error: not error.is_cause)
        if errors:
            raise (InvalidRequest if errors[0].is_refused else BackendError)(errors[0].sentence)
        code = next(code for code in codes.values() if code)
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise BackendError(f"a worker {ended}{self._log_tail()}")

    def _log_tail(self) -> str:
        """The end of the output of the first member that has any, as the rest of a sentence."""
        for name in self._processes:
            text = self.files(name).log.read_text(errors="replace").strip()
            if text:
                return f"; the end of what it wrote:\n{text[-_LOG_CHARACTERS:]}"
        return ""
