"""`springtide bench jct`: how long jobs take from submission to end under each policy, beside Pollux and the bound."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import make_policy
from springtide_studies.deadlines.runs import source_digest
from springtide_studies.jct.bound import find_bound
from springtide_studies.jct.play import JctCase, play_cases
from springtide_studies.jct.published import compare, read_published
from springtide_studies.options import folder_of, names_of, policies_option, trace_folders, trace_options
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

OURS, BASELINE = "springtide", "pollux"
POLICIES = (OURS, "goodput", BASELINE, "sia", "fapes", "optimus-oracle", "tiresias-tuned")
LOADS, LENGTHS, TABLES = ("0.5", "1", "1.5", "2"), ("known", "unknown"), ("raw", "packed")
PUBLISHED_ROUND_S = 60.0
# Policies of ours that decide in rounds, which take the published ones at the published cost of a restart.
_IN_ROUNDS = frozenset({"goodput"})
# Bounds on the mean over workloads (ratio to Pollux) by what a restart costs, published or ours, and what is known.
_AIMS = {("pollux", "known"): 0.82, ("measured", "known"): 0.72, ("pollux", "unknown"): 0.88}
# Pollux here has to reproduce its published figures, otherwise the comparison is worthless.
_FAITHFUL_PERCENT = 3.0
_FOLDERS = {"0.5": "workloads-0.5", "1": "workloads", "1.5": "workloads-1.5", "2": "workloads-2.0"}


class JctOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is played: `data` has profiles/, workloads-osdi21/ and published-osdi21/; see the command's help.

    `traces` is a folder of workloads instead of those of `data`, `only` their numbers or names. `round_s` is handed to
    every policy that takes one.
    """

    data: Path
    traces: Path | None = None
    only: tuple[str, ...] = ()
    load: str = "1"
    overhead: str = "pollux"
    round_s: float | None = None
    length: str = "known"
    tables: str = "raw"
    has_bound: bool = True
    cache: Path | None = None
    num_processes: int = 1


