"""The files of a coordinator on the platform's disk: notes for its successor, the status, the losses, the logs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import StorageError
from springtide.core.functions import Usage
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.wire.functions import MAX_LOSSES, Place
from springtide.perf.functions.bill import gb_s_of
from springtide.storage.files import make_private, write_durable

if TYPE_CHECKING:
    from springtide.backends.functions.coordinator.coordinator import Coordinator

_log = logging.getLogger(__name__)
NOTES_FILE = "functions-notes.json"
STATUS_FILE = "functions.json"
LOSSES_FILE = "losses.jsonl"
LOGS = "logs"
MAX_LOG_BYTES = 8 << 20
# Lines with this prefix are known from reports while the function runs; its own log repeats them at the end.
_STEP_LINE = "stage "


class NotedInvocation(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be running; `invoked_at_s` is since when it is charged (platform seconds)."""

    incarnation: int
    memory_mb: int
    invoked_at_s: float
    usage: Usage = Usage()


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """Written before functions are invoked, so that no incarnation number is used twice and no charge is forgotten.

    `usage` is everything except what `invocations` have used; `ids_digest` chains the sample ids of every committed
    step. `term` is that of the control plane that wrote the notes, as in the control record; `at_s` is when it wrote
    them (platform seconds).
    """

    term: int = 0
    at_s: float | None = None
    used_incarnations: int = 0
    usage: Usage = Usage()
    invocations: tuple[NotedInvocation, ...] = msgspec.field(name="lives", default=())
    ids_digest: str = ""


def usage_with_invocations(notes: Notes, now_s: float, lifetime_s: float) -> Usage:
    """The usage so far, with an upper bound for the functions whose end is unknown."""
    usage = notes.usage
    for invocation in notes.invocations:
        lasted_s = min(max(0.0, now_s - invocation.invoked_at_s), lifetime_s)
        usage = usage.plus(invocation.usage).plus(Usage(function_gb_s=gb_s_of(invocation.memory_mb, lasted_s)))
    return usage


def usage_taken_over(notes: Notes, now_s: float, *, uses_parameters: bool) -> Usage:
    """The usage so far, if functions went on; adds the uptime of a parameter store since the notes were written."""
    if not uses_parameters or notes.at_s is None:
        return notes.usage
    return notes.usage.plus(Usage(parameter_store_s=max(0.0, now_s - notes.at_s)))


def notes_of(coordinator: Coordinator, now_s: float) -> Notes:
    """The notes for the next coordinator of the job."""
    invocations = tuple(
        NotedInvocation(
            incarnation=invocation.incarnation,
            memory_mb=invocation.memory_mb,
            invoked_at_s=invocation.invoked_at_s,
            usage=invocation.usage,
        )
        for invocation in coordinator.run.ledger.running()
    )
    return Notes(
        at_s=now_s,
        used_incarnations=coordinator.run.pool.used_incarnations,
        usage=coordinator.run.ledger.settled_usage(now_s),
        invocations=invocations,
        ids_digest=coordinator.run.progress.ids_digest,
    )


def log_name(job_id: str, name: str) -> str:
    """The path of a job's log in its directory: the log of a place ("0.1") or of the coordinator."""
    return f"{LOGS}/{job_id}.{name}.log"


class CoordinatorFiles:
    """The files of one job in its workload's directory. Failures to write are logged: they must not stop the job.

    `on_new_lines` is called with the name of a file that got lines which will not be reported again by functions.
    """

    def __init__(self, work_dir: Path, job_id: str) -> None:
        self.on_new_lines: Callable[[str], None] = lambda name: None
        self._num_untold = 0
        self._work_dir = work_dir
        self._job_id = job_id
        self._notes_path = work_dir / NOTES_FILE
        self._losses_path = work_dir / LOSSES_FILE

    def read(self) -> Notes:
        """The notes of the previous coordinator, or empty ones."""
        try:
            return decode_json(self._notes_path.read_bytes(), Notes)
        except FileNotFoundError:
            return Notes()
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("%s is unreadable: %s", self._notes_path, error)
            return Notes()

    def write(self, notes: Notes) -> None:
        """Make the notes durable. Raises StorageError; without them no function may be invoked."""
        self._make(self._work_dir)
        write_durable(self._notes_path, msgspec.json.encode(notes))

    def write_status(self, status: FunctionRunStatus) -> None:
        """Save the status, to be shown after the job has ended."""
        try:
            self._make(self._work_dir)
            write_durable(status_path(self._work_dir), msgspec.json.encode(status))
        except StorageError as error:
            _log.error("%s", error)

    def last_loss(self) -> tuple[int, float, int] | None:
        """The last line of the losses: (step, mean loss, samples); None where there is none."""
        try:
            lines = self._losses_path.read_bytes().splitlines()
            step, loss, count = json.loads(lines[-1])
            return int(step), math.nan if loss is None else float(loss), int(count)
        except (OSError, IndexError, ValueError, TypeError):
            return None

    def add_losses(self, losses: Iterable[tuple[int, float, int]]) -> None:
        """Append steps' mean losses: a line [step, loss, samples] for each, null for a loss that is not finite."""
        lines = [
            f"{json.dumps([step, loss if math.isfinite(loss) else None, count])}\n" for step, loss, count in losses
        ]
        self._append(self._losses_path, "".join(lines))
        self._num_untold += len(lines)
        if self._num_untold >= MAX_LOSSES // 2:
            # Reports repeat only the newest losses, so these need a copy soon.
            self._num_untold = 0
            self.on_new_lines(LOSSES_FILE)

    def add_step(self, place: Place, incarnation: int, line: str) -> None:
        """Append a line about a step to the log of a place."""
        self._append(self._work_dir / log_name(self._job_id, str(place)), f"({incarnation}) {line}\n")

    def add_lines(self, name: str, lines: Iterable[str]) -> None:
        """Append lines to a log of the job: that of a place ("0.1") or of the coordinator."""
        text = "".join(f"{line}\n" for line in lines)
        if text:
            self._append(self._work_dir / log_name(self._job_id, name), text)
            self.on_new_lines(log_name(self._job_id, name))

    def add_tail(self, place: Place, incarnation: int, tail: str) -> None:
        """Append a function's output, except for the lines about its steps, which are there already."""
        lines = [line for line in tail.splitlines() if line.strip() and not line.startswith(_STEP_LINE)]
        self.add_lines(str(place), [f"({incarnation}) {line}" for line in lines])

    def _append(self, path: Path, text: str) -> None:
        if not text:
            return
        try:
            make_private(path.parent)
            with path.open("a", encoding="utf-8", errors="replace") as file:
                if file.tell() < MAX_LOG_BYTES:
                    file.write(text)
        except OSError as error:
            _log.error("cannot write %s: %s", path, error.strerror)

    def _make(self, directory: Path) -> None:
        try:
            make_private(directory)
        except OSError as error:
            raise StorageError(f"cannot make {directory}: {error.strerror}") from error


def status_path(work_dir: Path) -> Path:
    """The path of a job's last status on functions."""
    return work_dir / STATUS_FILE


def read_status(work_dir: Path) -> FunctionRunStatus | None:
    """The saved status; None where there is none."""
    try:
        return decode_json(status_path(work_dir).read_bytes(), FunctionRunStatus)
    except (OSError, msgspec.MsgspecError):
        return None
