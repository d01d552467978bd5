"""Known values in a worker's output are replaced by the names of the secrets that they belong to."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from collections.abc import Mapping
from typing import NoReturn

# Shorter values are found in words that are none.
LEAST_BYTES = 8
_READ_BYTES = 1 << 16
# How long the beginning of what may be a value is held back when nothing follows.
HOLD_S = 0.5


class Redactor:
    """Replaces values in a stream of bytes, wherever it is cut. Lines of a value are replaced like the whole."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._names: dict[bytes, bytes] = {}
        for name, value in values.items():
            for part in (value, value.strip(), *value.splitlines()):
                if len(part.encode()) >= LEAST_BYTES:
                    self._names.setdefault(part.encode(), b"***%s***" % name.encode())
        ordered = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(part) for part in ordered)) if ordered else None
        self._held = b""

    def __bool__(self) -> bool:
        """Whether there is anything to replace."""
        return self._pattern is not None

    @property
    def is_holding(self) -> bool:
        """Whether something is held back, which is to be passed on when nothing follows for HOLD_S."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now; the beginning of what may be a value is held back."""
        text = self._replaced(self._held + data)
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held

    def text(self, sentence: str) -> str:
        """The sentence without the values."""
        return self._replaced(sentence.encode(errors="replace")).decode(errors="replace") if self else sentence

    def _replaced(self, data: bytes) -> bytes:
        if self._pattern is None:
            return data
        return self._pattern.sub(lambda match: self._names[match[0]], data)

    def _num_held(self, text: bytes) -> int:
        """The length of the longest end of the text with which a value begins."""
        longest = 0
        for part in self._names:
            at = text.find(part[:1], max(0, len(text) - len(part) + 1))
            while at >= 0 and len(text) - at > longest:
                if part.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(part[:1], at + 1)
        return longest


def redact_output(redactor: Redactor) -> None:
    """Have a process of its own copy this process's output, without the values, to where it went before.

    Call it before other threads run. The process ends with the last one that holds the output, and what programs that
    this process starts write, and what it writes as it dies, goes through it, too.
    """
    if not redactor:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A child of the child: user code that waits for its children must not find it among them.
        if os.fork():
            os._exit(0)
        os.close(writing)
        _copy(reading, redactor)
    os.waitpid(pid, 0)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def _copy(reading: int, redactor: Redactor) -> NoReturn:
    """Copy until every writer is gone, and end this process."""
    try:
        os.setsid()
        # Whatever else was open belongs to the worker, whose peers wait for it to close.
        os.dup2(reading, 0)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))
        while True:
            ready, _, _ = select.select([0], [], [], HOLD_S if redactor.is_holding else None)
            data = os.read(0, _READ_BYTES) if ready else b""
            _write(redactor.feed(data) if data else redactor.flush())
            if ready and not data:
                break
    finally:
        os._exit(0)


def _write(data: bytes) -> None:
    view = memoryview(data)
    # Output is dropped while the disk is full, as without this process.
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(1, view) :]