def run_bench(
    options: JctOptions,
    policies: Sequence[str] = POLICIES,
    *,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Play every workload under every policy: one row a workload and one for their mean.

    `timer` counts CPU seconds; processes of their own count theirs. Raises InvalidRequest.
    """
    load_before = machine_load()
    paths = find_workloads(options)
    published = read_published(options.data, options.load)
    named = {policy: _played_as(policy, options) for policy in policies}
    cases = {
        (path, policy): JctCase(
            workload=str(path),
            profiles=str(options.data / "profiles"),
            policy=named[policy],
            overhead=options.overhead,
            length="unknown" if options.length == "unknown" else "known",
            tables=options.tables,
            # At the published cost everything is as published, the artifact's whole seconds too.
            whole_seconds=options.overhead == "pollux",
        )
        for path in paths
        for policy in policies
    }
    found = _play(cases, options, timer, tell)
    rows = []
    for path in paths:
        bound = find_bound(path, options, tell) if options.has_bound else None
        by_policy = {policy: found[path, policy] for policy in policies}
        # A workload of another folder is not the published one of the same name.
        known = published if options.traces is None else {}
        rows.append(_row(path.stem, by_policy, bound, compare(by_policy, known, path.stem)))
    if len(rows) > 1:
        rows.append(_mean_row(rows, policies))
    report = {
        "bench": "jct",
        "rows": rows,
        "played_as": named,
        "settings": {key: str(value) for key, value in msgspec.structs.asdict(options).items() if value is not None},
        "machine": machine_facts(load_before),
    }
    return report | _verdict(rows[-1], options)


def find_workloads(options: JctOptions) -> list[Path]:
    """The workloads that were asked for, in the order of their names. Raises InvalidRequest if one is missing."""
    if options.load not in _FOLDERS:
        raise InvalidRequest(f"there is no load {options.load!r}; choose one of {', '.join(_FOLDERS)}")
    folder = options.traces or options.data / "workloads-osdi21" / _FOLDERS[options.load]
    paths = {path.stem: path for path in sorted(folder.glob("*.csv"))}
    if not paths:
        raise InvalidRequest(
            f"no workload in {folder}; name the folder with --data DIR, or workloads with --traces DIR"
        )
    wanted = [name if name in paths else f"workload-{name}" for name in options.only] or list(paths)
    for name in wanted:
        if name not in paths:
            raise InvalidRequest(f"there is no workload {name!r} in {folder}; there are {', '.join(paths)}")
    return [paths[name] for name in dict.fromkeys(wanted)]


def _played_as(policy: str, options: JctOptions) -> str:
    """The policy's name with the length of its rounds, where it takes one that is not written there.

    At the published cost of a restart `goodput` decides in the published rounds, unless it is said otherwise.
    """
    round_s = options.round_s
    if round_s is None and options.overhead == "pollux" and policy.partition(":")[0] in _IN_ROUNDS:
        round_s = PUBLISHED_ROUND_S
    if round_s is None or "round_s=" in policy:
        return policy
    named = f"{policy}:round_s={round_s:g}"
    try:
        make_policy(named)
    except InvalidRequest:
        make_policy(policy)
        return policy
    return named


def _play(
    cases: Mapping[tuple[Path, str], JctCase],
    options: JctOptions,
    timer: Callable[[], float],
    tell: Callable[[str], None],
) -> dict[tuple[Path, str], dict[str, Any]]:
    keys = {case: key for key, case in cases.items()}
    digest = source_digest()
    found: dict[tuple[Path, str], dict[str, Any]] = {}
    places: dict[JctCase, Path] = {}
    waiting = []
    for key, case in cases.items():
        if options.cache is not None:
            options.cache.mkdir(parents=True, exist_ok=True)
            said = msgspec.json.encode(case) + Path(case.workload).read_bytes() + digest.encode()
            places[case] = options.cache / f"jct-{hashlib.sha256(said).hexdigest()[:24]}.json"
        place = places.get(case)
        if place is not None and place.is_file():
            found[key] = msgspec.json.decode(place.read_bytes(), type=dict[str, Any])
            tell(f"[{len(found)}/{len(cases)}] {_said(key, found[key])} (kept from an earlier run)")
        else:
            waiting.append(case)
    for case, figures in play_cases(waiting, timer, options.num_processes):
        key = keys[case]
        found[key] = figures
        tell(f"[{len(found)}/{len(cases)}] {_said(key, figures)}")
        if case in places and "error" not in figures:
            part = places[case].with_suffix(".part")
            part.write_bytes(msgspec.json.encode(figures))
            part.replace(places[case])
    return found


def _said(key: tuple[Path, str], figures: Mapping[str, Any]) -> str:
    path, policy = key
    if "error" in figures:
        return f"{path.stem}, {policy}: {figures['error']}"
    return f"{path.stem}, {policy}: {figures['jct_mean_s']:,.0f} s on average, {figures['cpu_s']:.0f} CPU s"


def _row(
    name: str, by_policy: Mapping[str, dict[str, Any]], bound: Mapping[str, Any] | None, published: Mapping[str, Any]
) -> dict[str, Any]:
    ours = _of(by_policy, OURS) or next(iter(by_policy.values()))
    baseline = _of(by_policy, BASELINE) or {}
    mean_s, bound_s = baseline.get("jct_mean_s"), None if bound is None else bound["jct_mean_s"]
    policies = {}
    for policy, figures in by_policy.items():
        ratios = {
            "ratio": ratio(figures.get("jct_mean_s"), mean_s),
            "of_bound": ratio(figures.get("jct_mean_s"), bound_s),
        }
        policies[policy] = figures | ratios
    return {
        "case": name,
        "ours": ours.get("jct_mean_s"),
        "baseline": mean_s,
        "baseline_name": BASELINE,
        "ratio": ratio(ours.get("jct_mean_s"), mean_s),
        "bound": bound_s,
        "bound_tight": None if bound is None else bound["jct_mean_tight_s"],
        "bound_by_application": None if bound is None else bound["jct_mean_s_by_application"],
        "unit": "s",
        "policies": policies,
        "published": dict(published),
    }


def _of(by_policy: Mapping[str, dict[str, Any]], plain: str) -> dict[str, Any] | None:
    """The figures of the first policy of that name, whatever its parameters are."""
    return next((figures for policy, figures in by_policy.items() if policy.partition(":")[0] == plain), None)


def _mean_row(rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> dict[str, Any]:
    """The mean over workloads of every figure, of ratios too; a policy that failed once has none."""
    means = {policy: _mean_figures([row["policies"][policy] for row in rows]) for policy in policies}
    named = {name for row in rows for name in row["published"]}
    return {
        "case": "mean",
        "baseline_name": BASELINE,
        "unit": "s",
        **{key: _mean(row[key] for row in rows) for key in ("ours", "baseline", "ratio", "bound", "bound_tight")},
        "policies": means,
        "published": {
            name: _mean_figures([row["published"].get(name, {"error": "not published"}) for row in rows])
            for name in sorted(named)
        },
    }


def _mean_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [figures["error"] for figures in found if "error" in figures]
    if errors:
        return {"error": errors[0]}
    keys = [key for key, value in found[0].items() if isinstance(value, int | float)]
    return {key: max(f[key] for f in found) if key.endswith("_max") else _mean(f[key] for f in found) for key in keys}


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _verdict(row: Mapping[str, Any], options: JctOptions) -> dict[str, Any]:
    """Whether our mean is within its bound, our tails are no worse, and Pollux is as published."""
    ours, baseline = _of(row["policies"], OURS), _of(row["policies"], BASELINE)
    failed = [policy for policy, figures in row["policies"].items() if "error" in figures]
    if ours is None or baseline is None or failed:
        return {"passed": not failed, "criterion": f"{OURS} and {BASELINE} were not both played: nothing to judge"}
    aim = _AIMS.get((options.overhead, options.length), 1.0)
    off = (_of(row["published"], BASELINE) or {}).get("difference_percent")
    is_faithful = off is None or options.overhead != "pollux" or abs(off) <= _FAITHFUL_PERCENT
    has_short_tail = ours["jct_p99_s"] <= baseline["jct_p99_s"] and ours["makespan_s"] <= baseline["makespan_s"]
    said = f"mean ratio to {BASELINE} at most {aim}, p99 and makespan no worse"
    if off is not None and options.overhead == "pollux":
        said += f"; {BASELINE} within {_FAITHFUL_PERCENT:g} % of the published mean (here {off:+.1f} %)"
    return {"passed": bool(row["ratio"] <= aim and has_short_tail and is_faithful), "criterion": said}


def markdown(report: Mapping[str, Any]) -> str:
    """Two tables for a page of results: mean completion times by workload, and every policy's figures on average."""
    rows = report["rows"]
    policies = list(rows[0]["policies"])
    header = ["workload", *(f"{policy} (ratio)" for policy in policies), "bound", *_published_names(rows)]
    lines = []
    for row in rows:
        cells = []
        for policy in policies:
            figures = row["policies"][policy]
            mean_s, part = figures.get("jct_mean_s"), figures.get("ratio")
            cells.append("failed" if mean_s is None else f"{mean_s:,.0f}" + (f" ({part:.3f})" if part else ""))
        published = [row["published"].get(name, {}) for name in _published_names(rows, is_plain=True)]
        told = [
            f"{p['jct_mean_s']:,.0f} ({p['difference_percent']:+.1f} %)" if "jct_mean_s" in p else "" for p in published
        ]
        lines.append([row["case"], *cells, "" if row["bound"] is None else f"{row['bound']:,.0f}", *told])
    return "\n\n".join([markdown_table(header, lines), _figures_table(rows[-1])])


def _published_names(rows: Sequence[Mapping[str, Any]], *, is_plain: bool = False) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["published"]))
    return names if is_plain else [f"{name} published (ours off by)" for name in names]


