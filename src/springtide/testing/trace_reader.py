"""The kit for trace readers: a good file gives jobs, any bad file one clear sentence, within bounded memory.

def test_my_reader(tmp_path):
    check_reader(read_my_format, Sample(text=GOOD_FILE, columns=("id", "submit_s")), tmp_path)
"""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.workloads.trace import Trace

# A trace of jobs, or the entries of a file that holds others, such as calls of functions.
Reader = Callable[[Path, int | None], Trace | tuple[Any, ...]]

MOST_CHARACTERS = 500
MOST_MEMORY_BYTES = 32 * 2**20
HOLE_BYTES = 10 * 2**30
_WRONG_CELLS = ("nan", "inf", "-inf", "-1", "", "x", "1e400", "0.5", "9" * 30, "9" * 5_000, "\u0663", '"a" b')


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A small good file of a format.

    `columns` are those that the reader requires (empty: the format is not a table). Without `has_header` the first line
    is a row; without `has_ids` rows may repeat.
    """

    text: str
    columns: tuple[str, ...] = ()
    has_header: bool = True
    has_ids: bool = True
    suffix: str = ".csv"


def check_reader(read: Reader, sample: Sample, folder: Path, *, num_mutations: int = 200, seed: int = 0) -> None:
    """Check a reader against a good file and many bad ones derived from it in `folder`. Raises AssertionError.

    `read(path, limit)` reads at most `limit` jobs (None: all). Reading twice must give equal results, a limit a part of
    them, and the file must stay unchanged. For every bad file the reader must raise InvalidRequest with one sentence
    that names the file and, for a cell, its line and column.
    """
    path = folder / f"sample{sample.suffix}"
    path.write_text(sample.text, encoding="utf-8")
    _check_good(read, path)
    _check_bad_files(read, sample, folder)
    if sample.columns:
        _check_bad_columns(read, sample, folder)
        _check_bad_rows(read, sample, folder)
    _check_mutations(read, sample, folder, num_mutations, seed)


def check_memory(read: Reader, sample: Sample, folder: Path) -> None:
    """Check that a sparse file of 10 GB is rejected without being read into memory. Raises AssertionError."""
    path = folder / f"huge{sample.suffix}"
    path.write_text(sample.text, encoding="utf-8")
    os.truncate(path, HOLE_BYTES)
    tracemalloc.start()
    try:
        sentence = refusal(read, path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        path.unlink()
    assert sentence is not None, "a file that ends in a hole of 10 GB was read"
    assert peak_bytes < MOST_MEMORY_BYTES, f"reading a file of 10 GB took {peak_bytes} bytes"


def refusal(read: Reader, path: Path) -> str | None:
    """The message of the reader's InvalidRequest, None if it reads the file. Raises AssertionError for a bad one."""
    try:
        read(path, None)
    except InvalidRequest as error:
        sentence = str(error)
        assert path.name in sentence, f"the file {path.name} is not named: {sentence}"
        assert "\n" not in sentence, f"more than one line: {sentence!r}"
        assert len(sentence) <= MOST_CHARACTERS, f"{len(sentence)} characters are no sentence: {sentence[:200]}..."
        return sentence
    return None


def _entries(trace: Trace | tuple[Any, ...]) -> tuple[Any, ...]:
    return trace.jobs if isinstance(trace, Trace) else trace


def _check_good(read: Reader, path: Path) -> None:
    before = path.read_bytes()
    trace = read(path, None)
    entries = list(_entries(trace))
    assert entries, "the good file holds nothing"
    assert read(path, None) == trace, "reading twice gives two results"
    assert path.read_bytes() == before, "reading changed the file"
    for limit in range(1, len(entries) + 2):
        part = list(_entries(read(path, limit)))
        assert len(part) == min(limit, len(entries)), f"a limit of {limit} gives {len(part)} of {len(entries)}"
        assert all(entry in entries for entry in part), f"a limit of {limit} changes what is read"
    for limit in (0, -1, 10**9):
        try:
            read(path, limit)
        except InvalidRequest:
            continue
        raise AssertionError(f"a limit of {limit} was taken")
    if isinstance(trace, Trace):
        moments = [job.submit_s for job in trace.jobs]
        assert moments == sorted(moments), "the jobs are not in order of submission"


def _bad_files(sample: Sample) -> Iterator[tuple[str, bytes]]:
    good = sample.text.encode()
    lines = good.splitlines(keepends=True)
    yield "empty", b""
    yield "blank", b"\n\n"
    yield "not UTF-8", good[:-3] + b"\xff\xfe" + good[-3:]
    yield "UTF-16", sample.text.encode("utf-16")
    yield "zero bytes", good[:-3] + b"\0\0" + good[-3:]
    yield "a huge line", good.rstrip() + b"," * 5_000_000
    yield "one huge line", b"a" * 5_000_000
    if sample.columns:
        yield "an open quote", b"".join(lines[:-1]) + b'"' + lines[-1]
        yield "text after a quote", b"".join(lines[:-1]) + b'"a"b,' + lines[-1]
    if sample.has_header:
        yield "no row", lines[0]


