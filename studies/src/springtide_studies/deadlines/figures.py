"""`springtide bench figures`: Figures 6b, 8, 9, 10 and 11 of ElasticFlow's evaluation, drawn anew from runs here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import POLICY_NAMES
from springtide_studies.deadlines.findings import CLOSE, EDF_SHOWN, FigureFinding, ordered, remarks
from springtide_studies.deadlines.references import References, read_references
from springtide_studies.deadlines.runs import BenchCase, Runs, trace_files
from springtide_studies.options import names_of, only_option, seed_option, trace_folders, trace_options
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

OURS, PAPERS = "springtide", "elasticflow"
_EVERYONE = (EDF_SHOWN, "edf", "gandiva", "tiresias", "themis", "chronus", PAPERS, OURS)
_VARIANTS = (EDF_SHOWN, "edf", "edf+admission", "edf+elastic", PAPERS, OURS)
_FIG9, _FIG10, _FIG11 = "gen_fig9_1000jobs_lam1500", "gen_fig10_100jobs_lam1500", "gen_fig11_200jobs_lam900_be"
_EFFICIENCY_S = 100 * 3600.0

Figures = Mapping[str, Any]
Values = dict[str, float | None]


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One group of bars of a figure: a trace on a cluster, the measure of each policy and what the paper shows."""

    name: str
    case: str
    measure: str
    values: Values
    published: Values


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """A figure: what it shows, its panels, and the paper's findings with whether they hold here."""

    figure: str
    title: str
    policies: tuple[str, ...]
    panels: tuple[Panel, ...]
    findings: tuple[FigureFinding, ...]
    lines: dict[str, list[list[float]]] = {}


_CASES: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "6b": (("195job", "16x8", "195 jobs, 128 devices"),),
        "8a": (("elasticVpollux_e", "16x4", "195 jobs, 64 T4"),),
        "8b": (
            *((f"cluster{n:02}", "64x8", f"#{n}") for n in (1, 2, 3)),
            ("cluster04", "128x8", "#4"),
            *((f"cluster{n:02}", "64x8", f"#{n}") for n in (5, 6)),
            *((f"cluster{n:02}", "128x8", f"#{n}") for n in (7, 8, 9)),
            ("cluster10", "32x8", "#10"),
            ("philly_103959", "32x8", "Philly"),
        ),
        "9": tuple((_FIG9, f"{nodes}x8", f"{nodes * 8} devices") for nodes in (8, 16, 32)),
        "10": ((_FIG10, "16x8", "100 jobs, 128 devices"),),
        "11": tuple((f"{_FIG11}0.{n}", "8x8", f"{n}0 % best effort") for n in (1, 3, 5, 7, 9)),
    }
)
FIGURES: tuple[str, ...] = tuple(_CASES)
_POLICIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"9": _VARIANTS, "10": (EDF_SHOWN, "edf", "gandiva", "tiresias", PAPERS, OURS)}
)


