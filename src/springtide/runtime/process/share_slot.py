"""The shared-memory slot through which a worker with a share of a device reports its iterations to the share daemon."""

from __future__ import annotations

import logging
import time

from springtide.core.errors import BackendError
from springtide.core.wire.shares import SlotWriter
from springtide.core.wire.workers import WorkerSpec

_LOG = logging.getLogger("springtide.worker")


def open_slot(spec: WorkerSpec) -> SlotWriter | None:
    """The worker's slot; None if the worker holds its whole device, or the slot cannot be opened.

    Without a slot the worker runs and is held to its share, but the share daemon cannot see its iterations.
    """
    if spec.share is None or not spec.share_path:
        return None
    try:
        return SlotWriter(spec.share_path, spec.share_slot, time.monotonic)
    except BackendError as error:
        _LOG.warning("the share daemon hears nothing of this worker: %s", error)
        return None
