"""The page of `springtide bench smlt`: workers and throughput over time beside the batch or the model's size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from springtide.simulator.report import chart, page
from springtide.simulator.report.chart import Line
from springtide.simulator.report.page import Content, Element, element

_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "batch": "samples a step",
        "size": "gradient, MB",
        "workers": "functions",
        "memory_mb": "memory of each, MB",
        "throughput": "samples a second",
        "arrived": "samples arrived",
    }
)


def write_smlt(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report of `bench_smlt.run_bench`. Raises OSError."""
    page.write(path, render(report))


def render(report: Mapping[str, Any]) -> str:
    """The page as text."""
    content: list[Content] = [
        element("h1", "Work that changes while it runs"),
        element("p", f"The course of the first world, seed {report['seeds'][0]}; costs are means.", class_="lead"),
    ]
    for part, series in report["series"].items():
        charts = [_drawn(part, name, series) for name in _TITLES if name in series]
        content.append(
            page.section(part, element("div", *charts, class_="many"), _table(part, report), note=_said(part, report))
        )
    machine: list[tuple[str, Content]] = [(str(name), str(value)) for name, value in report["machine"].items()]
    content.append(page.section("This run", page.facts([*machine, ("criterion", report["criterion"])])))
    return page.document("Work that changes while it runs", *content)


def _said(part: str, report: Mapping[str, Any]) -> str:
    return f"Published: {report['published'][part]}."


def _drawn(part: str, name: str, series: Mapping[str, Any]) -> Element:
    lines = [Line(name=name, slot=0, points=chart.points(series[name]), is_step=name != "throughput")]
    if name == "throughput" and "throughput of fixed" in series:
        lines.append(Line(name="fixed allocation", slot=1, points=chart.points(series["throughput of fixed"])))
    end_s = max((x for line in lines for x, _ in line.points), default=1.0)
    high = max((y for line in lines for _, y in line.points), default=1.0)
    title = _TITLES[name]
    drawn = chart.line_chart(
        lines,
        chart.time_axis(end_s, "time"),
        chart.count_axis(high, title),
        label=f"{part}: {title} over time",
        size=(430, 220),
    )
    return element("div", element("h3", title), drawn)


def _table(part: str, report: Mapping[str, Any]) -> Element:
    rows: list[page.Row] = [
        [
            row["baseline_name"],
            page.figure(row["ours"]),
            page.figure(row["baseline"]),
            page.figure(row["ratio"]),
            page.figure(row["time_ratio"]),
        ]
        for row in report["rows"]
        if row["case"] == f"{part}: cost"
    ]
    return page.table(("Beside", "Ours $", "Theirs $", "Cost ratio", "Time ratio"), rows, caption=f"{part}: costs")
