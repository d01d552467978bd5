"""The output of functions by line, as a provider's log service keeps it: the newest lines, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable

import msgspec

MAX_LINES = 20_000
MAX_LINE_BYTES = 1 << 16
TAIL_BYTES = 4096


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the function `group`: `at_ms` since 1970, its instance (`stream`), and its number over all lines."""

    number: int
    at_ms: int
    group: str
    stream: str
    text: str


class LogIndex:
    """The newest lines of all functions."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._events: deque[LogEvent] = deque(maxlen=MAX_LINES)
        self._num_events = 0

    def add(self, group: str, stream: str, text: str) -> None:
        self._num_events += 1
        event = LogEvent(number=self._num_events, at_ms=self._clock_ms(), group=group, stream=stream, text=text)
        self._events.append(event)

    def read(self, group: str, since_ms: int, after_number: int, limit: int) -> list[LogEvent]:
        """At most `limit` lines of a function from `since_ms` on, after the one of that number, oldest first."""
        found = []
        for event in self._events:
            if event.group == group and event.at_ms >= since_ms and event.number > after_number:
                found.append(event)
                if len(found) == limit:
                    break
        return found


class OutputPipe:
    """A function's standard output and error, read as it arrives; `drain` reads the rest at once."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._part = b""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._reader, self.drain)

    def started(self) -> None:
        """The function's process has the write end: close this side's."""
        os.close(self.writer)
        self.writer = -1

    def drain(self) -> None:
        while self._is_open:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            *lines, self._part = (self._part + data).split(b"\n")
            if len(self._part) > MAX_LINE_BYTES:
                lines.append(self._part)
                self._part = b""
            for line in lines:
                # awslambdaric ends the lines inside one message with a carriage return.
                for text in line.decode(errors="replace").split("\r"):
                    if text:
                        self._on_line(text)

    def close(self) -> None:
        """Stop reading; a last line without an end is kept."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            if self._part:
                self._on_line(self._part.decode(errors="replace"))
        if self.writer >= 0:
            with contextlib.suppress(OSError):
                os.close(self.writer)
            self.writer = -1
