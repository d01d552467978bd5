"""Tables of recorded latencies: order, missing line ends, and what is wrong in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.share_surfaces import read_share_surface


def write(folder: Path, text: str) -> Path:
    path = folder / "bs_sm_model.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_in_any_order_without_a_last_line_end(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "2.000000,50.000000,0.030000,66.666667\n1.000000,100.000000,0.010000,100.0\n"
        "1.000000,50.000000,0.020000,50.0\n2.000000,100.000000,0.012000,166.6",
    )
    surface = read_share_surface(path)
    assert surface.name == "bs_sm_model"
    assert (surface.batch_sizes, surface.percents, surface.shares) == ((1, 2), (50, 100), (0.5, 1.0))
    assert surface.at(2, 0.5) == 0.03
    assert surface.throughput_per_s[1, 100] == 100.0
    with pytest.raises(InvalidRequest, match="no row for a batch of 4 on 50%"):
        surface.at(4, 0.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("1,50,0.1\n", "3 fields where 4 columns"),
        ("1,50,0.1,9\n1,50,0.2,9\n", "line 2, column share_percent: a batch of 1 on 50 percent is there twice"),
        ("1,50,0.1,9\n2,100,0.2,9\n", "no row for a batch of 1 on 100 percent"),
        ("1,0,0.1,9\n", "column share_percent"),
        ("1,101,0.1,9\n", "column share_percent"),
        ("1.5,50,0.1,9\n", "must be a whole number"),
        ("0,50,0.1,9\n", "column batch_size"),
        ("1,50,0,9\n", "longer than no time"),
        ("1,50,nan,9\n", "column latency_s"),
        ("1,50,-1,9\n", "column latency_s"),
        ("1,50,0.1,inf\n", "column throughput_per_s"),
        ("batch,share,latency,throughput\n", "is not a number"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_share_surface(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no file"):
        read_share_surface(tmp_path / "none.csv")
