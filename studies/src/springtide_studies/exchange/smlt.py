"""SMLT's measurements of synchronisation on real processes: figure 7's parts, figure 8's systems, figure 9's stores.

Each rank is a process behind a link of its own; the object store is an S3 API with a latency added to every request,
the parameter store a Redis. Bytes are scaled down, times are not: size / rate is what 35 MB take at 70 MB/s.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell, measure_apart
from springtide.core.functions import Collective
from springtide.perf.functions.collective_choice import PARAMETER_STORE_BYTES_PER_S, PARAMETER_STORE_LATENCY_S
from springtide.perf.functions.collective_time import sync_time_s
from springtide.perf.functions.services import LAMBDA_BYTES_PER_S
from springtide.storage.stores.open import open_store
from springtide_studies.exchange.member import Done, MemberTask, expected_sha256
from springtide_studies.exchange.probe import (
    IN_FLIGHT,
    Members,
    client_environment,
    enough_chunks,
    running_members,
    took_s,
)
from springtide_studies.exchange.stores import missing, running_store
from springtide_studies.options import seed_option, small_option

StoreKind = Literal["s3", "redis"]
# What a request to S3 takes from a function before its first byte: FuncPipe measures up to 40 ms, quotes 30 to 40.
OBJECT_STORE_LATENCY_S = 0.035
# How many times a worker's link the parameter store's network card carries: 5 Gbit/s beside 70 MB/s.
CARD_LINKS = PARAMETER_STORE_BYTES_PER_S / LAMBDA_BYTES_PER_S
CHUNK_TOLERANCE_FRACTION = 0.04
GROWTH_MARGIN = 1.3
# As far as SMLT's figures go.
MORE_WORKERS = (2, 4, 8, 16, 32, 64, 100)
CRITERION = (
    "From the fewest workers to the most, the time of an exchange grows at least"
    f" {GROWTH_MARGIN} times as much with Siren's and Cirrus's ways as with SMLT's, and with the most SMLT is below"
    " both (figure 8); the same schedule takes less through a Redis than through an S3 API with a realistic latency"
    " (figure 9); `ours` takes no longer than any. Every sum was right bit for bit."
)


@dataclass(frozen=True, slots=True)
class System:
    """A way to exchange gradients: its schedule, its store, and its published name."""

    title: str
    collective: Collective
    store: StoreKind


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "smlt": System("SMLT: m = n shards through Redis", "smlt", "redis"),
        "siren": System("Siren-like: all to all, S3", "all-to-all", "s3"),
        "cirrus": System("Cirrus-like: a parameter server, S3", "parameter-server", "s3"),
        "lambdaml": System("LambdaML: scatter-reduce, S3", "lambdaml", "s3"),
        "ours": System("ours: chunked full duplex through Redis", "duplex", "redis"),
    }
)


@dataclass(frozen=True, slots=True)
class SmltPlan:
    """How many workers, how many bytes at what rate, and how often; `small_bytes` is a small model for figure 9.

    More than eight workers ask more of the S3 server, which is Python on one core, than it does in time.
    """

    workers: tuple[int, ...] = (2, 4, 8)
    num_bytes: int = 500_000
    bytes_per_s: float = 1e6
    small_bytes: int = 20_000
    num_repetitions: int = 3
    seed: int = 0


SMALL = SmltPlan(workers=(2, 4), num_repetitions=1)


class SmltTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One system (or schedule) as measured: all repetitions, where a worker's time went in the best, what is predicted.

    `parts_s` are those of figure 7, means over the workers.
    """

    system: str
    store: str
    collective: str
    n: int
    num_bytes: int
    latency_s: float
    num_chunks: int
    num_shards: int
    times_s: tuple[float, ...]
    predicted_s: float
    parts_s: dict[str, float] = {}

    @property
    def best_s(self) -> float:
        """The best repetition, which the machine's other work has disturbed least."""
        return min(self.times_s)


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says of more workers than this machine carries: seconds of each system, by name."""

    n: int
    seconds: dict[str, float]


class SmltMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One system beside another; seconds. `figure` is SMLT's."""

    case: str
    figure: int
    ours: float
    baseline: float
    baseline_name: str
    ratio: float
    n: int
    unit: str = "s"


