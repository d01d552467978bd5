"""`springtide bench serving`: a request to a service, beside the same handler in LitServe, BentoML and Ray Serve.

All servers run at once, each with one replica. In each round every server is asked for a while by each number of
clients, one server after the other, and the order changes from round to round. Ratios are taken within a round, so
that other work on the machine, which is as likely to meet one as the other, spoils few of them.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import BackendError
from springtide.service.gateway.bench import run_gateway_bench
from springtide_studies.options import names_of, only_option, small_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table
from springtide_studies.serving.load import ServingLoad, ServingPhase
from springtide_studies.serving.servers import (
    BARE,
    BODY,
    OURS,
    PEERS,
    ServingProcesses,
    answered,
    cpu_between,
    interpreters,
    running_peer,
    running_platform,
    version_of,
)

HANDLERS = {"sums": "sum of 64 numbers", "mlp": "MLP of 0.15 M"}
NUM_CLIENTS = (1, 16, 64)
# Medians of ratios that are nearer to 1 are level.
MARGIN = 1.05
MOST_OVER_DIRECT_US = 100.0
_IDLE_S = 5.0
_TOLERANCE = 1e-4
CRITERION = (
    f"Beside each framework, for each handler and {', '.join(map(str, NUM_CLIENTS))} clients: the median over rounds of"
    f" the ratio within a round at most {MARGIN:g} to our disadvantage, for requests a second, p99 and CPU time of a"
    f" request; no errors of ours. The gateway adds at most {MOST_OVER_DIRECT_US:g} us of CPU to a call of the same"
    f" replica over its socket. {BARE} is told, not bounded."
)
Metric = Literal["requests/s", "p50", "p99", "CPU"]
_UNITS: Mapping[Metric, str] = {"requests/s": "1/s", "p50": "ms", "p99": "ms", "CPU": "us/request"}


class ServingMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Ours beside one other. `ratio` is the median over rounds, between the least and the greatest of them.

    `bound` is what ours may be where `passed` is not None.
    """

    case: str
    metric: str
    ours: float
    baseline: float
    baseline_name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    bound: float | None
    unit: str
    passed: bool | None


@dataclass(slots=True)
class ServingRounds:
    """What each round found of one server, one handler and one number of clients."""

    loads: list[ServingLoad] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def values(self, metric: Metric) -> list[float]:
        """One value a round, in the metric's unit."""
        match metric:
            case "requests/s":
                return [load.per_s for load in self.loads]
            case "p50":
                return [load.p50_ms for load in self.loads]
            case "p99":
                return [load.p99_ms for load in self.loads]
            case "CPU":
                return self.cpu_us

    @property
    def num_errors(self) -> int:
        """Of all rounds."""
        return sum(load.num_errors for load in self.loads)


Found = dict[tuple[str, int], ServingRounds]


@contextlib.contextmanager
def _generator() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "springtide_studies.serving.load"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _ask(
    generator: subprocess.Popen[bytes], server: ServingProcesses, num_clients: int, seconds: float
) -> tuple[ServingLoad, float]:
    """One phase, and the CPU seconds of the server in it. Raises BackendError if the generator ends."""
    assert generator.stdin is not None
    assert generator.stdout is not None
    phase = ServingPhase(
        port=server.port,
        path=server.path,
        body=BODY,
        headers=dict(server.headers),
        num_clients=num_clients,
        seconds=seconds,
    )
    before = server.cpu_s()
    generator.stdin.write(msgspec.json.encode(phase) + b"\n")
    generator.stdin.flush()
    line = generator.stdout.readline()
    if not line:
        raise BackendError("the load generator has ended; its last output is above")
    return msgspec.json.decode(line, type=ServingLoad), cpu_between(before, server.cpu_s())


def measure_handler(
    handler: str, pythons: Mapping[str, str], num_rounds: int, seconds: float, tell: Tell
) -> tuple[Found, dict[str, Any]]:
    """All servers with one handler, taking turns. The first round warms up and is not counted.

    The second value tells of each server how many processes it has and how much of one core it uses when idle.
    Raises BackendError if a server does not start, or answers otherwise than the first one.
    """
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-serving-")))
        servers = {}
        for name in (OURS, *pythons):
            tell(f"{handler}: {name} starts")
            (directory := root / name).mkdir()
            starting = (
                running_platform(handler, directory)
                if name == OURS
                else running_peer(name, pythons[name], handler, directory)
            )
            servers[name] = stack.enter_context(starting)
        answers = {name: answered(server) for name, server in servers.items()}
        if any(abs(answer - answers[OURS]) > _TOLERANCE for answer in answers.values()):
            raise BackendError(f"the servers do not answer alike: {answers}")
        idle = _idle(servers)
        generator = stack.enter_context(_generator())
        found: Found = {(name, clients): ServingRounds() for name in servers for clients in NUM_CLIENTS}
        names = list(servers)
        for number in range(num_rounds + 1):
            turn = number % len(names)
            for clients in NUM_CLIENTS:
                for name in names[turn:] + names[:turn]:
                    load, cpu_s = _ask(generator, servers[name], clients, seconds)
                    if number:
                        found[name, clients].loads.append(load)
                        found[name, clients].cpu_us.append(1e6 * cpu_s / load.num_requests)
            tell(f"{handler}: round {number} of {num_rounds} done")
        return found, idle


