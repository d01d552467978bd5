"""What a training step costs on this platform, beside a plain loop and DistributedDataParallel with its defaults.

Every variant trains in processes of its own with one thread each. In each round every variant does some steps while
the others wait, and the order changes from round to round. What is compared is the processor time of one worker's step,
which other work on the machine disturbs less than the clock; wall times are told beside it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import BackendError
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.runtime.profiling.resize_probe import Driver, running_zygote
from springtide_studies.options import names_of, only_option, small_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table
from springtide_studies.training.pace import Cost

MODELS = {"mlp": "MLP of 9.5 M", "cnn": "CNN with BatchNorm, 0.7 M", "gpt": "GPT of 10 M"}
_BATCHES = {"mlp": 64, "cnn": 64, "gpt": 8}
# Workers of each variant, in the order of the first round.
VARIANTS = {"plain": 1, "ddp": 2, "ours-1": 1, "ours-2": 2, "exact-1": 1, "exact-2": 2}
NUM_SHARDS = 4
LIMITS = {"ours-1": 1.03, "ours-2": 1.03, "exact-1": None, "exact-2": None}
_MEMORY_LIMIT = 1.10
_WAIT_S = 600.0
CRITERION = (
    "Processor time of a worker's step, the median over rounds of the ratio within a round: one worker at most"
    " 1.03 of the plain loop, two at most 1.03 of DistributedDataParallel, whose peak memory is exceeded by at most a"
    f" tenth. The price of exact={NUM_SHARDS} is told, not bounded."
)


class TrainingMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Ours beside one other; `ratio` is the median over rounds, between the quartiles `ratio_low` and `ratio_high`."""

    case: str
    ours: float
    baseline: float
    baseline_name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    bound: float | None
    unit: str


@dataclass(slots=True)
class Variant:
    """The processes of one variant, and what each round cost: the mean over its processes, for one step."""

    links: list[socket.socket] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    def measure(self, num_steps: int) -> None:
        """Have every process train so many steps. Raises BackendError if one ends instead."""
        for link in self.links:
            link.sendall(f"{num_steps}\n".encode())
        costs = [msgspec.json.decode(_line(link), type=Cost) for link in self.links]
        self.cpu_ms.append(1e3 * statistics.mean(cost.cpu_s for cost in costs) / num_steps)
        self.wall_ms.append(1e3 * max(cost.wall_s for cost in costs) / num_steps)
        self.peak_mib = max(cost.peak_mib for cost in costs)


def _line(link: socket.socket) -> bytes:
    link.settimeout(_WAIT_S)
    data = b""
    while not data.endswith(b"\n"):
        part = link.recv(4096)
        if not part:
            raise BackendError("a process of the measurement has ended; its last output is above")
        data += part
    return data


@contextlib.contextmanager
def _without_platform(model: str, variant: str, directory: Path, address: Path) -> Iterator[None]:
    world_size = VARIANTS[variant]
    base = [sys.executable, "-m", "springtide_studies.training.member", model, variant, str(address)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*base, str(rank), str(world_size), str(directory / "meeting")], env=environment)
        for rank in range(world_size)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _on_platform(model: str, variant: str, directory: Path, address: Path, zygote_path: Path) -> Iterator[None]:
    num_workers = VARIANTS[variant]
    job = TrainingJob(
        job_id=WorkloadId("bench"),
        name="bench",
        entrypoint=Entrypoint(source_path=str(Path(__file__).with_name("member.py")), object_name="fit"),
        global_batch_size=_BATCHES[model],
        num_epochs=1_000_000,
        max_workers=num_workers,
        num_virtual_shards=NUM_SHARDS,
        exact=variant.startswith("exact"),
        params={"model": model, "variant": variant, "address": str(address)},
    )
    driver = Driver(directory, job, zygote_path, {})
    try:
        names = [f"w{rank}" for rank in range(num_workers)]
        driver.start(*names)
        driver.form(*names)
        is_over = threading.Event()
        answering = threading.Thread(target=driver.answer, args=(is_over.is_set,))
        answering.start()
        try:
            yield
        finally:
            is_over.set()
            answering.join()
    finally:
        driver.close()


