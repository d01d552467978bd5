"""Jobs of a trace that hold parts of their devices: read from a column that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.shares import make_share
from springtide.workloads.formats.springtide import COLUMNS
from springtide.workloads.readers import read_trace


def write(folder: Path, *shares: str) -> Path:
    rows = [f"j{number},{number},640,32,1,2,,100,0.9,{share}" for number, share in enumerate(shares)]
    path = folder / "trace.csv"
    path.write_text("\n".join([",".join((*COLUMNS, "share")), *rows]) + "\n", encoding="utf-8")
    return path


def test_shares_are_read_as_people_write_them(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "0.3", "30%", "0.3..0.5", "20%..90%", "", " 1 "))
    assert trace.format == "springtide"
    assert [job.share for job in trace.jobs] == [
        make_share(0.3, 0.6),
        make_share(0.3, 0.6),
        make_share(0.3, 0.5),
        make_share(0.2, 0.9),
        None,
        make_share(1.0),
    ]


@pytest.mark.parametrize("wrong", ["0", "1.2", "0.6..0.3", "half", "0.2..0.3..0.4", "-0.1", "nan"])
def test_what_is_no_share_is_refused_with_its_place(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=r"trace\.csv line 3, column share: "):
        read_trace(write(tmp_path, "0.3", wrong))


def test_without_the_column_everybody_has_whole_devices(tmp_path: Path) -> None:
    path = write(tmp_path, "0.3")
    plain = "\n".join(line.rpartition(",")[0] for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(plain + "\n", encoding="utf-8")
    assert [job.share for job in read_trace(path).jobs] == [None]
