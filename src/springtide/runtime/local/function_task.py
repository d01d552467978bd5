"""Training a declared task here and now with the worker that functions have: one place, no platform, no framework.

Also what every run in this process gives back, and its progress as lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.core.errors import StorageError
from springtide.core.quantities import format_duration
from springtide.core.wire.functions import Keys, Place
from springtide.core.workload import TrainingJob
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.functions.place_worker import PlaceWorker, task_worker
from springtide.runtime.models.user_models import told_if_missing
from springtide.storage.files import write_durable
from springtide.storage.frames import decode, encode
from springtide.storage.stores.open import memory_store

_LINE_INTERVAL_S = 2.0
_STREAM_POLL_S = 0.5
_MODEL_PREFIX = "model/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """How a run in this process ended. `loss` is the mean over the last global batch."""

    name: str
    num_steps: int
    loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    artifact_path: str
    took_s: float


class LossLines:
    """Progress as plain lines: the first step, then one every few seconds, then the last step."""

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self._name = name
        self._write = write
        self._began_s = self._wrote_s = time.monotonic()
        self._num_samples = 0

    def report(
        self, step: int, total_steps: int | None, loss: float | None, num_samples: int, metrics: Mapping[str, float]
    ) -> None:
        """A step with so many samples is done; `total_steps` is None while that is not known."""
        now_s = time.monotonic()
        self._num_samples += num_samples
        is_edge = step in (1, total_steps)
        if not is_edge and now_s - self._wrote_s < _LINE_INTERVAL_S:
            return
        self._wrote_s = now_s
        total = "" if total_steps is None else f"/{total_steps}"
        parts = [f"{self._name} step {step}{total}", f"loss {loss:.4g}" if loss is not None else ""]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        elapsed_s = now_s - self._began_s
        if step > 1 and elapsed_s > 0:
            parts.append(f"{self._num_samples / elapsed_s:.0f} samples/s")
            if total_steps is not None and step < total_steps:
                left_s = elapsed_s * (total_steps - step) / step
                parts.append(f"ETA {format_duration(left_s)}")
        self._write("  ".join(part for part in parts if part))


def run_local_task(
    task: Any,
    job: TrainingJob,
    directory: Path | None = None,
    write: Callable[[str], None] = print,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> LocalResult:
    """Train a declared task to its end in this process, as a function that is alone would.

    The final model lands in `directory` (springtide-out/<name> in the working directory, if none is given) as
    model.safetensors. A stream is waited for until it is closed. Raises InvalidRequest, StorageError, and whatever the
    user's code raises.
    """
    began_s = time.monotonic()
    chosen = (directory or Path("springtide-out") / job.name).absolute()
    lines, store, loss = LossLines(job.name, write), memory_store(), None
    keys = Keys(job.name)
    with told_if_missing():
        seed_everything(job.seed)
        worker = task_worker(task, job, None, Place(0, 0), store=None, wire=store, check=lambda: None)
    try:
        while _has_more(worker, job.name, write, sleep):
            done = worker.run_step(keys.wire(0, 0, worker.position.step))
            loss = done.loss
            lines.report(worker.position.step, worker.total_steps, loss, done.num_samples, {})
        worker.save_state(store, keys)
    finally:
        worker.close()
    path = chosen / "model.safetensors"
    frame = decode(store.get(keys.state(worker.position.step, 0)))
    tensors = {
        name.removeprefix(_MODEL_PREFIX): tensor
        for name, tensor in sorted(frame.tensors.items())
        if name.startswith(_MODEL_PREFIX)
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {path.parent}: {error.strerror or error}") from error
    write_durable(path, encode(tensors, {"format": "pt"}), mode=0o644)
    return LocalResult(
        name=job.name,
        num_steps=worker.position.step,
        loss=loss,
        artifact_path=str(path),
        took_s=time.monotonic() - began_s,
    )


def _has_more(worker: PlaceWorker, name: str, write: Callable[[str], None], sleep: Callable[[float], None]) -> bool:
    """Whether there is a step to do; waits for a stream until it has enough samples, or is closed."""
    has_told = False
    while not worker.is_over:
        needed, reader = worker.samples_needed, worker.samples.reader
        if needed is None or reader is None:
            return True
        # Both are of one version of the stream: what is closed has no more than these.
        num_samples = reader.refresh()
        worker.set_available(num_samples, is_closed=reader.is_closed)
        if worker.is_over:
            return False
        if num_samples >= (worker.samples_needed or 0):
            return True
        if not has_told:
            write(f"{name} waits for data of {reader.name!r} ({num_samples} of {needed} samples)")
            has_told = True
        sleep(_STREAM_POLL_S)
    return False
