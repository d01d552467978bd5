"""What a function does with the control record: whether it may go on, under which attempt, and until when."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.ports import Store
from springtide.core.wire.functions import MAX_RECORD_BYTES, ControlRecord, FunctionOrder, Keys, Place

POLL_S = 1.0
# A record that is not there yet, or does not name this function yet, may still be on its way.
_PATIENCE_S = 10.0


class NewAttempt(Exception):
    """All functions stop waiting and take up the record's attempt."""


class AttemptSuperseded(Exception):
    """Another function fills this place, or another generation owns the job: nothing more may be written."""


class Stopped(Exception):
    """The record says that all functions return at once and write nothing more."""


class ControlWatch:
    """Reads the control record about once a second while there is time, and says what it means for this function.

    Making one raises as `look` does, and StorageError where there is no record. `has_taken_over` is set once the
    function before has left for this one: the record may name that one for a while yet.
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
        """Take up the attempt of the newest record."""
        self._attempt = self.record.attempt
        return self.record

    def check(self) -> None:
        """While waiting: look at the record if the last look is a second ago. Raises NewAttempt, Superseded, Stopped.

        Also StorageError.
        """
        if self._now_s() - self._read_at_s >= POLL_S:
            self.look()

    def refresh(self, at_most_s: float) -> None:
        """At a step boundary: look if the last look is longer ago than this."""
        if self._now_s() - self._read_at_s >= at_most_s:
            self.look()

    def look(self) -> None:
        self.record = self._read()
        self._act()

    @property
    def is_awaited(self) -> bool:
        """Whether the record wants this function for a plan that is to follow."""
        upcoming = self.record.upcoming
        return upcoming is not None and upcoming.joiners.get(str(self.place)) == self._order.incarnation

    def _act(self) -> None:
        record, incarnation = self.record, self._order.incarnation
        stays_from = record.stays_from if record.stays_from is not None else record.generation
        if self._order.generation < stays_from or (self.named > incarnation and not self.is_awaited):
            raise AttemptSuperseded
        if record.verb == "stop":
            raise Stopped
        # A successor has no claim to the place once the record names a third function.
        follows = self._order.is_successor and self.named == self._order.follows
        if self.named < incarnation and not follows and not self.is_awaited:
            raise AttemptSuperseded
        if self._attempt >= 0 and record.attempt > self._attempt:
            raise NewAttempt

    def _first_record(self) -> ControlRecord:
        """The record as this function finds it; one of the generation before is still to be replaced."""
        deadline_s = self._now_s() + _PATIENCE_S
        order = self._order
        record: ControlRecord | None
        while True:
            try:
                self.record = record = self._read()
                # One that is called for a plan to come finds the record of the generation before.
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
            return msgspec.json.decode(data, type=ControlRecord)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StorageError(f"the control record is unreadable: {error}") from None