def _figures_table(row: Mapping[str, Any]) -> str:
    columns = {
        "jct_mean_s": "mean s",
        "jct_p50_s": "p50",
        "jct_p95_s": "p95",
        "jct_p99_s": "p99",
        "makespan_s": "makespan s",
        "queueing_mean_s": "queueing s",
        "restarts_mean": "restarts",
        "restarts_max": "most",
        "gpu_hours": "GPU-h",
        "decision_ms_p50": "decision p50 ms",
        "decision_ms_p90": "p90",
        "decision_ms_max": "max",
    }
    lines = []
    for policy, figures in row["policies"].items():
        small = {"restarts_mean", "decision_ms_p50", "decision_ms_p90"}
        cells = [f"{figures[key]:,.{1 if key in small else 0}f}" if key in figures else "failed" for key in columns]
        lines.append([policy, *cells])
    return markdown_table([row["case"], *columns.values()], lines)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    data = Path(options["data"] or "")
    if not options["data"] or not (data / "profiles").is_dir():
        raise InvalidRequest("name the folder that holds profiles/ and workloads-osdi21/ with --data DIR")
    return run_bench(
        JctOptions(
            data=data,
            traces=trace_folders(options)[0] if options["traces"] else None,
            only=tuple(names_of(options["workloads"])),
            load=options["load"],
            overhead=options["overhead"],
            round_s=options["rounds"],
            length=options["length"],
            tables=options["tables"],
            has_bound=not options["without_bound"],
            cache=folder_of(options, "cache"),
            num_processes=options["processes"],
        ),
        names_of(options["policies"]) or POLICIES,
        timer=time.process_time,
        tell=tell,
    )


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--data"], metavar="DIR", help="The folder with profiles/ and workloads-osdi21/."),
        *trace_options("pollux"),
        policies_option(),
        click.Option(["--workloads"], metavar="N,N", help="These of the folder instead of all."),
        click.Option(
            ["--load"], type=click.Choice(LOADS), default="1", help="Times the published arrivals. [default: 1]"
        ),
        click.Option(["--rounds"], type=click.FloatRange(min=1.0), metavar="S", help="Rounds of so many seconds."),
        click.Option(
            ["--length"],
            type=click.Choice(LENGTHS),
            default="known",
            help="What policies are told of lengths. [default: known]",
        ),
        click.Option(
            ["--tables"],
            type=click.Choice(TABLES),
            default="raw",
            help="packed: no layout of a job beats the compact one. [default: raw]",
        ),
        click.Option(
            ["--without-bound"], is_flag=True, help="Do not look for the bound, which takes a minute a workload."
        ),
    ],
    markdown=markdown,
)
