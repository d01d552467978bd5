"""The TrainContext passed to training functions: it maps the user's loop to the trainer's shards and steps."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from springtide.core.context import Batch
from springtide.core.errors import Fenced, InvalidRequest, StorageError
from springtide.core.quantities import validate_name
from springtide.runtime.data.batch_loader import PartIds
from springtide.runtime.data.batch_source import BatchSource, SourcePlace, open_source, say_who_decides
from springtide.runtime.data.fetching import fields_of, to_device, x_and_y
from springtide.runtime.data.shards import GlobalBatch, SampleOrder
from springtide.runtime.elastic.evaluation import Compute, Evaluation, PartScores, weighted_means
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.models.prepare_arguments import Prepared, prepared_arguments

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")

_PUBLISH_PATIENCE_S = 600.0
_PUBLISH_RETRY_S = 1.0


class ShardTrainer(Protocol):
    """What a context needs from a trainer: it takes shards from it and gives it their losses."""

    @property
    def step(self) -> int:
        """How many optimizer steps are committed."""

    @property
    def progress(self) -> float:
        """Committed work, in optimizer steps of the initial batch size."""

    @property
    def epoch(self) -> int:
        """The current pass over the dataset, from 0."""

    @property
    def metrics(self) -> dict[str, float]:
        """The user's metrics, reported with the progress; the context adds to this dict."""

    @property
    def loss(self) -> float | None:
        """The mean loss over the last committed step's global batch; None before the first."""

    def attach(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Sequence[Any] = (),
        micro_batch: int = 0,
    ) -> None:
        """Take over the model, its optimizers, and other objects that have a state.

        `micro_batch` is the most samples of one pass (0: no limit). Raises InvalidRequest.
        """

    @property
    def rank(self) -> int:
        """This worker's place in the present group, from 0."""

    @property
    def world_size(self) -> int:
        """How many workers the present group has."""

    @property
    def seed(self) -> int:
        """The job's seed."""

    @property
    def global_batch_size(self) -> int:
        """The samples of a full batch, the initial one if it may change; 0 where it is not known."""

    def evaluate(self, name: str, num_parts: int, compute: Compute) -> list[PartScores]:
        """The scores of all parts of a dataset, by the workers that ask for them."""

    def start(self, num_samples: int, order: SampleOrder | None = None) -> None:
        """Set the dataset's length and, if it has one, its own order. Raises InvalidRequest."""

    def set_epochs(self, num_epochs: int | None) -> int:
        """Set how many epochs a script has; returns how many there are. Raises InvalidRequest."""

    def take_batch_size(self, size: int) -> bool:
        """Set the samples of a full batch as a script's DataLoader has them (0: none); whether this is a script.

        Raises InvalidRequest.
        """

    @property
    def num_passes(self) -> int:
        """How many passes over the data are complete."""

    def end_step(self) -> None:
        """Commit a step in which several optimizers have taken turns."""

    def parts_ahead(self, part: int) -> Iterator[tuple[GlobalBatch, int, tuple[int, int]]]:
        """What `next_shard` will return, from this part of the current step on, if group and batch size stay."""

    def next_shard(self) -> tuple[GlobalBatch, int, tuple[int, int]] | None:
        """The next shard's global batch, number and (first, end) samples; None when all steps are done."""

    def backward(self, loss: torch.Tensor, place: int = 0, weight: float | None = None) -> None:
        """Run backward for the current shard; after the step's last shard, sum the gradients over the group.

        `place` is that of the optimizer that is to update. The shard counts for `weight`, or for its samples.
        """

    def leave_loop(self) -> None:
        """User code has left its loop over batches, perhaps within a batch."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the summed gradients; returns the norm that they had, NaN if they are not complete."""

    def update(self) -> bool:
        """Update the model and commit the step, if its gradients are complete; whether they are."""


class ArtifactWriter(Protocol):
    """Where a context saves the model's weights."""

    def write(self, file_name: str) -> str:
        """Write the weights and return their path. Raises Fenced, StorageError."""

    def path(self, file_name: str) -> str:
        """The path that `write` would return."""