def run_bench(folders: Sequence[Path], runs: Runs, *, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run what the figures need and return a report of `springtide bench` with `figures` and `ordering` beside.

    `only` names figures. Traces that no folder holds are left out of their figure. Raises InvalidRequest.
    """
    unknown = [name for name in only if name not in _CASES]
    if unknown:
        raise InvalidRequest(f"there is no figure {unknown[0]!r} here; choose from {', '.join(FIGURES)}")
    paths = {path.stem: path for path in trace_files(folders)}
    references = read_references(folders)
    load_before = machine_load()
    drawings = [
        _draw(figure, paths, runs, references)
        for figure in (only or FIGURES)
        if any(trace in paths for trace, _, _ in _CASES[figure])
    ]
    if not drawings:
        raise InvalidRequest("none of the traces of these figures is there; name their folder with --traces DIR")
    ordering = {
        drawing.figure: {
            "same_order": all(finding.holds for finding in drawing.findings),
            "findings": [_plain(finding) for finding in drawing.findings],
            "values": {panel.name: panel.values for panel in drawing.panels},
            "published": {panel.name: panel.published for panel in drawing.panels if panel.published},
        }
        for drawing in drawings
    }
    return {
        "bench": "figures",
        "machine": machine_facts(load_before) | {"seed": runs.seed, "overhead": runs.overhead},
        "rows": [_row(drawing, panel) for drawing in drawings for panel in drawing.panels],
        "criterion": "every finding of the paper about the order of its policies holds here",
        "passed": all(found["same_order"] for found in ordering.values()),
        "ordering": ordering,
        "figures": [
            msgspec.to_builtins(drawing) | {"findings": [_plain(finding) for finding in drawing.findings]}
            for drawing in drawings
        ],
    }


def _plain(finding: FigureFinding) -> dict[str, Any]:
    return {"holds": finding.holds, **msgspec.to_builtins(finding)}


def _draw(figure: str, paths: Mapping[str, Path], runs: Runs, references: References) -> Drawing:
    policies = tuple(name for name in _POLICIES.get(figure, _EVERYONE) if name.partition(":")[0] in POLICY_NAMES)
    cases = {
        name: BenchCase(path=paths[trace], cluster=cluster) for trace, cluster, name in _CASES[figure] if trace in paths
    }
    results = runs.all(list(cases.values()), policies)
    found = {name: {policy: results[case, policy] for policy in policies} for name, case in cases.items()}
    if figure == "10":
        return _draw_efficiency(found["100 jobs, 128 devices"], cases["100 jobs, 128 devices"], policies)
    panels = [_satisfied(name, case, found[name], references) for name, case in cases.items()]
    findings = [_same_order(panel) for panel in panels if panel.published]
    if figure == "9":
        findings += _sources(panels)
        title = "Sources of improvement: admission and elasticity, alone and together"
    elif figure == "11":
        best_effort = [_best_effort(name, case, found[name]) for name, case in cases.items()]
        findings += [_leads(panel) for panel in panels] + [_shortest(panel) for panel in best_effort[:1]]
        panels += best_effort
        title = "Jobs with deadlines beside best-effort jobs"
    else:
        findings += [_leads(panel) for panel in panels]
        title = {"6b": "Deadlines met: the trace of the testbed", "8a": "Deadlines met: the trace of Pollux"}.get(
            figure, "Deadlines met, trace by trace"
        )
    return Drawing(figure=figure, title=title, policies=policies, panels=tuple(panels), findings=tuple(findings))


def _satisfied(name: str, case: BenchCase, found: Mapping[str, Figures], references: References) -> Panel:
    """Deadline satisfactory ratio of each policy, with the paper's."""
    published: Values = {}
    for policy in found:
        theirs = {"edf": "", EDF_SHOWN: "edf"}.get(policy, policy)
        known = references.published.get((case.trace, case.num_devices, theirs))
        published[policy] = references.published.get((case.trace, 0, theirs)) if known is None else known
    return Panel(
        name=name,
        case=case.label,
        measure="deadlines met",
        values={policy: figures.get("deadline_satisfactory_ratio") for policy, figures in found.items()},
        published={policy: value for policy, value in published.items() if value is not None},
    )


def _best_effort(name: str, case: BenchCase, found: Mapping[str, Figures]) -> Panel:
    """Mean completion time of best-effort jobs, against Gandiva's (Figure 11(b))."""
    gandiva_s = found.get("gandiva", {}).get("best_effort_jct_mean_s")
    return Panel(
        name=f"{name}: completion of best-effort jobs",
        case=case.label,
        measure="mean completion time of best-effort jobs, over Gandiva's",
        values={policy: ratio(figures.get("best_effort_jct_mean_s"), gandiva_s) for policy, figures in found.items()},
        published={},
    )


def _draw_efficiency(found: Mapping[str, Figures], case: BenchCase, policies: tuple[str, ...]) -> Drawing:
    efficiency = Panel(
        name="efficiency over the first 100 h",
        case=case.label,
        measure="cluster efficiency, first 100 h",
        values={policy: figures.get("cluster_efficiency_100h") for policy, figures in found.items()},
        published={},
    )
    makespan = Panel(
        name="makespan",
        case=case.label,
        measure="makespan, hours",
        values={policy: ratio(figures.get("makespan_s"), 3600.0) for policy, figures in found.items()},
        published={},
    )
    finished = {
        policy: (figures.get("jobs") or 0) - (figures.get("declined") or 0) for policy, figures in found.items()
    }
    return Drawing(
        figure="10",
        title="Cluster efficiency",
        policies=policies,
        panels=(efficiency, makespan),
        findings=(
            ordered(
                f"{PAPERS} uses devices at least as efficiently as every baseline over the first 100 h",
                [(policy, PAPERS) for policy in _others(efficiency)],
                efficiency.values,
            ),
            _smallest(makespan, f"{PAPERS} is done first with all jobs"),
            FigureFinding(
                text="every policy runs every job",
                against=tuple(
                    f"{policy} runs {count}" for policy, count in finished.items() if count != max(finished.values())
                ),
            ),
        ),
        lines={
            policy: _start((figures.get("series") or {}).get("efficiency", [])) for policy, figures in found.items()
        },
    )


def _start(line: list[list[float]]) -> list[list[float]]:
    """The first 100 hours of a step line, its last value held."""
    begun = [point for point in line if point[0] <= _EFFICIENCY_S]
    return [*begun, [_EFFICIENCY_S, begun[-1][1]]] if begun else []


def _known(values: Values) -> Iterator[tuple[str, float]]:
    return ((policy, value) for policy, value in values.items() if value is not None)


def _same_order(panel: Panel) -> FigureFinding:
    """Whether every two policies that the paper tells apart stand in its order here."""
    shown = sorted(_known(panel.published), key=lambda pair: pair[1])
    pairs = [
        (low, high)
        for index, (low, low_published) in enumerate(shown)
        for high, high_published in shown[index + 1 :]
        if high_published - low_published > CLOSE
    ]
    return ordered(f"{panel.name}: {' < '.join(policy for policy, _ in shown)}", pairs, panel.values)


def _others(panel: Panel) -> list[str]:
    return [policy for policy, _ in _known(panel.values) if policy not in (OURS, PAPERS)]


def _leads(panel: Panel) -> FigureFinding:
    text = f"{panel.name}: {PAPERS} meets at least as many as every baseline"
    return ordered(text, [(policy, PAPERS) for policy in _others(panel)], panel.values)


def _sources(panels: Sequence[Panel]) -> list[FigureFinding]:
    """Figure 9's two findings: each source helps, both together most; elasticity does more on a larger cluster."""
    pairs = [
        (EDF_SHOWN, "edf+admission"),
        (EDF_SHOWN, "edf+elastic"),
        ("edf+admission", PAPERS),
        ("edf+elastic", PAPERS),
    ]
    findings = [
        ordered(
            f"{panel.name}: admission and elasticity each improve on EDF, and together on each alone",
            pairs,
            panel.values,
        )
        for panel in panels
    ]
    gaps = [(panel.values.get(PAPERS) or 0.0) - (panel.values.get("edf+elastic") or 0.0) for panel in panels]
    shrinks = all(wider >= narrower for wider, narrower in pairwise(gaps)) and gaps[0] > gaps[-1]
    said = ", ".join(f"{gap:.3f}" for gap in gaps)
    text = f"{PAPERS}'s lead over edf+elastic shrinks as the cluster grows"
    return [*findings, FigureFinding(text=text, against=() if shrinks else (said,))]


def _shortest(panel: Panel) -> FigureFinding:
    return _smallest(panel, f"{panel.name}: shortest under {PAPERS}")


def _smallest(panel: Panel, text: str) -> FigureFinding:
    """Whether no policy of the paper's has a smaller value."""
    here = panel.values.get(PAPERS)
    if here is None:
        return FigureFinding(text=text, against=(f"{PAPERS} has no value",))
    below = [(policy, panel.values[policy] or 0.0) for policy in _others(panel)]
    return FigureFinding(
        text=text,
        against=tuple(f"{policy} {value:.3f}, {PAPERS} {here:.3f}" for policy, value in below if value < here),
    )


def _row(drawing: Drawing, panel: Panel) -> dict[str, Any]:
    ours, baseline = panel.values.get(OURS), panel.values.get(PAPERS)
    return {
        "case": f"figure {drawing.figure}, {panel.name}",
        "ours": ours,
        "baseline": baseline,
        "baseline_name": f"{PAPERS}, run here",
        "ratio": ratio(ours, baseline),
        "bound": None,
        "unit": panel.measure,
    }


def markdown(report: Mapping[str, Any]) -> str:
    """For each figure a table of values, the paper's in brackets, and its findings."""
    parts = []
    for drawing in report["figures"]:
        policies = drawing["policies"]
        rows = [
            [panel["name"], *(_cell(panel["values"].get(name), panel["published"].get(name)) for name in policies)]
            for panel in drawing["panels"]
        ]
        lines = [f"### Figure {drawing['figure']}: {drawing['title']}", "", markdown_table(("", *policies), rows), ""]
        for finding in drawing["findings"]:
            lines.append(f"- {'holds' if finding['holds'] else 'does not hold'}: {finding['text']}{remarks(finding)}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(value: float | None, published: float | None) -> str:
    said = "" if value is None else f"{value:.3f}"
    return said if published is None else f"{said} ({published:.3f})"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(trace_folders(options), Runs.of(options, tell), only=names_of(options["only"]))


def _write_page(path: Path, report: Report) -> None:
    from springtide_studies.deadlines.figures_page import write_figures

    write_figures(path, report)


BENCH = Bench(
    run=_run,
    options=[
        *trace_options("elasticflow"),
        only_option(", ".join(FIGURES)),
        click.Option(["--profiles"], metavar="DIR", help="Scaling tables, if not those near the traces."),
        seed_option(),
    ],
    markdown=markdown,
    write_page=_write_page,
)
