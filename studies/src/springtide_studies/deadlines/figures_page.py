"""The page of `springtide bench figures`: the paper's figures drawn from runs here, with its own values as outlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.simulator.report import chart, page
from springtide.simulator.report.chart import Bar, BarRow, Line
from springtide.simulator.report.page import Content, Element, element
from springtide_studies.deadlines.findings import EDF_SHOWN, remarks

# A policy has the same colour on every chart of the page.
_SLOTS: tuple[str, ...] = (
    *("springtide", "elasticflow", "edf+elastic", "edf+admission", "edf"),
    *("gandiva", "tiresias", "themis", "chronus", EDF_SHOWN),
)
_EFFICIENCY_S = 100 * 3600.0
_NUM_AVERAGES = 100
_MOST_OVER_GANDIVA = 2.0


def write_figures(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report of `bench_figures.run_bench`. Raises OSError."""
    page.write(path, render(report))


def render(report: Mapping[str, Any]) -> str:
    """The page as text."""
    drawings = report["figures"]
    shown = [name for name in _SLOTS if any(name in drawing["policies"] for drawing in drawings)]
    num_held = sum(finding["holds"] for drawing in drawings for finding in drawing["findings"])
    num_all = sum(len(drawing["findings"]) for drawing in drawings)
    machine: list[tuple[str, Content]] = [(str(name), str(value)) for name, value in report["machine"].items()]
    parts: list[Content] = [
        element("h1", "ElasticFlow's evaluation, run here"),
        element(
            "p",
            f"{num_held} of {num_all} findings about the order of policies hold. Bars are runs here; an outline is the "
            "value that the paper shows.",
            class_="lead",
        ),
        element(
            "p",
            f"edf stops where more devices no longer help, as the paper describes it; {EDF_SHOWN} takes up to 64 even "
            "where that is slower, as the authors' program does, so the paper's numbers stand beside it.",
            class_="note",
        ),
        page.switches({_slot(name): name for name in shown}),
        *(_figure(drawing) for drawing in drawings),
        page.section("This run", page.facts(machine)),
    ]
    return page.document("ElasticFlow's evaluation, run here", *parts)


def _figure(drawing: Mapping[str, Any]) -> Element:
    content: list[Content] = []
    if drawing["lines"]:
        content.append(_lines(drawing["lines"]))
    panels = [
        element("div", element("h3", panel["name"]), element("p", panel["measure"], class_="note"), _bars(panel))
        for panel in drawing["panels"]
    ]
    content.append(element("div", *panels, class_="many"))
    content.append(_findings(drawing["findings"]))
    content.append(_values(drawing))
    return page.section(f"Figure {drawing['figure']}: {drawing['title']}", *content)


def _bars(panel: Mapping[str, Any]) -> Element:
    values, published = panel["values"], panel["published"]
    known = [value for value in (*values.values(), *published.values()) if value is not None]
    is_share = panel["measure"].startswith(("deadlines", "cluster"))
    rows = []
    for policy, value in values.items():
        slot = _slot(policy)
        said = page.fraction(value) if is_share else page.figure(value)
        paper = published.get(policy)
        behind = "" if paper is None else f" (paper {page.fraction(paper)})"
        bars = (
            ()
            if value is None
            else (Bar(value=value, look=f"s{slot % page.NUM_SERIES}", title=f"{policy}: {said}{behind}"),)
        )
        rows.append(
            BarRow(
                name=policy,
                bars=bars,
                label=f"{said}{behind}",
                outline=paper,
                outline_title=f"{policy} in the paper: {page.fraction(paper)}",
                slot=slot,
            )
        )
    high = 1.0 if panel["measure"].startswith("deadlines") else max([*known, 1e-9])
    if panel["measure"].endswith("over Gandiva's"):
        # EDF's bars would leave no room for the others; their ends are cut off, the labels tell.
        high = _MOST_OVER_GANDIVA
    label = f"{panel['name']}: {panel['measure']} by policy"
    return chart.bar_chart(rows, high, label=label, width=430, name_width=100, label_width=128)


def _slot(policy: str) -> int:
    return _SLOTS.index(policy) if policy in _SLOTS else len(_SLOTS)


def _lines(lines: Mapping[str, Sequence[Sequence[float]]]) -> Element:
    drawn = [
        Line(
            name=policy,
            slot=_slot(policy),
            points=chart.averaged(chart.points(points), _NUM_AVERAGES),
            is_step=True,
        )
        for policy, points in lines.items()
        if points
    ]
    high = max((y for line in drawn for _, y in line.points), default=1.0)
    label = f"Cluster efficiency over the first 100 hours under {', '.join(lines)}"
    picture = chart.line_chart(
        drawn,
        chart.time_axis(_EFFICIENCY_S, "time since the first submission"),
        chart.Axis(low=0.0, high=min(1.0, high * 1.1) or 1.0, title="cluster efficiency", kind="fraction"),
        label=label,
        size=(1100, 260),
    )
    key = element(
        "ul", *(element("li", page.swatch(_slot(policy)), policy) for policy in lines), class_="key", aria_label="Lines"
    )
    return element("div", picture, key)


def _findings(findings: Sequence[Mapping[str, Any]]) -> Element:
    rows = []
    for finding in findings:
        holds = finding["holds"]
        verdict = element("span", "holds" if holds else "does not hold", class_="good" if holds else "bad")
        rows.append(element("li", verdict, f" {finding['text']}", element("span", remarks(finding), class_="quiet")))
    return element("div", element("h3", "What the paper finds, and whether it does here"), element("ul", *rows))


def _values(drawing: Mapping[str, Any]) -> Element:
    policies = drawing["policies"]
    rows: list[page.Row] = [
        [panel["name"], *(_both(panel["values"].get(name), panel["published"].get(name)) for name in policies)]
        for panel in drawing["panels"]
    ]
    table = page.table(("", *policies), rows, caption=f"Values of figure {drawing['figure']}")
    return element("details", element("summary", "The values, the paper's in brackets"), table)


def _both(value: float | None, published: float | None) -> str:
    return page.figure(value) if published is None else f"{page.figure(value)} ({page.figure(published)})"
