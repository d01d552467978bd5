"""The position of a training whose loop a library runs: the library says which samples a step has, and how many follow.

It stands in the place of a TrainingCursor, for a batch of a fixed size.
"""

from __future__ import annotations

import msgspec

from springtide.core.job_parts import GradientNoise
from springtide.core.workload import TrainingJob
from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.training_cursor import Cursor


class LibraryCursor:
    """Counts the steps of a library's loop. `offer` the samples of each step before it begins.

    The batch is the library's, so that progress and speed count steps, each as one batch of the size that the job has.
    """

    measures_noise = False
    measures_step = False
    noise: GradientNoise | None = None
    learning_rate_factor = 1.0
    last_square = 0.0

    def __init__(self, job: TrainingJob) -> None:
        self._batch_size = job.global_batch_size
        self.cursor = Cursor(global_batch_size=self._batch_size)
        self._offered: GlobalBatch | None = None
        # Steps from the offered one to the end; None if the library does not know.
        self._num_left: int | None = None

    def offer(self, batch: GlobalBatch, num_left: int | None) -> None:
        """Set the samples of the next step. `num_left` counts the steps to the end, this one too; None: not known."""
        self._offered, self._num_left = batch, num_left

    def extend(self, batch: GlobalBatch) -> None:
        """Set the samples of the present step, to which some have come."""
        self._offered = batch

    @property
    def global_batch_size(self) -> int:
        """The samples of a full batch as the job has them."""
        return self._batch_size

    counted_size = global_batch_size

    @property
    def step(self) -> int:
        return self.cursor.step

    @property
    def epoch(self) -> int:
        """The epoch of the step that was offered last."""
        return 0 if self._offered is None else self._offered.epoch

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    @property
    def total_steps(self) -> int:
        """The number of steps at the end; 0 if it is not known."""
        return 0 if self._num_left is None else self.step + self._num_left

    @property
    def total_progress(self) -> float:
        return float(self.total_steps)

    @property
    def progress(self) -> float:
        """The number of committed steps."""
        return float(self.step)

    def set_batch_size(self, size: int) -> None:
        """Count steps in batches of the job's size: the library's own size stays as it is."""
        self.cursor = msgspec.structs.replace(self.cursor, global_batch_size=self._batch_size)

    def next_batch(self) -> GlobalBatch:
        """The samples that were offered."""
        assert self._offered is not None, "no step was offered"
        return self._offered

    def commit(
        self, batch: GlobalBatch, squares: tuple[float, float] | None, rank0_square: float, num_parts: int = 0
    ) -> None:
        """Advance by a committed step on `batch`."""
        if self._num_left is not None:
            self._num_left -= 1
        self.cursor = msgspec.structs.replace(
            self.cursor,
            step=self.cursor.step + 1,
            num_seen=(self.cursor.num_seen or 0) + len(batch.ids),
            progress=self.cursor.progress + 1.0,
        )
