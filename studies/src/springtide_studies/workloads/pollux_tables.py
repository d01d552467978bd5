"""The whole tables of Pollux's applications: step times by placement and local batch, and training run by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import TextRow, read_rows

Floats = NDArray[np.float64]
Placement = tuple[int, ...]

_PLACEMENTS, _SCALABILITY, _VALIDATION = "placements.csv", "scalability.csv", "validation-"
_TIMES = ("local_bsz", "step_time", "sync_time")
_LARGEST = 1e300
# YOLOv3 was measured with 16 samples a device on up to four nodes alone; the published runs stop at 8.
_MAX_LOCAL_SIZES = {"yolov3": 8}
# The authors run this application with one batch size and on one device alone (their artifact).
_FIXED_BATCH_SIZES = {"ncf": 32768}


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Steps on one placement: ascending local batch sizes [K], and [K, 2] seconds of a step and of its exchange."""

    local_batch_sizes: Floats
    times_s: Floats


@dataclass(frozen=True, eq=False)
class PolluxTrainingRun:
    """One real training at one global batch size: at the end of each of E epochs, arrays of shape [E].

    `progress` counts scale-invariant steps of the initial batch size, `steps` optimizer steps; `grad_sqr` and
    `grad_var` are the gradient's squared norm and its variance at the initial batch size during the epoch.
    """

    progress: Floats
    steps: Floats
    grad_sqr: Floats
    grad_var: Floats


@dataclass(frozen=True, eq=False)
class Application:
    """One application as measured.

    `placements` has each measured ring in its canonical form (see `canonical`); `scalability` has rows (nodes,
    workers, local batch size, step seconds, exchange seconds) of more nodes. `runs` are by global batch size,
    ascending: the first is the initial batch size of Pollux, the last the largest that it takes. `fixed_batch_size`
    is set where the authors fix the batch size.
    """

    name: str
    placements: dict[Placement, MeasuredSteps]
    scalability: Floats
    runs: dict[int, PolluxTrainingRun]
    min_local_size: int
    max_local_size: int
    fixed_batch_size: int | None = None

    @property
    def initial_batch_size(self) -> int:
        """The smallest batch size that was trained with."""
        return min(self.runs)

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that was trained with."""
        return max(self.runs)

    @property
    def num_epochs(self) -> int:
        """Epochs until a job is done: those of the shortest run."""
        return min(len(run.progress) for run in self.runs.values())


def canonical(placement: Placement) -> Placement:
    """The lexicographically smallest rotation of the workers per node: a ring looks the same from each of its nodes."""
    return min(placement[index:] + placement[:index] for index in range(len(placement)))


def read_application(folder: Path) -> Application:
    """Read one application's folder. Raises InvalidRequest naming file, line and column of what is wrong."""
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder of measurements; name one that holds {_PLACEMENTS}")
    placements = _read_placements(folder / _PLACEMENTS)
    sizes = np.concatenate([measured.local_batch_sizes for measured in placements.values()])
    name = folder.name
    return Application(
        name=name,
        placements=placements,
        scalability=_read_scalability(folder / _SCALABILITY),
        runs=_read_runs(folder),
        min_local_size=int(sizes.min()),
        max_local_size=min(int(sizes.max()), _MAX_LOCAL_SIZES.get(name, int(sizes.max()))),
        fixed_batch_size=_FIXED_BATCH_SIZES.get(name),
    )


def read_applications(folder: Path) -> dict[str, Application]:
    """Every application in `folder` that has both step times and training runs, by name. Raises InvalidRequest."""
    found = sorted(path.parent for path in folder.glob(f"*/{_PLACEMENTS}"))
    whole = [path for path in found if any(path.glob(f"{_VALIDATION}*.csv"))]
    if not whole:
        raise InvalidRequest(
            f"{folder} holds no application; name the folder that has APPLICATION/{_PLACEMENTS} and "
            f"APPLICATION/{_VALIDATION}BATCH.csv"
        )
    return {path.name: read_application(path) for path in whole}


