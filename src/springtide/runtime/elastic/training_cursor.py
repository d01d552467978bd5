"""The position of a training and what follows from it: next samples, batch size, gradient noise, learning-rate factor.

All of it is a function of the sequence of (step, batch size) and of reduced values, so it is the same on every member.
The cursor is part of the training state: checkpoints and joiners get it with the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import GradientNoise
from springtide.core.workload import TrainingJob
from springtide.perf.goodput import gain, learning_rate_factor
from springtide.perf.noise_scale import NoiseMeter, NoiseSample, sample_noise
from springtide.runtime.data.shards import GlobalBatch, SampleOrder, SampleSchedule

# In a few steps alone noise often exceeds the signal; the estimate would then allow any batch size.
LEAST_NOISE_STEPS = 16
# Squaring a large model's gradients costs several per cent of a step. Noise changes slowly, so after the first
# NUM_DENSE_STEPS only every NOISE_STRIDE-th step is measured, and each measurement counts for the steps between.
NUM_DENSE_STEPS = 128
NOISE_STRIDE = 4


class Squares(msgspec.Struct, frozen=True, kw_only=True):
    """One step's measurement of gradient noise.

    `shard_square` is the mean over `num_shards` shards of the square norm of a shard's gradient, `mean_square` the
    square norm of the mean gradient; both over `num_samples` samples.
    """

    num_shards: int
    num_samples: int
    shard_square: float
    mean_square: float

    def sample(self, mean_square: float) -> NoiseSample | None:
        """The step's estimate of the noise, with rank 0's value of `mean_square`."""
        shards = range(self.num_shards)
        sizes = [
            (at + 1) * self.num_samples // self.num_shards - at * self.num_samples // self.num_shards for at in shards
        ]
        return sample_noise([self.shard_square] * self.num_shards, sizes, mean_square)


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a training state beside the model and its optimizer, after `step` committed steps.

    `num_seen` counts samples used, over all epochs (None, in old checkpoints: `step` steps of the initial batch size).
    `global_batch_size` is that of the next step. `progress` is in steps of the initial batch size; a step of a larger
    batch counts as perf.goodput.gain says. `squares` is the last step's measurement: it enters `noise` one step later,
    when rank 0's value has reached all members. `num_updates` are those of the next step that are made already, where
    several optimizers take turns in it. `num_samples` are those of the dataset (0: not known, as in old checkpoints).
    """

    step: int = 0
    num_seen: int | None = 0
    global_batch_size: int = 0
    progress: float = 0.0
    noise: NoiseMeter = NoiseMeter()
    squares: Squares | None = None
    num_updates: int = 0
    num_samples: int = 0

    @property
    def position(self) -> float:
        """What is greater the more updates were made: the step, and a fraction for updates of the next one."""
        return self.step + self.num_updates / 1024 if self.num_updates else self.step


