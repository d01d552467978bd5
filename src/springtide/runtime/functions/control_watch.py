"""Reading a job's control record inside a function: whether it may go on, in which attempt, and until when."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.core.wire.functions import MAX_RECORD_BYTES, ControlRecord, FunctionOrder, Keys, Place

POLL_S = 1.0
# How long to wait for a record that does not exist yet, or does not name this function yet.
_FIRST_RECORD_WAIT_S = 10.0


class NewAttempt(Exception):
    """The record has a new attempt: this function must enter it."""


class AttemptSuperseded(Exception):
    """Another function has this place, or another generation owns the job: this function must write nothing more."""


class Stopped(Exception):
    """The record tells all functions to return at once and write nothing more."""


class ControlWatch:
    """Reads the control record about once a second and raises what it means for this function.

    The constructor raises as `look` does, and StorageError if there is no record. Set `has_taken_over` once the
    predecessor has left for this function; the record may still name the predecessor for a while.
    """

    def __init__(
        self, store: Store, order: FunctionOrder, now_s: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.keys = Keys(order.prefix)
        self.place = Place(order.stage, order.replica)
        self._store = store
        self._order = order
        self._now_s = now_s
        self._sleep = sleep
        self._read_at_s = float("-inf")
        self._attempt = -1
        self.has_taken_over = False
        self.record = self._first_record()
        self._act()

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def named(self) -> int:
        """The incarnation that the record names for this place."""
        return self.record.incarnations.get(str(self.place), -1)

    def enter(self) -> ControlRecord:
        """Enter the attempt of the newest record, and return the record."""
        self._attempt = self.record.attempt
        return self.record

    def check(self) -> None:
        """Read the record if that was last done a second ago; call it while waiting.

        Raises NewAttempt, AttemptSuperseded, Stopped, StorageError.
        """
        if self._now_s() - self._read_at_s >= POLL_S:
            self.look()

    def refresh(self, at_most_s: float) -> None:
        """Read the record if it was last read more than `at_most_s` ago. Raises as `check` does."""
        if self._now_s() - self._read_at_s >= at_most_s:
            self.look()

    def look(self) -> None:
        """Read the record now. Raises as `check` does."""
        self.record = self._read()
        self._act()

    @property
    def is_awaited(self) -> bool:
        """Whether the record names this function for the next plan."""
        upcoming = self.record.upcoming
        return upcoming is not None and upcoming.joiners.get(str(self.place)) == self._order.incarnation

    def _act(self) -> None:
        record, incarnation = self.record, self._order.incarnation
        stays_from = record.stays_from if record.stays_from is not None else record.generation
        if self._order.generation < stays_from or (self.named > incarnation and not self.is_awaited):
            raise AttemptSuperseded
        if record.verb == "stop":
            raise Stopped
        # A successor loses its place if the record names a third function.
        follows = self._order.is_successor and self.named == self._order.follows
        if self.named < incarnation and not follows and not self.is_awaited:
            raise AttemptSuperseded
        if self._attempt >= 0 and record.attempt > self._attempt:
            raise NewAttempt

    def _first_record(self) -> ControlRecord:
        """Wait for a record that is meant for this function; one of an earlier generation is not."""
        deadline_s = self._now_s() + _FIRST_RECORD_WAIT_S
        order = self._order
        record: ControlRecord | None
        while True:
            try:
                self.record = record = self._read()
                # A function that was invoked for the next plan finds the record of the current generation.
                is_ours = (order.plan is not None or record.generation >= order.generation) and (
                    record.attempt >= order.attempt
                )
                follows = order.is_successor and self.named == order.follows
                if is_ours and (self.named >= order.incarnation or follows or self.is_awaited):
                    return record
            except ObjectMissing:
                record = None
            if self._now_s() >= deadline_s:
                if record is None:
                    raise StorageError(f"there is no control record under {self.keys.control}; was the job removed?")
                raise AttemptSuperseded
            self._sleep(0.2)

    def _read(self) -> ControlRecord:
        self._read_at_s = self._now_s()
        data = self._store.get(self.keys.control)
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f"it has {len(data)} bytes")
            return decode_json(data, ControlRecord)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StorageError(f"the control record is unreadable: {error}") from None
