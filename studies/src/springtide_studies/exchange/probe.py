"""How long all-reduces over throttled links to three stores take, beside the lower bound and the papers' formulas.

Real processes, one a rank, each behind a link of its own with a rate each way. Bytes are scaled down, times are not:
size / rate is what 64 MB take at 70 MB/s, on rates that two cores carry. Every result is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell, measure_apart
from springtide.core.errors import BackendError
from springtide.core.functions import Collective
from springtide.perf.functions.collective_time import CHUNK_CHOICES, CHUNKED, sync_time_s
from springtide.storage.stores.open import open_store
from springtide_studies.exchange.member import Done, MemberTask, expected_sha256
from springtide_studies.exchange.stores import S3_ENVIRONMENT, missing, running_store
from springtide_studies.options import seed_option, small_option

BOUND_LIMIT = 1.25
IN_FLIGHT = 4
# A quarter of what chunks can win is left where more of them would mostly be more requests.
CHUNK_TOLERANCE_FRACTION = 0.04
CRITERION = (
    f"In every row `ours`, our chunked full-duplex all-reduce, takes at most {BOUND_LIMIT} x `bound`, 2 (n - 1) / n x"
    " size / rate, and no longer than `baseline`, for the pipelined scatter-reduce with as many requests in flight."
    " Each is the best of `num_repetitions`, taken in turn; every sum was right bit for bit."
)
PAIR: tuple[Collective, ...] = ("funcpipe", "duplex")
OTHERS: tuple[Collective, ...] = ("lambdaml", "smlt", "parameter-server")


def lower_bound_s(n: int, num_bytes: float, bytes_per_s: float) -> float:
    """2 (n - 1) / n x S / w: the lower bound of any all-reduce over a store that cannot add, with a link each way.

    Before the first worker has an element's sum, the part of each other worker has been read at least once; then each
    other worker reads at least once more. So there are 2 (n - 1) reads of S over n links. The bound is 0 for n = 1.
    """
    return 2.0 * (n - 1) / n * num_bytes / bytes_per_s


def enough_chunks(
    name: Collective,
    n: int,
    num_bytes: float,
    bytes_per_s: float,
    latency_s: float,
    in_flight: int,
    tolerance_fraction: float,
) -> int:
    """The fewest chunks with which an all-reduce takes at most `tolerance_fraction` longer than with the best number.

    For stores with free requests, whose machine still has to process them.
    """
    choices = CHUNK_CHOICES if name in CHUNKED else (1,)
    times_s = [sync_time_s(name, n, num_bytes, bytes_per_s, latency_s, chunks, in_flight) for chunks in choices]
    enough_s = min(times_s) * (1.0 + tolerance_fraction)
    return next(chunks for chunks, took_s in zip(choices, times_s, strict=True) if took_s <= enough_s)


class SyncMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Ours beside one other schedule, on one store, for one number of workers and one latency; seconds."""

    case: str
    ours: float
    baseline: float
    baseline_name: str
    ratio: float
    bound: float
    over_bound: float
    baseline_over_bound: float
    num_chunks: int
    num_repetitions: int
    baseline_repetitions: int
    unit: str = "s"


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule as measured: all repetitions, the best over the bound, and what the walk of its events predicts."""

    store: str
    n: int
    latency_s: float
    schedule: str
    num_chunks: int
    times_s: tuple[float, ...]
    over_bound: float
    size_over_rate_s: float
    predicted_s: float
    bound_s: float
    cpu_s: float
    num_misses: int


@dataclass(frozen=True, slots=True)
class Scale:
    """What is moved how fast on a kind of store, and how often: so that this machine's cores are not what is timed."""

    num_bytes: int
    bytes_per_s: float
    num_repetitions: int
    others: tuple[Collective, ...]
    others_with_latency: tuple[Collective, ...]


# 4 MB at 4.375 MB/s: size / rate is that of 64 MB at 70 MB/s.
_FAST = Scale(4_000_000, 4.375e6, 3, OTHERS, OTHERS[:1])
# Two workers are far from both limits: fewer repetitions tell as much.
_PAIR = replace(_FAST, num_repetitions=2)
_BRIEF = Scale(2_000_000, 2.5e6, 2, (), ())


