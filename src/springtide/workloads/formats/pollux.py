"""Reader of the workloads of Pollux (OSDI'21) and Sia (SOSP'23): application, batch size and replicas, no length."""

from __future__ import annotations

from pathlib import Path

from springtide.workloads.collecting import Collected
from springtide.workloads.rows import TextRow, read_rows
from springtide.workloads.trace import Trace, TraceJob

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


def read(path: Path, limit: int | None = None) -> Trace:
    """Read a workload: `time` in seconds since its start. Raises InvalidRequest naming line and column.

    The length is not in the file: it is the published run's at this batch size (`STEPS_TO_END`), or 0, unknown.
    """
    collected = Collected(path, limit)
    for row in read_rows(path, COLUMNS):
        collected.keep(_read_row(row, collected), row.line, "application")
        if collected.is_full:
            break
    drawn = ("num_steps: of the published validation run of the application at this batch size, where there is one",)
    return collected.finish("pollux", drawn)


def _read_row(row: TextRow, collected: Collected) -> TraceJob:
    application = row.text("application")
    if not application:
        row.refuse("application", "it is empty; the name of an application belongs here")
    batch_size = row.count("batch_size")
    return TraceJob(
        job_id=collected.claim_row(row, "name"),
        submit_s=row.number("time"),
        num_steps=STEPS_TO_END.get(application, {}).get(batch_size, 0),
        model=application,
        global_batch_size=batch_size,
        num_devices=row.devices("num_replicas"),
    )
