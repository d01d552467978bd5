"""Reader of Google's cluster trace of 2011, `task_events`: when tasks arrive, and how long each of them ran."""

from __future__ import annotations

from pathlib import Path

from springtide.workloads.rows import TextRow, read_rows
from springtide.workloads.trace import MAX_TIME_S, Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

# The files have no header. Machine, class, priority and requests are not read.
COLUMNS = (
    "timestamp",
    "missing info",
    "job ID",
    "task index",
    "machine ID",
    "event type",
    "user",
    "scheduling class",
    "priority",
    "CPU request",
    "memory request",
    "disk space request",
    "different machines restriction",
)
NUM_EVENT_TYPES = 9
_SUBMIT, _SCHEDULE = 0, 1
# Evicted, failed, finished, killed, lost: each ends an interval in which the task ran. After the last three a task
# has ended, so that reading can stop once all tasks within the limit have.
_ENDS = frozenset({2, 3, 4, 5, 6})
_LAST = frozenset({4, 5, 6})
_MAX_TIMESTAMP = 2**63 - 1
_US_PER_S = 1e6


class _Task:
    """A task as read so far, in microseconds of the trace's clock."""

    __slots__ = ("has_ended", "job_id", "owner", "ran_us", "started_us", "submit_us")

    def __init__(self, job_id: str, submit_us: int, owner: str) -> None:
        self.job_id = job_id
        self.submit_us = submit_us
        self.owner = owner
        self.ran_us = 0
        self.started_us: int | None = None
        self.has_ended = False


def read(path: Path, limit: int | None = None) -> Trace:
    """Read one file of events: each task is a job on one device, from its first submission, which has event type 0.

    Its duration is the sum of the intervals from being scheduled to being evicted, failed, finished, killed or lost,
    until it is finished, killed or lost; None if the file has no such interval. Timestamps are microseconds; 0 and
    2^63 - 1 mean before and after the trace: such submissions are skipped and counted, and so are later submissions of
    the same task. With a limit, reading stops when that many first tasks have ended. Raises InvalidRequest.
    """
    builder = TraceBuilder(path, limit)
    tasks: dict[tuple[int, int], _Task] = {}
    num_open = 0
    for row in read_rows(path, (), columns=list(COLUMNS)):
        at_us = row.big_count("timestamp", highest=_MAX_TIMESTAMP)
        key = (row.big_count("job ID", highest=_MAX_TIMESTAMP), row.count("task index", lowest=0))
        event = row.count("event type", lowest=0, highest=NUM_EVENT_TYPES - 1)
        task = tasks.get(key)
        if event == _SUBMIT and task is not None:
            builder.skip("submission of a task that was submitted before")
        elif event == _SUBMIT and not 0 < at_us < _MAX_TIMESTAMP:
            builder.skip("submitted before or after the trace")
        elif event == _SUBMIT and (limit is None or len(tasks) < limit):
            _check_time(row, at_us)
            job_id = builder.claim(f"{key[0]}-{key[1]}", row.line, "task index")
            tasks[key] = _Task(job_id, at_us, row.text("user"))
            num_open += 1
        elif task is not None and at_us < _MAX_TIMESTAMP:
            _check_time(row, at_us)
            num_open -= _follow(task, event, at_us)
            _check_time(row, task.ran_us)
        if limit is not None and len(tasks) >= limit and num_open == 0:
            break
    for task in tasks.values():
        builder.add(
            TraceJob(
                job_id=task.job_id,
                submit_s=task.submit_us / _US_PER_S,
                duration_s=task.ran_us / _US_PER_S if task.ran_us else None,
                owner=task.owner,
            )
        )
    return builder.build("google")


def _check_time(row: TextRow, at_us: int) -> None:
    if at_us > MAX_TIME_S * _US_PER_S:
        row.refuse("timestamp", f"{at_us} microseconds are over 3,000 years; is the unit right?")


def _follow(task: _Task, event: int, at_us: int) -> bool:
    """Apply an event to a known task; whether the task ends with it."""
    if task.has_ended:
        return False
    if event == _SCHEDULE:
        task.started_us = at_us
    elif event in _ENDS:
        if task.started_us is not None:
            task.ran_us += max(0, at_us - task.started_us)
        task.started_us = None
        task.has_ended = event in _LAST
    return task.has_ended
