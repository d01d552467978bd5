"""Reader of the workloads of Pollux (OSDI'21) and Sia (SOSP'23): application, batch size and replicas, no length.

Also scaling tables at a fixed global batch, from the step times that Pollux measured by placement and local batch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from pathlib import Path

from springtide.workloads.rows import TextRow, read_rows
from springtide.workloads.trace import Trace, TraceJob
from springtide.workloads.trace_builder import TraceBuilder

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
# Optimizer steps until the last epoch ends at a global batch size: the last `iteration` of the published
# validation run at that size (adaptdl, branch osdi21-artifact, <application>/validation-<batch size>.csv).
STEPS_TO_END = {
    "bert": {12: 14_774, 24: 7_427, 48: 3_732, 96: 1_885, 192: 940, 384: 480},
    "cifar10": {128: 39_062, 256: 20_377, 512: 10_615, 1024: 5_722, 2048: 3_178, 4096: 2_011},
    "deepspeech2": {20: 28_536, 40: 14_711, 80: 7_683, 160: 4_041, 320: 2_264, 640: 1_423},
    "imagenet": {
        200: 576_525,
        400: 292_995,
        800: 150_231,
        1600: 78_453,
        3200: 42_123,
        6400: 23_972,
        12800: 14_461,
    },
    "ncf": {
        256: 194_174,
        512: 97_094,
        1024: 48_625,
        2048: 24_308,
        4096: 12_172,
        8192: 6_122,
        16384: 3_069,
        32768: 1_548,
    },
    "yolov3": {8: 103_444, 16: 52_905, 32: 27_430, 64: 14_577, 128: 8_075, 256: 4_809, 512: 3_143},
}
_PLACEMENTS, _SCALABILITY = "placements.csv", "scalability.csv"
_DEVICES_PER_NODE = 4
_TIMES = ("local_bsz", "step_time", "sync_time")
# Local batch size -> seconds of a step that ends in an all-reduce, and the part of it that is the all-reduce.
Times = dict[int, tuple[float, float]]


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a workload: `time` in seconds since its start. Raises InvalidRequest naming line and column.

    The length is not in the file: it is the published run's at this batch size (`STEPS_TO_END`), or 0, unknown.
    """
    builder = TraceBuilder(path, limit)
    for row in read_rows(path, COLUMNS):
        builder.add(_read_row(row, builder), row.line, "application")
        if builder.is_full:
            break
    drawn = ("num_steps: of the published validation run of the application at this batch size, where there is one",)
    return builder.build("pollux", drawn)


def _read_row(row: TextRow, builder: TraceBuilder) -> TraceJob:
    application = row.text("application")
    if not application:
        row.refuse("application", "it is empty; the name of an application belongs here")
    batch_size = row.count("batch_size")
    return TraceJob(
        job_id=builder.claim_row(row, "name"),
        submit_s=row.number("time"),
        num_steps=STEPS_TO_END.get(application, {}).get(batch_size, 0),
        model=application,
        global_batch_size=batch_size,
        num_devices=row.devices("num_replicas"),
    )


def find_measurements(folder: Path) -> list[Path]:
    """The folders APPLICATION/ in `folder` that hold measurements, by name."""
    return sorted(path.parent for path in folder.glob(f"*/{_PLACEMENTS}") if path.parent.name in STEPS_TO_END)


def derive_table(folder: Path) -> dict[int, dict[int, float]]:
    """Global batch size -> devices -> optimizer steps a second, for the batch sizes of which a length is published.

    Devices are those of the most compact placements that were measured on nodes of four. A step of the global batch B
    on n devices is cut into as few micro-steps as the largest measured local batch allows: with k of them, each of
    ceil(B / n / k) samples, it takes step_time + (k - 1) * (step_time - sync_time), both interpolated linearly between
    measured local batch sizes. Raises InvalidRequest naming file, line and column.
    """
    times = _read_times(folder)
    table: dict[int, dict[int, float]] = {}
    for batch_size in STEPS_TO_END[folder.name]:
        rates = {count: _steps_per_s(times[count], batch_size, count) for count in sorted(times)}
        table[batch_size] = {count: rate for count, rate in rates.items() if rate > 0}
    return table


def _read_times(folder: Path) -> dict[int, Times]:
    times: dict[int, Times] = {}
    for count, row in _compact_rows(folder):
        local = row.count("local_bsz")
        step_s, sync_s = row.number("step_time"), row.number("sync_time")
        if step_s == 0 or sync_s > step_s:
            row.refuse("sync_time", f"{sync_s:g} s of a step of {step_s:g} s; the step is the longer of the two")
        times.setdefault(count, {})[local] = (step_s, sync_s)
    return {count: dict(sorted(measured.items())) for count, measured in times.items()}


def _compact_rows(folder: Path) -> Iterator[tuple[int, TextRow]]:
    """The rows of placements that fill nodes one after the other, with their number of devices."""
    for row in read_rows(folder / _PLACEMENTS, ("placement", *_TIMES)):
        digits = row.text("placement")
        if not digits.isascii() or not digits.isdecimal():
            row.refuse("placement", f"{digits[:40]!r} is not a placement; it has a digit for each node, such as 44")
        count = sum(int(digit) for digit in digits)
        if digits == _compact(count):
            yield count, row
    if not (folder / _SCALABILITY).is_file():
        return
    for row in read_rows(folder / _SCALABILITY, ("num_nodes", "num_replicas", *_TIMES)):
        count = row.devices("num_replicas")
        if count == row.devices("num_nodes") * _DEVICES_PER_NODE:
            yield count, row


def _compact(count: int) -> str:
    """The compact placement as the files write it: the smallest rotation of its digits, so the part of a node first."""
    full, part = divmod(count, _DEVICES_PER_NODE)
    return (str(part) if part else "") + str(_DEVICES_PER_NODE) * full


def _steps_per_s(times: Times, batch_size: int, num_devices: int) -> float:
    """0.0 where the global batch is too small for so many devices."""
    share = batch_size / num_devices
    num_micro_steps = max(1, math.ceil(share / max(times)))
    local = math.ceil(share / num_micro_steps)
    if local < min(times):
        return 0.0
    step_s, sync_s = _interpolate(times, local)
    return 1.0 / (step_s + (num_micro_steps - 1) * (step_s - sync_s))


def _interpolate(times: Times, local: int) -> tuple[float, float]:
    if local in times:
        return times[local]
    sizes = list(times)
    above = bisect.bisect_left(sizes, local)
    low, high = sizes[above - 1], sizes[above]
    part = (local - low) / (high - low)
    (step_low, sync_low), (step_high, sync_high) = times[low], times[high]
    return step_low + part * (step_high - step_low), sync_low + part * (sync_high - sync_low)