class TrainingCursor:
    """Advances a job's cursor. Call `start` once the dataset is known; before that only `cursor` can be used."""

    def __init__(self, job: TrainingJob, *, measures_noise: bool | None = None) -> None:
        self._job = job
        self.measures_noise = job.batch is not None if measures_noise is None else measures_noise
        self.cursor = Cursor(global_batch_size=job.global_batch_size)
        self._schedule: SampleSchedule | None = None
        # A script says these itself: whether it has said its epochs, and in which unit the platform counts its steps.
        self._lacks_epochs = job.has_own_batch
        self._counted_size = job.global_batch_size if job.has_own_batch else 0

    @property
    def step(self) -> int:
        return self.cursor.step

    @property
    def global_batch_size(self) -> int:
        """The samples of a full batch; the initial one, if it may change."""
        return self._job.global_batch_size

    @property
    def counted_size(self) -> int:
        """The samples of a full batch as reports count them: of a script, those that its job has for the platform."""
        return self._counted_size or self.cursor.global_batch_size

    def set_epochs(self, num_epochs: int | None) -> int:
        """Set how many epochs a script has; returns how many there are. Raises InvalidRequest.

        A training function has those of its job, and `num_epochs` is None or equal.
        """
        job = self._job
        if job.length_unit != "samples":
            raise InvalidRequest(
                'a job with length="progress" does not know its epochs; write one loop: for batch in ctx.batches(data)'
            )
        if not job.has_own_batch:
            if num_epochs not in (None, job.num_epochs):
                raise InvalidRequest(
                    f"ctx.epochs({num_epochs}) is not what the job has: epochs={job.num_epochs}; write ctx.epochs()"
                )
            return job.num_epochs
        if type(num_epochs) is not int or num_epochs < 1:
            raise InvalidRequest(f"epochs() needs the number of epochs of this script, at least 1, not {num_epochs!r}")
        self._job = msgspec.structs.replace(job, num_epochs=num_epochs)
        self._lacks_epochs = False
        return num_epochs

    def take_batch_size(self, size: int) -> bool:
        """Set the samples of a full batch as a script's DataLoader has them (0: it has none); whether this is a script.

        That of a training function is its job's. Raises InvalidRequest.
        """
        if not self._job.has_own_batch:
            return False
        if self._lacks_epochs:
            raise InvalidRequest(
                "batches() of a script is a pass over the data within an epoch; write it into the loop over epochs: "
                "for epoch in job.epochs(3): for batch in job.batches(loader): ..."
            )
        if size < 1:
            raise InvalidRequest(
                "batches() of a script needs a torch DataLoader with batch_size=N, which is the size of its batches"
            )
        if self.step and size != self.cursor.global_batch_size:
            raise InvalidRequest(
                f"the DataLoader has batch_size={size}, and the {self.step} steps before had "
                f"{self.cursor.global_batch_size} samples each; keep that size, or start the job anew"
            )
        self._job = msgspec.structs.replace(self._job, global_batch_size=size)
        self.cursor = msgspec.structs.replace(self.cursor, global_batch_size=size)
        return True

    def start(self, num_samples: int, order: SampleOrder | None = None) -> None:
        """Set the dataset's length, from which the samples of every step follow. Raises InvalidRequest if it is 0.

        `order` is the dataset's own; None: each epoch is shuffled.
        """
        if num_samples <= 0:
            raise InvalidRequest("the dataset is empty; hand over at least one sample")
        job, known = self._job, self.cursor.num_samples
        if job.has_own_batch and known and num_samples != known:
            raise InvalidRequest(
                f"the dataset has {num_samples} samples in an epoch, and had {known} before; keep its length, or start "
                "the job anew"
            )
        self._schedule = SampleSchedule(
            num_samples=num_samples,
            global_batch_size=job.global_batch_size,
            num_epochs=job.num_epochs,
            seed=job.seed,
            order=None if order is None else order.order,
            arrange=None if order is None else order.arranged,
        )

    def set_batch_size(self, size: int) -> None:
        """Use global batches of `size` samples from the next step on (0: no change). A script keeps its own."""
        size = (0 if self._counted_size else size) or self.cursor.global_batch_size or self._job.global_batch_size
        self.cursor = msgspec.structs.replace(self.cursor, global_batch_size=size)

    @property
    def num_seen(self) -> int:
        """How many samples were used, over all epochs."""
        num_seen = self.cursor.num_seen
        return num_seen if num_seen is not None else self._known_schedule.num_seen(self.cursor.step)

    @property
    def epoch(self) -> int:
        """The epoch of the next step (of the last one, at the end)."""
        if self._schedule is None:
            return self.num_passes
        epoch = self.num_seen // self._schedule.num_samples
        return min(epoch, self._job.num_epochs - 1) if self._job.length_unit == "samples" else epoch

    @property
    def num_passes(self) -> int:
        """How many passes over the data are complete; 0 also before its first step."""
        num_samples = self.cursor.num_samples
        return self.num_seen // num_samples if num_samples else 0

    @property
    def is_over(self) -> bool:
        if self._job.length_unit == "progress":
            return self.cursor.progress >= self.total_progress
        return self.num_seen >= self._known_schedule.num_samples * self._job.num_epochs

    @property
    def total_steps(self) -> int:
        """The number of steps at the end, if the batch size stays as it is."""
        if self._job.length_unit == "progress":
            left = max(0.0, self.total_progress - self.cursor.progress)
            return self.step + math.ceil(left / self._gain(self.cursor.global_batch_size))
        return self.step + self._known_schedule.num_steps_left(self.num_seen, self.cursor.global_batch_size)

    @property
    def total_progress(self) -> float:
        """The job's length in steps of the initial batch size; for a fixed batch, the number of steps."""
        if self._job.batch is None:
            return float(self._known_schedule.total_steps)
        return self._known_schedule.num_samples * self._job.num_epochs / self._job.global_batch_size

    @property
    def progress(self) -> float:
        """The committed part of `total_progress`; for a fixed batch, the number of committed steps."""
        if self._job.batch is None or self._schedule is None:
            return float(self.step)
        if self._job.length_unit == "progress":
            return min(self.cursor.progress, self.total_progress)
        return self.num_seen / self._job.global_batch_size

    @property
    def noise(self) -> GradientNoise | None:
        """The current estimate of the gradient's square norm and variance; None before LEAST_NOISE_STEPS."""
        if self.cursor.noise.num_samples < LEAST_NOISE_STEPS:
            return None
        return self.cursor.noise.noise(self._job.global_batch_size)

    @property
    def learning_rate_factor(self) -> float:
        """The factor on the user's learning rate for the current batch size; exactly 1 for a fixed batch."""
        batch = self._job.batch
        if batch is None:
            return 1.0
        scale = self.cursor.global_batch_size / self._job.global_batch_size
        return learning_rate_factor(batch.learning_rate, self.noise, scale)

    @property
    def last_square(self) -> float:
        """The square norm of the last step's mean gradient, which rank 0 sends to the others; 0 if not measured."""
        return self.cursor.squares.mean_square if self.cursor.squares is not None else 0.0

    @property
    def measures_step(self) -> bool:
        """Whether noise is measured in the next step. It depends on the step's number only, so all members agree."""
        return self.measures_noise and is_measured_step(self.cursor.step)

    def next_batch(self) -> GlobalBatch:
        cursor = self.cursor
        return self._known_schedule.batch_at(cursor.step, self.num_seen, cursor.global_batch_size)

    def batches_ahead(self) -> Iterator[GlobalBatch]:
        """The batches from the next step on, if the batch size stays as it is."""
        schedule, job, size = self._known_schedule, self._job, self.cursor.global_batch_size
        num_seen = self.num_seen
        for step in itertools.count(self.cursor.step):
            # How many epochs make a length in progress is not known before.
            if job.length_unit == "samples" and num_seen >= schedule.num_samples * job.num_epochs:
                return
            batch = schedule.batch_at(step, num_seen, size)
            num_seen += len(batch.ids)
            yield batch

    def note_update(self) -> None:
        """Count an update of a step that may have more of them."""
        self.cursor = msgspec.structs.replace(self.cursor, num_updates=self.cursor.num_updates + 1)

    def commit(
        self, batch: GlobalBatch, squares: tuple[float, float] | None, rank0_square: float, num_parts: int = 0
    ) -> None:
        """Advance the cursor by a committed step on `batch`.

        `squares` are StepVector.squares of this step, if it was measured; `rank0_square` is rank 0's `last_square`.
        """
        cursor = self.cursor
        noise = cursor.noise
        if cursor.squares is not None:
            scale = cursor.squares.num_samples / self._job.global_batch_size
            noise = noise.update(cursor.squares.sample(rank0_square), scale * _stride(cursor.step - 1))
        measured = None
        # NaN and infinity would spoil the estimate, and the JSON of a checkpoint cannot hold them.
        if squares is not None and self.measures_step and all(math.isfinite(square) for square in squares):
            num_shards = num_parts or batch.num_filled(self._job.num_virtual_shards)
            measured = Squares(
                num_shards=num_shards, num_samples=len(batch.ids), shard_square=squares[0], mean_square=squares[1]
            )
        self.cursor = Cursor(
            step=cursor.step + 1,
            num_seen=self.num_seen + len(batch.ids),
            global_batch_size=cursor.global_batch_size,
            progress=cursor.progress + self._gain(len(batch.ids)),
            noise=noise,
            squares=measured,
            num_samples=self._known_schedule.num_samples,
        )

    @property
    def _known_schedule(self) -> SampleSchedule:
        assert self._schedule is not None, "the dataset is not known yet"
        return self._schedule

    def _gain(self, num_samples: int) -> float:
        if self._job.batch is None:
            return 1.0
        return float(gain(self.noise, num_samples / self._job.global_batch_size))


def is_measured_step(step: int) -> bool:
    """Whether gradient noise is measured in step `step` (from 0) of a job that measures it."""
    return _stride(step) > 0


def _stride(step: int) -> int:
    """How many steps the measurement of step `step` (from 0) counts for; 0 if it is not measured."""
    if step < NUM_DENSE_STEPS:
        return 1
    return NOISE_STRIDE if step % NOISE_STRIDE == 0 else 0
