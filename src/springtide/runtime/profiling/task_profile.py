"""What profiling a declared task gives: its model's figures, and how much data it has."""

from __future__ import annotations

import msgspec

from springtide.core.functions import ModelProfile


class TaskProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A task's profile, and its data: the length of its dataset, or the name of the stream that it trains on.

    `dataset` is set for a dataset that the platform keeps.
    """

    profile: ModelProfile
    num_samples: int | None = None
    stream: str = ""
    dataset: str = ""
