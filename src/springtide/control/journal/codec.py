"""Steps as bytes, the same in every journal, and those of older versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from springtide.control.journal.chain import Row
from springtide.core.decoding import decode_json
from springtide.core.errors import JournalError
from springtide.core.ports import Step

# Raised with every change of what a step can hold, also by a field alone: an older version would drop it unseen.
SCHEMA_VERSION = 2
# What turns the steps of a schema, as JSON objects, into those of the next one, where new fields' defaults do not.
_CHANGES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


# Stands for a policy's memory that is the same as in the step before: it is two fifths of a usual step.
SAME_MEMORY = "="
# So that a reader never has to look back farther.
LONGEST_SAME = 1000


class StepEncoder:
    """Encodes the steps of one writer, each memory only when it has changed."""

    def __init__(self) -> None:
        self._memory: object = self
        self._num_same = 0

    def encode(self, step: Step) -> bytes:
        """Return the step as it is stored after the last one that was given to `note`."""
        is_same = step.memory is self._memory and step.memory is not None and self._num_same < LONGEST_SAME
        return encode_step(replace(step, memory=SAME_MEMORY) if is_same else step)

    def note(self, step: Step) -> None:
        """The step is durable."""
        self._num_same = self._num_same + 1 if step.memory is self._memory else 0
        self._memory = step.memory


def decode_rows(rows: Iterable[Row], memory: Any = None) -> Iterator[tuple[int, Step]]:
    """The steps with their numbers, each with its memory; `memory` is that of the step before them."""
    for row in rows:
        step = decode_step(row.step)
        if step.memory == SAME_MEMORY:
            step = replace(step, memory=memory)
        memory = step.memory
        yield row.seq, step


def encode_step(step: Step) -> bytes:
    """Return the step as one line of JSON."""
    return msgspec.json.encode(step)


def decode_step(data: bytes) -> Step:
    """Return the step that `encode_step` wrote. Raises JournalError if it is not one."""
    try:
        return decode_json(data, Step)
    except (ValueError, TypeError, RecursionError) as error:
        raise JournalError(f"a step of the journal cannot be read: {error}") from error


def upgraded(schema: int, data: bytes) -> bytes:
    """Return a step of an older schema as one of the present schema. Raises JournalError."""
    changes = [_CHANGES[number] for number in range(schema, SCHEMA_VERSION) if number in _CHANGES]
    if changes:
        try:
            step = msgspec.json.decode(data)
        except (ValueError, TypeError, RecursionError) as error:
            raise JournalError(f"a step of the journal cannot be read: {error}") from error
        for change in changes:
            step = change(step)
        data = msgspec.json.encode(step)
    decode_step(data)
    return data


def unreadable_schema(journal: str, found: str | None) -> str:
    """Why a journal cannot be read, and what to do."""
    if found is not None and found.isdecimal() and int(found) > SCHEMA_VERSION:
        return (
            f"the journal {journal} has schema {found}, this version reads up to {SCHEMA_VERSION}: "
            "it was written by a newer version, which can read it"
        )
    if found is not None and found.isdecimal():
        return f"the journal {journal} has schema {found}; the platform converts it when it starts"
    return f"the journal {journal} has no schema that this version knows: {found}"
