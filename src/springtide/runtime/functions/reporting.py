"""A function's reports: the newest one is written by a thread of its own, often enough but not too often."""

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
from springtide.core.wire.functions import MAX_LOSSES, FunctionOrder, FunctionReport, Keys, Phase, Place

# Between two reports of steps, and between two where nothing happens but waiting.
LEAST_INTERVAL_S = 0.5
IDLE_INTERVAL_S = 5.0
_LARGEST = 1e300


class FunctionReporter:
    """Keeps the report of one incarnation and writes it: changes of phase at once, steps twice a second at most.

    `store` takes the reports; the requests of `stores` are counted (of the first one as usage: the others are paid
    for by time). A report that cannot be written is tried again with the next one.
    """

    def __init__(self, order: FunctionOrder, store: Store, stores: list[Store], now_s: Callable[[], float]) -> None:
        place = Place(order.stage, order.replica)
        self._key = Keys(order.prefix).report(place, order.incarnation)
        self._store = store
        self._stores = stores
        self._now_s = now_s
        self._losses: dict[int, tuple[int, float, int]] = {}
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
        """Change the report. A change of phase is written before this returns, anything else soon."""
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
        """The mean loss over this place's samples of a step. NaN and infinity become the largest number.

        A step that is redone comes out the same, so what was told of it stands.
        """
        told = loss if math.isfinite(loss) else _LARGEST
        self._losses[step] = (step, max(-_LARGEST, min(_LARGEST, told)), num_samples)
        if len(self._losses) > MAX_LOSSES:
            del self._losses[min(self._losses)]
        self.update(losses=tuple(self._losses[at] for at in sorted(self._losses)))

    def take_losses(self, losses: Iterable[tuple[int, float, int]]) -> None:
        """Report the predecessor's losses at this place as this function's own."""
        self._losses = {**{told[0]: told for told in losses}, **self._losses}
        self.update(losses=tuple(self._losses[at] for at in sorted(self._losses)))

    def usage(self) -> Usage:
        """What this incarnation has asked of the object store so far."""
        asked = self._stores[0].requests()
        return Usage(
            num_puts=asked.num_puts,
            num_gets=asked.num_gets,
            num_lists=asked.num_lists,
            num_deletes=asked.num_deletes,
        )

    def close(self, *, writes: bool = True) -> None:
        """End the thread; write what is left to say, unless nothing may be written any more."""
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
        # One at a time, in order: an older report must not come to lie over a newer one.
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