def parts_of(collective: Collective, done: Sequence[Done]) -> dict[str, float]:
    """Figure 7's parts of an all-reduce, means over workers: each lasts from the end of the one before to its own.

    SMLT's four phases; for the others UL-grad until the worker's gradient is up, DL-grad until it has the sum. A
    parameter server waits and adds while its workers do neither, and is left out.
    """
    ranks = done[1:] if collective == "parameter-server" else done
    parts: dict[str, float] = {}
    for one in ranks:
        whole_s = one.ended_s - one.began_s
        marks = one.marks
        if collective == "smlt":
            ends = {
                "UL-Shard": marks.raw_put_s,
                "DL-Shard": marks.raw_got_s,
                "UL-aggr": marks.sum_put_s,
                "DL-grad": whole_s,
            }
        else:
            ends = {"UL-grad": marks.raw_put_s, "DL-grad": whole_s}
        before_s = 0.0
        for name, end_s in ends.items():
            # With fewer shards than workers some merge none: a part without requests takes no time.
            end_s = max(end_s, before_s)
            parts[name] = parts.get(name, 0.0) + (end_s - before_s) / len(ranks)
            before_s = end_s
    return parts


def rate_of(plan: SmltPlan, store: StoreKind, n: int) -> float:
    """What each of n workers has of its link: through a Redis they share one network card, through S3 none."""
    return plan.bytes_per_s * (min(1.0, CARD_LINKS / n) if store == "redis" else 1.0)


def latency_of(store: StoreKind) -> float:
    """What a request to that store takes."""
    return OBJECT_STORE_LATENCY_S if store == "s3" else PARAMETER_STORE_LATENCY_S


def chunks_of(plan: SmltPlan, system: System, n: int) -> int:
    """In how many chunks a system sends: ours in as few as come close to the best, the others in one."""
    if system.collective != "duplex":
        return 1
    rate, latency_s = rate_of(plan, system.store, n), latency_of(system.store)
    return enough_chunks("duplex", n, plan.num_bytes, rate, latency_s, IN_FLIGHT, CHUNK_TOLERANCE_FRACTION)


def predict(plan: SmltPlan, workers: Sequence[int]) -> list[Predicted]:
    """Figure 8 by the model, as far as SMLT's own goes, and beyond what is measured here."""

    def seconds(system: System, n: int) -> float:
        rate, latency_s = rate_of(plan, system.store, n), latency_of(system.store)
        chunks = chunks_of(plan, system, n)
        return sync_time_s(system.collective, n, plan.num_bytes, rate, latency_s, chunks, IN_FLIGHT)

    both = {**SYSTEMS, "smlt-s3": replace(SYSTEMS["smlt"], store="s3"), "ours-s3": replace(SYSTEMS["ours"], store="s3")}
    return [Predicted(n=n, seconds={name: seconds(system, n) for name, system in both.items()}) for n in workers]


