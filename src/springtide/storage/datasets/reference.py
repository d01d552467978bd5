"""A reference to a dataset: its name, and how it is read. Needs no other library."""

from __future__ import annotations

import msgspec


class DatasetReference(msgspec.Struct, frozen=True, kw_only=True):
    """Names a dataset of the platform's store. A stream grows; each of its samples is used once, in order of arrival.

    An epoch visits shards in random order and shuffles the samples of `num_mixed` shards at a time (0: as many as fit
    on the disk of one function).
    """

    name: str
    is_stream: bool = False
    num_mixed: int = 0
