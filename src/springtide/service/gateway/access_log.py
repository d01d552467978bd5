"""The access log of services: a line of JSON for each request to the gateway, and each that was refused before it.

Many lines share a write.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

LOG = logging.getLogger("springtide.gateway")
ACCESS_FILE = "access.jsonl"
# Once the file is so long it is kept under another name, in the place of the one before.
MAX_FILE_BYTES = 32 << 20
# What waits to be written; more is dropped, and counted.
_MAX_LINES = 10_000
_MAX_PATH_CHARS = 512
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Access(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Its query is left out.

    `caller` is the name of its API key, or `service:` and the name of the service whose code sent it; `trace_id` is
    that of its `traceparent`.
    """

    unix_s: float
    request_id: str
    method: str
    path: str
    status: int
    seconds: float
    service: str = ""
    revision: int = 0
    caller: str = ""
    trace_id: str = ""


class AccessLog:
    """Lines for the file at `path`, or for standard output without one.

    `note` and `take` are for one thread; `write` may wait for the disk, and run in another one.
    """

    def __init__(self, path: Path | None, unix_s: Callable[[], float] = time.time) -> None:
        self._path, self._unix_s = path, unix_s
        self._encoder = msgspec.json.Encoder()
        self._lines: list[bytes] = []
        self._num_dropped = 0

    def note(
        self,
        *,
        request_id: bytes,
        method: str,
        path: str,
        status: int,
        seconds: float,
        service: str = "",
        revision: int = 0,
        caller: str = "",
        traceparent: bytes | None = None,
    ) -> None:
        """Add a line. `seconds` is from the request's head to the end of its answer."""
        if len(self._lines) >= _MAX_LINES:
            self._num_dropped += 1
            return
        trace = _TRACE.fullmatch(traceparent) if traceparent else None
        access = Access(
            round(self._unix_s(), 3),
            request_id.decode("ascii", "replace"),
            method,
            path[:_MAX_PATH_CHARS],
            status,
            round(seconds, 6),
            service,
            revision,
            caller,
            trace[1].decode() if trace else "",
        )
        self._lines.append(self._encoder.encode(access))

    def take(self) -> bytes:
        """The lines that have not been taken yet."""
        lines, self._lines = self._lines, []
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            LOG.warning("%d lines of the access log were dropped: they came faster than they were written", num_dropped)
        return b"".join([line + b"\n" for line in lines])

    def write(self, data: bytes) -> None:
        """Write taken lines. What cannot be written is lost, and the platform's log says so."""
        try:
            if self._path is None:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            else:
                self._append(self._path, data)
        except OSError as error:
            num = data.count(b"\n")
            LOG.warning("%d line(s) of the access log are lost: %s", num, error.strerror or error)

    def _append(self, path: Path, data: bytes) -> None:
        with open(path, "ab", opener=_private) as file:
            length = file.tell()
            file.write(data)
        if length + len(data) >= MAX_FILE_BYTES:
            path.replace(path.with_name(path.name + ".1"))


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
