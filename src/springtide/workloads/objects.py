"""The objects of a JSON array, one at a time in bounded memory, each with the line on which it begins."""

from __future__ import annotations

import codecs
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import open_bytes

MAX_OBJECT_CHARACTERS = 4_194_304
_CHUNK_BYTES = 262_144
_BLANK = re.compile(r"[ \t\r\n]*")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object). Raises InvalidRequest naming the line; holds one object at a time."""
    with open_bytes(path) as file:
        window = _Window(path.name, file)
        if window.peek() != "[":
            window.refuse("an array of jobs begins with '['")
        window.skip()
        if window.peek() == "]":
            window.refuse("the array is empty; objects belong in it")
        while True:
            window.peek()
            line = window.line
            value = window.decode()
            if not isinstance(value, dict):
                raise InvalidRequest(f"{path.name} line {line}: an object in braces belongs here")
            yield line, value
            mark = window.peek()
            if mark not in (",", "]"):
                window.refuse("',' or ']' belongs after an object" if mark else "the file ends within the array")
            window.skip()
            if mark == "]":
                if window.peek():
                    window.refuse("something follows the end of the array")
                return


class _Window:
    """The part of the file that is in memory. `line` is the line of `position`."""

    def __init__(self, name: str, file: io.BufferedReader) -> None:
        self.name = name
        self.file = file
        self.text = ""
        self.position = 0
        self.line = 1
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(parse_constant=_refuse_constant)

    def peek(self) -> str:
        """The next character that is not blank, without consuming it; "" at the end of the file."""
        while True:
            self._consume(_BLANK.match(self.text, self.position).end())  # type: ignore[union-attr]
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._fill():
                return ""

    def skip(self) -> None:
        """Consume the character that `peek` returned."""
        self._consume(self.position + 1)

    def decode(self) -> Any:
        while True:
            try:
                value, end = self._json.raw_decode(self.text, self.position)
            except RecursionError:
                self.refuse("it is nested too deep")
            except ValueError as error:
                offset = getattr(error, "pos", self.position) - self.position
                if len(self.text) - self.position <= MAX_OBJECT_CHARACTERS and self._fill():
                    continue
                self._consume(self.position + offset)
                self.refuse(f"the object here is no JSON: {getattr(error, 'msg', error)}")
            self._consume(end)
            return value

    def refuse(self, problem: str) -> NoReturn:
        """Raise InvalidRequest about the current line."""
        raise InvalidRequest(f"{self.name} line {self.line}: {problem}")

    def _consume(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def _fill(self) -> bool:
        """Drop consumed text and read as much again as is held, so that a long object is parsed only a few times."""
        self.text = self.text[self.position :]
        self.position = 0
        try:
            raw = self.file.read(max(_CHUNK_BYTES, len(self.text)))
            self.text += self._utf8.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            self.line += self.text.count("\n") + error.object[: error.start].count(b"\n")
            self.refuse("not UTF-8 text; convert it, for example with iconv -t UTF-8")
        except (OSError, EOFError, zlib.error) as error:
            self.refuse(f"it cannot be read on: {error}")
        return bool(raw)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