def _check_bad_files(read: Reader, sample: Sample, folder: Path) -> None:
    for name, content in _bad_files(sample):
        path = folder / f"bad{sample.suffix}"
        path.write_bytes(content)
        sentence = refusal(read, path)
        assert sentence is not None, f"a bad file was read: {name}"
        assert re.search(r"line \d+", sentence), f"{name}: no line is named: {sentence}"
    place = folder / "place"
    place.mkdir()
    assert refusal(read, place) is not None, "a directory was read"
    assert refusal(read, folder / "missing") is not None, "a missing file was read"
    compressed = folder / f"bad{sample.suffix}.gz"
    compressed.write_bytes(b"\x1f\x8b" + sample.text.encode())
    assert refusal(read, compressed) is not None, "a broken archive was read"


def _check_bad_columns(read: Reader, sample: Sample, folder: Path) -> None:
    rows = [line.split(",") for line in sample.text.splitlines() if line]
    path = folder / f"columns{sample.suffix}"
    if not sample.has_header:
        path.write_text("\n".join(",".join(row[1:]) for row in rows) + "\n")
        assert refusal(read, path) is not None, "rows without their first field were read"
        return
    for column in sample.columns:
        index = rows[0].index(column)
        path.write_text("\n".join(",".join(row[:index] + row[index + 1 :]) for row in rows) + "\n")
        sentence = refusal(read, path)
        assert sentence is not None, f"a file without the column {column} was read"
        assert "line 1" in sentence, f"the line is not named: {sentence}"
        assert column in sentence, f"the missing column {column} is not named: {sentence}"
        path.write_text("\n".join(",".join([row[index], *row]) for row in rows) + "\n")
        assert refusal(read, path) is not None, f"a file with two columns {column} was read"


def _check_bad_rows(read: Reader, sample: Sample, folder: Path) -> None:
    lines = sample.text.splitlines()
    names = lines[0].split(",") if sample.has_header else list(sample.columns)
    path = folder / f"rows{sample.suffix}"
    for number in range(2 if sample.has_header else 1, len(lines) + 1):
        row = lines[number - 1].split(",")
        if row == [""]:
            continue
        for changed in (row[:-1], [*row, "more"]):
            path.write_text("\n".join([*lines[: number - 1], ",".join(changed), *lines[number:]]) + "\n")
            sentence = refusal(read, path)
            assert sentence is not None, f"line {number} of another length was read"
            assert f"line {number}" in sentence, f"the line is not named: {sentence}"
        for index, name in enumerate(names):
            for wrong in _WRONG_CELLS:
                changed = [*row[:index], wrong, *row[index + 1 :]]
                path.write_text("\n".join([*lines[: number - 1], ",".join(changed), *lines[number:]]) + "\n")
                sentence = refusal(read, path)
                # Columns that no job needs may hold anything; a rejection must name the column.
                place = rf"line \d+(, column {re.escape(name)}\b|: the quotes)|line 2: no job|line 2: no function"
                assert sentence is None or re.search(place, sentence), f"{wrong!r:.40} for {name}: {sentence}"
    if sample.has_ids:
        last = next(line for line in reversed(lines) if line)
        path.write_text("\n".join([*lines, last]) + "\n")
        sentence = refusal(read, path)
        assert sentence is not None, "the same job was read twice"
        assert f"line {len(lines) + 1}" in sentence, f"the line is not named: {sentence}"


def _check_mutations(read: Reader, sample: Sample, folder: Path, count: int, seed: int) -> None:
    """Check that only InvalidRequest is raised when random bytes are changed, dropped, doubled or inserted."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    good = sample.text.encode()
    path = folder / f"mutation{sample.suffix}"
    for _ in range(count):
        content = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            begin, length = int(rng.integers(len(content))), int(rng.integers(1, 12))
            kind = int(rng.integers(4))
            if kind == 0:
                content[begin] = int(rng.integers(256))
            elif kind == 1:
                del content[begin : begin + length]
            elif kind == 2:
                content[begin:begin] = content[begin : begin + length]
            else:
                content[begin:begin] = bytes(rng.choice(list(b'0123456789-.,e"[]{}:nN\n '), length).tolist())
            content = content or bytearray(b",")
        path.write_bytes(bytes(content))
        refusal(read, path)
