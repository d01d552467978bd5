"""A function's reports to the coordinator, written by a background thread at limited intervals."""

from __future__ import annotations

import math
import resource
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from springtide.core.errors import StorageError
from springtide.core.functions import Usage
from springtide.core.ports import Store
from springtide.core.wire.functions import (
    LARGEST_LOSS,
    MAX_LOSSES,
    FunctionOrder,
    FunctionReport,
    Keys,
    Phase,
    Place,
    ReportedLoss,
)

# Least time between reports of steps, and the interval of reports while waiting.
LEAST_INTERVAL_S = 0.5
IDLE_INTERVAL_S = 5.0


class FunctionReporter:
    """Keeps and writes the report of one incarnation: changes of phase at once, steps at most twice a second.

    Reports are written to `store`. They count the bytes of all `stores`, and as usage the requests of the first one
    only, because the others are billed by time. A report that cannot be written is superseded by the next one.
    """

    def __init__(self, order: FunctionOrder, store: Store, stores: list[Store], now_s: Callable[[], float]) -> None:
        place = Place(order.stage, order.replica)
        self._key = Keys(order.prefix).report(place, order.incarnation)
        self._store = store
        self._stores = stores
        self._now_s = now_s
        self._losses: dict[int, ReportedLoss] = {}
        self._report = FunctionReport(
            stage=order.stage,
            replica=order.replica,
            incarnation=order.incarnation,
            generation=order.generation,
            attempt=order.attempt,
            phase="starting",
        )
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._is_due = False
        self._is_closed = False
        self._wrote_at_s = -math.inf
        self._write()
        self._thread = threading.Thread(target=self._run, name="springtide-reports", daemon=True)
        self._thread.start()

    @property
    def report(self) -> FunctionReport:
        """The newest report, written or not."""
        return self._report

    def update(self, phase: Phase | None = None, **fields: Any) -> None:
        """Change fields of the report. A change of phase is written before this returns, other changes soon after."""
        with self._changed:
            is_new_phase = phase is not None and phase != self._report.phase
            if phase is not None:
                fields["phase"] = phase
            self._report = msgspec.structs.replace(self._report, **fields)
            self._is_due = True
            if not is_new_phase:
                self._changed.notify_all()
        if is_new_phase:
            self._write()

    def add_loss(self, step: int, loss: float, num_samples: int) -> None:
        """Add the mean loss over this place's samples of a step; None stands for one that is not finite.

        A step that is redone gives the same loss again.
        """
        self._losses[step] = (step, loss if abs(loss) < LARGEST_LOSS else None, num_samples)
        if len(self._losses) > MAX_LOSSES:
            del self._losses[min(self._losses)]
        self.update(losses=tuple(self._losses[at] for at in sorted(self._losses)))

    def take_losses(self, losses: Iterable[ReportedLoss]) -> None:
        """Add the predecessor's losses at this place to this function's reports."""
        self._losses = {**{entry[0]: entry for entry in losses}, **self._losses}
        self.update(losses=tuple(self._losses[at] for at in sorted(self._losses)))

    def usage(self) -> Usage:
        """The requests of this incarnation to the object store so far."""
        requests = self._stores[0].requests()
        return Usage(
            num_puts=requests.num_puts,
            num_gets=requests.num_gets,
            num_lists=requests.num_lists,
            num_deletes=requests.num_deletes,
        )

    def close(self, *, writes: bool = True) -> None:
        """End the thread, and with `writes` write a last report if anything changed."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if writes and self._is_due:
            self._write()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                self._changed.wait_for(lambda: self._is_closed or self._is_due, IDLE_INTERVAL_S)
                left_s = self._wrote_at_s + LEAST_INTERVAL_S - self._now_s()
                if left_s > 0.0:
                    self._changed.wait_for(lambda: self._is_closed, left_s)
                if self._is_closed:
                    return
            self._write()

    def _write(self) -> None:
        # One write at a time, so that an older report never overwrites a newer one.
        with self._writing:
            requests = [store.requests() for store in self._stores]
            with self._changed:
                report = self._report = msgspec.structs.replace(
                    self._report,
                    usage=self.usage(),
                    memory_bytes=peak_memory_bytes(),
                    bytes_up=sum(each.bytes_up for each in requests),
                    bytes_down=sum(each.bytes_down for each in requests),
                )
                self._is_due = False
            self._wrote_at_s = self._now_s()
            try:
                self._store.put(self._key, msgspec.json.encode(report))
            except StorageError as error:
                self._is_due = True
                sys.stderr.write(f"springtide: a report could not be written: {error}\n")


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
