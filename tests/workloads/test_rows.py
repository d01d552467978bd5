from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import MAX_LINE_BYTES, read_header, read_lines, read_rows


def write(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path, *columns: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        for _ in read_rows(path, columns):
            pass
    return str(caught.value)


def test_rows_read_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, '\ufeffa, b ,c\r\n 1 ,"x, y",2.5\r\n\r\n3,"he said ""no""",nan')
    rows = list(read_rows(path, ["a", "b"]))
    assert [(row.line, row.text("a"), row.text("b")) for row in rows] == [(2, "1", "x, y"), (4, "3", 'he said "no"')]
    assert rows[0].number("c") == 2.5
    assert rows[0].count("a") == 1
    with pytest.raises(InvalidRequest, match=re.escape("t.csv line 4, column c: 'nan' must be a finite number")):
        rows[1].number("c")
    assert read_header(path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "t.csv line 1: the file is empty"),
        ("\n\na,b\n", "t.csv line 1: it is blank"),
        ("a,c\n1,2\n", "t.csv line 1: no column 'b'; the header must name a, b"),
        ("a,b,a\n1,2,3\n", "t.csv line 1, column a: named twice"),
        ("a,b\n1,2\n1,2,3\n", "t.csv line 3: 3 fields where 2 columns are"),
        ("a,b\n1,2\n1\n", "t.csv line 3: 1 fields where 2 columns are"),
        ('a,b\n1,"2\n3,4\n', "t.csv line 2: the quotes are wrong"),
        ('a,b\n1,"2"3\n', "t.csv line 2: the quotes are wrong"),
        ("a,b\n1,\0\n", "t.csv line 2, character 3: a zero byte"),
        (b"a,b\n1,2\nabc\xff,2\n", "t.csv line 3, byte 4: not UTF-8"),
        ("a,b\n1," + "2" * MAX_LINE_BYTES, f"t.csv line 2: over {MAX_LINE_BYTES} bytes long"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: bytes | str, sentence: str) -> None:
    assert refusal(write(tmp_path, content), "a", "b").startswith(sentence)


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a" * MAX_LINE_BYTES + "\r\nb\n")
    assert [len(text) for _, text in read_lines(path)] == [MAX_LINE_BYTES, 1]


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("number", "x", "'x' is not a number"),
        ("number", " ", "it is empty; a number belongs here"),
        ("number", "-0.5", "'-0.5' must be a finite number from 0 to 1e+11"),
        ("number", "1e300", "'1e300' must be a finite number"),
        ("number", "1_000", "'1_000' is not a number"),
        ("number", "\u0663", "'\u0663' is not a number"),
        ("count", "1.5", "'1.5' must be a whole number"),
        ("count", "0", "'0' must be a finite number from 1"),
        ("devices", "100001", "'100001' must be a finite number from 1 to 100000"),
        ("flag", "yes", "'yes' must be 0 or 1"),
        ("moment", "yesterday", "'yesterday' is not a date"),
        ("moment", "1903-01-01", "'1903-01-01' is not a date after 1970"),
        ("number", "z" * 1000, repr("z" * 40 + "...") + " is not a number"),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, column: str, value: str, sentence: str) -> None:
    path = write(
        tmp_path, f"number,count\n1,1\n{value},{value}\n".replace("number", column, 1).replace("count", "x", 1)
    )
    row = list(read_rows(path, [column]))[1]
    with pytest.raises(InvalidRequest, match=re.escape(f"t.csv line 3, column {column}: {sentence}")):
        getattr(row, column)(column)


def test_big_counts_are_exact(tmp_path: Path) -> None:
    row = next(read_rows(write(tmp_path, f"a,b\n{2**63 - 1},{2**63}\n"), ["a"]))
    assert row.big_count("a", highest=2**63 - 1) == 2**63 - 1
    with pytest.raises(InvalidRequest, match="line 2, column b"):
        row.big_count("b", highest=2**63 - 1)


def test_archives_are_read_and_broken_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 9_999))
    assert sum(row.count("a") for row in read_rows(path, ["a"])) == 9_999
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 9_999)[:-12])
    assert "t.csv.gz line " in refusal(path, "a")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)
    assert "there is no file" in refusal(tmp_path / "missing.csv")
    assert "not a regular file" in refusal(Path("/dev/null"))
    assert "cannot be read" in refusal(tmp_path / ("x" * 5_000))
