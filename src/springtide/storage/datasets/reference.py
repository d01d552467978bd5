"""A dataset by its name, as a task holds it: what it is called, and how it is read. Needs no library."""

from __future__ import annotations

import msgspec


class DatasetReference(msgspec.Struct, frozen=True, kw_only=True):
    """Names a dataset of the platform's store. A stream grows; its samples come once each, in order of arrival.

    The order of an epoch shuffles shards, and samples within `num_mixed` of them at a time (0: as many as the disk of
    one function holds).
    """

    name: str
    is_stream: bool = False
    num_mixed: int = 0
