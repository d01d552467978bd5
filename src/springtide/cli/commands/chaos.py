"""`springtide chaos`: inject faults into a platform of its own and check that nothing was lost."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import click

from springtide.cli.session import Session, json_option
from springtide.cli.tables.columns import align
from springtide.core.plugins import load_from_studies


@click.command()
@click.option("--minutes", type=click.FloatRange(0.05, 1440), default=5.0, show_default=True, help="How long.")
@click.option("--seed", type=click.IntRange(0), help="Draw the same jobs and faults again. [default: a new one]")
@click.option("--policy", metavar="P", default="springtide", show_default=True, help="What decides.")
@click.option("--only", multiple=True, metavar="FAULT", help="Only this kind of fault; may be repeated.")
@click.option("--state-dir", metavar="DIR", default="", help="Keep all that the platform wrote in this empty folder.")
@json_option
@click.pass_obj
def chaos(session: Session, /, minutes: float, seed: int | None, **given: Any) -> None:
    """Injure a platform of its own for some minutes: kill, stop, starve it, and check that nothing was lost.

    It starts that platform itself and touches no other. Exit code 1 if a check fails, with the command that draws the
    same faults again. As root it also fills disks, takes memory and cuts the network, in namespaces of its own. It
    comes with springtide[studies].
    """
    run = load_from_studies("springtide.chaos", "run", "chaos")
    drawn = secrets.randbelow(1_000_000) if seed is None else seed
    report = run({"minutes": minutes, "seed": drawn, **given}, session.note)
    session.answer(report, _text(report))
    if not report["passed"]:
        raise click.exceptions.Exit(1)


def _text(report: Mapping[str, Any]) -> str:
    rows = [
        (
            fault["kind"],
            str(fault["num_times"]),
            f"{fault['longest_recovery_s']:.1f} s" if fault["num_times"] else "-",
            str(fault["num_lost"]),
            str(len(fault["violations"])),
            fault["seen"] or "-",
        )
        for fault in report["faults"]
    ]
    rows += [(kind, "skipped", "-", "-", "-", why) for kind, why in report["skipped"].items()]
    header = ("FAULT", "TIMES", "LONGEST RECOVERY", "REQUESTS LOST", "VIOLATIONS", "THE LAST ONE")
    lines = [
        align(header, rows),
        "",
        f"jobs      {_counts(report['jobs'])}",
        f"requests  {_counts(report['requests'])}",
    ]
    grown = [f"{name} {report['first'][name]:.0f} -> {value:.0f}" for name, value in report["last"].items()]
    lines.append(f"{report['num_control_planes']} control planes; {', '.join(grown)}")
    lines += [f"VIOLATED  {sentence}" for sentence in report["violations"]]
    if report["kept"]:
        lines.append(f"state     {report['kept']}")
    if not report["passed"]:
        lines.append(f"again     {report['command']}")
    return "\n".join([*lines, "passed" if report["passed"] else "NOT PASSED"])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name.lower()}" for name, number in sorted(counts.items())) or "none"
