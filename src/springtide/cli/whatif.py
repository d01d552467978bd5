"""Questions that need no running platform: `policies` and `bench`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click
import msgspec

from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables import align, number
from springtide.core.errors import BackendError

BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "gateway": "what the gateway adds to a call of a replica: time and CPU",
        "resize": "how long training stands still at each kind of resize, beside moving the state once",
    }
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