def _idle(servers: Mapping[str, ServingProcesses]) -> dict[str, Any]:
    time.sleep(_IDLE_S)
    before = {name: server.cpu_s() for name, server in servers.items()}
    time.sleep(_IDLE_S)
    return {
        name: {
            "processes": len(server.tree()),
            "cpu_percent": round(100 * cpu_between(before[name], server.cpu_s()) / _IDLE_S, 1),
        }
        for name, server in servers.items()
    }


def rows_of(handler: str, found: Found) -> list[ServingMeasurement]:
    """A row for each number of clients, other server and metric; requests a second must be high, all else low."""
    rows = []
    for (name, clients), other in found.items():
        if name == OURS:
            continue
        ours = found[OURS, clients]
        for metric, unit in _UNITS.items():
            mine, theirs = ours.values(metric), other.values(metric)
            ratios = sorted(
                one / another if another else float("inf") for one, another in zip(mine, theirs, strict=True)
            )
            middle, baseline = statistics.median(ratios), statistics.median(theirs)
            is_bounded = name != BARE and metric != "p50"
            worse = 1 / middle if metric == "requests/s" else middle
            limit = baseline / MARGIN if metric == "requests/s" else baseline * MARGIN
            rows.append(
                ServingMeasurement(
                    case=f"{HANDLERS[handler]}, {clients} clients, {metric}",
                    metric=metric,
                    ours=statistics.median(mine),
                    baseline=baseline,
                    baseline_name=name,
                    ratio=middle,
                    ratio_low=ratios[0],
                    ratio_high=ratios[-1],
                    bound=limit if is_bounded else None,
                    unit=unit,
                    passed=worse <= MARGIN and not ours.num_errors if is_bounded else None,
                )
            )
    return rows


def rows_of_direct(report: Mapping[str, Any]) -> list[ServingMeasurement]:
    """The CPU rows of `bench gateway`: a request through the gateway beside a call of the replica."""
    return [
        ServingMeasurement(
            case=f"gateway, {row['case']}",
            metric="CPU",
            ours=row["ours"],
            baseline=row["baseline"],
            baseline_name="replica, directly",
            ratio=(ratio := row["ours"] / row["baseline"] if row["baseline"] else float("inf")),
            ratio_low=ratio,
            ratio_high=ratio,
            bound=row["baseline"] + MOST_OVER_DIRECT_US,
            unit="us/request",
            passed=row["ours"] - row["baseline"] <= MOST_OVER_DIRECT_US,
        )
        for row in report["rows"]
        if "CPU" in row["case"]
    ]


def has_passed(rows: Sequence[ServingMeasurement]) -> bool:
    """Whether some peer was measured, and every row with a bound keeps it."""
    is_beside = any(row.passed is not None and row.baseline_name in PEERS for row in rows)
    return is_beside and all(row.passed is not False for row in rows)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    load_before = machine_load()
    chosen = names_of(options["only"]) or list(HANDLERS)
    if unknown := sorted(set(chosen) - HANDLERS.keys()):
        raise click.UsageError(f"--only {unknown[0]} is none of {', '.join(HANDLERS)}")
    pythons = interpreters(options["peer"])
    versions = {name: version_of(name, python) for name, python in pythons.items()}
    if missing := sorted(PEERS.keys() - pythons.keys()):
        how = "pip install 'springtide-studies[serving-peers]', or --peer NAME=PYTHON for one in another environment"
        tell(f"not installed, so not measured: {', '.join(missing)}; {how}")
    num_rounds, seconds = (1, 0.3) if options["small"] else (options["rounds"], options["seconds"])
    rows: list[ServingMeasurement] = []
    rounds: dict[str, Any] = {}
    idle: dict[str, Any] = {}
    for handler in chosen:
        found, idle[handler] = measure_handler(handler, pythons, num_rounds, seconds, tell)
        rows += rows_of(handler, found)
        rounds[handler] = {f"{name}, {clients} clients": each for (name, clients), each in found.items()}
    tell("the gateway beside its replica, called directly")
    direct = run_gateway_bench(
        num_rounds=num_rounds, num_requests=64 if options["small"] else 400, client_counts=NUM_CLIENTS
    )
    rows += rows_of_direct(direct)
    return {
        "bench": "serving",
        "passed": has_passed(rows),
        "criterion": CRITERION,
        "machine": {**machine_facts(load_before), "load_1m_after": round(machine_load(), 2)},
        "load_generator": "springtide_studies.serving.load",
        "versions": versions,
        "missing": missing,
        "num_rounds": num_rounds,
        "seconds": seconds,
        "idle": idle,
        "rounds": msgspec.to_builtins(rounds),
        "rows": msgspec.to_builtins(rows),
    }


def _markdown(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        verdict = {True: "yes", False: "NO", None: "told"}[row["passed"]]
        spread = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        beside = f"{row['baseline_name']} {row['baseline']:.4g}"
        rows.append([row["case"], f"{row['ours']:.4g} {row['unit']}", beside, spread, verdict])
    return markdown_table(["", "ours", "beside", "ratio", "within the bound"], rows)


BENCH = Bench(
    run=_run,
    options=[
        only_option("sums,mlp"),
        click.Option(
            ["--peer"],
            multiple=True,
            metavar="NAME=PYTHON",
            help="A framework in another environment: litserve=/path/to/python. May be repeated.",
        ),
        click.Option(["--rounds"], type=click.IntRange(min=1), default=8, help="So many rounds. [default: 8]"),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(min=0.1, max=60),
            default=2.0,
            help="How long each server is asked at a time. [default: 2]",
        ),
        small_option("One short round, which shows that it runs."),
    ],
    markdown=_markdown,
)
