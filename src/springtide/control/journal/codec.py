"""Steps as bytes, the same in every journal, and those of older versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from springtide.core.errors import JournalError
from springtide.core.ports import Step

# Raised with every change of what a step can hold, also by a field alone: an older version would drop it unseen.
SCHEMA_VERSION = 2
# What turns the steps of a schema, as JSON objects, into those of the next one, where new fields' defaults do not.
_CHANGES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def encode_step(step: Step) -> bytes:
    """Return the step as one line of JSON."""
    return msgspec.json.encode(step)


def decode_step(data: bytes) -> Step:
    """Return the step that `encode_step` wrote. Raises JournalError if it is not one."""
    try:
        return msgspec.json.decode(data, type=Step)
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
