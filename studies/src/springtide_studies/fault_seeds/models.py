"""How long things take on the virtual machines, and how fast a job really trains. A job's model is in its params."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from springtide.core.workload import TrainingJob


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the machine model. The defaults are of the order of what real workers take on one machine."""

    message_s: float = 0.002
    spawn_s: float = 0.05
    warm_up_s: float = 0.4
    load_s: float = 0.6
    switch_s: float = 0.04
    exit_s: float = 0.05
    drain_s: float = 0.3
    checkpoint_s: float = 0.2
    progress_s: float = 4.0
    lost_after_s: float = 2.0
    node_lost_after_s: float = 4.0
    collective_timeout_s: float = 3.0
    start_timeout_s: float = 30.0
    last_words_s: float = 5.0
    lease_s: float = 30.0


class JobModel(msgspec.Struct, frozen=True, kw_only=True):
    """The truth about a job that no policy sees: its length and its scaling curve.

    `batch_size` is the one it begins with, and `noise_scale` the batch at which its gradient's noise equals its signal.
    `poison` names a defect of the user's code: "" (none), "crash" (dies while warming up), "hang" (never gets warm),
    "raise" (an exception in the middle), "segfault" (dies in the middle, always at the same step).
    """

    num_samples: int
    samples_per_s: float
    parallel_fraction: float
    batch_size: int
    num_epochs: int
    poison: str = ""
    noise_scale: float = 0.0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the dataset."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.steps_per_epoch * self.num_epochs

    @property
    def poison_step(self) -> int:
        """The step at which a defect in the middle shows."""
        return self.total_steps // 2

    def rate_per_s(self, world_size: int) -> float:
        """Samples a second on `world_size` workers (Amdahl's law)."""
        serial = 1.0 - self.parallel_fraction
        return self.samples_per_s / (serial + self.parallel_fraction / world_size)

    def step_s(self, world_size: int, batch_size: int) -> float:
        """Seconds of one optimizer step over `batch_size` samples on `world_size` workers."""
        return batch_size / self.rate_per_s(world_size)

    @property
    def total_samples(self) -> int:
        """Samples of the whole job."""
        return self.num_samples * self.num_epochs

    def num_steps_left(self, num_seen: int, batch_size: int) -> int:
        """Steps still to take after `num_seen` samples, all of this size but for the last of each epoch."""
        epoch, start = divmod(num_seen, self.num_samples)
        if epoch >= self.num_epochs:
            return 0
        whole_epochs = (self.num_epochs - epoch - 1) * math.ceil(self.num_samples / batch_size)
        return math.ceil((self.num_samples - start) / batch_size) + whole_epochs

    def num_seen_after(self, num_seen: int, num_steps: int, batch_size: int) -> int:
        """Samples seen `num_steps` steps of this size later."""
        epoch, start = divmod(num_seen, self.num_samples)
        to_epochs_end = math.ceil((self.num_samples - start) / batch_size)
        if num_steps < to_epochs_end:
            return num_seen + num_steps * batch_size
        epochs, steps = divmod(num_steps - to_epochs_end, math.ceil(self.num_samples / batch_size))
        return (epoch + 1 + epochs) * self.num_samples + steps * batch_size


def describe(
    num_samples: int, samples_per_s: float, parallel_fraction: float, poison: str = "", noise_scale: float = 0.0
) -> dict[str, str]:
    """Return the params by which `job_model` finds a job's model again, from the journal too."""
    return {
        "num_samples": str(num_samples),
        "samples_per_s": repr(samples_per_s),
        "parallel_fraction": repr(parallel_fraction),
        "poison": poison,
        **({"noise_scale": repr(noise_scale)} if noise_scale else {}),
    }


def job_model(job: TrainingJob) -> JobModel:
    """The model that `describe` put into the job's params."""
    params = job.params
    return JobModel(
        num_samples=int(params.get("num_samples", "320")),
        samples_per_s=float(params.get("samples_per_s", "32.0")),
        parallel_fraction=float(params.get("parallel_fraction", "0.9")),
        batch_size=job.global_batch_size,
        num_epochs=job.num_epochs,
        poison=params.get("poison", ""),
        noise_scale=float(params.get("noise_scale", "0.0")),
    )


def batch_news(
    job: TrainingJob, model: JobModel, batch_size: int, num_seen: int, num_workers: int, step_s: float
) -> dict[str, Any]:
    """What a worker reports besides steps, as runtime.reporting does."""
    news: dict[str, Any] = {
        "global_batch_size": batch_size,
        "local_batch_size": math.ceil(batch_size / num_workers),
        "step_s": step_s,
        "sync_s": 0.0,
    }
    if job.batch is None:
        total_steps = float(model.total_steps)
        return {
            **news,
            "progress": total_steps - model.num_steps_left(num_seen, batch_size),
            "total_progress": total_steps,
        }
    return {
        **news,
        "progress": num_seen / model.batch_size,
        "total_progress": model.total_samples / model.batch_size,
        "grad_sqr": 1.0,
        "grad_var": model.noise_scale / model.batch_size,
    }
