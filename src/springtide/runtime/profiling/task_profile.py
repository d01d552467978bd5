"""The result of profiling a declared task: its model's profile, and the length of its data."""

from __future__ import annotations

import msgspec

from springtide.core.functions import ModelProfile


class TaskProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A task's profile, with the length of its dataset or the name of its stream.

    `dataset` is the name of the dataset, if it is a named one.
    """

    profile: ModelProfile
    num_samples: int | None = None
    stream: str = ""
    dataset: str = ""
