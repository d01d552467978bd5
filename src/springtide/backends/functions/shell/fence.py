"""Which coordinator owns a job's functions, where control planes on several machines share nothing but the store.

Ownership is in two objects: the control record, which functions obey, and the notes, which are written before any
function is invoked. The next coordinator claims both: it rewrites them with its own term, and only then reads them.
Both are replaced by compare-and-swap, so a coordinator that was suspended meanwhile fails at its next write, before it
can direct or invoke any function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from springtide.backends.functions.shell.notes import Notes
from springtide.core.decoding import decode_json
from springtide.core.errors import Fenced, StorageError
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import MAX_RECORD_BYTES, ControlRecord, Keys
from springtide.storage.stores.checked import CheckedStore

RecordT = TypeVar("RecordT", ControlRecord, Notes)
T = TypeVar("T")
# Two coordinators race at most briefly: after this many lost races in a row the store must be broken.
MAX_RACES = 20
# The record of a claimed job before its first attempt: it names no functions and tells all to stop.
_NO_PLAN = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=1),))
_UNCLAIMED = ControlRecord(generation=0, attempt=0, restore_step=0, plan=_NO_PLAN, incarnations={}, verb="stop")


class RecordFence:
    """One job's control record and notes, written for `term`: `claim` first. Every method raises StorageError.

    That is Fenced, a StorageError, where a later control plane has claimed the job.
    """

    def __init__(self, store: CheckedStore, keys: Keys, term: int) -> None:
        self._store = store
        self._keys = keys
        self._term = term
        self._versions: dict[str, str] = {}

    def claim(self) -> tuple[ControlRecord | None, Notes]:
        """Claim both for this term; returns what they held before, None where there was no control record.

        A missing control record is created, telling every function to stop, so that no other coordinator creates it.
        """
        record = self._take(self._keys.control, ControlRecord, _UNCLAIMED)
        notes = self._take(self._keys.notes, Notes, Notes())
        return record, notes or Notes()

    def write_control(self, record: ControlRecord) -> None:
        """Replace the control record. Raises Fenced also where the stored one has a newer generation."""
        self._replace(
            self._keys.control,
            ControlRecord,
            msgspec.structs.replace(record, term=self._term),
            lambda known: known.generation > record.generation,
        )

    def write_notes(self, notes: Notes) -> None:
        """Replace the notes; the functions that they name may be invoked once this returns."""
        self._replace(self._keys.notes, Notes, msgspec.structs.replace(notes, term=self._term), lambda known: False)

    def check(self) -> None:
        """Check that the job still belongs to this coordinator."""
        found = self._store.get_version(self._keys.control)
        if found is None:
            raise _gone(self._keys.control)
        if decoded(found[0], ControlRecord, self._keys.control).term > self._term:
            raise self._fenced()

    def _take(self, key: str, kind: type[RecordT], first: RecordT) -> RecordT | None:
        """Rewrite the stored record with this term, or create it as `first`; returns what was stored."""
        for _ in range(MAX_RACES):
            found = self._store.get_version(key)
            known = None if found is None else decoded(found[0], kind, key)
            if known is not None and known.term > self._term:
                raise self._fenced()
            data = msgspec.json.encode(msgspec.structs.replace(known or first, term=self._term))
            if self._swap(key, data, "" if found is None else found[1]):
                return known
        raise StorageError(f"{key} was changed by others {MAX_RACES} times in a row")

    def _replace(self, key: str, kind: type[RecordT], record: RecordT, is_later: Callable[[RecordT], bool]) -> None:
        data = msgspec.json.encode(record)
        for _ in range(MAX_RACES):
            if self._swap(key, data, self._versions.get(key, "")):
                return
            found = self._store.get_version(key)
            if found is None:
                raise _gone(key)
            known = decoded(found[0], kind, key)
            if known.term > self._term or is_later(known):
                raise self._fenced()
            # It is this control plane's: a write whose answer was lost, or that of the job's previous replica.
            self._versions[key] = found[1]
        raise StorageError(f"{key} was changed by others {MAX_RACES} times in a row")

    def _swap(self, key: str, data: bytes, version: str) -> bool:
        """Write the object if its version is still that one; returns whether it was written."""
        try:
            replaced = self._store.replace(key, data, version)
        except StorageError:
            # Maybe only the answer was lost: read the object to see whether it was written.
            found = self._store.get_version(key)
            if found is None or found[0] != data:
                raise
            replaced = found[1]
        if replaced is None:
            return False
        self._versions[key] = replaced
        return True

    def _fenced(self) -> Fenced:
        return Fenced(f"{self._keys.prefix} belongs to a later control plane or generation than {self._term}")


def _gone(key: str) -> StorageError:
    """The error for a claimed record that is missing: the job has ended elsewhere and must not start again here."""
    return StorageError(f"{key} is gone from the store")


def decoded(data: bytes, kind: type[T], what: str) -> T:
    """Decode a record; `what` names it in errors. Raises StorageError."""
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        return decode_json(data, kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(f"{what} is unreadable: {error}") from None
