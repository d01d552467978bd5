"""Child processes of this runtime that do one measurement and end: started by entry point, watched, never left behind.

The parent's side: one folder for each measurement, in which its processes (members) report progress, errors and results
as small files.
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

from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.quantities import format_duration

_POLL_S = 0.05
# Progress is told no more often than people read.
_TELL_S = 1.0
# When one member has failed the others lose their peer: so long may pass until the one that knows why has said so.
_SETTLE_S = 1.0
_LOG_CHARACTERS = 600


class ErrandError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a member failed. `is_refused`: what was asked cannot be. `is_cause` False: it only lost its peers."""

    sentence: str
    is_refused: bool = False
    is_cause: bool = True


class ErrandFiles:
    """The files through which one member reports, in the measurement's folder."""

    def __init__(self, directory: Path, name: str) -> None:
        self.progress = directory / f"{name}.progress"
        self.error = directory / f"{name}.error.json"
        self.result = directory / f"{name}.result.json"
        self.log = directory / f"{name}.log"

    def tell(self, text: str) -> None:
        """Say what the member is doing; the parent shows the newest line."""
        _replace(self.progress, text.encode())

    def fail(self, error: ErrandError) -> None:
        _replace(self.error, msgspec.json.encode(error))

    def finish(self, value: object) -> None:
        _replace(self.result, msgspec.json.encode(value))


def _replace(path: Path, data: bytes) -> None:
    """The parent reads at any moment: it must never see half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


class Errand:
    """The child processes of one measurement. Use it as a context manager: none of them outlives it."""

    def __init__(self, *, deadline_s: float, tell: Callable[[str], None]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="springtide-errand-", ignore_cleanup_errors=True)
        self.directory = Path(self._folder.name)
        self._allowed_s = deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._tell = tell
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._told: dict[str, str] = {}
        self._tell_at_s = 0.0

    def __enter__(self) -> Errand:
        """Nothing runs before `start`."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, with all that it started, and remove the folder."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._folder.cleanup()

    def files(self, name: str) -> ErrandFiles:
        return ErrandFiles(self.directory, name)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        """Start `python -m springtide.runtime ARGUMENTS`, behind `prefix`, as the leader of a process group."""
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SPRINGTIDE_ERRAND_PARENT": str(os.getpid()),
            **(environment or {}),
        }
        with self.files(name).log.open("wb") as log:
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
        """Wait until every member has ended well. Raises InvalidRequest, BackendError in one sentence."""
        failed_at_s: float | None = None
        while True:
            codes = {name: process.poll() for name, process in self._processes.items()}
            self._show_progress()
            if all(code == 0 for code in codes.values()):
                return
            if any(codes.values()):
                failed_at_s = time.monotonic() if failed_at_s is None else failed_at_s
                has_cause = any(error.is_cause for error in self._errors())
                if has_cause or None not in codes.values() or time.monotonic() - failed_at_s > _SETTLE_S:
                    self._raise(codes)
            if time.monotonic() > self._end_s:
                raise BackendError(
                    f"it was not done after {format_duration(self._allowed_s)} and was ended{self._last_words()}"
                )
            time.sleep(_POLL_S)

    def _show_progress(self) -> None:
        if time.monotonic() < self._tell_at_s:
            return
        for name in self._processes:
            with contextlib.suppress(OSError):
                text = self.files(name).progress.read_text()
                if text and self._told.get(name) != text:
                    self._told[name] = text
                    self._tell_at_s = time.monotonic() + _TELL_S
                    self._tell(text)

    def _errors(self) -> Iterator[ErrandError]:
        for name in self._processes:
            with contextlib.suppress(OSError):
                yield msgspec.json.decode(self.files(name).error.read_bytes(), type=ErrandError)

    def _raise(self, codes: Mapping[str, int | None]) -> None:
        errors = sorted(self._errors(), key=lambda error: not error.is_cause)
        if errors:
            raise (InvalidRequest if errors[0].is_refused else BackendError)(errors[0].sentence)
        code = next(code for code in codes.values() if code)
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise BackendError(f"a worker {ended}{self._last_words()}")

    def _last_words(self) -> str:
        """The end of what the first member with something to say has written."""
        for name in self._processes:
            text = self.files(name).log.read_text(errors="replace").strip()
            if text:
                return f"; the end of what it wrote:\n{text[-_LOG_CHARACTERS:]}"
        return ""
