"""Steps as bytes, the same in every journal."""

from __future__ import annotations

import msgspec

from springtide.core.errors import JournalError
from springtide.core.ports import Step

SCHEMA_VERSION = 1


def encode_step(step: Step) -> bytes:
    """Return the step as one line of JSON."""
    return msgspec.json.encode(step)


def decode_step(data: bytes) -> Step:
    """Return the step that `encode_step` wrote. Raises JournalError if it is not one."""
    try:
        return msgspec.json.decode(data, type=Step)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"a step of the journal cannot be read: {error}") from error
