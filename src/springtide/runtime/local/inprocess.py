"""Training in the current process with one worker and no platform; bit-identical to a run on the platform."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from springtide.core.errors import InvalidRequest
from springtide.core.workload import TrainingJob
from springtide.runtime.data.shards import GlobalBatch, SampleOrder, seed_everything
from springtide.runtime.elastic.context import ElasticContext
from springtide.runtime.elastic.evaluation import Compute, PartScores, compute_alone
from springtide.runtime.elastic.steps.choice import step_method
from springtide.runtime.elastic.steps.gradients import LossScaling, clip_gradients, divided_by_weight, weighted
from springtide.runtime.elastic.steps.loss_means import LossWeights
from springtide.runtime.elastic.steps.method import Flags, Reduced, parts_ahead
from springtide.runtime.elastic.training_cursor import TrainingCursor
from springtide.runtime.local.function_task import LocalResult, LossLines
from springtide.runtime.local.torchrun_ranks import TorchrunRanks
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.process.devices import worker_devices
from springtide.runtime.process.entry import as_function
from springtide.storage.files import write_durable
from springtide.storage.workloads.results import OUT_VARIABLE


class _OneWorker:
    """The trainer of a group of one; with `ranks`, one of those that torchrun has started."""

    def __init__(
        self,
        job: TrainingJob,
        device: torch.device,
        report: Callable[[_OneWorker, int], None],
        ranks: TorchrunRanks | None = None,
    ) -> None:
        self.job = job
        self._ranks = ranks
        self.rank, self.world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        self.training_cursor = TrainingCursor(job)
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self._device = device
        self._report = report
        # The batch, and this rank's part of it.
        self._batch: GlobalBatch | None = None
        self._own: GlobalBatch | None = None
        self._part_size = 0
        self._reduced: Reduced | None = None
        self._last_turn: Reduced | None = None
        self._place = 0

    def attach(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Sequence[Any] = (),
        micro_batch: int = 0,
    ) -> None:
        self.state = TrainingState(model, optimizers, self._device, objects)
        self._scaling = LossScaling(self.state)
        self._loss_weights = LossWeights()
        measures_noise = self.training_cursor.measures_noise
        self._method = step_method(
            self.job, self.state, measures_noise=measures_noise, micro_batch=micro_batch, metrics=self.metrics
        )
        if self._ranks is not None:
            self._ranks.copy_first(self.state)

    def set_epochs(self, num_epochs: int | None) -> int:
        """Set how many epochs a script has; returns how many there are. Raises InvalidRequest."""
        return self.training_cursor.set_epochs(num_epochs)

    def take_batch_size(self, size: int) -> bool:
        """Set the samples of a full batch: those of a script's DataLoader, on each rank; whether this is a script.

        Raises InvalidRequest.
        """
        return self.training_cursor.take_batch_size(size * self.world_size)

    @property
    def num_passes(self) -> int:
        """How many passes over the data are complete."""
        return self.training_cursor.num_passes

    def start(self, num_samples: int, order: SampleOrder | None = None) -> None:
        """Set the dataset's length, from which all steps of the training follow. Raises InvalidRequest."""
        self.training_cursor.start(num_samples, order)

    def parts_ahead(self, part: int) -> Iterator[tuple[GlobalBatch, int, tuple[int, int]]]:
        """What `next_shard` will return, from this part of the current step on."""
        if self._ranks is None:
            return parts_ahead(self.training_cursor, self._method, None, part)
        batches = map(self._ranks.part_of, self.training_cursor.batches_ahead())
        found = ((batch, *task) for batch in batches for task in self._method.parts(batch, None))
        return itertools.islice(found, part, None)

    @property
    def step(self) -> int:
        return self.training_cursor.step

    @property
    def progress(self) -> float:
        """Committed work, in optimizer steps of the initial batch size."""
        return self.training_cursor.progress

    @property
    def epoch(self) -> int:
        """The epoch of the next step (of the last one, at the end)."""
        return self.training_cursor.epoch

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def global_batch_size(self) -> int:
        """The samples of a full batch; the initial one, if it may change."""
        return self.training_cursor.global_batch_size

    def end_step(self) -> None:
        """Commit a step in which several optimizers have taken turns."""
        last_turn, self._last_turn = self._last_turn, None
        if last_turn is not None:
            self._commit(last_turn)

    def next_shard(self) -> tuple[GlobalBatch, int, tuple[int, int]] | None:
        """The next shard's global batch, number and (first, end) samples; None when all steps are done."""
        self.end_step()
        if self._batch is None:
            if self.training_cursor.is_over:
                return None
            self._batch = self._own = self.training_cursor.next_batch()
            if self._ranks is not None:
                self._own = self._ranks.part_of(self._batch)
            self._method.begin(self._own, None, is_measured=self.training_cursor.measures_step)
        assert self._own is not None
        part, bounds = self._method.begin_part()
        self._part_size = bounds[1] - bounds[0]
        seed_everything(self.job.seed, self._batch.step, max(part, 0) * self.world_size + self.rank)
        return self._own, part, bounds

    def evaluate(self, name: str, num_parts: int, compute: Compute) -> list[PartScores]:
        """The scores of all parts, in order."""
        known: dict[int, PartScores] = {}
        compute_alone(num_parts, known, compute, lambda: None)
        return [known[number] for number in range(num_parts)]

    def backward(self, loss: torch.Tensor, place: int = 0, weight: float | None = None) -> None:
        """Run backward for the current shard; after the step's last shard, the gradients are complete."""
        if self._batch is None:
            return
        self._place = place
        weight = self._loss_weights.of(loss, weight, self._part_size)
        loss, root = weighted(loss, self._scaling.scaled(loss), weight, self._part_size)
        self._method.backward(loss, root, place, weight)
        if not self._method.has_part():
            assert self._batch is not None
            reduced = self._method.exchange(self.step, Flags(), self.training_cursor.last_square)
            if self._ranks is not None:
                reduced = self._ranks.summed(reduced, self.state, self._batch)
            reduced = divided_by_weight(reduced, self._method.payload.parameters, len(self._batch.ids))
            self._reduced = self._scaling.unscale(reduced, place)

    def leave_loop(self) -> None:
        """User code has left its loop over batches."""
        self._method.leave_loop()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradients, once they are complete; returns the norm that they had, NaN before."""
        if self._reduced is None:
            return math.nan
        return clip_gradients(self._method.payload.parameters, max_norm, None)

    def update(self) -> bool:
        """Update the model, if the gradients are complete; whether they are."""
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return False
        if len(self.state.optimizers) == 1:
            self._commit(reduced)
        else:
            self._apply()
            # Another optimizer may take its turn: the step ends with the next batch.
            self._last_turn, self.loss = reduced, reduced.loss
        return True

    def _apply(self) -> None:
        factor = self.training_cursor.learning_rate_factor
        self._method.update(factor, None, is_skipped=self._scaling.is_skipped)
        self._scaling.updated(self._place)

    def _commit(self, reduced: Reduced) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        self.loss = reduced.loss
        self.training_cursor.commit(batch, reduced.squares, reduced.rank0_square, reduced.num_parts)
        if len(self.state.optimizers) == 1:
            self._apply()
        self._report(self, len(batch.ids))


class _DirectoryArtifacts:
    """Writes the weights into a given directory."""

    def __init__(self, worker: _OneWorker, directory: Path) -> None:
        self._worker = worker
        self._directory = directory

    def write(self, file_name: str) -> str:
        path = self._directory / file_name
        if self._worker.rank:
            return str(path)
        # Tied weights share memory, which safetensors refuses: every name gets its own copy.
        state = self._worker.state.model.state_dict()
        data = save({key: tensor.detach().cpu().clone().contiguous() for key, tensor in state.items()})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durable(path, data, mode=0o644)
        return str(path)

    def path(self, file_name: str) -> str:
        return str(self._directory / file_name)


def _reporter(lines: LossLines) -> Callable[[_OneWorker, int], None]:
    def report(worker: _OneWorker, num_samples: int) -> None:
        lines.report(worker.step, worker.training_cursor.total_steps, worker.loss, num_samples, worker.metrics)

    return report


def script_context(
    job: TrainingJob, directory: Path, report: Callable[[int, int, float | None, dict[str, float]], None]
) -> ElasticContext:
    """The context of a script that runs alone, or as one of torchrun's ranks, without the platform.

    `report` is called after each step, with the steps so far, those of the whole run, the loss and the metrics;
    `directory` is where the context saves models. Raises InvalidRequest if torch sees no device.
    """
    ranks = TorchrunRanks.joined()
    index = 0 if ranks is None else ranks.local_rank
    devices = worker_devices("gpu" if torch.cuda.is_available() else "cpu", index, job.devices_each)

    def step_ended(worker: _OneWorker, _: int) -> None:
        report(worker.step, worker.training_cursor.total_steps, worker.loss, worker.metrics)

    worker = _OneWorker(job, devices[0], step_ended, ranks)
    return ElasticContext(worker, _DirectoryArtifacts(worker, directory), directory, devices, job.params)


@contextmanager
def _as_on_a_worker(job: TrainingJob, results: Path) -> Iterator[None]:
    """Set `job.env`, name the folder of the results, and limit torch to one thread.

    With several it may add numbers in another order.
    """
    num_threads, before = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    results.mkdir(parents=True, exist_ok=True)
    ours = {**job.env, OUT_VARIABLE: str(results)}
    os.environ.update(ours)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        for name in ours:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def run_local(
    function: Any,
    job: TrainingJob,
    directory: Path | None = None,
    write: Callable[[str], None] = print,
) -> LocalResult:
    """Train `function` (a training function or a declared task) to its end in this process.

    The goal, the bounds on workers and the entrypoint of `job` are ignored. Writes the final model to
    `directory`/model.safetensors (default directory: springtide-out/<name>). Raises InvalidRequest, StorageError, and
    whatever the function raises.
    """
    began_s = time.monotonic()
    devices = worker_devices("gpu" if torch.cuda.is_available() else "cpu", 0, job.devices_each)
    worker = _OneWorker(job, devices[0], _reporter(LossLines(job.name, write)))
    chosen = (directory or Path("springtide-out") / job.name).absolute()
    context = ElasticContext(worker, _DirectoryArtifacts(worker, chosen), chosen, devices, job.params)
    with _as_on_a_worker(job, chosen):
        seed_everything(job.seed)
        as_function(function)(context)
        if not context.is_prepared:
            raise InvalidRequest(
                f"{job.name} returned without ctx.prepare(); it has trained nothing: call "
                "ctx.prepare(model, optimizer), then loop over ctx.batches(dataset)"
            )
        artifact_path = context.save()
    return LocalResult(
        name=job.name,
        num_steps=worker.step,
        loss=worker.loss,
        metrics=dict(worker.metrics),
        artifact_path=artifact_path,
        took_s=time.monotonic() - began_s,
    )
