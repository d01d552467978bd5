"""Executes the task graph of one step: each lane has its own threads, and computation runs on the calling thread.

FuncPipe, section 4: a task runs as soon as the tasks it needs are done; uploads, downloads and computation overlap.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from springtide.perf.functions.pipeline.tasks import Lane, StageTask

# The calling thread calls `check` at least this often while it waits.
POLL_S = 0.5
_THREADED: tuple[Lane, ...] = ("download", "upload", "sync")


class StepExecutor:
    """Runs task graphs, one after another.

    `num_in_flight` is the number of concurrent transfers in each direction. `check` is called about every half second
    while the calling thread waits; an exception that it raises ends the step. `now_s` is a clock in seconds.
    """

    def __init__(self, num_in_flight: int, check: Callable[[], None], now_s: Callable[[], float]) -> None:
        self._num_threads = {"download": num_in_flight, "upload": num_in_flight, "sync": 1}
        self._check = check
        self._now_s = now_s
        self._interrupted: list[threading.Thread] = []

    def run(
        self, tasks: Sequence[StageTask], work: Callable[[StageTask, Callable[[], bool]], None]
    ) -> dict[str, float]:
        """Run all tasks by `work(task, is_ended)` and return the total seconds of each kind of task.

        Tasks of a lane begin in the graph's order. The first error of any lane ends the step and is raised. Work that
        blocks must call `is_ended` about once a second and return if it is true.
        """
        run = _Run(tasks, work, self._now_s)
        threads = []
        for lane in _THREADED:
            queue = [index for index, task in enumerate(tasks) if task.lane == lane]
            for number in range(min(len(queue), self._num_threads[lane])):
                name = f"springtide-{lane}-{number}"
                threads.append(threading.Thread(target=run.run_lane, args=(lane,), name=name, daemon=True))
        try:
            for thread in threads:
                thread.start()
            run.compute(self._check)
        except BaseException:
            run.end()
            # Threads may still wait for a message; they end by themselves and change nothing more.
            self._interrupted += [thread for thread in threads if thread.is_alive()]
            raise
        for thread in threads:
            thread.join()
        return dict(run.took_s)

    def close(self) -> None:
        """Wait for the threads of interrupted steps."""
        while self._interrupted:
            self._interrupted.pop().join()


class _Run:
    """The state of one running step: which tasks are done, the lanes' queues, and the first error."""

    def __init__(
        self,
        tasks: Sequence[StageTask],
        work: Callable[[StageTask, Callable[[], bool]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._tasks = tasks
        self._work = work
        self._now_s = now_s
        self._changed = threading.Condition()
        self._is_done = [False] * len(tasks)
        self._num_left = len(tasks)
        self._queues = {lane: [at for at, task in enumerate(tasks) if task.lane == lane] for lane in _THREADED}
        self._is_ended = False
        self._error: BaseException | None = None
        self.took_s: defaultdict[str, float] = defaultdict(float)

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def has_ended(self) -> bool:
        return self._is_ended

    def compute(self, check: Callable[[], None]) -> None:
        """On the calling thread, run the computation tasks in order, then wait for the other lanes."""
        for index, task in enumerate(self._tasks):
            if task.lane == "compute":
                self._wait(partial(self._are_done, task.needs), check)
                self._do(index)
        self._wait(lambda: self._num_left == 0, check)

    def _are_done(self, needs: Sequence[int]) -> bool:
        return all(self._is_done[need] for need in needs)

    def _may_begin(self, needs: Sequence[int]) -> bool:
        return self._is_ended or self._are_done(needs)

    def _wait(self, is_ready: Callable[[], bool], check: Callable[[], None]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or is_ready(), POLL_S)
                if self._error is not None:
                    raise self._error
                if is_ready():
                    return
            # Outside the lock, so that the lanes can continue.
            check()

    def run_lane(self, lane: Lane) -> None:
        """On a lane's thread, run the lane's tasks one by one."""
        while True:
            with self._changed:
                if self._is_ended or self._error is not None or not self._queues[lane]:
                    return
                index = self._queues[lane].pop(0)
                needs = self._tasks[index].needs
                self._changed.wait_for(partial(self._may_begin, needs))
                if self._is_ended:
                    return
            try:
                self._do(index)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return

    def _do(self, index: int) -> None:
        task = self._tasks[index]
        began_s = self._now_s()
        self._work(task, self.has_ended)
        took_s = self._now_s() - began_s
        with self._changed:
            self.took_s[task.kind] += took_s
            self._is_done[index] = True
            self._num_left -= 1
            self._changed.notify_all()
