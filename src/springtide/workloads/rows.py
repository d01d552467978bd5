"""Text files line by line in bounded memory; errors name file, line and column."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from springtide.core.errors import InvalidRequest
from springtide.workloads.trace import MAX_DEVICES, MAX_STEPS, MAX_TIME_S

MAX_LINE_BYTES = 65_536
_SHOWN_CHARACTERS = 40


def name_of(path: Path) -> str:
    """The name of a trace: its file name without extensions."""
    return Path(path.name.removesuffix(".gz")).stem


def open_bytes(path: Path) -> io.BufferedReader:
    """Open a plain or gzip-compressed regular file. Raises InvalidRequest for anything else."""
    try:
        if path.is_dir():
            raise InvalidRequest(f"{path} is a directory; give one file of it")
        if not path.exists():
            raise InvalidRequest(f"there is no file {path}; give the path of one that is")
        if not path.is_file():
            raise InvalidRequest(f"{path} is not a regular file; copy what it gives into a file first")
        return io.BufferedReader(gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def read_lines(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its end). Raises InvalidRequest; holds one line at a time."""
    number = 0
    with open_bytes(path) as file:
        while True:
            number += 1
            try:
                raw = file.readline(max_line_bytes + 2)
            except (OSError, EOFError, zlib.error) as error:
                raise InvalidRequest(f"{path.name} line {number}: it cannot be read on: {error}") from error
            if not raw:
                return
            if len(raw.rstrip(b"\r\n")) > max_line_bytes:
                raise InvalidRequest(
                    f"{path.name} line {number}: over {max_line_bytes} bytes long, which no row is; "
                    "is it a text file with line ends?"
                )
            yield number, _decode(raw, f"{path.name} line {number}", is_first=number == 1)


def _decode(raw: bytes, where: str, *, is_first: bool) -> str:
    try:
        text = raw.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{where}, byte {error.start + 1}: not UTF-8 text; convert it, for example with iconv -t UTF-8"
        ) from None
    if "\0" in text:
        raise InvalidRequest(f"{where}, character {text.index(chr(0)) + 1}: a zero byte; this is no text file")
    return text.rstrip("\r\n")


