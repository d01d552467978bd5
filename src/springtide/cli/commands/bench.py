"""`springtide bench`: each measurement with its baseline, as a table, as JSON, or as Markdown for a page of results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import msgspec

from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.columns import align, number
from springtide.core.errors import BackendError

BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "communication": "how far predictors of communication time are off on placements that none has seen",
        "deadlines": "how many deadlines each policy meets on every trace of a folder, beside others and the bound",
        "decision": "how long a policy thinks at one event, from 64 to 8,192 devices",
        "fapes": "FaPES's table beside its rivals, ablations, loans at 8,000 GPUs, and its gap to the exact plan",
        "figures": "the figures of ElasticFlow's evaluation drawn anew, and whether the order of policies is the same",
        "funcpipe": "functions in a pipeline beside LambdaML, HybridPS, TPDMP and Bayes, as in FuncPipe's figures",
        "gateway": "what the gateway adds to a call of a replica: time and CPU",
        "goals": "goals met by search in a world that is not its model, beside the best of all and other methods",
        "interpose": "what the CUDA interposition library adds to a launch, beside a stub driver; on no device",
        "jct": "how long jobs take under each policy that chooses workers and batch sizes, beside Pollux and the bound",
        "kubernetes": "1,000 nodes x 8, 2,000 jobs on a real API server: bind rate, watch lag, CPU, turns; slow API",
        "packing": "devices that instances share at the peak, beside other packers and the bound; CPU of each decision",
        "pipeline-plan": "how long the best plan of a pipeline of functions takes to find, and whether it is the best",
        "resize": "how long training stands still at each kind of resize, beside moving the state once",
        "sharing": "two services and a job on one shared device under surges, beside exclusive and static ones; real",
        "smlt": "batches that grow, data that arrives all day, models that change: searched beside a fixed allocation",
        "smlt-sync": "how SMLT, Siren, Cirrus, LambdaML and ours exchange a gradient, by parts, workers and stores",
        "sync": "how long replicas take to exchange a gradient through a store, beside the bound of separate links",
    }
)
# Which options belong to which benches.
_OPTIONS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "small": ("kubernetes", "resize", "sharing", "smlt-sync", "sync"),
        "traces": ("deadlines", "figures", "jct"),
        "only": ("deadlines", "fapes", "figures", "funcpipe", "goals", "smlt"),
        "policies": ("deadlines", "decision", "jct", "kubernetes"),
        "cluster": ("deadlines",),
        "profiles": ("deadlines", "figures"),
        "overhead": ("deadlines", "figures", "jct"),
        "cache": ("deadlines", "figures", "jct"),
        "processes": ("deadlines", "figures", "jct"),
        "html": ("deadlines", "figures", "smlt"),
        "sizes": ("decision", "packing", "pipeline-plan"),
        "events": ("decision",),
        "samples": ("communication",),
        "seed": (
            "communication",
            "deadlines",
            "decision",
            "fapes",
            "figures",
            "funcpipe",
            "goals",
            "interpose",
            "packing",
            "pipeline-plan",
            "sharing",
            "smlt",
            "smlt-sync",
            "sync",
        ),
        "markdown": (
            "communication",
            "deadlines",
            "decision",
            "fapes",
            "figures",
            "funcpipe",
            "goals",
            "jct",
            "packing",
            "pipeline-plan",
            "smlt",
        ),
        "data": ("jct", "packing"),
        "workloads": ("jct",),
        "load": ("jct",),
        "rounds": ("jct",),
        "length": ("jct",),
        "tables": ("jct",),
        "without_bound": ("jct",),
        "seeds": ("goals", "smlt"),
        "scenario": ("goals",),
        "launches": ("interpose",),
    }
)
# Where the measurements are.
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "communication": "springtide_studies.communication.bench",
        "deadlines": "springtide_studies.deadlines.bench",
        "decision": "springtide_studies.decision.bench",
        "fapes": "springtide_studies.fapes.bench",
        "figures": "springtide_studies.deadlines.figures",
        "funcpipe": "springtide_studies.funcpipe.bench",
        "goals": "springtide_studies.goals.bench",
        "interpose": "springtide_studies.interposition.bench",
        "jct": "springtide_studies.jct.bench",
        "kubernetes": "springtide_studies.kubernetes.bench",
        "packing": "springtide_studies.dilu.packing_bench",
        "pipeline-plan": "springtide_studies.funcpipe.pipeline_plan",
        "sharing": "springtide_studies.sharing.bench",
        "smlt": "springtide_studies.goals.smlt",
    }
)
_PAGES: Mapping[str, str] = MappingProxyType(
    {
        "deadlines": "springtide_studies.deadlines.deadlines_page",
        "figures": "springtide_studies.deadlines.figures_page",
        "smlt": "springtide_studies.goals.smlt_page",
    }
)


@click.command()
@click.argument("name", required=False)
@click.option("--list", "is_listed", is_flag=True, help="List what can be measured.")
@click.option(
    "--small",
    is_flag=True,
    help="kubernetes, resize, sharing, smlt-sync, sync: leave the large out; a minute instead of several.",
)
@click.option(
    "--traces", multiple=True, metavar="DIR", help="deadlines, figures, jct: where the traces are (more than once)."
)
@click.option(
    "--only",
    metavar="A,B",
    help="deadlines: these traces; fapes: of table,ablations,gap,scale these; figures: of 6b,8a,8b,9,10,11 these; "
    "funcpipe: of 5,8,9,11,walk these; goals: of bert-medium,resnet50,small; smlt: these parts.",
)
@click.option(
    "--policies", metavar="P,P", help="deadlines, decision, jct: these instead of the usual ones; kubernetes: this one."
)
@click.option("--cluster", metavar="NODESxDEVICES", help="deadlines: for traces whose cluster is not known.")
@click.option("--profiles", metavar="DIR", help="deadlines, figures: scaling tables, if not those near the traces.")
@click.option(
    "--overhead",
    metavar="RULE",
    help="deadlines, figures, jct: elasticflow (default), measured, pollux (default of jct) or none.",
)
@click.option(
    "--cache", metavar="DIR", help="deadlines, figures, jct: keep each result, so that a cut-off run goes on."
)
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="N", help="deadlines, figures, jct: policies at a time."
)
@click.option("--html", metavar="OUT", help="deadlines, figures: draw them into this file.")
@click.option(
    "--sizes",
    metavar="N,N",
    help="decision: these numbers of devices; packing: of instances; pipeline-plan: of layers.",
)
@click.option("--events", type=click.IntRange(min=1), help="decision: so many arrivals and endings. [default: 500]")
@click.option("--samples", metavar="FILE", help="communication: measured samples instead of the analytic model's.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="All but gateway, jct, kubernetes and resize: where chance comes from.",
)
@click.option(
    "--markdown",
    is_flag=True,
    help="All but gateway, interpose, kubernetes, resize, sharing and sync: print tables for a page of results.",
)
@click.option("--data", metavar="DIR", help="jct: the folder with profiles/ and workloads-osdi21/; packing: workload/.")
@click.option("--workloads", metavar="N,N", help="jct: these of the folder instead of all.")
@click.option("--load", metavar="X", help="jct: 0.5, 1 (default), 1.5 or 2 times the published arrivals.")
@click.option("--rounds", type=click.FloatRange(min=1.0), metavar="S", help="jct: rounds of so many seconds.")
@click.option("--length", metavar="RULE", help="jct: known (default) or unknown, what policies are told of lengths.")
@click.option("--tables", metavar="RULE", help="jct: raw (default), or packed: no layout beats the compact one.")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="goals, smlt: so many worlds. [default: 20, 5]")
@click.option("--scenario", metavar="NAME", help="goals: cheapest (within a deadline) or fastest (within a budget).")
@click.option("--launches", type=click.IntRange(min=1), metavar="N", help="interpose: on each path. [default: 1000000]")
@click.option("--without-bound", is_flag=True, help="jct: do not look for the bound, which takes a minute a workload.")
@common_options
@click.pass_obj
def bench(session: Session, /, name: str | None, is_listed: bool, **options: Any) -> None:
    """Measure NAME against a named baseline, side by side in one run. Exit code 1 if a bound is missed."""
    if is_listed:
        answer = [{"name": known, "description": line} for known, line in BENCHES.items()]
        session.answer(answer, align(("BENCH", "WHAT IT MEASURES"), list(BENCHES.items())), "springtide bench resize")
        return
    if name is None or name not in BENCHES:
        said = "name what to measure" if name is None else f"there is no bench {name!r}"
        refuse(f"{said}; known are {', '.join(BENCHES)}, and `springtide bench --list` says what they measure")
    for option, value in options.items():
        if value and name not in _OPTIONS_OF[option]:
            refuse(f"--{option} is for {' and '.join(_OPTIONS_OF[option])}; leave it out for {name}")
    if options["html"] and not Path(options["html"]).absolute().parent.is_dir():
        refuse(f"{options['html']} cannot be written: there is no folder {Path(options['html']).parent}")
    session.note(f"measuring {name}; other work on this machine makes the numbers worse ...")
    if name == "gateway":
        report = _gateway_bench()
    elif name in ("interpose", "kubernetes", "sharing"):
        report = _client_bench(session, name, options)
    elif name == "resize":
        report = _probe(["springtide.runtime", "probe-resize"], small=options["small"])
    elif name in ("smlt-sync", "sync"):
        report = _probe(["springtide_studies.exchange", name], small=options["small"], seed=options["seed"])
    else:
        module = importlib.import_module(_MODULES[name])
        report = _RUN[name](session, module, options)
        if options["html"]:
            drawn = importlib.import_module(_PAGES[name])
            getattr(drawn, f"write_{name}")(Path(options["html"]), report)
        if options["markdown"]:
            click.echo(module.markdown(report))
            return
    _answer(session, report)


def _answer(session: Session, report: Mapping[str, Any]) -> None:
    """Print the report and end with what it says."""
    rows = [
        [
            str(row.get("case")),
            number(row.get("ours")),
            number(row.get("baseline")),
            str(row.get("baseline_name")),
            number(row.get("ratio"), 3),
            number(row.get("bound")),
            str(row.get("unit")),
        ]
        for row in report["rows"]
    ]
    tables = []
    if report["bench"] == "sharing":
        table = importlib.import_module("springtide_studies.sharing.report").arms_table(report)
        tables = [align(*table), *report["problems"], ""]
    text = align(("CASE", "OURS", "BASELINE", "BASELINE NAME", "RATIO", "BOUND", "UNIT"), rows)
    criterion = [report["criterion"]] if "criterion" in report else []
    machine = ", ".join(
        f"{key} {number(value) if isinstance(value, float) else value}" for key, value in report["machine"].items()
    )
    verdict = "passed" if report["passed"] else "NOT PASSED"
    session.answer(report, "\n".join([*tables, text, *criterion, f"{verdict}   on {machine}"]))
    if not report["passed"]:
        raise click.exceptions.Exit(1)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _run_communication(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        seed=options["seed"] or 0,
        timer=time.process_time,
        tell=session.note,
        samples=Path(options["samples"]) if options["samples"] else None,
    )
    return report


def _run_decision(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _names(options["sizes"])
    wrong = [size for size in sizes if not size.isdecimal() or int(size) % module.DEVICES_PER_NODE or not int(size)]
    if wrong:
        refuse(f"--sizes {wrong[0]!r} is no number of devices; give multiples of {module.DEVICES_PER_NODE}, as 64,512")
    report: dict[str, Any] = module.run_bench(
        _names(options["policies"]) or None,
        sizes=[int(size) for size in sizes] or module.SIZES,
        seed=options["seed"] or 0,
        num_events=options["events"] or module.NUM_EVENTS,
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_pipeline_plan(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _names(options["sizes"])
    wrong = [size for size in sizes if not size.isdecimal() or not 1 <= int(size) <= 64]
    if wrong:
        refuse(f"--sizes {wrong[0]!r} is no number of layers from 1 to 64; give them as 8,12,40")
    report: dict[str, Any] = module.run_bench(
        sizes=[int(size) for size in sizes] or module.SIZES,
        seed=options["seed"] or 0,
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_packing(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    if not options["data"] or not Path(options["data"]).is_dir():
        refuse("name the folder that holds workload/instances-*.txt with --data DIR")
    sizes = _names(options["sizes"])
    wrong = [size for size in sizes if not size.isdecimal() or not 1 <= int(size) <= 100_000]
    if wrong:
        refuse(f"--sizes {wrong[0]!r} is no number of instances; give them as 100,3200")
    report: dict[str, Any] = module.run_bench(
        Path(options["data"]),
        sizes=[int(size) for size in sizes],
        seed=options["seed"] or 0,
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_funcpipe(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        only=_names(options["only"]), seed=options["seed"] or 0, timer=time.process_time, tell=session.note
    )
    return report


def _run_goals(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        num_seeds=options["seeds"] or module.NUM_SEEDS,
        first_seed=options["seed"] or 0,
        scenarios=_names(options["scenario"]),
        cases=_names(options["only"]),
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_smlt(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        num_seeds=options["seeds"] or module.NUM_SEEDS,
        first_seed=options["seed"] or 0,
        only=_names(options["only"]),
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_deadlines(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        _folders(options),
        _runs(session, options),
        policies=_names(options["policies"]) or module.POLICIES,
        only=_names(options["only"]),
        cluster=options["cluster"],
    )
    return report


def _run_jct(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    data = Path(options["data"] or "")
    if not options["data"] or not (data / "profiles").is_dir():
        refuse("name the folder that holds profiles/ and workloads-osdi21/ with --data DIR")
    for name, known in (("load", module.LOADS), ("length", module.LENGTHS), ("tables", module.TABLES)):
        if options[name] and options[name] not in known:
            refuse(f"--{name} {options[name]!r} is not known; choose one of {', '.join(known)}")
    report: dict[str, Any] = module.run_bench(
        module.JctOptions(
            data=data,
            traces=_folders(options)[0] if options["traces"] else None,
            only=tuple(_names(options["workloads"])),
            load=options["load"] or "1",
            overhead=options["overhead"] or "pollux",
            round_s=options["rounds"],
            length=options["length"] or "known",
            tables=options["tables"] or "raw",
            has_bound=not options["without_bound"],
            cache=Path(options["cache"]) if options["cache"] else None,
            num_processes=options["processes"] or 1,
        ),
        _names(options["policies"]) or module.POLICIES,
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_fapes(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(
        parts=_names(options["only"]) or module.PARTS,
        seed=options["seed"] or 0,
        timer=time.process_time,
        tell=session.note,
    )
    return report


def _run_figures(session: Session, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = module.run_bench(_folders(options), _runs(session, options), only=_names(options["only"]))
    return report


_RUN: Mapping[str, Callable[[Session, Any, Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "communication": _run_communication,
        "deadlines": _run_deadlines,
        "decision": _run_decision,
        "fapes": _run_fapes,
        "figures": _run_figures,
        "funcpipe": _run_funcpipe,
        "goals": _run_goals,
        "jct": _run_jct,
        "packing": _run_packing,
        "pipeline-plan": _run_pipeline_plan,
        "smlt": _run_smlt,
    }
)


def _folders(options: Mapping[str, Any]) -> list[Path]:
    named = list(options["traces"]) or [
        name for name in os.environ.get("SPRINGTIDE_TRACES", "").split(os.pathsep) if name
    ]
    missing = [name for name in named if not Path(name).is_dir()]
    if missing:
        refuse(f"there is no folder {missing[0]!r}; name one that holds traces with --traces DIR")
    return [Path(name) for name in named]


def _runs(session: Session, options: Mapping[str, Any]) -> Any:
    return importlib.import_module("springtide_studies.deadlines.runs").Runs(
        timer=time.process_time,
        seed=options["seed"] or 0,
        overhead=options["overhead"] or "elasticflow",
        profiles=Path(options["profiles"]) if options["profiles"] else None,
        cache=Path(options["cache"]) if options["cache"] else None,
        num_processes=options["processes"] or 1,
        tell=session.note,
    )


def _gateway_bench() -> dict[str, Any]:
    measured = importlib.import_module("springtide.service.gateway.bench").run_gateway_bench()
    plain: dict[str, Any] = msgspec.to_builtins(measured)
    return plain


def _client_bench(session: Session, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    module, seed = importlib.import_module(_MODULES[name]), options["seed"] or 0
    measured: dict[str, Any]
    if name == "sharing":
        measured = module.run_sharing_bench(seed=seed, is_small=options["small"], tell=session.note)
    elif name == "kubernetes":
        policy = next(iter(_names(options["policies"])), "springtide")
        measured = module.run_bench(policy=policy, is_small=options["small"], tell=session.note)
    else:
        num_launches = options["launches"] or module.NUM_LAUNCHES
        measured = module.run_interpose_bench(num_launches=num_launches, seed=seed, tell=session.note)
    return measured


def _probe(started: Sequence[str], *, small: bool, seed: int | None = None) -> dict[str, Any]:
    """The runtime measures itself in a process of its own, because it needs torch."""
    command = [sys.executable, "-m", *started, "--json", *(["--small"] if small else [])]
    command += [] if seed is None else ["--seed", str(seed)]
    measured = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        report: dict[str, Any] = msgspec.json.decode(measured.stdout, type=dict[str, Any])
    except ValueError:
        raise BackendError(
            f"the measurement ended with code {measured.returncode} and no numbers; `springtide doctor` may say why"
        ) from None
    # Whether the numbers are good enough is said by what measured them; numbers without a verdict have not passed.
    return {"passed": False, **report}
