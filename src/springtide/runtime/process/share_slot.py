"""The slot through which a worker that holds a part of its device tells the share daemon what it does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from springtide.core.errors import BackendError
from springtide.core.wire.shares import SlotWriter
from springtide.core.wire.workers import WorkerSpec

_LOG = logging.getLogger("springtide.worker")


def open_slot(spec: WorkerSpec) -> SlotWriter | None:
    """The worker's slot; None for one that holds the whole of its device, so that nothing at all is done there.

    A slot that cannot be opened costs the worker its voice, never its work: it is held to its share all the same.
    """
    if spec.share is None or not spec.share_path:
        return None
    try:
        return SlotWriter(spec.share_path, spec.share_slot, time.monotonic)
    except BackendError as error:
        _LOG.warning("the share daemon hears nothing of this worker: %s", error)
        return None


@contextmanager
def iteration(slot: SlotWriter, num_samples: int) -> Iterator[None]:
    """The block is one iteration over so many samples; the time of one that raises is not reported."""
    slot.begin(num_samples)
    try:
        yield
    except BaseException:
        slot.abandon()
        raise
    slot.end()