def split_line(text: str, where: str) -> list[str]:
    """The fields of one CSV line. Raises InvalidRequest for quotes that do not close on the same line."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise InvalidRequest(f"{where}: the quotes are wrong ({error}); a quoted field ends on its own line") from None


class TextRow:
    """One data row. Its methods read a field by its column and raise InvalidRequest naming line and column."""

    __slots__ = ("fields", "file", "indexes", "line")

    def __init__(self, file: str, line: int, indexes: dict[str, int], fields: list[str]) -> None:
        self.file = file
        self.line = line
        self.indexes = indexes
        self.fields = fields

    def refuse(self, column: str, problem: str) -> NoReturn:
        """Raise InvalidRequest about one field of this row."""
        raise InvalidRequest(f"{self.file} line {self.line}, column {column}: {problem}")

    def has(self, column: str) -> bool:
        """Whether the file has the column and this row a value in it."""
        index = self.indexes.get(column)
        return index is not None and bool(self.fields[index].strip())

    def text(self, column: str) -> str:
        """The field, stripped; it may be empty."""
        return self.fields[self.indexes[column]].strip()

    def number(self, column: str, *, lowest: float = 0.0, highest: float = MAX_TIME_S) -> float:
        """A finite number within bounds."""
        text = self.text(column)
        try:
            # Python also accepts 1_000 and digits of other scripts; in a table they are mistakes.
            value = float(text if text.isascii() and "_" not in text else "?")
        except ValueError:
            self.refuse(column, f"{shorten(text)} is not a number" if text else "it is empty; a number belongs here")
        if not math.isfinite(value) or not lowest <= value <= highest:
            self.refuse(column, f"{shorten(text)} must be a finite number from {lowest:g} to {highest:g}")
        return value

    def count(self, column: str, *, lowest: int = 1, highest: int = MAX_STEPS) -> int:
        """A whole number within bounds."""
        value = self.number(column, lowest=lowest, highest=highest)
        if value != int(value):
            self.refuse(column, f"{shorten(self.text(column))} must be a whole number")
        return int(value)

    def big_count(self, column: str, *, highest: int) -> int:
        """A whole number written in digits alone, which may be too large for a float."""
        text = self.text(column)
        if not text.isascii() or not text.isdecimal() or len(text) > len(str(highest)) or int(text) > highest:
            self.refuse(column, f"{shorten(text)} must be a whole number from 0 to {highest}")
        return int(text)

    def moment(self, column: str) -> float:
        """A date such as 2017-10-09 07:01:55, read as UTC, in seconds since 1970."""
        text = self.text(column)
        try:
            return parse_moment_s(text)
        except (ValueError, OverflowError):
            self.refuse(column, f"{shorten(text)} is not a date after 1970 like 2017-10-09 07:01:55")

    def devices(self, column: str, *, lowest: int = 1) -> int:
        return self.count(column, lowest=lowest, highest=MAX_DEVICES)

    def flag(self, column: str) -> bool:
        """0 or 1; a missing column or an empty field means False."""
        if not self.has(column):
            return False
        text = self.text(column)
        if text not in ("0", "1"):
            self.refuse(column, f"{shorten(text)} must be 0 or 1")
        return text == "1"


def shorten(text: str) -> str:
    """A value in quotes for an error text, cut if it is long."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def read_header(path: Path) -> list[str]:
    """The fields of the first line, stripped. Raises InvalidRequest for an empty file."""
    for number, text in read_lines(path):
        return [field.strip() for field in split_line(text, f"{path.name} line {number}")]
    raise InvalidRequest(f"{path.name} line 1: the file is empty; a header and rows belong in it")


def read_rows(
    path: Path, required: Iterable[str], *, columns: list[str] | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[TextRow]:
    """Yield the rows of a CSV file whose header names `required`; `columns` names the fields of a file without one.

    Blank lines are skipped. Raises InvalidRequest for a missing or doubled column and a row of another length.
    """
    indexes: dict[str, int] = {}
    if columns is not None:
        indexes = {column: index for index, column in enumerate(columns)}
    num_lines = 0
    for number, text in read_lines(path, max_line_bytes=max_line_bytes):
        num_lines = number
        if not text.strip():
            if number == 1:
                raise InvalidRequest(f"{path.name} line 1: it is blank; the header belongs here")
            continue
        where = f"{path.name} line {number}"
        fields = split_line(text, where)
        if not indexes:
            indexes = _index_header(fields, required, where)
            continue
        if len(fields) != len(indexes):
            raise InvalidRequest(f"{where}: {len(fields)} fields where {len(indexes)} columns are; mend the row")
        yield TextRow(path.name, number, indexes, fields)
    if num_lines == 0:
        raise InvalidRequest(f"{path.name} line 1: the file is empty; a header and rows belong in it")


def _index_header(fields: list[str], required: Iterable[str], where: str) -> dict[str, int]:
    indexes: dict[str, int] = {}
    for index, field in enumerate(fields):
        column = field.strip()
        if column in indexes:
            raise InvalidRequest(f"{where}, column {column}: named twice; keep one of the two")
        indexes[column] = index
    wanted = list(required)
    for column in wanted:
        if column not in indexes:
            raise InvalidRequest(f"{where}: no column {column!r}; the header must name {', '.join(wanted)}")
    return indexes


def parse_moment_s(text: str) -> float:
    """`2017-10-09 07:01:55`, with or without an offset (without: UTC), as seconds since 1970. Raises ValueError."""
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    seconds = moment.timestamp()
    if not 0 <= seconds <= MAX_TIME_S:
        raise ValueError("it lies before 1970 or thousands of years ahead")
    return seconds
