"""Training a declared task in this process with the worker that runs on functions: one place, no platform.

Also the result of local runs, and their progress lines.
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
from springtide.runtime.models.user_models import explain_missing_framework
from springtide.storage.files import make_private, write_durable
from springtide.storage.frames import decode, encode
from springtide.storage.stores.open import memory_store

_LINE_INTERVAL_S = 2.0
_STREAM_POLL_S = 0.5
_MODEL_PREFIX = "model/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    """The result of a run in this process.

    `loss` is the mean over the last global batch, None if no step was taken; `metrics` are the last values passed to
    `ctx.metrics`; `artifact_path` is the saved model; `took_s` is the duration in seconds.
    """

    name: str
    num_steps: int
    loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    artifact_path: str
    took_s: float


class LossLines:
    """Prints progress as plain lines: for the first step, every few seconds, and for the last step."""

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self._name = name
        self._write = write
        self._began_s = self._wrote_s = time.monotonic()
        self._num_samples = 0

    def report(
        self, step: int, total_steps: int | None, loss: float | None, num_samples: int, metrics: Mapping[str, float]
    ) -> None:
        """Report a completed step with `num_samples` samples; `total_steps` is None while it is not known."""
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
    """Train a declared task to its end in this process, as a single function would.

    Writes the final model to `directory`/model.safetensors (default directory: springtide-out/<name>). On a stream,
    waits for samples until the stream is closed. Raises InvalidRequest, StorageError, and whatever the user's code
    raises.
    """
    began_s = time.monotonic()
    chosen = (directory or Path("springtide-out") / job.name).absolute()
    lines, store, loss = LossLines(job.name, write), memory_store(), None
    keys = Keys(job.name)
    with explain_missing_framework():
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
        make_private(path.parent)
    except OSError as error:
        raise StorageError(f"cannot make {path.parent}: {error.strerror or error}") from error
    write_durable(path, encode(tensors, {"format": "pt"}))
    return LocalResult(
        name=job.name,
        num_steps=worker.position.step,
        loss=loss,
        artifact_path=str(path),
        took_s=time.monotonic() - began_s,
    )


def _has_more(worker: PlaceWorker, name: str, write: Callable[[str], None], sleep: Callable[[float], None]) -> bool:
    """Whether there is another step; waits until a stream has enough samples for it or is closed."""
    has_written_wait = False
    while not worker.is_over:
        needed, reader = worker.samples_needed, worker.samples.reader
        if needed is None or reader is None:
            return True
        # Length and `is_closed` are of the same version of the stream.
        num_samples = reader.refresh()
        worker.set_available(num_samples, is_closed=reader.is_closed)
        if worker.is_over:
            return False
        if num_samples >= (worker.samples_needed or 0):
            return True
        if not has_written_wait:
            write(f"{name} waits for data of {reader.name!r} ({num_samples} of {needed} samples)")
            has_written_wait = True
        sleep(_STREAM_POLL_S)
    return False
