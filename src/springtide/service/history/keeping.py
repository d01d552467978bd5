"""What an index of the journal keeps of its steps, as bytes for the journal's next snapshot and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args, get_origin

import msgspec

from springtide.core.decoding import convert, decode_msgpack
from springtide.core.errors import JournalError
from springtide.core.workload import WorkloadId

# The name under which the clock's newest anchor is kept.
ANCHOR = "anchor"


class Keeper(Protocol):
    """An index of the journal that begins at a snapshot with what it kept until then."""

    def kept(self) -> bytes:
        """What it keeps."""
        ...

    def take(self, data: bytes) -> None:
        """Go on from what `kept` returned. Raises JournalError."""
        ...

    def kept_of_job(self, job_id: WorkloadId) -> bytes:
        """What it keeps of one workload."""
        ...


class Keepers:
    """The indexes of one platform, by name."""

    def __init__(self) -> None:
        self._keepers: dict[str, Keeper] = {}
        self._takers: list[tuple[str, Callable[[bytes], None]]] = []

    def keep(self, name: str, keeper: Keeper) -> None:
        """Have what the index keeps stand under that name."""
        self._keepers[name] = keeper
        self.follow(name, keeper.take)

    def follow(self, name: str, take: Callable[[bytes], None]) -> None:
        """Have `take` called with what stands under that name."""
        self._takers.append((name, take))

    def kept(self) -> dict[str, bytes]:
        """What all of them keep."""
        return {name: keeper.kept() for name, keeper in self._keepers.items()}

    def kept_of_job(self, job_id: WorkloadId) -> dict[str, bytes]:
        """What all of them keep of one workload."""
        return {name: keeper.kept_of_job(job_id) for name, keeper in self._keepers.items()}

    def take(self, kept: Mapping[str, bytes]) -> None:
        """Go on from what `kept` returned. If one cannot read its part, all are as before, and its error is raised."""
        before = self.kept()
        try:
            self._take(kept)
        except (JournalError, ValueError, TypeError):
            self._take(before)
            raise

    def _take(self, kept: Mapping[str, bytes]) -> None:
        for name, take in self._takers:
            if name in kept:
                take(kept[name])


def packed(owner: object, fields: Mapping[str, Any]) -> bytes:
    """The named attributes of an index."""
    return msgspec.msgpack.encode({name: getattr(owner, name) for name in fields}, enc_hook=_plain)


def unpack(owner: object, fields: Mapping[str, Any], data: bytes) -> None:
    """Set the attributes that `packed` was given; those that it did not know stay. Raises JournalError."""
    try:
        found = decode_msgpack(data, dict[str, msgspec.Raw])
        values = {
            name: decode_msgpack(found[name], kind, dec_hook=_typed) for name, kind in fields.items() if name in found
        }
    except (ValueError, TypeError) as error:
        raise JournalError(f"what was kept of the journal's steps cannot be read: {error}") from error
    for name, value in values.items():
        before = getattr(owner, name)
        setattr(owner, name, deque(value, before.maxlen) if isinstance(before, deque) else value)


def _plain(value: object) -> object:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(type(value).__name__)


def _typed(kind: Any, value: Any) -> Any:
    if get_origin(kind) is deque:
        return deque(convert(value, list[get_args(kind)[0]]))  # type: ignore[misc, arg-type]
    raise NotImplementedError(str(kind))
