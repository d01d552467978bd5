"""`springtide bench`: each measurement with its baseline, as a table, as JSON, or as Markdown for a page of results."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import click
import msgspec

from springtide.cli import terminal
from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.columns import align, number
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError
from springtide.core.plugins import load_from_studies

Report = dict[str, Any]
Tell = Callable[[str], None]
# Listed without an import; all but gateway and resize come with springtide-studies.
BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "calibration": "the probabilities that quotes say beside how often deadlines are kept: a drift, failures",
        "communication": "how far predictors of communication time are off on placements that none has seen",
        "deadlines": "how many deadlines each policy meets on every trace of a folder, beside others and the bound",
        "decision": "how long a policy thinks at one event, from 64 to 8,192 devices",
        "fapes": "FaPES's table beside its rivals, ablations, loans at 8,000 GPUs, and its gap to the exact plan",
        "figures": "the figures of ElasticFlow's evaluation drawn anew, and whether the order of policies is the same",
        "funcpipe": "functions in a pipeline beside LambdaML, HybridPS, TPDMP and Bayes, as in FuncPipe's figures",
        "gateway": "what the gateway adds to a call of a replica: time and CPU",
        "goals": "goals met by search in a world that is not its model, beside the best of all and other methods",
        "heterogeneous": "completion times on devices of three models, beside Gavel's policies and Sia's rule",
        "interpose": "what the CUDA interposition library adds to a launch, beside a stub driver; on no device",
        "jct": "how long jobs take under each policy that chooses workers and batch sizes, beside Pollux and the bound",
        "kubernetes": "1,000 nodes x 8, 2,000 jobs on a real API server: bind rate, watch lag, CPU, turns; slow API",
        "one-plan": "what a week of everything costs under the default policy, beside every stack of the registry",
        "packing": "devices that instances share at the peak, beside other packers and the bound; CPU of each decision",
        "pipeline-plan": "how long the best plan of a pipeline of functions takes to find, and whether it is the best",
        "prefixes": "a recorded trace of prompts on two replicas, routed by prefixes and load, beside other rules",
        "promised-batches": "deadlines of jobs whose batch may change, met, promised and broken, and what others get",
        "resize": "how long training stands still at each kind of resize, beside moving the state once",
        "serving": "a request to a service, beside the same handler in LitServe, BentoML and Ray Serve; real",
        "sharing": "two services and a job on one shared device under surges, beside exclusive and static ones; real",
        "smlt": "batches that grow, data that arrives all day, models that change: searched beside a fixed allocation",
        "smlt-sync": "how SMLT, Siren, Cirrus, LambdaML and ours exchange a gradient, by parts, workers and stores",
        "sync": "how long replicas take to exchange a gradient through a store, beside the bound of separate links",
        "training": "what a training step costs, beside a plain loop and DistributedDataParallel, and what exact adds",
    }
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One bench as a command: its options, how it runs, and how its report is shown.

    `run(options, tell)` gets the options by name and a function for progress lines, and returns a report with the keys
    `bench`, `machine`, `rows`, `passed`, and others. `markdown` formats the report as tables, `write_page` as a page
    with charts; without them the command has no --markdown or --html. `heading` returns lines above the table of rows.
    """

    run: Callable[[Mapping[str, Any], Tell], Report]
    options: Sequence[click.Option] = ()
    markdown: Callable[[Report], str] | None = None
    write_page: Callable[[Path, Report], None] | None = None
    heading: Callable[[Report], Sequence[str]] = lambda report: ()


