"""Questions that need no running platform: `policies`, `simulate`, `bench`."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import msgspec

from springtide.cli.session import Session, common_options, refuse, state_option
from springtide.cli.tables import align, duration, number, percent
from springtide.core.errors import BackendError

BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "gateway": "what the gateway adds to a call of a replica: time and CPU",
        "resize": "how long training stands still at each kind of resize, beside moving the state once",
    }
)
_SHOWN: tuple[tuple[str, str], ...] = (
    ("deadlines_met", "DEADLINES MET"),
    ("deadline_satisfactory_ratio", "SATISFIED"),
    ("jct_mean_s", "MEAN TIME"),
    ("jct_p95_s", "P95 TIME"),
    ("queueing_mean_s", "MEAN WAIT"),
    ("makespan_s", "ALL DONE"),
    ("utilisation", "USE"),
    ("resizes", "RESIZES"),
    ("decision_ms_p99", "DECISION P99 MS"),
)


@click.command()
@common_options
@click.pass_obj
def policies(session: Session) -> None:
    """List the scheduling policies."""
    from springtide.policies.registry import POLICY_NAMES, describe_policy

    known = {name: describe_policy(name) for name in POLICY_NAMES}
    text = align(("POLICY", "WHAT IT DOES"), list(known.items()))
    hint = f"use one: springtide up --policy {POLICY_NAMES[0]} | compare: springtide simulate --policy " + ",".join(
        POLICY_NAMES
    )
    session.answer([{"name": name, "description": line} for name, line in known.items()], text, hint)


def parse_cluster(text: str) -> tuple[int, int]:
    """`4x8` as nodes and devices per node. Raises InvalidRequest."""
    nodes, separator, devices = text.lower().partition("x")
    if not separator or not nodes.isdecimal() or not devices.isdecimal() or not int(nodes) or not int(devices):
        refuse(f"cluster {text!r} is not NODESxDEVICES; write it like 4x8")
    return int(nodes), int(devices)


@click.command()
@click.option("--trace", required=True, metavar="generated:N|FILE.csv", help="The jobs that arrive.")
@click.option("--cluster", required=True, metavar="NODESxDEVICES", help="What they share: 4x8.")
@click.option("--policy", required=True, metavar="P[,P..]", help="See `springtide policies`.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Where all chance comes from.")
@click.option("--json", "output", metavar="OUT|-", help="Write the answer there as JSON; - is standard output.")
@state_option
@click.pass_obj
def simulate(session: Session, trace: str, cluster: str, policy: str, seed: int, output: str | None) -> None:
    """Ask the same scheduler that runs the platform what it would do with a trace of jobs."""
    from springtide.policies.registry import make_policy

    num_nodes, devices_per_node = parse_cluster(cluster)
    names = [name.strip() for name in policy.split(",") if name.strip()]
    for name in names:
        make_policy(name)
    if not trace.startswith("generated:") and not Path(trace).is_file():
        refuse(f"there is no trace {trace!r}; give a CSV file or generated:200")
    from springtide.sim import figures

    answer = figures.simulate(trace, num_nodes, devices_per_node, names, seed, timer=time.process_time)
    encoded = msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n"
    if output == "-":
        click.echo(encoded.decode(), nl=False)
        return
    if output is not None:
        Path(output).write_bytes(encoded)
    click.echo(_comparison(answer["policies"]))
    session.hint(f"all numbers: {output}" if output else "all numbers: --json OUT (or --json -)")


def _comparison(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, str(row.get("jobs", "-")), *[_cell(key, row.get(key)) for key, _ in _SHOWN]]
        for name, row in found.items()
    ]
    return align(("POLICY", "JOBS", *[title for _, title in _SHOWN]), rows)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_s"):
        return duration(value)
    if key in ("utilisation", "deadline_satisfactory_ratio"):
        return percent(value)
    return number(value) if isinstance(value, float) else str(value)


@click.command()
@click.argument("name", required=False)
@click.option("--list", "is_listed", is_flag=True, help="List what can be measured.")
@click.option("--small", is_flag=True, help="resize: leave the large model out; half a minute instead of several.")
@common_options
@click.pass_obj
def bench(session: Session, name: str | None, is_listed: bool, small: bool) -> None:
    """Measure NAME against a named baseline, side by side in one run. Exit code 1 if a bound is missed."""
    if is_listed:
        answer = [{"name": known, "description": line} for known, line in BENCHES.items()]
        session.answer(answer, align(("BENCH", "WHAT IT MEASURES"), list(BENCHES.items())), "springtide bench resize")
        return
    if name not in BENCHES:
        said = "name what to measure" if name is None else f"there is no bench {name!r}"
        refuse(f"{said}; known are {', '.join(BENCHES)}, and `springtide bench --list` says what they measure")
    if small and name != "resize":
        refuse(f"--small is for resize; {name} has one size")
    session.note(f"measuring {name}; other work on this machine makes the numbers worse ...")
    report = _gateway_bench() if name == "gateway" else _probe("probe-resize", small=small)
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
    session.answer(report, "\n".join([text, *criterion, f"{verdict}   on {machine}"]))
    if not report["passed"]:
        raise click.exceptions.Exit(1)


def _gateway_bench() -> dict[str, Any]:
    measured = importlib.import_module("springtide.service.gateway_bench").run_gateway_bench()
    plain: dict[str, Any] = msgspec.to_builtins(measured)
    return plain


def _probe(verb: str, *, small: bool) -> dict[str, Any]:
    """The runtime measures itself in a process of its own, because it needs torch."""
    command = [sys.executable, "-m", "springtide.runtime", verb, "--json", *(["--small"] if small else [])]
    measured = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        report: dict[str, Any] = msgspec.json.decode(measured.stdout, type=dict[str, Any])
    except ValueError:
        raise BackendError(
            f"the measurement ended with code {measured.returncode} and no numbers; `springtide doctor` may say why"
        ) from None
    # Whether the numbers are good enough is said by what measured them; numbers without a verdict have not passed.
    return {"passed": False, **report}
