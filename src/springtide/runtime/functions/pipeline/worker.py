"""One place of the pipeline: forward and backward of its part of a global batch, messages, exchange and update.

Gradients equal those of one process with the same batches: micro-batches are weighted by their sizes, and sums have a
fixed order (within a place that of the backward passes, the last micro-batch first; across replicas that of ranks).
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from springtide.collectives.communicator import Communicator
from springtide.core.errors import InvalidRequest, ObjectMissing, StorageError
from springtide.core.functions import FunctionPlan
from springtide.core.ports import Store
from springtide.core.wire.functions import Keys, LaneTimes, Place
from springtide.core.workload import TrainingJob
from springtide.perf.functions.pipeline.tasks import StageTask, micro_batch_bounds, step_tasks
from springtide.runtime.data.samples import schedule_of
from springtide.runtime.data.shards import GlobalBatch, seed_everything
from springtide.runtime.functions.pipeline.executor import StepExecutor
from springtide.runtime.functions.pipeline.messages import Parcel, pack_parcel, present, unpack_parcel
from springtide.runtime.functions.pipeline.state import load_state, save_state
from springtide.runtime.functions.pipeline.task_parts import TaskParts, stage_training
from springtide.runtime.functions.saved_states import read_meta
from springtide.runtime.functions.step import Position, StepOutcome
from springtide.runtime.models.gradients import GradientVector
from springtide.runtime.models.layers import borders, has_gradient

# How long to wait for a message before checking whether the step was ended.
_WAIT_S = 1.0
_LONGEST_WAIT_S = 2.0


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch in progress: the stage's inputs and outputs, and their gradients."""

    low: int
    high: int
    weight: float
    inputs: tuple[torch.Tensor | None, ...] = ()
    is_tuple: bool = False
    outputs: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None
    output_gradients: tuple[torch.Tensor | None, ...] = ()
    input_gradients: tuple[torch.Tensor | None, ...] = ()
    gives_tuple: bool = False