class _BenchGroup(click.Group):
    """Imports a bench only when it is named; each has its own options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in BENCHES:
            _refuse_name(f"there is no bench {cmd_name!r}")
        own = _OF_THE_PRODUCT.get(cmd_name)
        return _command(cmd_name, own or load_from_studies("springtide.benches", cmd_name, f"bench {cmd_name}"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benches"):
            formatter.write_dl(list(BENCHES.items()))


@click.group(cls=_BenchGroup, invoke_without_command=True, subcommand_metavar="NAME [OPTIONS]")
@click.option("--list", "is_listed", is_flag=True, help="List what can be measured.")
@common_options
@click.pass_context
def bench(ctx: click.Context, /, is_listed: bool) -> None:
    """Measure NAME against a named baseline, side by side in one run. Exit code 1 if a bound is missed.

    `springtide bench NAME --help` shows the options of one. All but gateway and resize come with springtide[studies].
    """
    if ctx.invoked_subcommand is not None:
        return
    if not is_listed:
        _refuse_name("name what to measure")
    answer = [{"name": known, "description": line} for known, line in BENCHES.items()]
    text = align(("BENCH", "WHAT IT MEASURES"), list(BENCHES.items()))
    ctx.ensure_object(Session).answer(answer, text, "springtide bench resize")


def _refuse_name(said: str) -> NoReturn:
    refuse(f"{said}; known are {', '.join(BENCHES)}, and `springtide bench --list` says what they measure")


def _command(name: str, bench: Bench) -> click.Command:
    """The command of one bench, with its own options and those for the outputs that it supports."""
    options = list(bench.options)
    if bench.markdown is not None:
        options.append(click.Option(["--markdown"], is_flag=True, help="Print tables for a page of results."))
    if bench.write_page is not None:
        options.append(click.Option(["--html"], metavar="OUT", help="Draw the charts into this file."))

    def measure(**given: Any) -> None:
        session = click.get_current_context().ensure_object(Session)
        page = given.get("html")
        if page and not Path(page).absolute().parent.is_dir():
            refuse(f"{page} cannot be written: there is no folder {Path(page).parent}")
        session.note(f"measuring {name}; other work on this machine makes the numbers worse ...")
        report = bench.run(given, session.note)
        if page and bench.write_page is not None:
            bench.write_page(Path(page), report)
        if given.get("markdown") and bench.markdown is not None:
            terminal.write(bench.markdown(report))
            return
        _answer(session, report, bench.heading(report))

    line = BENCHES[name]
    text = f"{line[0].upper()}{line[1:]}."
    return common_options(click.Command(name, params=list[click.Parameter](options), callback=measure, help=text))


def _answer(session: Session, report: Report, heading: Sequence[str]) -> None:
    """Print the report; exit with 1 unless it passed."""
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
    text = align(("CASE", "OURS", "BASELINE", "BASELINE NAME", "RATIO", "BOUND", "UNIT"), rows)
    criterion = [report["criterion"]] if "criterion" in report else []
    machine = ", ".join(
        f"{key} {number(value) if isinstance(value, float) else value}" for key, value in report["machine"].items()
    )
    verdict = "passed" if report["passed"] else "NOT PASSED"
    session.answer(report, "\n".join([*heading, text, *criterion, f"{verdict}   on {machine}"]))
    if not report["passed"]:
        raise click.exceptions.Exit(1)


def _run_gateway(options: Mapping[str, Any], tell: Tell) -> Report:
    plain: Report = msgspec.to_builtins(importlib.import_module("springtide.service.gateway.bench").run_gateway_bench())
    return plain


def _run_resize(options: Mapping[str, Any], tell: Tell) -> Report:
    # A child process, because it needs torch.
    return measure_apart(["springtide.runtime", "probe-resize"], small=options["small"])


def measure_apart(started: Sequence[str], *, small: bool, seed: int | None = None) -> Report:
    """Run the measurement `python -m STARTED` and return its report. Raises BackendError."""
    command = [sys.executable, "-m", *started, "--json", *(["--small"] if small else [])]
    command += [] if seed is None else ["--seed", str(seed)]
    measured = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        report: Report = decode_json(measured.stdout, Report)
    except ValueError:
        raise BackendError(
            f"the measurement ended with code {measured.returncode} and no numbers; `springtide doctor` may say why"
        ) from None
    # The measurement decides whether it passed; a report without a verdict has not.
    return {"passed": False, **report}


_OF_THE_PRODUCT: Mapping[str, Bench] = MappingProxyType(
    {
        "gateway": Bench(run=_run_gateway),
        "resize": Bench(
            run=_run_resize,
            options=[click.Option(["--small"], is_flag=True, help="Without the large model; a minute, not several.")],
        ),
    }
)
