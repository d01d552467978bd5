"""The interposition library on a real device: a service and a training job that share it, arm beside arm.

python benchmarks/gpu_interposition.py [--small] [--device cuda:0] [--seed 0] [--out FILE]

Arms: each alone (exclusive), together without control (the driver's own time slices), under MPS at the requests and at
the limits (only where an MPS daemon runs already: this script starts none and changes no setting of a device), under
HAMi-core (only where HAMI_CORE_LIBRARY names it), under this library without control (monitor) and with it (ours).
Runs take turns: another arm begins each time. What is reported are ratios to the exclusive arm of the same run, since
devices differ; 20 pairs with and without the library tell what it costs alone. With --device cpu it is a rehearsal of
the script itself, without the arms that need a device, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.backends.sharing.gpu.library import find_library, preload
from springtide.core.shares import Share
from springtide_studies.interposition.daemon import WHOLE, BenchTenant, RunningDaemon

WORK = Path(__file__).with_name("gpu_pair_work.py")
EXCLUSIVE, NO_CONTROL, MPS_REQUEST, MPS_LIMIT = "exclusive", "no control", "MPS at request", "MPS at limit"
HAMI, MONITOR, OURS = "HAMi-core", "ours, monitor only", "ours"
SERVICE_SHARE, TRAINING_SHARE = Share(request=0.5, limit=0.8), Share(request=0.3, limit=0.8)
PAIRS = (
    ("bert-base", False, "resnet152"),
    ("bert-base", True, "resnet152"),
    ("roberta-large", False, "gpt2-large"),
    ("resnet152", True, "gpt2-large"),
    ("llm-decode", False, "resnet152"),
)
LOADS = ((0.2, 1.0), (0.5, 1.0), (0.5, 4.0), (0.8, 1.0))  # of the exclusive capacity, and the gamma arrivals' variation
SLO_FACTOR = 2.0  # of the exclusive 95th percentile at the lowest load
NUM_OVERHEAD_PAIRS = 20
T_95 = 2.093  # of 19 degrees of freedom
MOST_OVERHEAD = 0.01
CAP_MB = 4096


@dataclass(frozen=True)
class Plan:
    """How many runs of what length one measurement has."""

    device: str
    seed: int
    num_runs: int
    run_s: float
    warm_s: float
    overhead_s: float
    pairs: Sequence[tuple[str, bool, str]]
    loads: Sequence[tuple[float, float]]
    serving_batch: int = 1
    training_batch: int = 16

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no device: the numbers are then no measurement."""
        return not self.device.startswith("cuda")


@dataclass
class Process:
    """A running tenant."""

    process: subprocess.Popen[str]
    uuid: str = ""

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The answer to the oldest order that has not been read yet."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a tenant ended with code {self.process.wait()}; what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.tell(order)
        return self.hear()


@dataclass
class Trial:
    """One run of one arm."""

    latencies_s: list[float] = field(default_factory=list)
    num_served: int = 0
    samples_per_s: float = 0.0
    launches: int = 0
    num_open: int = 0
    throttled_s: float = 0.0


def gamma_moments(rate: float, variation: float, duration_s: float, seed: int) -> list[float]:
    """Arrivals whose gaps are gamma distributed with this coefficient of variation (1: Poisson)."""
    draw, at_s = random.Random(seed), 0.0
    moments: list[float] = []
    shape = 1.0 / variation**2
    while True:
        at_s += draw.gammavariate(shape, 1.0 / (rate * shape))
        if at_s >= duration_s:
            return moments
        moments.append(at_s)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.nan


def overhead_of(ratios: Sequence[float]) -> dict[str, Any]:
    """The mean of time with the library over time without it, and its 95 % interval."""
    mean = statistics.fmean(ratios)
    half = T_95 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return {"ratio": mean, "interval": [mean - half, mean + half], "is_met": mean + half < 1.0 + MOST_OVERHEAD}


