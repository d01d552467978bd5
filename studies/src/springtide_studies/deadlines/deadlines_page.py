"""The page of `springtide bench deadlines`: for each trace what every policy met, beside the bound that none passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.simulator.report import chart, page
from springtide.simulator.report.chart import Bar, BarRow
from springtide.simulator.report.page import Content, Element, element
from springtide_studies.deadlines.references import BASELINE, OURS

Entry = Mapping[str, Any]


def write_deadlines(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page of a report of `bench_deadlines.run_bench`. Raises OSError."""
    page.write(path, render(report))


def render(report: Mapping[str, Any]) -> str:
    """The page as text."""
    cases: dict[str, list[Entry]] = {}
    for entry in report["table"]:
        cases.setdefault(f"{entry['trace']} on {entry['cluster']}", []).append(entry)
    policies = list(dict.fromkeys(entry["policy"] for entry in report["table"]))
    slots = {policy: slot for slot, policy in enumerate(policies)}
    panels = [
        element("div", element("h3", name), element("p", _said(entries), class_="note"), _bars(name, entries, slots))
        for name, entries in sorted(cases.items())
    ]
    machine: list[tuple[str, Content]] = [(str(name), str(value)) for name, value in report["machine"].items()]
    content: list[Content] = [
        element("h1", "Deadlines met on every trace"),
        element("p", _lead(report["table"]), class_="lead"),
        page.switches({slot: policy for policy, slot in slots.items()}),
        page.section(
            "By trace",
            element("div", *panels, class_="many"),
            note="Bars: jobs that met their deadline, of all jobs with one; red: admitted and late. The outline is the "
            "offline bound: the future known, fractional devices, no overhead.",
        ),
        page.section("All figures", _table(report["table"], slots)),
        page.section("This run", page.facts([*machine, ("criterion", report["criterion"])])),
    ]
    return page.document("Deadlines met on every trace", *content)


def _lead(table: Sequence[Entry]) -> str:
    ours = [entry for entry in table if entry["policy"] == OURS and "error" not in entry]
    if not ours:
        return f"{OURS} was not among the policies."
    met, jobs = (sum(entry[key] for entry in ours) for key in ("deadlines_met", "deadline_jobs"))
    broken = sum(entry["admitted_and_broken"] for entry in ours)
    shares = [entry["share_of_bound"] for entry in ours if entry["share_of_bound"] is not None]
    said = f"{OURS} meets {met:,} of {jobs:,} deadlines on {len(ours)} traces and breaks {broken:,} promises"
    said += f"; at least {page.fraction(min(shares))} of the bound on each" if shares else ""
    num_failed = sum(entry["policy"] == OURS and "error" in entry for entry in table)
    return f"{said}. It failed on {num_failed} more." if num_failed else f"{said}."


def _said(entries: Sequence[Entry]) -> str:
    """What others reached on this trace."""
    known = {entry["policy"]: entry for entry in entries}
    first, theirs = entries[0], known.get(BASELINE, entries[0])
    parts = []
    if first["bound"] is not None:
        parts.append(f"bound {first['bound']:,}")
    if theirs["policy"] == BASELINE:
        for key, name in (("artifact_met", "artifact"), ("artifact_mended_met", "mended")):
            if theirs[key] is not None:
                parts.append(f"{name} {theirs[key]:,}")
        if theirs["published_ratio"] is not None:
            parts.append(f"published {page.fraction(theirs['published_ratio'])}")
    return ", ".join(parts)


def _bars(name: str, entries: Sequence[Entry], slots: Mapping[str, int]) -> Element:
    rows = []
    most = max([entry.get("deadline_jobs") or 1 for entry in entries])
    for entry in entries:
        policy, slot = entry["policy"], slots[entry["policy"]]
        if "error" in entry:
            rows.append(BarRow(name=policy, bars=(), label="failed", slot=slot))
            continue
        met, broken = entry["deadlines_met"], entry["admitted_and_broken"] if entry["promised"] else 0
        bars = [Bar(value=met, look=f"s{slot % page.NUM_SERIES}", title=f"{policy}: {met:,} met")]
        if broken:
            bars.append(Bar(value=broken, look="broken", title=f"{policy}: {broken:,} promises broken"))
        share = "" if entry["share_of_bound"] is None else f" ({page.fraction(entry['share_of_bound'])})"
        rows.append(
            BarRow(
                name=policy,
                bars=tuple(bars),
                label=f"{met:,}{share}",
                outline=entry["bound"],
                outline_title=f"bound: {entry['bound']}",
                slot=slot,
            )
        )
    label = f"{name}: deadlines met by policy"
    return chart.bar_chart(rows, most, label=label, width=430, name_width=104, label_width=104)


def _table(table: Sequence[Entry], slots: Mapping[str, int]) -> Element:
    header = (
        "Trace",
        "Cluster",
        "Policy",
        "Deadlines",
        "Met",
        "Share of bound",
        "Broken",
        "CPU s",
        "Slowest decisions, ms",
    )
    rows: list[page.Row] = [
        [
            entry["trace"],
            entry["cluster"],
            element("span", entry["policy"]),
            page.figure(entry.get("deadline_jobs")),
            "failed" if "error" in entry else page.figure(entry["deadlines_met"]),
            page.fraction(entry["share_of_bound"]),
            page.figure(entry["admitted_and_broken"]) if entry.get("promised") else page.UNKNOWN,
            page.figure(entry.get("cpu_s")),
            page.figure(entry.get("decision_ms_p99")),
        ]
        for entry in table
    ]
    made = page.table(header, rows, caption="Figures by trace and policy")
    return element("details", element("summary", "As a table"), made)