class PipelineWorker:
    """A PlaceWorker for one place (stage, replica) of a pipeline; holds the stage's training state and its position.

    `wire` carries messages, `exchange` sums the replicas' gradients (None with one replica). `check` is called about
    twice a second while the place waits; an exception that it raises ends the step. The state is then as before the
    step, or, if the update was done and only messages were outstanding, as after it, which `position` says.
    """

    def __init__(
        self,
        *,
        parts: TaskParts,
        job: TrainingJob,
        plan: FunctionPlan,
        place: Place,
        wire: Store,
        check: Callable[[], None],
        exchange: Communicator | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if parts.layers and plan.stages[-1].end_layer != len(parts.layers):
            raise InvalidRequest(
                f"the plan is for {plan.stages[-1].end_layer} layers, but the model has {len(parts.layers)}; "
                "profile it again"
            )
        own = plan.stages[place.stage]
        self.place = place
        self.plan = plan
        self.model = parts.model
        self.training = stage_training(parts, own.first_layer, own.end_layer)
        self.position = Position()
        self._gradients = GradientVector(self.training.stage)
        self._is_first = place.stage == 0
        self._is_last = place.stage == len(plan.stages) - 1
        # Only the first and last stages need samples.
        self._fetch = parts.fetch if self._is_first or self._is_last else None
        self._loss = parts.loss
        self._job = job
        self._schedule = schedule_of(job, parts.samples)
        self.samples = parts.samples
        self._wire = wire
        self.exchange = exchange
        self._now_s = now_s
        self._check = check
        self._executor = StepExecutor(min(plan.num_in_flight, 2), check, now_s)
        self._stage = self.training.stage
        self._clones_input = self._stage.starts_in_place and not self._is_first
        self._batch = GlobalBatch(0, 0, torch.empty(0).numpy())
        self._micro_batches: list[_MicroBatch] = []
        self._prefix = ""
        self._ends_here = self._is_updated = False
        self._read_keys: list[str] = []
        self._sweeper: threading.Thread | None = None

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

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """Set how many samples of the stream may be used; see PlaceWorker."""
        self._schedule.set_available(num_samples, is_closed=is_closed)

    @property
    def num_exchanged(self) -> int:
        """How many numbers the replicas of this stage exchange in a step."""
        return self._gradients.vector.numel()

    @property
    def gradient_bytes(self) -> int:
        """The bytes that this place exchanges in a step."""
        return self._gradients.vector.nbytes

    def sync_prefix(self, prefix: str) -> str:
        """The prefix of the keys of this stage's exchange, in the step whose messages are under `prefix`."""
        return f"{prefix}/sync/{self.place.stage}"

    def run_step(self, prefix: str, *, ends_here: bool = False) -> StepOutcome:
        """Train the next step, with its messages under `prefix`.

        `ends_here` (for the first stage) asks all places to stop after it: messages carry that, and it is in every
        place's outcome. Raises what `check` and the user's code raise, and StorageError.
        """
        step, began_s = self.position.step, self._now_s()
        batch = self._schedule.batch(step)
        bounds = micro_batch_bounds(
            len(batch.ids), self.place.replica, self.plan.num_replicas, self.plan.micro_batch_size
        )
        self._batch, self._prefix = batch, prefix
        self._micro_batches = [_MicroBatch(low, high, (high - low) / len(batch.ids)) for low, high in bounds]
        # A replica without samples sends no messages, so another replica has to pass this on.
        self._ends_here = ends_here and bool(bounds)
        self._read_keys, self._is_updated = [], False
        tasks = step_tasks(self.place, len(self.plan.stages), self.plan.num_replicas, len(bounds))
        self._gradients.begin_step()
        try:
            took_s = self._executor.run(tasks, self._work)
        except BaseException:
            # Wait for the threads: a running exchange would write into the next attempt's gradients.
            self._executor.close()
            self._micro_batches = []
            if self._is_updated:
                # The step will be repeated, because messages were not sent, but this state is already the one after it.
                # With the old position it would be updated a second time.
                self._commit(batch)
            else:
                self._gradients.drop()
            raise
        loss = self._own_loss()
        self._micro_batches = []
        self._commit(batch)
        self._sweep()
        return StepOutcome(
            batch=batch,
            num_samples=sum(high - low for low, high in bounds),
            loss=loss,
            is_last=self._ends_here,
            lanes=_lanes(took_s, self._now_s() - began_s),
        )

    def _commit(self, batch: GlobalBatch) -> None:
        before = self.position
        digest = hashlib.sha256((before.ids_digest + batch.ids_digest).encode()).hexdigest()[:16]
        self.position = Position(before.step + 1, before.num_seen + len(batch.ids), digest if self._is_first else "")

    def save_state(self, store: Store, keys: Keys) -> None:
        """Write the stage's state at the current position. Raises StorageError."""
        save_state(store, keys, self.place.stage, self.training, self.position)

    def has_state(self, store: Store, keys: Keys, step: int) -> bool:
        """Whether this stage's state after `step` steps is saved. Raises StorageError, CheckpointError."""
        return read_meta(store, keys, step, self.place.stage) is not None

    def load_state(self, store: Store, keys: Keys, step: int) -> None:
        """Restore the state and position after `step` steps. Raises CheckpointError, StorageError."""
        self.position = load_state(store, keys, step, self.place.stage, self.training)

    def set_plan(self, plan: FunctionPlan, place: Place | None = None) -> None:
        """Use another plan with the same stages; see PlaceWorker. Raises InvalidRequest for other stages."""
        place = place or self.place
        bounds = [[(stage.first_layer, stage.end_layer) for stage in each.stages] for each in (self.plan, plan)]
        if bounds[0] != bounds[1] or place.stage != self.place.stage or place.replica >= plan.num_replicas:
            raise InvalidRequest("another plan cuts the model in another way, or has no such place: it is begun anew")
        self.plan, self.place, self.exchange = plan, place, None
        self._executor.close()
        self._executor = StepExecutor(min(plan.num_in_flight, 2), self._check, self._now_s)

    def close(self) -> None:
        """Wait for all threads."""
        self._executor.close()
        if self._sweeper is not None:
            self._sweeper.join()
        self.samples.close()

    def _sweep(self) -> None:
        """Delete the messages that this place has read, in the background of the next step."""
        if self._sweeper is not None:
            self._sweeper.join()
        self._sweeper = threading.Thread(
            target=self._remove, args=(self._read_keys,), name="springtide-sweep", daemon=True
        )
        self._sweeper.start()

    def _remove(self, keys: list[str]) -> None:
        try:
            self._wire.delete(keys)
        except StorageError as error:
            sys.stderr.write(f"springtide: messages that were read could not be removed: {error}\n")

    def _work(self, task: StageTask, is_ended: Callable[[], bool]) -> None:
        if task.kind == "forward":
            self._forward(self._micro_batches[task.micro_batch], task.micro_batch)
        elif task.kind == "backward":
            self._backward(self._micro_batches[task.micro_batch])
        elif task.kind == "exchange":
            assert self.exchange is not None
            self._gradients.seal(flag=self._ends_here)
            self.exchange.all_reduce(self._gradients.array, self.sync_prefix(self._prefix), abandon=is_ended)
        elif task.kind == "update":
            if self.plan.num_replicas == 1:
                self._gradients.seal(flag=self._ends_here)
            self._ends_here = self._gradients.take()
            self.training.update()
            self._is_updated = True
        else:
            self._transfer(task, self._micro_batches[task.micro_batch], is_ended)

    def _transfer(self, task: StageTask, micro_batch: _MicroBatch, is_ended: Callable[[], bool]) -> None:
        assert task.message is not None
        key = f"{self._prefix}/{task.message.name}"
        if task.kind == "send-output":
            outputs = tuple(tensor.detach() for tensor in micro_batch.outputs)
            self._wire.put(key, pack_parcel(Parcel(outputs, micro_batch.gives_tuple, self._ends_here)))
        elif task.kind == "send-gradient":
            self._wire.put(key, pack_parcel(Parcel(micro_batch.input_gradients, is_tuple=True)))
            micro_batch.input_gradients = ()
        else:
            data = self._receive(key, is_ended)
            if data is None:
                return
            parcel = unpack_parcel(data)
            if task.kind == "take-input":
                micro_batch.inputs, micro_batch.is_tuple = present(parcel.tensors), parcel.is_tuple
                self._ends_here = self._ends_here or parcel.is_last
            else:
                micro_batch.output_gradients = parcel.tensors

    def _receive(self, key: str, is_ended: Callable[[], bool]) -> bytes | None:
        """Wait for a message; None if the step was ended."""
        timeout_s = _WAIT_S
        while not is_ended():
            try:
                data = self._wire.wait(key, timeout_s)
            except ObjectMissing:
                # A polling store begins each wait with short pauses, so longer waits cost fewer requests.
                timeout_s = min(2 * timeout_s, _LONGEST_WAIT_S)
                continue
            self._read_keys.append(key)
            return data
        return None

    def _forward(self, micro_batch: _MicroBatch, index: int) -> None:
        self._gradients.begin_micro_batch()
        step, replica = self._batch.step, self.place.replica
        targets = None
        value: Any
        if self._fetch is not None:
            # Seeded alike at the first and last stage, because reading the dataset may draw random numbers.
            seed_everything(self._job.seed, step, replica, index)
            ids = tuple(int(sample) for sample in self._batch.ids[micro_batch.low : micro_batch.high])
            value, targets = self._fetch(ids)
        if not self._is_first:
            value = self._leaf_inputs(micro_batch)
        seed_everything(self._job.seed, step, self.place.stage, replica, index)
        output = self._stage(value)
        if self._is_last:
            loss = self._loss(output, targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise InvalidRequest("the task's loss must give the mean loss of the batch as a tensor of one element")
            micro_batch.loss = loss.reshape(())
        else:
            where = f"layer {self._stage.end_layer - 1}"
            micro_batch.outputs, micro_batch.gives_tuple = borders(output, where)
        self._gradients.end_forward(micro_batch.weight)

    def _leaf_inputs(self, micro_batch: _MicroBatch) -> Any:
        """The previous stage's outputs as leaf tensors that collect gradients."""
        tensors = present(micro_batch.inputs)
        for tensor in tensors:
            tensor.requires_grad_(has_gradient(tensor))
        if self._clones_input:
            # Autograd forbids in-place changes of a leaf, but not of a clone.
            tensors = tuple(tensor.clone() for tensor in tensors)
        return tensors if micro_batch.is_tuple else tensors[0]

    def _backward(self, micro_batch: _MicroBatch) -> None:
        if micro_batch.loss is not None:
            if micro_batch.loss.requires_grad:
                torch.autograd.backward(micro_batch.loss * micro_batch.weight)
            micro_batch.loss = micro_batch.loss.detach()
        else:
            pairs = [
                (output, gradient)
                for output, gradient in zip(micro_batch.outputs, micro_batch.output_gradients, strict=True)
                if output.requires_grad and gradient is not None
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            micro_batch.outputs = micro_batch.output_gradients = ()
        micro_batch.input_gradients = tuple(
            tensor.grad if tensor is not None else None for tensor in micro_batch.inputs
        )
        micro_batch.inputs = ()

    def _own_loss(self) -> float | None:
        if not self._is_last or not self._micro_batches:
            return None
        num_samples = sum(each.high - each.low for each in self._micro_batches)
        parts = [
            float(each.loss.detach()) * (each.high - each.low) for each in self._micro_batches if each.loss is not None
        ]
        return math.fsum(parts) / num_samples


def _lanes(took_s: dict[str, float], step_s: float) -> LaneTimes:
    """The step's times as in FuncPipe's figure 6; the flush is all time outside computation, exchange and update."""
    forward_s, backward_s = took_s.get("forward", 0.0), took_s.get("backward", 0.0)
    sync_s, update_s = took_s.get("exchange", 0.0), took_s.get("update", 0.0)
    return LaneTimes(
        step_s=step_s,
        forward_s=forward_s,
        backward_s=backward_s,
        upload_s=took_s.get("send-output", 0.0) + took_s.get("send-gradient", 0.0),
        download_s=took_s.get("take-input", 0.0) + took_s.get("take-gradient", 0.0),
        sync_s=sync_s,
        update_s=update_s,
        flush_s=max(0.0, step_s - forward_s - backward_s - sync_s - update_s),
    )
