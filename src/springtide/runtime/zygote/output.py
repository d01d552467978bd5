"""The output of workers: a log file that neither a full disk nor odd characters can end the training by."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from springtide.storage.files import make_private

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def use_log_streams() -> None:
    """Have `sys.stdout` and `sys.stderr` write to descriptors 1 and 2 for good.

    Libraries keep these objects when they are imported, in handlers of logging for example: workers that are forked
    later have the same ones, and change what is behind the descriptors.
    """
    sys.stdout, sys.stderr = _log_stream(1), _log_stream(2)


def redirect_output(log_path: str) -> None:
    """Have everything that this process writes go to the end of this file."""
    if not log_path:
        return
    make_private(Path(log_path).parent)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class _LogFile(io.FileIO):
    """A log file that drops output while the disk is full, so that a full disk does not end the training."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def _log_stream(descriptor: int) -> TextIO:
    raw = _LogFile(descriptor, "w", closefd=False)
    # Characters that UTF-8 cannot encode must not end the training either.
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
