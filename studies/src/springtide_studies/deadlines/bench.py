"""`springtide bench deadlines`: how many deadlines each policy meets on every trace, beside what others reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide_studies.deadlines.references import BASELINE, OURS, PublishedArtifact, References, read_references
from springtide_studies.deadlines.runs import BenchCase, Runs, find_cases, trace_files
from springtide_studies.options import names_of, only_option, policies_option, seed_option, trace_folders, trace_options
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

# The policy that decides as the published program does.
ARTIFACT = "elasticflow-artifact"
POLICIES: tuple[str, ...] = (OURS, BASELINE, "edf+elastic", "edf+admission", "edf")
# The aims of our policy: at least this share of the offline bound, no broken promise, at most so many CPU seconds.
LEAST_SHARE_OF_BOUND = 0.97
MOST_CPU_S = 300.0
# Figures of a run that stand in the table as they are.
_TAKEN = (
    *("jobs", "deadline_jobs", "deadlines_met", "deadline_satisfactory_ratio", "admitted", "promised"),
    *(
        "admitted_and_broken",
        "misses",
        "jct_mean_s",
        "makespan_s",
        "utilisation",
        "resizes",
        "decision_ms_p99",
        "cpu_s",
    ),
)


def run_bench(
    folders: Sequence[Path],
    runs: Runs,
    *,
    policies: Sequence[str] = POLICIES,
    only: Sequence[str] = (),
    cluster: str | None = None,
) -> dict[str, Any]:
    """Run every trace of the folders under every policy and return the report of `springtide bench`.

    A row sets springtide beside elasticflow, both measured here; `bound` is the offline bound in jobs. `table` has
    every trace and policy, with what the published artifact printed, what its paper says and the bound. Raises
    InvalidRequest.
    """
    cases = find_cases(trace_files(folders), only, cluster)
    references = read_references(folders)
    load_before = machine_load()
    found = runs.all(cases, policies)
    rows = [_row(case, found, references) for case in cases if (case, OURS) in found]
    table = [_entry(case, policy, figures, references) for (case, policy), figures in found.items()]
    return {
        "bench": "deadlines",
        "machine": machine_facts(load_before) | {"seed": runs.seed, "overhead": runs.overhead},
        "rows": rows,
        "criterion": (
            f"{OURS} meets at least {LEAST_SHARE_OF_BOUND:.0%} of the bound where one is known, breaks no promise, "
            f"and takes at most {MOST_CPU_S:.0f} CPU seconds a trace"
        ),
        "passed": bool(rows) and all(is_good(entry) for entry in table if entry["policy"] == OURS),
        "table": table,
    }


def is_good(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of the table reaches the aim."""
    if "error" in entry or entry["admitted_and_broken"]:
        return False
    share, cpu_s = entry["share_of_bound"], entry["cpu_s"]
    return (share is None or share >= LEAST_SHARE_OF_BOUND) and (cpu_s is None or cpu_s <= MOST_CPU_S)


def _row(
    case: BenchCase, found: Mapping[tuple[BenchCase, str], Mapping[str, Any]], references: References
) -> dict[str, Any]:
    ours = found[case, OURS].get("deadlines_met")
    baseline = found.get((case, BASELINE), {}).get("deadlines_met")
    return {
        "case": case.label,
        "ours": ours,
        "baseline": baseline,
        "baseline_name": f"{BASELINE}, run here" if baseline is not None else "none",
        "ratio": ratio(ours, baseline),
        "bound": references.bounds.get((case.trace, case.num_devices)),
        "unit": "deadlines met",
    }


def _entry(case: BenchCase, policy: str, figures: Mapping[str, Any], references: References) -> dict[str, Any]:
    theirs = BASELINE if policy == ARTIFACT else policy
    key = (case.trace, case.num_devices, theirs)
    artifact = references.artifact.get(key, PublishedArtifact())
    published = references.published.get(key, references.published.get((case.trace, 0, theirs)))
    bound = references.bounds.get((case.trace, case.num_devices))
    entry: dict[str, Any] = {"trace": case.trace, "cluster": case.cluster, "policy": policy}
    entry |= {"error": figures["error"]} if "error" in figures else {key: figures.get(key) for key in _TAKEN}
    return entry | {
        "artifact_met": artifact.met,
        "artifact_ratio": artifact.ratio,
        "artifact_mended_met": artifact.mended_met,
        "published_ratio": published,
        "bound": bound,
        "share_of_bound": ratio(figures.get("deadlines_met"), bound),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Two tables for a page of results: our policy beside the baselines by trace, and every policy by trace."""
    entries: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for entry in report["table"]:
        entries.setdefault((entry["trace"], entry["cluster"]), {})[entry["policy"]] = entry
    header = (
        *("trace", "cluster", "deadlines", OURS, "broken", "share of bound", "CPU s", f"{BASELINE} here", "its broken"),
        *("artifact", "artifact mended", "published", "LP bound"),
    )
    rows = []
    for (trace, cluster), by_policy in sorted(entries.items()):
        ours, baseline = by_policy.get(OURS, {}), by_policy.get(BASELINE, {})
        known = ours or baseline
        rows.append(
            [
                trace,
                cluster,
                _said(known.get("deadline_jobs")),
                _said(ours.get("deadlines_met"), error=ours.get("error")),
                _said(ours.get("admitted_and_broken")),
                _percent(ours.get("share_of_bound")),
                _said(ours.get("cpu_s"), digits=1),
                _said(baseline.get("deadlines_met"), error=baseline.get("error")),
                _said(baseline.get("admitted_and_broken")),
                _said(baseline.get("artifact_met")),
                _said(baseline.get("artifact_mended_met")),
                _percent(baseline.get("published_ratio")),
                _said(known.get("bound")),
            ]
        )
    return "\n\n".join([markdown_table(header, rows), _all_policies(entries)])


def _all_policies(entries: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]) -> str:
    """Deadlines met by every policy; behind a slash the promises broken by one that makes any."""
    policies = list(dict.fromkeys(policy for by_policy in entries.values() for policy in by_policy))
    rows = []
    for (trace, cluster), by_policy in sorted(entries.items()):
        cells = []
        for policy in policies:
            entry = by_policy.get(policy, {})
            broken = entry.get("admitted_and_broken") if entry.get("promised") else None
            cells.append(
                _said(entry.get("deadlines_met"), error=entry.get("error")) + (f" / {broken}" if broken else "")
            )
        rows.append([trace, cluster, *cells])
    return markdown_table(("trace", "cluster", *policies), rows)


def _said(value: float | None, *, digits: int = 0, error: str | None = None) -> str:
    if error is not None:
        return "failed"
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(
        trace_folders(options),
        Runs.of(options, tell),
        policies=names_of(options["policies"]) or POLICIES,
        only=names_of(options["only"]),
        cluster=options["cluster"],
    )


def _write_page(path: Path, report: Report) -> None:
    from springtide_studies.deadlines.deadlines_page import write_deadlines

    write_deadlines(path, report)


BENCH = Bench(
    run=_run,
    options=[
        *trace_options("elasticflow"),
        only_option("the traces"),
        policies_option(),
        click.Option(["--cluster"], metavar="NODESxDEVICES", help="For traces whose cluster is not known."),
        click.Option(["--profiles"], metavar="DIR", help="Scaling tables, if not those near the traces."),
        seed_option(),
    ],
    markdown=markdown,
    write_page=_write_page,
)