class ExchangeMeasurements:
    """Measures on running ranks and stores. `urls` are the stores' addresses by kind."""

    def __init__(self, members: Members, urls: Mapping[str, str], plan: SmltPlan) -> None:
        self._members = members
        self._urls = urls
        self._plan = plan
        self._cleaners = {kind: open_store(url) for kind, url in urls.items()}

    def close(self) -> None:
        """Close the stores."""
        for cleaner in self._cleaners.values():
            cleaner.close()

    def measure(self, label: str, system: System, n: int, num_bytes: int, latency_s: float) -> SmltTimes:
        """All repetitions of one case. Raises BackendError where a rank fails, or has another sum than it should."""
        plan = self._plan
        rate, chunks = rate_of(plan, system.store, n), chunks_of(plan, system, n)
        num_elements = num_bytes // 4
        found: list[list[Done]] = []
        for repetition in range(plan.num_repetitions):
            prefix = f"{label}.{n}.{num_bytes}.{round(latency_s * 1e3)}.{repetition}"
            tasks = [
                MemberTask(
                    store_url=self._urls[system.store],
                    prefix=prefix,
                    rank=rank,
                    num_ranks=n,
                    collective=system.collective,
                    num_chunks=chunks,
                    num_in_flight=IN_FLIGHT,
                    num_elements=num_elements,
                    bytes_per_s=rate,
                    latency_s=latency_s,
                    seed=plan.seed,
                    doublings=repetition,
                    num_shards=n if system.collective == "smlt" else 0,
                )
                for rank in range(n)
            ]
            found.append(self._members.measure(tasks, expected_sha256(plan.seed, n, num_elements, repetition)))
            cleaner = self._cleaners[system.store]
            cleaner.delete(cleaner.keys(f"{prefix}/"))
        best = min(found, key=took_s)
        return SmltTimes(
            system=label,
            store=system.store,
            collective=system.collective,
            n=n,
            num_bytes=num_bytes,
            latency_s=latency_s,
            num_chunks=chunks,
            num_shards=n if system.collective == "smlt" else 0,
            times_s=tuple(took_s(done) for done in found),
            predicted_s=sync_time_s(system.collective, n, num_bytes, rate, latency_s, chunks, IN_FLIGHT),
            parts_s=parts_of(system.collective, best),
        )

    def systems(self) -> Iterator[SmltTimes]:
        """Figure 8's measurements (figure 7's are their parts): every system with every number of workers."""
        for n, (label, system) in itertools.product(self._plan.workers, SYSTEMS.items()):
            yield self.measure(label, system, n, self._plan.num_bytes, latency_of(system.store))

    def stores(self) -> Iterator[SmltTimes]:
        """Figure 9's: SMLT's schedule through the S3 API, for a large and a small gradient, with and without latency.

        The Redis's are measured beside them, in the same minute.
        """
        plan = self._plan
        for n, num_bytes in itertools.product(plan.workers, (plan.num_bytes, plan.small_bytes)):
            redis = SYSTEMS["smlt"]
            yield self.measure("stores", redis, n, num_bytes, PARAMETER_STORE_LATENCY_S)
            for latency_s in (OBJECT_STORE_LATENCY_S, 0.0):
                yield self.measure("stores", replace(redis, store="s3"), n, num_bytes, latency_s)


def rows_of(systems: Sequence[SmltTimes], stores: Sequence[SmltTimes]) -> list[SmltMeasurement]:
    """Every system beside SMLT and ours (figure 8), and each store beside the Redis (figure 9)."""
    rows: list[SmltMeasurement] = []
    for n in dict.fromkeys(one.n for one in systems):
        by_name = {one.system: one for one in systems if one.n == n}
        for left, right in (("smlt", "siren"), ("smlt", "cirrus"), *(("ours", other) for other in SYSTEMS)):
            if left != right:
                case = f"{left}, n={n}"
                rows.append(_row(8, case, by_name[left], by_name[right], SYSTEMS[right].title))
    for redis in (one for one in stores if one.store == "redis"):
        beside = (one for one in stores if (one.n, one.num_bytes) == (redis.n, redis.num_bytes))
        for other in (one for one in beside if one.store != "redis"):
            case = f"SMLT through Redis, n={redis.n}, {redis.num_bytes / 1e3:.0f} kB"
            title = f"the same through S3, {other.latency_s * 1e3:.0f} ms a request"
            rows.append(_row(9, case, redis, other, title))
    return rows


def _row(figure: int, case: str, ours: SmltTimes, other: SmltTimes, title: str) -> SmltMeasurement:
    return SmltMeasurement(
        case=case,
        figure=figure,
        ours=ours.best_s,
        baseline=other.best_s,
        baseline_name=title,
        ratio=ours.best_s / other.best_s,
        n=ours.n,
    )


def growth_of(systems: Sequence[SmltTimes], name: str) -> float:
    """How many times as long a system takes with the most workers as with the fewest."""
    times = sorted((one.n, one.best_s) for one in systems if one.system == name)
    return times[-1][1] / times[0][1]


