"""One replica of a whole model: it computes its part of a global batch, exchanges gradients, and updates the model.

The model computes its gradients itself (core.model.Model), in any framework. Micro-batches are weighted by their sizes
and sums have a fixed order, so the number of replicas changes at most the last bits of a sum.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from springtide.collectives.communicator import Communicator
from springtide.core.errors import CheckpointError, InvalidRequest
from springtide.core.functions import FunctionPlan
from springtide.core.model import Model
from springtide.core.ports import Store
from springtide.core.wire.functions import Keys, LaneTimes, Place
from springtide.core.workload import TrainingJob
from springtide.perf.functions.pipeline.tasks import micro_batch_bounds
from springtide.runtime.data.samples import Samples, schedule_of
from springtide.runtime.data.shards import GlobalBatch, seed_everything
from springtide.runtime.functions.data_parallel.gradients import GradientLayout, Vector
from springtide.runtime.functions.data_parallel.state import frame_of, state_of, values_of
from springtide.runtime.functions.saved_states import read_frame, read_meta, write_frame
from springtide.runtime.functions.step import Position, StepOutcome


class ReplicaWorker:
    """A PlaceWorker for one replica of a whole model, under a plan of one stage.

    `make_model` builds the model in its state before the first step. `check` is called about once a second while the
    replica waits for others; an exception that it raises ends the step, and the model stays unchanged.
    """

    def __init__(
        self,
        *,
        make_model: Callable[[], Model],
        samples: Samples,
        job: TrainingJob,
        plan: FunctionPlan,
        place: Place,
        check: Callable[[], None],
        exchange: Communicator | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_plan(plan, place)
        self.plan = plan
        self.place = place
        self.position = Position()
        self.exchange = exchange
        self._make_model = make_model
        self.samples = samples
        self._schedule = schedule_of(job, samples)
        self._job = job
        self._check = check
        self._now_s = now_s
        self._begin_model()

    def _begin_model(self) -> None:
        seed_everything(self._job.seed)
        self.model = self._make_model()
        # For how many epochs `begin_epoch` was called.
        self._num_begun = 0
        self._layout: GradientLayout | None = None

    # --- position ---------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int | None:
        """The job's number of steps; None while its stream is open."""
        return self._schedule.total_steps

    @property
    def is_over(self) -> bool:
        return self.total_steps is not None and self.position.step >= self.total_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next step (of the last one, at the end)."""
        return self._schedule.epoch_of(self.position.step)

    @property
    def global_batch_size(self) -> int:
        """The size of a full global batch of the next step (of the last one, at the end)."""
        return self._schedule.global_batch_size_at(self.position.step)

    @property
    def samples_needed(self) -> int | None:
        """How many samples the stream must have for the next step; None without a stream."""
        return self._schedule.samples_needed(self.position.step)

    @property
    def num_exchanged(self) -> int:
        """How many numbers the replicas exchanged in the last step; 0 before the first."""
        return 0 if self._layout is None else self._layout.num_elements

    @property
    def gradient_bytes(self) -> int:
        """The bytes of these numbers."""
        return 0 if self._layout is None else self._layout.num_elements * np.dtype(self._layout.dtype).itemsize

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """Set how many samples of the stream may be used; see PlaceWorker."""
        self._schedule.set_available(num_samples, is_closed=is_closed)

    def sync_prefix(self, prefix: str) -> str:
        """The prefix of the keys of the exchange, in the step whose messages are under `prefix`."""
        return f"{prefix}/sync/{self.place.stage}"

    def set_plan(self, plan: FunctionPlan, place: Place | None = None) -> None:
        """Use a plan with another number of replicas from the next step on; see PlaceWorker. Raises InvalidRequest."""
        place = place or self.place
        _check_plan(plan, place)
        if plan.stages[0].end_layer != self.plan.stages[0].end_layer:
            raise InvalidRequest("another plan is for another number of layers: it is of another model")
        self.plan, self.place, self.exchange = plan, place, None

    def close(self) -> None:
        self.samples.close()

    # --- a step -----------------------------------------------------------------------------------------------

    def run_step(self, prefix: str, *, ends_here: bool = False) -> StepOutcome:
        """Train the next step, exchanging gradients under `prefix`.

        `ends_here` asks all replicas to stop after it: that is exchanged too, and is in every replica's outcome. Raises
        what `check` and the model raise, and StorageError.
        """
        step, began_s = self.position.step, self._now_s()
        batch = self._schedule.batch(step)
        self._begin_epochs(batch.epoch + 1)
        bounds = micro_batch_bounds(
            len(batch.ids), self.place.replica, self.plan.num_replicas, self.plan.micro_batch_size
        )
        losses: list[tuple[float, int]] = []
        vector: Vector | None = None
        read_s = computed_s = 0.0
        # A replica without samples adds nothing, but needs the layout of what the others exchange. It takes two samples
        # to find it, because models with batch normalisation reject one.
        for low, high in bounds or [(0, min(2, len(batch.ids)))]:
            if self._layout is not None and not bounds:
                break
            at_s = self._now_s()
            x, y = self.samples.fetch([int(sample) for sample in batch.ids[low:high]])
            read_at_s = self._now_s()
            seed_everything(self._job.seed, step, low)
            loss, gradients = self._gradients(x, y)
            if self._layout is None:
                self._layout = GradientLayout.of(gradients)
            if vector is None:
                vector = self._layout.zeros()
            if bounds:
                self._layout.add(vector, gradients, (high - low) / len(batch.ids))
                losses.append((loss, high - low))
            read_s += read_at_s - at_s
            computed_s += self._now_s() - read_at_s
        assert self._layout is not None
        vector = self._layout.zeros() if vector is None else vector
        vector[-1] = float(ends_here)
        at_s = self._now_s()
        if self.plan.num_replicas > 1:
            assert self.exchange is not None
            self.exchange.all_reduce(vector, self.sync_prefix(prefix), abandon=self._is_abandoned)
        synced_s = self._now_s()
        self.model.apply(self._layout.split(vector))
        ended_s = self._now_s()
        self._commit(batch)
        num_samples = sum(count for _, count in losses)
        sync_s, update_s = synced_s - at_s, ended_s - synced_s
        return StepOutcome(
            batch=batch,
            num_samples=num_samples,
            loss=math.fsum(loss * count for loss, count in losses) / num_samples if losses else None,
            is_last=bool(vector[-1] > 0),
            # Forward and backward are one call here, so both are reported as backward.
            lanes=LaneTimes(
                step_s=ended_s - began_s,
                backward_s=computed_s,
                download_s=read_s,
                sync_s=sync_s,
                update_s=update_s,
                flush_s=max(0.0, ended_s - began_s - computed_s - sync_s - update_s),
            ),
        )

    def _gradients(self, x: Any, y: Any) -> tuple[float, Any]:
        found = self.model.gradients(x, y)
        if not (isinstance(found, tuple) and len(found) == 2 and hasattr(found[1], "keys")):
            raise InvalidRequest(
                "the model's gradients(x, y) must return the mean loss and the gradients by name: (loss, {name: array})"
            )
        return float(found[0]), found[1]

    def _is_abandoned(self) -> bool:
        self._check()
        return False

    def _commit(self, batch: GlobalBatch) -> None:
        before = self.position
        digest = hashlib.sha256((before.ids_digest + batch.ids_digest).encode()).hexdigest()[:16]
        self.position = Position(before.step + 1, before.num_seen + len(batch.ids), digest)

    def _begin_epochs(self, num_epochs: int) -> None:
        """Call `begin_epoch` for each epoch up to `num_epochs` that has not begun; it may change the model's size."""
        begin = getattr(self.model, "begin_epoch", None)
        while self._num_begun < num_epochs:
            if callable(begin):
                seed_everything(self._job.seed, self._num_begun)
                begin(self._num_begun)
                self._layout = None
            self._num_begun += 1

    # --- state ------------------------------------------------------------------------------------------------

    def save_state(self, store: Store, keys: Keys) -> None:
        """Write the model's state at the current position. Raises StorageError, InvalidRequest."""
        layout = self._layout
        values = {
            "num_begun": self._num_begun,
            "gradients": [] if layout is None else [layout.names, layout.shapes, layout.dtypes],
        }
        layers = (0, self.plan.stages[0].end_layer)
        write_frame(store, keys, self.place.stage, layers, frame_of(self.model.state(), values), self.position)

    def has_state(self, store: Store, keys: Keys, step: int) -> bool:
        """Whether the state after `step` steps is saved. Raises StorageError, CheckpointError."""
        return read_meta(store, keys, step, self.place.stage) is not None

    def load_state(self, store: Store, keys: Keys, step: int) -> None:
        """Restore the state and position after `step` steps. Raises CheckpointError, StorageError."""
        meta = read_meta(store, keys, step, self.place.stage)
        if meta is None:
            raise CheckpointError(f"there is no state after step {step}; an older one has to do")
        frame = read_frame(store, meta)
        values = values_of(frame)
        try:
            num_begun = int(values["num_begun"])
            layout = _layout_of(values["gradients"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state after step {step} is malformed: {error!r}") from None
        if self._num_begun > num_begun and callable(getattr(self.model, "begin_epoch", None)):
            # A model that has grown cannot shrink again.
            self._begin_model()
        self._begin_epochs(num_begun)
        self._num_begun = num_begun
        self.model.load(state_of(frame, self.model.state()))
        self._layout = layout
        self.position = Position(step, meta.num_seen, meta.ids_digest)


def _layout_of(saved: Any) -> GradientLayout | None:
    if not saved:
        return None
    names, shapes, dtypes = saved
    return GradientLayout(
        tuple(str(name) for name in names),
        tuple(tuple(int(size) for size in shape) for shape in shapes),
        tuple(str(dtype) for dtype in dtypes),
    )


def _check_plan(plan: FunctionPlan, place: Place) -> None:
    if len(plan.stages) != 1:
        raise InvalidRequest(
            f"the plan cuts the model into {len(plan.stages)} stages, but it is trained whole; profile it again"
        )
    if place.stage != 0 or not 0 <= place.replica < plan.num_replicas:
        raise InvalidRequest(f"the plan has no place {place}")