class TrainerArtifacts:
    """The artifacts of a job: rank 0 writes them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def write(self, file_name: str) -> str:
        """Publish the weights if this worker is rank 0, and return their path on every rank.

        Raises Fenced if a newer generation owns the job.
        """
        return write_artifact(file_name, self._trainer) if self._trainer.rank == 0 else self.path(file_name)

    def path(self, file_name: str) -> str:
        """The path for the current generation and step."""
        trainer = self._trainer
        return trainer.storage.artifact_path(file_name, trainer.membership.generation, trainer.step)


class ElasticContext:
    """Implements core.context.TrainContext on top of a ShardTrainer."""

    def __init__(
        self,
        trainer: ShardTrainer,
        artifacts: ArtifactWriter,
        work_dir: Path,
        devices: Sequence[torch.device],
        params: Mapping[str, str],
        store_url: str = "",
    ) -> None:
        """`store_url` is the store of named datasets; empty if this worker can read the platform's directory."""
        self._trainer = trainer
        self._artifacts = artifacts
        self._work_dir = work_dir
        self._devices, self._device = list(devices), devices[0]
        self._params = dict(params)
        self._store_url = store_url
        self._is_prepared = False
        # Sources of evaluations, and of epochs, by the DataLoader whose processes are to be kept.
        self._kept: weakref.WeakKeyDictionary[Any, BatchSource] = weakref.WeakKeyDictionary()
        self._kept_passes: weakref.WeakKeyDictionary[Any, BatchSource] = weakref.WeakKeyDictionary()
        self._prepared: Prepared | None = None
        self._is_checked = False
        # In a loop over epochs: the present one, and whether its pass over the data has begun.
        self._epoch: int | None = None
        self._has_pass = False
        # Whether a loop over batches has come to the last step, or to where another worker has ended the training.
        self._has_ended = False
        self._num_yielded = 0
        self._num_stepped = 0
        # Whether a backward pass waits for its update, and the place of the optimizer that makes it.
        self._is_open = False
        self._place = 0

    @property
    def params(self) -> Mapping[str, str]:
        """What the user passed with `--param name=value`."""
        return self._params

    @property
    def step_number(self) -> int:
        """How many optimizer steps are committed."""
        return self._trainer.step

    @property
    def progress(self) -> float:
        """Committed work, in optimizer steps of the initial batch size."""
        return self._trainer.progress

    @property
    def epoch(self) -> int:
        """The current pass over the dataset, from 0."""
        return self._trainer.epoch

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the one of its group that writes logs and files for all."""
        return self._trainer.rank == 0

    @property
    def num_workers(self) -> int:
        """How many workers the present group has."""
        return self._trainer.world_size

    @property
    def device(self) -> torch.device:
        """The torch device of this worker; of several the first."""
        return self._device

    @property
    def devices(self) -> list[torch.device]:
        """The torch devices of this worker, as many as `gpu` says."""
        return list(self._devices)

    @property
    def loss(self) -> float | None:
        """The mean loss over the whole batch of the last step, or turn, alike on every worker; None before it."""
        return self._trainer.loss

    @overload
    def prepare(
        self, model: ModelT, optimizer: OptimizerT | Callable[[Any], OptimizerT], *, micro_batch: int | None = None
    ) -> tuple[ModelT, OptimizerT]: ...

    @overload
    def prepare(self, model: Any, optimizer: Any, *objects: Any, micro_batch: int | None = None) -> tuple[Any, ...]: ...

    def prepare(self, model: Any, optimizer: Any, *objects: Any, micro_batch: int | None = None) -> tuple[Any, ...]:
        """Register the model, its optimizer (or a factory called with the parameters) and what else has a state.

        `objects` have `state_dict` and `load_state_dict` (schedulers, a GradScaler, an average of the weights), or are
        factories called with the optimizers. Several models may come first, and after them their optimizers, which take
        turns: see `backward`. With `micro_batch` a worker's part of a batch comes in passes of at most so
        many samples. Call it exactly once. Returns all in their order, the model on this worker's device, once this
        worker is a member of a running group and holds that group's training state. Raises InvalidRequest.
        """
        if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
            raise InvalidRequest(f"micro_batch is a number of samples, at least 1, not {micro_batch!r}")
        if self._is_prepared:
            raise InvalidRequest("ctx.prepare() was called a second time; call it once, before the loop")
        self._is_prepared = True
        self._prepared = prepared = prepared_arguments((model, optimizer, *objects), self._devices)
        self._trainer.attach(prepared.model, prepared.optimizers, prepared.objects, micro_batch or 0)
        return (*prepared.models, *prepared.optimizers, *prepared.objects)

    def epochs(self, number: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch that is left, from 0; `batches` then ends with the epoch.

        A worker that joins, and a restart, begin with the present epoch. `number` is how many there are, which only a
        script says itself. Raises InvalidRequest, also if an epoch had no complete pass over the data.
        """
        num_epochs = self._trainer.set_epochs(number)
        if not self._is_prepared:
            raise InvalidRequest("ctx.epochs() needs a model first; call ctx.prepare(model, optimizer) before the loop")
        while (epoch := self._trainer.num_passes) < num_epochs:
            self._epoch, self._has_pass = epoch, False
            yield epoch
            if self._has_ended:
                break
            if self._trainer.num_passes == epoch:
                raise InvalidRequest(
                    f"epoch {epoch} has ended without a complete pass over its data; go through all of "
                    "ctx.batches(data) in each, or leave the loop over epochs, too, to end early"
                )
        self._epoch = None

    def batches(
        self,
        dataset: Any,
        *,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
    ) -> Iterator[Batch]:
        """Yield this worker's parts of every remaining global batch; the group may change between two of them.

        `num_workers` processes read samples, `prefetch` parts ahead each (2); `collate` stacks a list of samples. A
        DataLoader has these itself. Raises InvalidRequest, also if a batch was not followed by `step`; StorageError if
        a named dataset cannot be read; and what the dataset raises.
        """
        trainer, epoch = self._trainer, self._epoch
        if not self._is_prepared:
            raise InvalidRequest(
                "ctx.batches() needs a model first; call ctx.prepare(model, optimizer) before the loop"
            )
        if self._has_ended:
            self._artifacts.write("model.safetensors")
            raise InvalidRequest(
                "ctx.batches() was called again after the job's last step. One call goes through all epochs, unless "
                "the loop around it is `for epoch in ctx.epochs():`. Write that, or leave the loop over epochs out and "
                "do what belongs to the end of an epoch where batch.is_last is True after ctx.step(). The weights are "
                "saved as they are now"
            )
        if epoch is not None and self._has_pass:
            raise InvalidRequest(
                f"ctx.batches() was called twice in epoch {epoch}; it is for the one pass that trains: use the "
                "DataLoader itself, or ctx.evaluate(), for validation"
            )
        self._has_pass = True
        is_own = trainer.take_batch_size((dataset.batch_size or 0) if isinstance(dataset, DataLoader) else 0)
        # One loop over all epochs ends with the training.
        is_kept = epoch is not None and _is_kept(dataset)
        source = self._open(dataset, is_kept=is_kept, num_workers=num_workers, collate=collate, prefetch=prefetch)
        if not is_own and not trainer.num_passes:
            say_who_decides(source.batch_size, trainer.global_batch_size)
        try:
            trainer.start(source.num_samples, source.order)
            while True:
                if self._num_yielded != self._num_stepped or self._is_open:
                    raise InvalidRequest(
                        "a batch was not trained on; call ctx.step(loss), or ctx.backward(loss) and ctx.update(), once "
                        "for every batch of the loop"
                    )
                if epoch is not None and self._is_over(epoch):
                    return
                task = trainer.next_shard()
                self._has_ended = task is None
                if task is None or (epoch is not None and task[0].epoch > epoch):
                    return
                batch, shard, _ = task
                part = _part_ids(task)
                data = source.fetch(part, lambda shard=shard: map(_part_ids, trainer.parts_ahead(shard)))  # type: ignore[misc]
                self._num_yielded += 1
                yield self._made(data, part, batch.step, shard, is_last=batch.is_last)
        finally:
            trainer.leave_loop()
            if not is_kept:
                source.close()

    def _open(self, dataset: Any, *, is_kept: bool, **options: Any) -> BatchSource:
        """The source of batches; one that `is_kept` is that of the epoch before."""
        source = self._kept_passes.get(dataset) if is_kept else None
        if source is None:
            source = open_source(dataset, self._source_place, self._trainer.global_batch_size, **options)
        if is_kept:
            self._kept_passes[dataset] = source
        return source

    def _is_over(self, epoch: int) -> bool:
        """Whether all steps of the epoch are committed. Its boundary is passed when the next one begins."""
        if self._trainer.num_passes == epoch:
            self._trainer.end_step()
        return self._trainer.num_passes > epoch

    @property
    def _source_place(self) -> SourcePlace:
        return SourcePlace(self._trainer.seed, self._device, _state_dir_of(self._work_dir), self._store_url)

    def _made(self, data: Any, part: PartIds, step: int, shard: int, *, is_last: bool = False) -> Batch:
        data = to_device(data, self._device)
        x, y = x_and_y(data)
        return Batch(
            x=x,
            y=y,
            ids=part.ids,
            epoch=part.epoch,
            step=step,
            shard=shard,
            fields=fields_of(data),
            data=data,
            is_last=is_last,
        )

    def step(
        self, loss: Any = None, *, weight: Any = None, clip_grad_norm: float | None = None, optimizer: Any = None
    ) -> bool:
        """Run backward; after the last part of the global batch also exchange gradients and update the model.

        `loss` is the mean over the batch, a tensor with one element, and counts for `weight`, or for its samples. With
        `clip_grad_norm` the norm of the global gradient is at most that. Where several optimizers were prepared,
        `optimizer` is the one whose turn it is. Returns True if this call completed an update. Raises InvalidRequest
        for another loss, weight, bound or optimizer, or if no new batch was taken since the last call.
        """
        self.backward(loss, weight=weight, optimizer=optimizer)
        if clip_grad_norm is not None:
            self.clip_grad_norm(clip_grad_norm)
        return self.update(optimizer)

    def backward(self, loss: Any, *, weight: Any = None, optimizer: Any = None) -> None:
        """The first half of `step`: backward, and after the last part of the global batch the exchange of gradients.

        Then call `update`, and before it `clip_grad_norm` if you like. Raises InvalidRequest as `step` does.
        """
        place = self._place_of(optimizer)
        takes_turns = self._prepared is not None and len(self._prepared.optimizers) > 1
        if self._is_open and loss is None:
            raise InvalidRequest("after ctx.backward(loss) call ctx.update(); ctx.step(loss) alone does both")
        if self._is_open or (self._num_yielded == self._num_stepped and not (takes_turns and self._num_yielded)):
            raise InvalidRequest("ctx.step() was called without a new batch; call it once inside the loop over batches")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidRequest(
                "ctx.step() needs the mean loss of the batch as a tensor with one element: ctx.step(loss), which runs "
                "backward itself; after ctx.backward(loss) call ctx.update()"
            )
        number = _checked_weight(weight)
        self._is_open, self._place = True, place
        self._trainer.backward(loss.reshape(()), place, number)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Between `backward` and `update`: scale the global gradient down to `max_norm`; returns the norm that it had.

        The norm is NaN, and nothing is clipped, where `update` will return False. Raises InvalidRequest.
        """
        self._assert_backward("ctx.clip_grad_norm()")
        if not isinstance(max_norm, int | float) or not max_norm > 0:
            raise InvalidRequest(f"a norm of gradients is clipped to a positive number, not {max_norm!r}")
        return self._trainer.clip_grad_norm(float(max_norm))

    def update(self, optimizer: Any = None) -> bool:
        """The second half of `step`: update the model, if all parts of the global batch had their backward pass.

        Returns True if it did. Raises InvalidRequest without a `backward` before it, or with another optimizer.
        """
        self._assert_backward("ctx.update()")
        if optimizer is not None and self._place_of(optimizer) != self._place:
            raise InvalidRequest("ctx.update() names another optimizer than ctx.backward() before it")
        self._is_open = False
        # With several optimizers a batch has several updates, of which the first makes it one that was trained on.
        self._num_stepped = self._num_yielded
        is_made = self._trainer.update()
        if is_made and not self._is_checked:
            self._is_checked = True
            if self._prepared is not None and self._prepared.has_stray_scheduler():
                _tell_stray("the optimizer has a scheduler", "scheduler")
            if self._prepared is not None and self._prepared.has_stray_average():
                _tell_stray("there is an AveragedModel", "average")
        return is_made

    def _place_of(self, optimizer: Any) -> int:
        optimizers = [] if self._prepared is None else self._prepared.optimizers
        if optimizer is None and len(optimizers) > 1:
            raise InvalidRequest(
                "several optimizers were prepared; name the one whose turn it is: ctx.step(loss, optimizer=optimizer)"
            )
        places = [place for place, other in enumerate(optimizers) if other is optimizer]
        if optimizer is not None and not places:
            raise InvalidRequest("ctx.step() got an optimizer that was not handed to ctx.prepare()")
        return places[0] if places else 0

    def _assert_backward(self, call: str) -> None:
        if not self._is_open:
            raise InvalidRequest(f"{call} was called without a gradient; call ctx.backward(loss) before it")

    def evaluate(
        self,
        dataset: Any,
        function: Callable[[Batch], Any],
        *,
        batch: int | None = None,
        name: str = "",
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
    ) -> dict[str, float]:
        """The means of what `function` returns for batches of a whole dataset, which the workers divide between them.

        `function` returns a dict of means over its batch, or a pair of such a dict and the batch's weight. Raises
        InvalidRequest, StorageError, and what the dataset and the function raise.
        """
        if self._prepared is None:
            raise InvalidRequest("ctx.evaluate() needs a model first; call ctx.prepare(model, optimizer) before it")
        is_kept = _is_kept(dataset)
        source = self._kept.get(dataset) if is_kept else None
        if source is None:
            source = open_source(
                dataset, self._source_place, 0, num_workers=num_workers, collate=collate, prefetch=prefetch
            )
        if is_kept:
            self._kept[dataset] = source
        size = batch or source.batch_size or self._trainer.global_batch_size or 1
        if source.num_samples <= 0 or size < 1:
            raise InvalidRequest("ctx.evaluate() needs a dataset of at least one sample, and batches of at least one")
        evaluation = Evaluation(
            self._prepared.model, self._device, self._trainer.seed, source, size, self._trainer.step
        )
        try:
            with evaluation.undisturbed():
                scores = self._trainer.evaluate(
                    f"{name}/{source.num_samples}/{size}",
                    evaluation.num_parts,
                    lambda parts: evaluation.compute(parts, function, self._made),
                )
        finally:
            if not is_kept:
                source.close()
        return weighted_means(scores)

    def metrics(self, **values: float) -> None:
        """Attach numbers, for example an accuracy, to the progress reports; a later value replaces an earlier one."""
        self._trainer.metrics.update({name: float(value) for name, value in values.items()})

    def save(self, name: str = "model") -> str:
        """Write the model's weights as `<name>.safetensors` to the job's artifacts and return the path.

        Only rank 0 writes; every rank gets the path. Raises Fenced if a newer generation owns the job.
        """
        file_name = f"{validate_name(name, 'artifact name')}.safetensors"
        return self._artifacts.write(file_name) if self._is_prepared else self._artifacts.path(file_name)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._is_prepared


def write_artifact(name: str, trainer: Trainer) -> str:
    """Publish the weights under their `state_dict` names and return the path. Raises StorageError, Fenced."""
    state = trainer.state.model.state_dict()
    # Tied weights share memory, which safetensors refuses: every name gets its own copy.
    data = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()})
    return trainer.storage.publish_artifact(name, data, trainer.membership.generation, trainer.step)


def publish_result(trainer: Trainer) -> str:
    """On rank 0, write the final model and return its path; returns "" on other ranks and on a fenced worker.

    Retries for ten minutes while storage fails (a full disk, say), because all training is done; then raises
    StorageError.
    """
    end_s = time.monotonic() + _PUBLISH_PATIENCE_S
    while trainer.rank == 0:
        try:
            return write_artifact("model.safetensors", trainer)
        except Fenced:
            # A newer group owns the job. If it includes this worker, an order to join arrives, and it writes then.
            return ""
        except StorageError as error:
            if time.monotonic() > end_s:
                raise
            sys.stderr.write(f"springtide: the result cannot be written yet: {error}\n")
            time.sleep(_PUBLISH_RETRY_S)
    return ""


def _is_kept(dataset: Any) -> bool:
    """Whether the processes of a DataLoader are to be kept for its next pass."""
    return bool(getattr(dataset, "persistent_workers", False))


def _checked_weight(weight: Any) -> float | None:
    """What user code lets a loss count for. Raises InvalidRequest."""
    if weight is None:
        return None
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0.0):
        raise InvalidRequest(f"the weight of a loss is a number of at least 0, as of tokens, not {weight!r:.80}")
    return number


def _part_ids(task: tuple[GlobalBatch, int, tuple[int, int]]) -> PartIds:
    batch, _, (low, high) = task
    return PartIds(batch.epoch, tuple(batch.ids[low:high].tolist()))


def _state_dir_of(work_dir: Path) -> Path | None:
    """The platform's state directory if `work_dir` is <state>/workloads/<id>, else None."""
    return work_dir.parents[1] if work_dir.parent.name == "workloads" else None


def _tell_stray(what: str, name: str) -> None:
    sys.stderr.write(
        f"springtide: {what} that was not prepared, so that it starts anew in a worker that joins and after a restart; "
        f"call ctx.prepare(model, optimizer, {name}), or in a script springtide.adopt(model, optimizer, {name})\n"
    )