def has_passed(systems: Sequence[SmltTimes], stores: Sequence[SmltTimes]) -> bool:
    """Whether the criterion holds: what grows faster, what is below what."""
    if not systems or not stores:
        return False
    most = max(one.n for one in systems)
    rows = rows_of(systems, stores)
    slow = [growth_of(systems, name) >= GROWTH_MARGIN * growth_of(systems, "smlt") for name in ("siren", "cirrus")]
    above = [row.ratio < 1.0 for row in rows if row.figure == 8 and row.n == most and row.case.startswith("smlt")]
    ours = [row.ratio <= 1.0 for row in rows if row.case.startswith("ours")]
    redis = [row.ratio < 1.0 for row in rows if row.figure == 9 and " 0 ms" not in row.baseline_name]
    return all((*slow, *above, *ours, *redis))


def measure_all(plan: SmltPlan) -> tuple[list[SmltTimes], list[SmltTimes]]:
    """Figure 8's and figure 9's measurements. Raises BackendError where a store cannot be started."""
    with ExitStack() as stack:
        members = stack.enter_context(running_members(max(plan.workers)))
        urls = {kind: stack.enter_context(running_store(kind)) for kind in ("redis", "s3")}
        stack.enter_context(client_environment())
        bench = ExchangeMeasurements(members, urls, plan)
        stack.callback(bench.close)
        return list(map(_told, bench.systems())), list(map(_told, bench.stores()))


def _told(one: SmltTimes) -> SmltTimes:
    sys.stderr.write(
        f"{one.system}, {one.store}, n={one.n}, {one.num_bytes / 1e3:.0f} kB, {one.latency_s * 1e3:.0f} ms: "
        f"{one.best_s:.2f} s (predicted {one.predicted_s:.2f})\n"
    )
    return one


def run_probe(*, as_json: bool, small: bool = False, seed: int = 0) -> int:
    """Measure and print; returns the exit code."""
    plan = replace(SMALL if small else SmltPlan(), seed=seed)
    skipped = [f"{kind}: {missing(kind)}" for kind in ("redis", "s3") if missing(kind)]
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    systems, stores = ([], []) if skipped else measure_all(plan)
    passed = has_passed(systems, stores)
    body = {
        "bench": "smlt-sync",
        "passed": passed,
        "criterion": CRITERION,
        "seed": seed,
        "skipped": skipped,
        "machine": {
            "cpus": os.cpu_count(),
            "load_1m": os.getloadavg()[0],
            "load_1m_before": load_before,
            "machine": platform.machine(),
            "took_s": round(time.monotonic() - began_s, 1),
        },
        "size_over_rate_s": plan.num_bytes / plan.bytes_per_s,
        "object_store_latency_s": OBJECT_STORE_LATENCY_S,
        "growth": {name: growth_of(systems, name) for name in SYSTEMS} if systems else {},
        "rows": msgspec.to_builtins(rows_of(systems, stores) if systems else []),
        "predicted": msgspec.to_builtins(predict(plan, MORE_WORKERS)),
        "systems": msgspec.to_builtins(systems),
        "stores": msgspec.to_builtins(stores),
    }
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
        return 0
    sys.stdout.write(table_of(systems, stores) + "".join(f"not measured: {reason}\n" for reason in skipped))
    sys.stdout.write(f"{'passed' if passed else 'NOT passed'}. {CRITERION}\n")
    return 0


def table_of(systems: Sequence[SmltTimes], stores: Sequence[SmltTimes]) -> str:
    """All measurements as text: the best in seconds, as predicted, and where the time of a worker went."""
    lines = [f"{'system':9s} {'store':6s} {'n':>2s} {'kB':>5s} {'latency':>8s} {'s':>7s} {'model':>7s}  parts"]
    for one in (*systems, *stores):
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.parts_s.items())
        lines.append(
            f"{one.system:9s} {one.store:6s} {one.n:2d} {one.num_bytes / 1e3:5.0f} {one.latency_s * 1e3:5.0f} ms "
            f"{one.best_s:7.3f} {one.predicted_s:7.3f}  {parts}"
        )
    return "\n".join(lines) + "\n"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return measure_apart(["springtide_studies.exchange", "smlt-sync"], small=options["small"], seed=options["seed"])


BENCH = Bench(run=_run, options=[small_option("Up to four workers, once."), seed_option()])
