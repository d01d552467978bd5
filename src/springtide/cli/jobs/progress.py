"""Watching a job until it ends: a live line on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from springtide.cli import terminal
from springtide.cli.tables.columns import count, pause
from springtide.cli.tables.functions import changes as function_changes
from springtide.cli.tables.search import search_changes
from springtide.cli.tables.statuses import progress_line
from springtide.core.errors import BackendError
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.api import Client

_POLL_S = 0.25
_PLAIN_LINE_S = 2.0
# How long to tolerate a platform that does not answer; a restart takes less, and workers train on meanwhile.
_PATIENCE_S = 30.0
# How long the rest of a script's output may take after its end.
_OUTPUT_S = 10.0


class JobWatcher:
    """Compares consecutive statuses of a job and describes what changed."""

    def __init__(self) -> None:
        self._last: JobStatus | None = None
        # The number of workers before a running resize: a status has the new number at once, but counts the resize only
        # when the workers have switched.
        self._num_training = 0
        self._batch_size = 0
        self.pauses_s: list[float] = []

    def observe(self, job: JobStatus) -> list[str]:
        """Lines about what changed since the last status."""
        last, self._last = self._last, job
        if last is None:
            self._batch_size = job.global_batch_size
        lines = [] if last is None else self._compare(last, job)
        if job.num_workers == 0 or self._num_training == 0:
            self._num_training = job.num_workers if job.state == JobState.RUNNING else 0
        return lines

    def _compare(self, last: JobStatus, job: JobStatus) -> list[str]:
        lines: list[str] = []
        if job.functions is not None and last.functions is not None:
            lines += function_changes(last.functions, job.functions, has_search=job.search is not None)
            lines += search_changes(last, job)
        if job.num_restarts > last.num_restarts:
            origin = "the beginning" if job.checkpoint_step is None else f"its checkpoint at step {job.checkpoint_step}"
            lines.append(f"restarted from {origin}: {job.reason}")
        if job.num_preemptions > last.num_preemptions:
            lines.append(f"gave its devices back, checkpoint at step {job.checkpoint_step or job.step}: {job.reason}")
        if job.functions is not None:
            # The plan changes, which is reported above, not the number of coordinators.
            pass
        elif job.num_resizes > last.num_resizes and job.num_workers > 0:
            lines.append(self._change_line("resized", job))
        elif job.last_pause_s != last.last_pause_s and job.num_workers < self._num_training:
            lines.append(self._change_line("went on without a lost worker,", job))
        if job.state != last.state and job.state != JobState.RUNNING and not JobState(job.state).is_terminal:
            lines.append(f"{job.state}: {job.reason}" if job.reason else job.state)
        return lines

    def _change_line(self, what: str, job: JobStatus) -> str:
        before, self._num_training = self._num_training, job.num_workers
        change = f"{before} -> {job.num_workers}" if before else f"to {count(job.num_workers, 'worker')}"
        paused = ""
        if job.last_pause_s is not None:
            self.pauses_s.append(job.last_pause_s)
            paused = f", pause {pause(job.last_pause_s)}"
        batch = f"global batch {job.global_batch_size} kept"
        if self._batch_size != job.global_batch_size:
            batch, self._batch_size = f"batch {self._batch_size} -> {job.global_batch_size}", job.global_batch_size
            if before == job.num_workers:
                return f"{batch}{paused}, step {job.step} continued"
        why = f" ({job.resize_reason})" if job.resize_reason else ""
        return f"{what} {change}{why}{paused}, {batch}, step {job.step} continued"


class Display(Protocol):
    """Shows progress."""

    def update(self, job: JobStatus) -> None:
        """Show the job's present progress."""
        ...

    def event(self, line: str) -> None:
        """Show an event on a line that stays."""
        ...

    def output(self, line: str) -> None:
        """Show a line that the job wrote; from another thread than the others are called from."""
        ...


class PlainDisplay:
    """Plain lines: every event, and progress if it changed, at most every two seconds."""

    def __init__(self, write: Callable[[str], None], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._monotonic_s = monotonic_s
        self._due_s = float("-inf")
        self._last = ""

    def update(self, job: JobStatus) -> None:
        line = progress_line(job)
        now_s = self._monotonic_s()
        if now_s >= self._due_s and line != self._last:
            self._write(line)
            self._last = line
            self._due_s = now_s + _PLAIN_LINE_S

    def event(self, line: str) -> None:
        """Print the event at once."""
        self._write(f"  {line}")

    def output(self, line: str) -> None:
        """Print the line as it is."""
        self._write(line)


class _LiveDisplay:
    """One line that changes in place; events scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(terminal.rich_text(""), console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> _LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, job: JobStatus) -> None:
        line = progress_line(job, self._console.width)
        self._live.update(terminal.rich_text(line, no_wrap=True, overflow="ellipsis"))

    def event(self, line: str) -> None:
        """Print the event above the line."""
        self._console.print(terminal.rich_text(f"  {line}"))

    def output(self, line: str) -> None:
        """Print the line as it is, above the line that changes."""
        self._console.print(terminal.rich_text(line))


@contextmanager
def display(*, live: bool, to_stderr: bool) -> Iterator[Display]:
    """A live display if `live`, else plain lines."""
    if live:
        with _LiveDisplay() as shown:
            yield shown
    else:
        yield PlainDisplay(lambda line: terminal.write(line, err=to_stderr))


def can_redraw() -> bool:
    """Whether standard output is a terminal on which a line can change in place."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def terminal_width() -> int | None:
    """The terminal's width in characters; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def follow(
    client: Client,
    job_id: str,
    shown: Display,
    sleep: Callable[[float], None] = time.sleep,
    watcher: JobWatcher | None = None,
    *,
    has_output: bool = False,
) -> JobStatus:
    """Show the job until it has ended and return its last status; tolerates a restart of the platform.

    With `has_output`, what it writes shows that it runs, until it reports steps. Raises BackendError if the platform
    does not answer for 30 s. KeyboardInterrupt passes through.
    """
    watcher = watcher or JobWatcher()
    patience_s = _PATIENCE_S
    while True:
        try:
            job = client.job(job_id)
        except BackendError as error:
            if patience_s == _PATIENCE_S:
                shown.event(f"{error}; waiting for the platform, the workers train on")
            patience_s -= _POLL_S
            if patience_s <= 0:
                raise
            sleep(_POLL_S)
            continue
        patience_s = _PATIENCE_S
        for line in watcher.observe(job):
            shown.event(line)
        if JobState(job.state).is_terminal:
            return job
        if job.has_steps or job.state != JobState.RUNNING or not has_output:
            shown.update(job)
        sleep(_POLL_S)


def follow_script(client: Client, job_id: str, shown: Display, watcher: JobWatcher) -> JobStatus:
    """`follow`, and show beside it all that the script writes.

    Raises BackendError if the platform does not answer for 30 s. KeyboardInterrupt passes through.
    """

    def show_output() -> None:
        try:
            for line in client.logs(job_id, follow=True):
                shown.output(line.rstrip("\n"))
        except BackendError as error:
            shown.event(f"its output is shown no further ({error}): springtide logs {job_id} -f")

    output = threading.Thread(target=show_output, daemon=True)
    output.start()
    job = follow(client, job_id, shown, watcher=watcher, has_output=True)
    output.join(_OUTPUT_S)
    return job