def arms_here(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The arms that can run on this machine, and why the others cannot."""
    missing: dict[str, str] = {}
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if not (pipe / "control").exists():
        missing |= dict.fromkeys((MPS_REQUEST, MPS_LIMIT), "no MPS daemon runs here, and this script starts none")
    if not Path(os.environ.get("HAMI_CORE_LIBRARY", "")).is_file():
        missing[HAMI] = "HAMI_CORE_LIBRARY names no library"
    if plan.is_rehearsal:
        missing |= dict.fromkeys((MPS_REQUEST, MPS_LIMIT, HAMI, MONITOR, OURS), "a rehearsal without a device")
    known = (EXCLUSIVE, NO_CONTROL, MPS_REQUEST, MPS_LIMIT, HAMI, MONITOR, OURS)
    return {arm: "" for arm in known if arm not in missing}, missing


def environment_of(arm: str, share: Share, daemon: RunningDaemon | None) -> dict[str, str]:
    """The environment variables that a tenant's process of this arm has beside ours."""
    if arm in (MONITOR, OURS):
        assert daemon is not None
        return {**preload(os.environ, find_library()), **daemon.environment(is_there=True)}
    if arm in (MPS_REQUEST, MPS_LIMIT):
        part = share.request if arm == MPS_REQUEST else share.limit
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(round(100 * part))}
    if arm == HAMI:
        return {"LD_PRELOAD": os.environ["HAMI_CORE_LIBRARY"], "CUDA_DEVICE_SM_LIMIT": str(round(100 * share.limit))}
    # A program that runs alone is to see the device as it is.
    return {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


@contextlib.contextmanager
def tenant(
    plan: Plan, kind: str, model: str, environment: Mapping[str, str], *, is_graph: bool = False
) -> Iterator[Process]:
    """Start a tenant, warm it up, and return it ready for orders."""
    batch = plan.serving_batch if kind == "serve" else plan.training_batch
    order = {"kind": kind, "model": model, "batch": batch, "device": plan.device, "is_graph": is_graph}
    started = Process(
        subprocess.Popen(
            [sys.executable, str(WORK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
    )
    try:
        started.uuid = started.ask(order)["uuid"]
        yield started
    finally:
        assert started.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            started.process.stdin.close()
        try:
            started.process.wait(30)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()


@contextlib.contextmanager
def daemon_of(arm: str) -> Iterator[RunningDaemon | None]:
    """The daemon of an arm that has one."""
    if arm not in (MONITOR, OURS):
        yield None
        return
    settings = {"SPRINGTIDE_SHARE_CONTROL": "off"} if arm == MONITOR else {}
    with tempfile.TemporaryDirectory() as folder, RunningDaemon(Path(folder), settings) as daemon:
        yield daemon


def play(plan: Plan, service: Process | None, training: Process | None, moments: list[float]) -> Trial:
    """Run both tenants at once, or one of them; the first seconds are warm-up and not counted."""
    trial = Trial()
    starts_at_s = time.monotonic() + 1.0
    if service is not None:
        service.tell({"do": "serve", "starts_at_s": starts_at_s, "moments": moments})
    if training is not None:
        training.ask({"do": "run", "seconds": 1.0 + plan.warm_s})
        done = training.ask({"do": "run", "seconds": plan.run_s - plan.warm_s})
        trial.samples_per_s = done["samples"] / done["seconds"]
    if service is not None:
        latencies = service.hear()["latencies_s"]
        told = [(s, moment) for s, moment in zip(latencies, moments, strict=True) if moment >= plan.warm_s]
        trial.latencies_s = [s for s, _ in told]
        trial.num_served = sum(moment + s <= plan.run_s for s, moment in told)
    return trial


def run_arm(plan: Plan, arm: str, pair: tuple[str, bool, str], moments: list[float]) -> Trial:
    """One run of one arm, with processes of its own."""
    model, is_graph, trained = pair
    if arm == EXCLUSIVE:
        around = environment_of(arm, WHOLE, None)
        with tenant(plan, "serve", model, around, is_graph=is_graph) as service:
            alone = play(plan, service, None, moments)
        with tenant(plan, "train", trained, around) as training:
            alone.samples_per_s = play(plan, None, training, []).samples_per_s
        return alone
    with daemon_of(arm) as daemon, contextlib.ExitStack() as stack:
        serving = environment_of(arm, SERVICE_SHARE, daemon)
        service = stack.enter_context(tenant(plan, "serve", model, serving, is_graph=is_graph))
        around = environment_of(arm, TRAINING_SHARE, daemon)
        training = stack.enter_context(tenant(plan, "train", trained, around))
        if daemon is not None:
            shares = (WHOLE, WHOLE) if arm == MONITOR else (SERVICE_SHARE, TRAINING_SHARE)
            daemon.grant(
                {
                    "service": BenchTenant(service.process.pid, service.uuid, shares[0], is_slo=True),
                    "training": BenchTenant(training.process.pid, training.uuid, shares[1]),
                }
            )
            time.sleep(1.5)  # a process that asked before it had a share asks again within a second
        trial = play(plan, service, training, moments)
        status = None if daemon is None else daemon.status()
        for held in () if status is None else status.sharing.tenants:
            trial.launches += held.num_launches
            trial.num_open += held.num_open
            trial.throttled_s += held.throttled_s
        return trial


def capacity(plan: Plan, pair: tuple[str, bool, str]) -> float:
    """Requests a second of the service alone, one after the other."""
    with tenant(plan, "serve", pair[0], environment_of(EXCLUSIVE, WHOLE, None), is_graph=pair[1]) as service:
        done = service.ask({"do": "run", "seconds": max(2.0, plan.warm_s)})
        return float(done["steps"] / done["seconds"])


def compare(trials: Mapping[str, list[Trial]], slo_s: float) -> list[dict[str, Any]]:
    """Every arm beside the exclusive one: medians over runs of what each run came to."""
    rows = []
    for arm, runs in trials.items():
        ratios: dict[str, list[float]] = {"p50": [], "p95": [], "p99": [], "training": [], "aggregate": []}
        for run, alone in zip(runs, trials[EXCLUSIVE], strict=True):
            for name in ("p50", "p95", "p99"):
                fraction = float(name[1:]) / 100
                ratios[name].append(percentile(run.latencies_s, fraction) / percentile(alone.latencies_s, fraction))
            ratios["training"].append(run.samples_per_s / alone.samples_per_s)
            ratios["aggregate"].append(ratios["training"][-1] + run.num_served / max(1, alone.num_served))
        latencies = [s for run in runs for s in run.latencies_s]
        rows.append(
            {
                "arm": arm,
                "ratios_to_exclusive": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
                "slo_misses": round(sum(s > slo_s for s in latencies) / max(1, len(latencies)), 4),
                "num_requests": len(latencies),
                "launches": sum(run.launches for run in runs),
                "launches_let_through": sum(run.num_open for run in runs),
                "throttled_s": round(sum(run.throttled_s for run in runs), 3),
            }
        )
    return rows


def measure_pairs(plan: Plan, arms: Sequence[str], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every pair under every load in every arm, by turns."""
    found = []
    for pair in plan.pairs:
        most = capacity(plan, pair)
        slo_s = math.nan
        for load, variation in plan.loads:
            trials: dict[str, list[Trial]] = {arm: [] for arm in arms}
            for number in range(plan.num_runs):
                moments = gamma_moments(load * most, variation, plan.run_s, plan.seed * 1000 + number)
                for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                    tell(f"{pair}, load {load:g}, run {number + 1} of {plan.num_runs}: {arm}")
                    trials[arm].append(run_arm(plan, arm, pair, moments))
            if math.isnan(slo_s):
                alone = [s for run in trials[EXCLUSIVE] for s in run.latencies_s]
                slo_s = SLO_FACTOR * percentile(alone, 0.95)
            setting = {
                "service": pair[0],
                "is_graph": pair[1],
                "training": pair[2],
                "load": load,
                "variation": variation,
            }
            found.append({**setting, "capacity_per_s": most, "slo_s": slo_s, "arms": compare(trials, slo_s)})
    return found


def measure_overhead(plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """A service alone, with the library (and a daemon that holds it to nothing) and without, by turns."""
    model, is_graph, _ = plan.pairs[0]
    tell(f"{NUM_OVERHEAD_PAIRS} pairs with and without the library ...")
    with daemon_of(OURS) as daemon, contextlib.ExitStack() as stack:
        plain = stack.enter_context(
            tenant(plan, "serve", model, environment_of(EXCLUSIVE, WHOLE, None), is_graph=is_graph)
        )
        around = environment_of(OURS, WHOLE, daemon)
        held = stack.enter_context(tenant(plan, "serve", model, around, is_graph=is_graph))
        assert daemon is not None
        daemon.grant({"held": BenchTenant(held.process.pid, held.uuid)})
        time.sleep(1.5)
        ratios = []
        for number in range(NUM_OVERHEAD_PAIRS):
            spent = {}
            for process in (plain, held) if number % 2 else (held, plain):
                done = process.ask({"do": "run", "seconds": plan.overhead_s})
                spent[process.uuid, process is held] = done["seconds"] / done["steps"]
            ratios.append(spent[held.uuid, True] / spent[plain.uuid, False])
        return {**overhead_of(ratios), "num_launches": daemon.num_launches("held"), "ratios": ratios}


def measure_cap(plan: Plan) -> dict[str, Any]:
    """How much memory a process capped at CAP_MB can allocate in pieces of 64 MB, and how much it is told there is."""
    share = Share(request=1.0, limit=1.0, memory_mb=CAP_MB)
    with daemon_of(OURS) as daemon, contextlib.ExitStack() as stack:
        held = stack.enter_context(tenant(plan, "serve", "tiny", environment_of(OURS, share, daemon)))
        assert daemon is not None
        daemon.grant({"held": BenchTenant(held.process.pid, held.uuid, share)})
        time.sleep(1.5)
        filled = held.ask({"do": "fill", "piece_bytes": 64_000_000})
    return {**filled, "cap_bytes": CAP_MB * 1_000_000, "error": filled["reserved_bytes"] / (CAP_MB * 1e6) - 1.0}


def run(plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole plan."""
    arms, missing = arms_here(plan)
    report: dict[str, Any] = {
        "bench": "gpu-interposition",
        "is_rehearsal": plan.is_rehearsal,
        "device": device_name(),
        "not_run": missing,
        "shares": {"service": [SERVICE_SHARE.request, SERVICE_SHARE.limit]},
        "pairs": measure_pairs(plan, list(arms), tell),
    }
    report["shares"]["training"] = [TRAINING_SHARE.request, TRAINING_SHARE.limit]
    if not plan.is_rehearsal:
        report |= {"overhead": measure_overhead(plan, tell), "memory_cap": measure_cap(plan)}
    return report


def device_name() -> str:
    """What the driver calls the devices."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=name,driver_version,uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def small_plan(device: str, seed: int) -> Plan:
    """A few minutes: does everything once, and is no measurement to be quoted."""
    pairs = (("tiny", False, "tiny"),) if not device.startswith("cuda") else PAIRS[:2]
    return Plan(device, seed, 1, 3.0 if not device.startswith("cuda") else 10.0, 1.0, 1.0, pairs, LOADS[1:2])


def main() -> int:
    """Measure and print. Exit code 0, also where there is no device to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="everything once, in minutes")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    full = Plan(asked.device, asked.seed, 5, 65.0, 5.0, 10.0, PAIRS, LOADS)
    plan = small_plan(asked.device, asked.seed) if asked.small else full
    if not plan.is_rehearsal and shutil.which("nvidia-smi") is None:
        print("skipped: there is no CUDA device on this machine (no nvidia-smi); nothing was measured", file=sys.stderr)
        return 0
    text = json.dumps(run(plan, lambda line: print(line, file=sys.stderr, flush=True)), indent=2)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