def _read_placements(path: Path) -> dict[Placement, MeasuredSteps]:
    rows: dict[Placement, dict[int, tuple[float, float]]] = {}
    for row in read_rows(path, ("placement", *_TIMES)):
        digits = row.text("placement")
        if not digits.isascii() or not digits.isdecimal() or "0" in digits:
            row.refuse("placement", f"{digits[:40]!r} is not a placement; it has a digit for each node, such as 44")
        placement = tuple(int(digit) for digit in digits)
        if placement != canonical(placement):
            smallest = "".join(str(count) for count in canonical(placement))
            row.refuse("placement", f"{digits} is the ring {smallest} turned round; write it as that")
        known = rows.setdefault(placement, {})
        local, times_s = _read_times(row)
        if local in known:
            row.refuse("local_bsz", f"{local} stands twice for placement {digits}; keep one of the two")
        known[local] = times_s
    if not rows:
        raise InvalidRequest(f"{path.name} line 2: no placement was measured; rows belong below the header")
    return {placement: _measured(known) for placement, known in rows.items()}


def _measured(known: dict[int, tuple[float, float]]) -> MeasuredSteps:
    sizes = sorted(known)
    return MeasuredSteps(np.array(sizes, dtype=float), np.array([known[size] for size in sizes]))


def _read_times(row: TextRow) -> tuple[int, tuple[float, float]]:
    local, step_s, sync_s = row.count("local_bsz"), row.number("step_time"), row.number("sync_time")
    if step_s == 0 or sync_s > step_s:
        row.refuse("sync_time", f"{sync_s:g} s of a step of {step_s:g} s; the step is the longer of the two")
    return local, (step_s, sync_s)


def _read_scalability(path: Path) -> Floats:
    """Rows in the order of the file; none where there is no such file."""
    rows: list[list[float]] = []
    if path.is_file():
        for row in read_rows(path, ("num_nodes", "num_replicas", *_TIMES)):
            num_nodes, num_workers = row.devices("num_nodes"), row.devices("num_replicas")
            if num_workers < num_nodes:
                row.refuse("num_replicas", f"{num_workers} on {num_nodes} nodes; each node has at least one")
            local, times_s = _read_times(row)
            rows.append([num_nodes, num_workers, local, *times_s])
    return np.array(rows, dtype=float).reshape(-1, 5)


def _read_runs(folder: Path) -> dict[int, PolluxTrainingRun]:
    runs = {}
    for path in folder.glob(f"{_VALIDATION}*.csv"):
        digits = path.stem.removeprefix(_VALIDATION)
        if not digits.isascii() or not digits.isdecimal() or not int(digits):
            raise InvalidRequest(f"{path.name}: {digits[:40]!r} is no batch size; call it {_VALIDATION}128.csv")
        runs[int(digits)] = _read_run(path)
    return dict(sorted(runs.items()))


def _read_run(path: Path) -> PolluxTrainingRun:
    values: list[list[float]] = []
    for row in _rows_of_run(path):
        progress = row.number("progress")
        if progress <= (values[-1][0] if values else 0.0):
            row.refuse("progress", f"{progress:g} is not above that of the epoch before; progress is cumulative")
        noise = [row.number(column, highest=_LARGEST) for column in ("grad_sqr", "grad_var")]
        if not sum(noise):
            row.refuse("grad_var", "norm and variance are both 0; a gradient has one of them")
        values.append([progress, row.number("iteration"), *noise])
    if not values:
        raise InvalidRequest(f"{path.name} line 2: no epoch; rows belong below the header")
    columns: Any = np.array(values).T
    return PolluxTrainingRun(*columns)


def _rows_of_run(path: Path) -> Iterator[TextRow]:
    return read_rows(path, ("progress", "iteration", "grad_sqr", "grad_var"))
