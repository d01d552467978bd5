"""The report of a comparison: one HTML file that shows what every policy did with the same jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from springtide.simulator.report import chart, page
from springtide.simulator.report.chart import Bar, BarRow, Line
from springtide.simulator.report.page import Content, Element, element

Figures = Mapping[str, Any]

OVERHEAD_RULES: Mapping[str, str] = MappingProxyType(
    {
        "elasticflow": "elasticflow: every start, resize or move of a job costs it 2 s (7 s from 256 devices up), and "
        "2 (log2 n + 1) s more on n devices that no job has used together before",
        "measured": "measured: what starting and resizing cost on our own runtime",
        "none": "none: changing a job costs nothing",
    }
)
_SHOWN_ABOVE = frozenset(
    (
        "deadlines_met",
        "deadline_jobs",
        "deadline_satisfactory_ratio",
        "admitted_and_broken",
        "admitted",
        "jct_mean_s",
        "jct_p95_s",
        "queueing_mean_s",
        "makespan_s",
        "utilisation",
        "cluster_efficiency",
        "resizes",
        "decision_ms_p99",
        "decision_ms_max",
        "series",
        "misses",
    )
)
_NUM_AVERAGES = 96
# Why a deadline was missed, as the figures name it: the look of its piece of the bar, and what it means.
_CAUSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "scheduler": ("broken", "late although all was as predicted: the policy's doing"),
        "misprediction": ("late", "late, with speeds other than profiled"),
        "fault": ("fault", "late after losing a worker or a node"),
        "not_admitted": ("idle", "declined, though possible alone on the empty cluster"),
        "impossible": ("hopeless", "not possible even alone on the empty cluster"),
        "missed": ("late", "late or declined"),
    }
)


def write_report(path: Path, answer: Mapping[str, Any], *, command: str = "") -> None:
    """Write the report of an answer of `simulate` as one self-contained file. Raises OSError.

    `command` is shown as the command that makes it again. Figures that the answer lacks are left out.
    """
    page.write(path, render(answer, command=command))


def render(answer: Mapping[str, Any], *, command: str = "") -> str:
    found: Mapping[str, Figures] = answer.get("policies", {})
    name = Path(str(answer.get("trace", "a trace"))).name
    title = f"{name} on {answer.get('cluster', 'a cluster')}"
    parts: list[Content | None] = [
        element("h1", title),
        element("p", _lead(found), class_="lead"),
        page.switches(dict(enumerate(found))) if len(found) > 1 else None,
        page.section(
            "What each policy delivered",
            _headline(found),
            note="A promise is the deadline of a job that was admitted. Times count finished jobs only: a policy that "
            "declines more jobs can look faster. Efficiency: speed gained for each device held, against one device "
            "(ElasticFlow, equation 8). Bold: most deadlines kept.",
        ),
        _outcomes(found),
        _distributions(found),
        _timelines(found, answer.get("num_devices")),
        _efficiencies(found),
        _everything(found),
        page.section("This run", page.facts(_run_facts(answer, command))),
    ]
    return page.document(f"{title}: {', '.join(found)}", *(part for part in parts if part is not None))


def _lead(found: Mapping[str, Figures]) -> str:
    ranked = sorted(
        (figures["deadline_satisfactory_ratio"], name)
        for name, figures in found.items()
        if figures.get("deadline_satisfactory_ratio") is not None
    )
    if not ranked:
        return f"{len(found)} policies, none of the jobs with a deadline."
    _, best = ranked[-1]
    figures = found[best]
    said = (
        f"{best} kept {_count(figures.get('deadlines_met'))} of {_count(figures.get('deadline_jobs'))} deadlines "
        f"({page.fraction(ranked[-1][0])})"
    )
    broken = figures.get("admitted_and_broken")
    if broken is not None and figures.get("promised") != 0:
        said += (
            ", no promise broken" if broken == 0 else f", {broken} {'promise' if broken == 1 else 'promises'} broken"
        )
    if len(ranked) == 1:
        return f"{said}."
    second, other = ranked[-2]
    return f"{said}. Next is {other} with {page.fraction(second)}."


def _headline(found: Mapping[str, Figures]) -> Element:
    header = (
        *(
            "Policy",
            "Deadlines kept",
            "Satisfied",
            "Broken promises",
            "Admitted",
            "Completion, mean",
            "Completion, p95",
        ),
        *("Waiting, mean", "All done after", "Use of devices", "Efficiency", "Resizes", "Decision p99 / max, ms"),
    )
    best = max((figures.get("deadline_satisfactory_ratio") or 0.0 for figures in found.values()), default=0.0)
    rows: list[page.Row] = []
    for slot, (name, figures) in enumerate(found.items()):
        satisfied = figures.get("deadline_satisfactory_ratio")
        is_best = satisfied is not None and satisfied == best
        rows.append(
            [
                element("span", page.swatch(slot), name),
                f"{_count(figures.get('deadlines_met'))} of {_count(figures.get('deadline_jobs'))}",
                _meter(satisfied, slot, is_best=is_best),
                _broken(figures),
                _count(figures.get("admitted")),
                page.seconds(figures.get("jct_mean_s")),
                page.seconds(figures.get("jct_p95_s")),
                page.seconds(figures.get("queueing_mean_s")),
                page.seconds(figures.get("makespan_s")),
                page.fraction(figures.get("utilisation")),
                page.fraction(figures.get("cluster_efficiency")),
                _count(figures.get("resizes")),
                " / ".join(page.figure(figures.get(f"decision_ms_{part}"), 2) for part in ("p99", "max")),
            ]
        )
    return page.table(header, rows, caption="Figures by policy", row_class="of-{}")


def _meter(value: float | None, slot: int, *, is_best: bool) -> Content:
    if value is None:
        return page.UNKNOWN
    style = f"width: {value * 100:.1f}%; background: var(--s{slot % page.NUM_SERIES})"
    bar = element("span", element("span", style=style), class_="meter", aria_hidden="true")
    return element("span", bar, element("span", page.fraction(value), class_="best" if is_best else None))


def _broken(figures: Figures) -> Content:
    """How many promises were broken; a policy that admits no job by deadline has made none."""
    value = figures.get("admitted_and_broken")
    if value is None:
        return page.UNKNOWN
    if figures.get("promised") == 0:
        return element("span", "none made", class_="quiet")
    return element("span", f"{value:,}", class_="bad" if value else "good")


def _outcomes(found: Mapping[str, Figures]) -> Element | None:
    """Every job with a deadline: kept, or missed and by which cause."""
    most = max((figures.get("deadline_jobs") or 0 for figures in found.values()), default=0)
    if not most:
        return None
    all_causes = _causes_of_all(found)
    rows = []
    for slot, (name, figures) in enumerate(found.items()):
        met = figures.get("deadlines_met") or 0
        causes = _causes(figures)
        bars = [Bar(value=met, look="met", title=f"{name}: {met:,} deadlines kept")]
        bars += [
            Bar(value=causes[cause], look=_look(cause), title=f"{name}: {causes[cause]:,} {_meaning(cause)}")
            for cause in all_causes
            if cause in causes
        ]
        said = f"{met:,} kept, {max(0, (figures.get('deadline_jobs') or 0) - met):,} missed"
        rows.append(BarRow(name=name, bars=tuple(bars), label=said, slot=slot))
    drawn = chart.bar_chart(
        rows, most, label="Jobs with a deadline by outcome and policy", width=1100, name_width=120, label_width=150
    )
    pieces = [("met", "deadline kept"), *((_look(cause), _meaning(cause)) for cause in all_causes)]
    key = element("ul", *(element("li", _key_swatch(look), text) for look, text in pieces), class_="key")
    content: list[Content] = [drawn, key]
    table = _cause_table(found)
    if table is not None:
        content.append(table)
    return page.section("Where deadlines were missed", *content, note="All jobs that came with a deadline.")


def _causes(figures: Figures) -> Mapping[str, int]:
    """Misses by cause; all under `missed` where the answer has no causes."""
    if figures.get("misses"):
        return {str(cause): int(count) for cause, count in figures["misses"].items() if count}
    missed = (figures.get("deadline_jobs") or 0) - (figures.get("deadlines_met") or 0)
    return {"missed": missed} if missed > 0 else {}


def _causes_of_all(found: Mapping[str, Figures]) -> list[str]:
    """Every cause that occurs under any policy, the known ones first and in their order."""
    named = dict.fromkeys(cause for figures in found.values() for cause in _causes(figures))
    return [*(cause for cause in _CAUSES if cause in named), *(cause for cause in named if cause not in _CAUSES)]


def _look(cause: str) -> str:
    return _CAUSES.get(cause, ("late", ""))[0]


def _meaning(cause: str) -> str:
    return _CAUSES.get(cause, ("", cause))[1]


def _key_swatch(look: str) -> Element:
    square = element("rect", width=12, height=12, rx=2, class_=f"bar {look}")
    return element("svg", square, viewBox="0 0 12 12", width=12, height=12, aria_hidden="true")


def _cause_table(found: Mapping[str, Figures]) -> Element | None:
    causes = _causes_of_all(found)
    if not causes:
        return None
    rows: list[page.Row] = [
        [element("span", page.swatch(slot), name), *(_count(_causes(figures).get(cause, 0)) for cause in causes)]
        for slot, (name, figures) in enumerate(found.items())
    ]
    table = page.table(("Policy", *map(_meaning, causes)), rows, caption="Misses by cause", row_class="of-{}")
    return element("details", element("summary", "Misses by cause as a table"), table, open="open")


def _series(figures: Figures, name: str) -> tuple[chart.Point, ...]:
    return chart.points((figures.get("series") or {}).get(name))


def _distributions(found: Mapping[str, Figures]) -> Element | None:
    """How long jobs took and waited: the share that was done within a time."""
    drawn = []
    for key, title, what in (
        ("jct_s", "Completion time", "finished within"),
        ("queueing_s", "Waiting before the first step", "started within"),
    ):
        lines = [
            Line(name=name, slot=slot, points=_series(figures, key), is_step=True)
            for slot, (name, figures) in enumerate(found.items())
        ]
        times_s = [x for line in lines for x, _ in line.points]
        if times_s:
            # The first policy is drawn last, so that no other line lies over it.
            picture = chart.line_chart(
                lines[::-1],
                chart.log_time_axis(times_s, "time since submission (powers of ten)"),
                chart.fraction_axis(f"share of jobs {what}"),
                label=f"{title}: share of jobs by time, one line for each of {', '.join(found)}",
            )
            drawn.append(element("figure", element("h3", title), picture, style="margin: 0"))
    if not drawn:
        return None
    return page.section(
        "How long jobs took and waited",
        element("div", *drawn, class_="pair"),
        note="Higher and further left is sooner. Each line counts the jobs that got there under its policy.",
    )


def _timelines(found: Mapping[str, Figures], num_devices: int | None) -> Element | None:
    """What was held and what was admitted over time, one pair of charts for each policy, all on the same axes."""
    held = {name: _series(figures, "allocated") for name, figures in found.items()}
    submitted = {name: _series(figures, "submitted") for name, figures in found.items()}
    admitted = {name: _series(figures, "admitted") for name, figures in found.items()}
    ends_s = [line[-1][0] for lines in (held, submitted, admitted) for line in lines.values() if line]
    if not ends_s:
        return None
    end_s = max(ends_s)
    time = chart.time_axis(end_s, "time since the first submission")
    most = max(_highest(held.values()), num_devices or 0)
    devices = chart.Axis(low=0.0, high=float(most), title="devices held")
    jobs = chart.count_axis(_highest([*submitted.values(), *admitted.values()]), "jobs submitted and admitted")
    panels = []
    for slot, name in enumerate(found):
        parts: list[Content] = [element("h3", page.swatch(slot), name)]
        if held[name]:
            line = Line(name=f"{name}: devices held", slot=slot, points=held[name], is_step=True, is_filled=True)
            parts.append(
                chart.line_chart(
                    [line],
                    time,
                    devices,
                    label=f"{name}: devices held over time",
                    size=(430, 150),
                    limit=None if num_devices is None else float(num_devices),
                )
            )
        if submitted[name] or admitted[name]:
            lines = [
                Line(name="submitted", slot=None, points=_until(submitted[name], end_s), is_step=True),
                Line(name=f"{name}: admitted", slot=slot, points=_until(admitted[name], end_s), is_step=True),
            ]
            parts.append(
                chart.line_chart(lines, time, jobs, label=f"{name}: jobs submitted and admitted", size=(430, 150))
            )
        panels.append(element("div", *parts, class_=f"alone of-{slot}"))
    return page.section(
        "Over time",
        element("div", *panels, class_="many"),
        note="Above: devices held; the dashed level is all there are. Below: jobs submitted (thin, grey) and "
        "admitted (the policy's line); where they part, jobs were declined.",
    )


def _until(line: tuple[chart.Point, ...], end_s: float) -> tuple[chart.Point, ...]:
    """The line with its last value held until the end."""
    return (*line, (end_s, line[-1][1])) if line and line[-1][0] < end_s else line


def _efficiencies(found: Mapping[str, Figures]) -> Element | None:
    lines = [
        Line(name=name, slot=slot, points=chart.averaged(_series(figures, "efficiency"), _NUM_AVERAGES), is_step=True)
        for slot, (name, figures) in enumerate(found.items())
    ]
    ends_s = [line.points[-1][0] for line in lines if line.points]
    if not ends_s:
        return None
    high = _highest([line.points for line in lines])
    picture = chart.line_chart(
        lines[::-1],
        chart.time_axis(max(ends_s), "time since the first submission"),
        chart.fraction_axis("efficiency") if high <= 1.0 else chart.count_axis(high, "efficiency"),
        label=f"Cluster efficiency over time, one line for each of {', '.join(found)}",
        size=(1100, 240),
    )
    return page.section(
        "Cluster efficiency over time",
        picture,
        note="Mean over all devices of a job's speed for each device it holds, against its speed on one device; an "
        "idle device counts nothing (ElasticFlow, equation 8). Each step is the mean over one part in 96 of that run.",
    )


def _highest(lines: Any) -> float:
    return max((y for line in lines for _, y in line), default=1.0)


def _everything(found: Mapping[str, Figures]) -> Element | None:
    """The figures of the answer that have no column above."""
    keys: dict[str, None] = {}
    for figures in found.values():
        keys.update(
            dict.fromkeys(
                key
                for key, value in figures.items()
                if key not in _SHOWN_ABOVE and (value is None or isinstance(value, int | float | str))
            )
        )
    if not keys:
        return None
    header: page.Row = ["Figure", *(element("span", page.swatch(slot), name) for slot, name in enumerate(found))]
    rows: list[page.Row] = [[key, *(_plain(key, figures.get(key)) for figures in found.values())] for key in keys]
    table = page.table(header, rows, caption="Further figures by policy", column_class="of-{}")
    return page.section("Further figures", table, note="Named as in the JSON answer.")


def _plain(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if key.endswith("_s") and "per_" not in key and not key.startswith("cpu"):
        return page.seconds(value)
    return page.figure(value)


def _count(value: int | None) -> str:
    return page.UNKNOWN if value is None else f"{value:,}"


def _run_facts(answer: Mapping[str, Any], command: str) -> Sequence[tuple[str, Content]]:
    overhead = answer.get("overhead")
    pairs: list[tuple[str, Content]] = [
        ("Trace", str(answer.get("trace", page.UNKNOWN))),
        ("Cluster", str(answer.get("cluster", page.UNKNOWN))),
        ("Seed", str(answer.get("seed", page.UNKNOWN))),
    ]
    for key, name in (("num_devices", "Devices"), ("num_jobs", "Jobs"), ("skipped", "Rows left out")):
        if answer.get(key) is not None:
            pairs.append((name, page.figure(answer[key])))
    if answer.get("profiles") is not None:
        pairs.append(("Speed profiles", str(answer["profiles"])))
    if overhead is not None:
        pairs.append(("Overhead rule", OVERHEAD_RULES.get(str(overhead), str(overhead))))
    if command:
        pairs.append(("Command", element("code", command)))
    return pairs
