"""The report: everything that the answer holds is shown, nothing that a trace says becomes markup."""

from __future__ import annotations

import base64
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from springtide.simulator.report import chart, page
from springtide.simulator.report.report import render, write_report

EVIL = "<script>alert(1)</script>&\x00\"'.csv"
VOID = {"meta", "input", "br", "link", "img", "hr"}


class Reader(HTMLParser):
    """Checks that elements close in order and keeps what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def figures(met: int, broken: int, **others: Any) -> dict[str, Any]:
    steps = [[0.0, 0], [60.0, 8], [7200.0, 3], [90000.0, 0]]
    return {
        "jobs": 40,
        "deadline_jobs": 20,
        "deadlines_met": met,
        "deadline_satisfactory_ratio": met / 20,
        "admitted": met + broken,
        "admitted_and_broken": broken,
        "jct_mean_s": 4000.0,
        "jct_p95_s": 300000.0,
        "utilisation": 0.5,
        "cpu_s": 1.5,
        "decision_ms_p99": 3.21,
        "misses": {"impossible": 1, "not_admitted": 19 - met - broken, "scheduler": broken},
        "series": {
            "jct_s": [[0.0, 0.1], [50.0, 0.5], [86400.0, 1.0]],
            "queueing_s": [[0.0, 1.0]],
            "allocated": steps,
            "efficiency": [[t, n / 8] for t, n in steps],
            "submitted": [[0.0, 1], [10.0, 40]],
            "admitted": [[0.0, 1], [10.0, 21]],
        },
        **others,
    }


def an_answer() -> dict[str, Any]:
    return {
        "trace": "folder/195job.csv",
        "cluster": "1x8",
        "seed": 7,
        "overhead": "elasticflow",
        "num_devices": 8,
        "policies": {"springtide": figures(18, 0), "edf": figures(11, 2, deadlines_told=EVIL)},
    }


def test_report_leads_with_the_result_and_shows_every_policy() -> None:
    reader = read(render(an_answer(), command="springtide simulate --seed 7"))
    shown = " ".join("".join(reader.text).split())
    assert "springtide kept 18 of 20 deadlines (90.0 %), no promise broken. Next is edf with 55.0 %." in shown
    assert "springtide simulate --seed 7" in shown
    assert "declined, though possible alone on the empty cluster" in shown
    assert "the policy's doing" in shown
    assert "2 (log2 n + 1) s more" in shown
    labels = [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg" and "role" in attributes]
    # Outcomes, two distributions, two charts over time for each policy, and the efficiency.
    assert len(labels) == 1 + 2 + 4 + 1
    assert all(labels)


def test_what_a_trace_says_never_becomes_markup() -> None:
    answer = an_answer() | {"trace": EVIL, "cluster": EVIL, "seed": EVIL, "profiles": EVIL}
    answer["policies"] |= {EVIL: figures(3, 1, misses={EVIL: 4})}
    text = render(answer, command=EVIL)
    reader = read(text)
    assert "script" not in {tag for tag, _ in reader.tags}
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert "\x00" not in text
    assert "<script>alert(1)</script>&\ufffd" in "".join(reader.text)


def test_report_needs_nothing_from_anywhere() -> None:
    text = render(an_answer())
    assert not re.search(r"(?:src|href|url)\s*[=(]", text)
    assert "@import" not in text
    assert "://" not in text


def test_report_bears_an_answer_with_little_in_it() -> None:
    bare = {"trace": "t", "policies": {"fifo": {"jobs": 3, "deadline_satisfactory_ratio": None}}}
    shown = "".join(read(render(bare)).text)
    assert "none of the jobs with a deadline" in shown
    assert "fifo" in shown
    read(render({"trace": "t", "policies": {}}))


def test_write_leaves_one_whole_file(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.write_text("old")
    write_report(place, an_answer())
    assert place.read_text(encoding="utf-8").endswith("</html>\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_points_are_thinned_and_keep_their_ends() -> None:
    thinned = chart.points([[float(i), float(i)] for i in range(100_000)])
    assert len(thinned) <= 800
    assert thinned[0] == (0.0, 0.0)
    assert thinned[-1] == (99_999.0, 99_999.0)


def test_averages_keep_the_area() -> None:
    steps = tuple((float(i), float(i % 7)) for i in range(500))
    averages = chart.averaged(steps, 50)
    area = sum(y for _, y in steps[:-1])
    part = (steps[-1][0] - steps[0][0]) / 50
    assert sum(y * part for _, y in averages[:-1]) == pytest.approx(area)


@pytest.mark.parametrize(
    ("axis", "least", "most"),
    [
        (chart.time_axis(8_000_000.0, "t"), 3, 9),
        (chart.time_axis(0.0, "t"), 1, 9),
        (chart.log_time_axis([0.0, 0.5, 1e6], "t"), 4, 10),
        (chart.log_time_axis([], "t"), 1, 10),
        (chart.count_axis(15802, "n"), 4, 8),
        (chart.count_axis(0, "n"), 4, 8),
        (chart.fraction_axis("f"), 4, 8),
    ],
)
def test_axes_have_a_readable_number_of_ticks_inside(axis: chart.Axis, least: int, most: int) -> None:
    ticks = axis.ticks()
    assert least <= len(ticks) <= most
    assert all(0.0 <= axis.place(value) <= 1.0 for value, _ in ticks)
    assert len({name for _, name in ticks}) == len(ticks)


def test_numbers_are_written_for_people() -> None:
    assert page.seconds(None) == page.UNKNOWN
    assert page.seconds(200_000) == "2d08h"
    assert page.figure(15802) == "15,802"
    assert page.figure(0.0123) == "0.0123"
    assert page.fraction(0.9385) == "93.8 %"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: apt-get install -y chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    place, picture = tmp_path / "report.html", tmp_path / "report.png"
    write_report(place, an_answer())
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *flags, "--window-size=1280,900", f"--screenshot={picture}", place.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 900)
    assert len(base64.b64encode(data)) > 20_000, "an empty page is smaller"