def _served(bytes_per_s: float) -> Scale:
    """What the S3 server carries: Python on one core, the slowest of the three stores by far."""
    return Scale(1_000_000, bytes_per_s, 2, OTHERS[:2], ())


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Which stores are measured with how many workers on which scale, and with which latencies."""

    cases: tuple[tuple[str, int, Scale], ...]
    latencies_s: tuple[float, ...] = (0.0, 0.03)
    seed: int = 0


FULL = SyncPlan(
    (
        *((store, n, _FAST if n > 2 else _PAIR) for store in ("file", "redis") for n in (2, 4, 8)),
        *(("s3", n, _served(bytes_per_s)) for n, bytes_per_s in ((2, 1e6), (4, 0.7e6), (8, 0.3e6))),
    )
)
SMALL = SyncPlan(tuple((store, n, _BRIEF) for store in ("file", "redis") for n in (2, 4)))


class Members:
    """The processes that are ranks: started once, told what to do for every measurement."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "springtide_studies.exchange.member"]
        environment = {**os.environ, **dict(S3_ENVIRONMENT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(count)
        ]

    def measure(self, tasks: Sequence[MemberTask], sha256: str) -> list[Done]:
        """One all-reduce, as each rank saw it.

        Raises BackendError where a rank fails or has another result than it should.
        """
        taking_part = self._processes[: len(tasks)]
        for process, task in zip(taking_part, tasks, strict=True):
            self._tell(process, msgspec.json.encode(task))
        for process in taking_part:
            line = self._hear(process)
            if line != b"ready\n":
                raise BackendError(f"a rank cannot begin: {msgspec.json.decode(line, type=Done).error}")
        for process in taking_part:
            self._tell(process, b"go")
        done = [msgspec.json.decode(self._hear(process), type=Done) for process in taking_part]
        for rank, one in enumerate(done):
            if one.error:
                raise BackendError(f"rank {rank} failed in {tasks[rank].collective}: {one.error}")
            if one.sha256 != sha256:
                raise BackendError(f"rank {rank} has another sum than that of all ranks in {tasks[rank].collective}")
        return done

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
            process.communicate()

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        process.stdin.flush()

    @staticmethod
    def _hear(process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BackendError("a rank of the measurement has died; its last output is above")
        return line


def took_s(done: Sequence[Done]) -> float:
    """Seconds of an all-reduce, from the first rank's beginning to the last one's end."""
    return max(one.ended_s for one in done) - min(one.began_s for one in done)


@dataclass
class _Tally:
    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    num_misses: int = 0


def chunks_of(name: Collective, n: int, scale: Scale, latency_s: float) -> int:
    """In how many chunks a schedule is measured: as few as come close to the best; papers' schedules have one."""
    if name != "duplex":
        return 1
    arguments = (n, scale.num_bytes, scale.bytes_per_s, latency_s, IN_FLIGHT)
    return enough_chunks(name, *arguments, CHUNK_TOLERANCE_FRACTION)


def measure_case(
    members: Members, url: str, store: str, scale: Scale, n: int, latency_s: float, seed: int
) -> list[Timing]:
    """Every schedule on one store, for one number of workers and one latency; repetitions in turn."""
    rest = scale.others_with_latency if latency_s else scale.others
    tallies: dict[Collective, _Tally] = {name: _Tally() for name in (*rest, *PAIR)}
    num_elements = scale.num_bytes // 4
    cleaner = open_store(url)
    for repetition in range(scale.num_repetitions):
        sha256 = expected_sha256(seed, n, num_elements, repetition)
        # The order changes each time, so that what the machine does meanwhile favours no schedule.
        pair = PAIR if repetition % 2 == 0 else PAIR[::-1]
        for name in (*rest, *pair) if repetition == 0 else pair:
            prefix = f"{n}.{round(latency_s * 1e3)}/{name}.{repetition}"
            tasks = [
                MemberTask(
                    store_url=url,
                    prefix=prefix,
                    rank=rank,
                    num_ranks=n,
                    collective=name,
                    num_chunks=chunks_of(name, n, scale, latency_s),
                    num_in_flight=IN_FLIGHT,
                    num_elements=num_elements,
                    bytes_per_s=scale.bytes_per_s,
                    latency_s=latency_s,
                    seed=seed,
                    doublings=repetition,
                )
                for rank in range(n)
            ]
            done = members.measure(tasks, sha256)
            tally = tallies[name]
            tally.times_s.append(took_s(done))
            tally.cpu_s += sum(one.cpu_s for one in done)
            tally.num_misses += sum(one.num_misses for one in done)
            cleaner.delete(cleaner.keys(f"{prefix}/"))
    cleaner.close()
    bound_s = lower_bound_s(n, scale.num_bytes, scale.bytes_per_s)
    return [
        Timing(
            store=store,
            n=n,
            latency_s=latency_s,
            schedule=name,
            num_chunks=(chunks := chunks_of(name, n, scale, latency_s)),
            times_s=tuple(tally.times_s),
            over_bound=min(tally.times_s) / bound_s,
            size_over_rate_s=scale.num_bytes / scale.bytes_per_s,
            predicted_s=sync_time_s(name, n, scale.num_bytes, scale.bytes_per_s, latency_s, chunks, IN_FLIGHT),
            bound_s=bound_s,
            cpu_s=tally.cpu_s / len(tally.times_s),
            num_misses=tally.num_misses // len(tally.times_s),
        )
        for name, tally in tallies.items()
    ]


_NAMES: tuple[tuple[str, str], ...] = (
    ("funcpipe", f"pipelined scatter-reduce (FuncPipe), {IN_FLIGHT} in flight"),
    ("lambdaml", f"three-phase scatter-reduce (LambdaML), {IN_FLIGHT} in flight"),
    ("smlt", f"hierarchical aggregation (SMLT), {IN_FLIGHT} in flight"),
    ("parameter-server", f"one worker as parameter server, {IN_FLIGHT} in flight"),
)


def rows_of(timings: Sequence[Timing]) -> list[SyncMeasurement]:
    """Ours beside each other schedule of one case, the pipelined one first."""
    by_name = {timing.schedule: timing for timing in timings}
    ours = by_name["duplex"]
    best_s = min(ours.times_s)
    rows = []
    for name, words in _NAMES:
        if name not in by_name:
            continue
        other = by_name[name]
        baseline_s = min(other.times_s)
        rows.append(
            SyncMeasurement(
                case=f"{ours.store}, n={ours.n}, {ours.latency_s * 1e3:.0f} ms latency",
                ours=best_s,
                baseline=baseline_s,
                baseline_name=words,
                ratio=best_s / baseline_s,
                bound=ours.bound_s,
                over_bound=best_s / ours.bound_s,
                baseline_over_bound=baseline_s / ours.bound_s,
                num_chunks=ours.num_chunks,
                num_repetitions=len(ours.times_s),
                baseline_repetitions=len(other.times_s),
            )
        )
    return rows


def has_passed(rows: Sequence[SyncMeasurement], skipped: Sequence[str]) -> bool:
    """Whether the criterion holds in every row, and everything that was to be measured was."""
    is_close = all(row.ours <= BOUND_LIMIT * row.bound for row in rows)
    is_faster = all(row.ours <= row.baseline for row in rows if "pipelined" in row.baseline_name)
    return bool(rows) and not skipped and is_close and is_faster


def measure_all(plan: SyncPlan) -> tuple[list[Timing], list[str]]:
    """Every case of a plan, and which stores were left out and why."""
    timings: list[Timing] = []
    skipped: list[str] = []
    with running_members(max(n for _, n, _ in plan.cases)) as members:
        for store in dict.fromkeys(store for store, _, _ in plan.cases):
            reason = missing(store)
            if reason:
                skipped.append(f"{store}: {reason}")
                continue
            with running_store(store) as url, client_environment():
                cases = [(n, scale) for other, n, scale in plan.cases if other == store]
                for (n, scale), latency_s in itertools.product(cases, plan.latencies_s):
                    found = measure_case(members, url, store, scale, n, latency_s, plan.seed)
                    timings += found
                    told = ", ".join(f"{timing.schedule} {timing.over_bound:.2f}" for timing in found)
                    sys.stderr.write(f"{store}, n={n}, {latency_s * 1e3:.0f} ms, x bound: {told}\n")
    return timings, skipped


@contextlib.contextmanager
def running_members(count: int) -> Iterator[Members]:
    """So many processes that are ranks, for as long as something is measured."""
    members = Members(count)
    try:
        yield members
    finally:
        members.close()


@contextlib.contextmanager
def client_environment() -> Iterator[None]:
    """What a client of the S3 server needs, for as long as this process cleans up behind the ranks."""
    before = {name: os.environ.get(name) for name, _ in S3_ENVIRONMENT}
    os.environ.update(S3_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_probe(*, as_json: bool, small: bool = False, seed: int = 0) -> int:
    """Measure and print; returns the exit code."""
    plan = replace(SMALL if small else FULL, seed=seed)
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    timings, skipped = measure_all(plan)
    cases: dict[tuple[str, int, float], list[Timing]] = {}
    for timing in timings:
        cases.setdefault((timing.store, timing.n, timing.latency_s), []).append(timing)
    rows = [row for found in cases.values() for row in rows_of(found)]
    passed = has_passed(rows, skipped)
    machine = {
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "load_1m_before": load_before,
        "machine": platform.machine(),
        "took_s": round(time.monotonic() - began_s, 1),
    }
    if as_json:
        body = {"bench": "sync", "passed": passed, "criterion": CRITERION, "machine": machine, "seed": seed}
        body |= {"in_flight": IN_FLIGHT, "skipped": skipped}
        body |= {"rows": msgspec.to_builtins(rows), "schedules": msgspec.to_builtins(timings)}
        sys.stdout.write(json.dumps(body) + "\n")
        return 0
    sys.stdout.write(table_of(timings) + "\n" + "".join(f"not measured: {reason}\n" for reason in skipped))
    sys.stdout.write(f"{'passed' if passed else 'NOT passed'}. {CRITERION}\n")
    return 0


def table_of(timings: Sequence[Timing]) -> str:
    """All timings as text: times the bound as measured (best), as predicted, and every repetition in seconds."""
    lines = [f"{'store':6s} {'n':>2s} {'latency':>8s} {'schedule':17s} {'chunks':>6s} {'x bound':>8s} {'model':>6s}  s"]
    for timing in timings:
        times = ", ".join(f"{seconds:.2f}" for seconds in timing.times_s)
        lines.append(
            f"{timing.store:6s} {timing.n:2d} {timing.latency_s * 1e3:5.0f} ms {timing.schedule:17s} "
            f"{timing.num_chunks:6d} {timing.over_bound:8.3f} {timing.predicted_s / timing.bound_s:6.3f}  {times}"
        )
    return "\n".join(lines)


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return measure_apart(["springtide_studies.exchange", "sync"], small=options["small"], seed=options["seed"])


BENCH = Bench(run=_run, options=[small_option("Two stores, up to four workers."), seed_option()])