def measure_model(model: str, num_rounds: int, num_steps: int) -> dict[str, Variant]:
    """All variants of one model, taking turns. The first round warms up and is not counted."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-training-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = directory / "pace.sock"
        listener.bind(str(address))
        listener.listen()
        variants = {name: Variant() for name in VARIANTS}
        for name in VARIANTS:
            (own := directory / name).mkdir()
            if name.startswith(("ours", "exact")):
                # Each has a zygote of its own, which obeys one control plane.
                zygote_path = stack.enter_context(running_zygote(own))
                stack.enter_context(_on_platform(model, name, own, address, zygote_path))
            else:
                stack.enter_context(_without_platform(model, name, own, address))
            for _ in range(VARIANTS[name]):
                link = _accept(listener)
                variants[_line(link).decode().strip()].links.append(link)
                stack.callback(link.close)
        names = list(VARIANTS)
        for number in range(num_rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                variants[name].measure(num_steps)
        for variant in variants.values():
            del variant.cpu_ms[0], variant.wall_ms[0]
        return variants


def _accept(listener: socket.socket) -> socket.socket:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        if not selector.select(_WAIT_S):
            raise BackendError("a process of the measurement did not come up; its last output is above")
    return listener.accept()[0]


def rows_of(model: str, variants: Mapping[str, Variant]) -> list[TrainingMeasurement]:
    """The rows of one model: processor time of each of ours beside what it replaces, and memory beside DDP's."""
    rows = []
    for name, limit in LIMITS.items():
        other = "ddp" if VARIANTS[name] > 1 else "plain"
        ours, baseline = variants[name].cpu_ms, variants[other].cpu_ms
        ratios = [one / another for one, another in zip(ours, baseline, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        baseline_ms = statistics.median(baseline)
        exact = f", exact={NUM_SHARDS}" if name.startswith("exact") else ""
        rows.append(
            TrainingMeasurement(
                case=f"{MODELS[model]}, {VARIANTS[name]} worker{'s' * (VARIANTS[name] > 1)}{exact}",
                ours=statistics.median(ours),
                baseline=baseline_ms,
                baseline_name="DDP" if other == "ddp" else "plain loop",
                ratio=middle,
                ratio_low=low,
                ratio_high=high,
                bound=None if limit is None else limit * baseline_ms,
                unit="CPU ms/step",
            )
        )
    ours_mib, ddp_mib = variants["ours-2"].peak_mib, variants["ddp"].peak_mib
    ratio = ours_mib / ddp_mib
    rows.append(
        TrainingMeasurement(
            case=f"{MODELS[model]}, 2 workers: peak memory",
            ours=ours_mib,
            baseline=ddp_mib,
            baseline_name="DDP",
            ratio=ratio,
            ratio_low=ratio,
            ratio_high=ratio,
            bound=_MEMORY_LIMIT * ddp_mib,
            unit="MiB",
        )
    )
    return rows


def has_passed(rows: Sequence[TrainingMeasurement]) -> bool:
    """Whether every row with a bound keeps it."""
    return bool(rows) and all(row.bound is None or row.ratio <= row.bound / row.baseline for row in rows)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    load_before = machine_load()
    chosen = names_of(options["only"]) or list(MODELS)
    if unknown := sorted(set(chosen) - MODELS.keys()):
        raise click.UsageError(f"--only {unknown[0]} is none of {', '.join(MODELS)}")
    num_rounds, num_steps = (2, 2) if options["small"] else (options["rounds"], 10)
    rows: list[TrainingMeasurement] = []
    wall_ms = {}
    for model in chosen:
        variants = measure_model(model, num_rounds, num_steps)
        rows += rows_of(model, variants)
        wall_ms[model] = {name: statistics.median(variant.wall_ms) for name, variant in variants.items()}
        tell(", ".join(f"{name} {statistics.median(one.cpu_ms):.1f} CPU ms" for name, one in variants.items()))
    return {
        "bench": "training",
        "passed": has_passed(rows),
        "criterion": CRITERION,
        "machine": machine_facts(load_before),
        "rounds": num_rounds,
        "wall_ms": wall_ms,
        "rows": msgspec.to_builtins(rows),
    }


def _markdown(report: Report) -> str:
    header = ["", "ours", "baseline", "ratio", "quartiles", "bound"]
    rows = []
    for row in report["rows"]:
        bound = "told" if row["bound"] is None else f"{row['bound'] / row['baseline']:.2f}"
        beside = f"{row['baseline_name']} {row['baseline']:.1f}"
        quartiles = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        rows.append([row["case"], f"{row['ours']:.1f} {row['unit']}", beside, f"{row['ratio']:.3f}", quartiles, bound])
    return markdown_table(header, rows)


BENCH = Bench(
    run=_run,
    options=[
        only_option("mlp,cnn,gpt"),
        click.Option(["--rounds"], type=click.IntRange(min=2), default=9, help="So many rounds. [default: 9]"),
        small_option("Two short rounds, which show that it runs."),
    ],
    markdown=_markdown,
)
