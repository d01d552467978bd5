"""The contract of TrainContext, the argument of training functions. The runtime implements it; no torch here.

User code is written for a single device and does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's part of a global batch; in an exact job, that of one of its virtual shards.

    `shard` is the part's number: the worker's rank, or the number of the virtual shard. `x` and `y` are the stacked
    samples (`y` is None for a dataset of single values; for longer tuples or mappings `fields` holds all parts). `ids`
    are the dataset indices, in order.
    """

    x: Any
    y: Any
    ids: tuple[int, ...]
    epoch: int
    step: int
    shard: int
    fields: Any = None


class TrainContext(Protocol):
    """The only argument of a training function."""

    @property
    def params(self) -> Mapping[str, str]:
        """What the user passed with `--param name=value`."""
        ...

    @property
    def step_number(self) -> int:
        """Number of committed optimizer steps."""
        ...

    @property
    def progress(self) -> float:
        """Progress in optimizer steps of the initial batch size, for schedules of jobs whose batch may change.

        With a fixed batch size it equals `step_number`.
        """
        ...

    @property
    def epoch(self) -> int:
        """The current pass over the dataset, from 0."""
        ...

    @property
    def device(self) -> Any:
        """The torch device of this worker."""
        ...

    @property
    def loss(self) -> float | None:
        """The mean loss over the whole batch of the last committed step, alike on every worker; None before it."""
        ...

    @overload
    def prepare(
        self, model: ModelT, optimizer: OptimizerT | Callable[[Any], OptimizerT], *, micro_batch: int | None = None
    ) -> tuple[ModelT, OptimizerT]:
        """The model and its optimizer (or a factory that gets the parameters). Must be called exactly once."""
        ...

    @overload
    def prepare(self, model: Any, optimizer: Any, *objects: Any, micro_batch: int | None = None) -> tuple[Any, ...]:
        """The same with what else has a state: schedulers, a GradScaler, an average of the weights, own objects.

        Each has `state_dict` and `load_state_dict`, or is a factory that gets the optimizer. All are returned in their
        order, with the state of a checkpoint or of a running worker, if there is one. A GradScaler is used by `step`.
        With `micro_batch` a worker takes its part of a batch in passes of at most so many samples. Several models may
        come first, and then their optimizers, which take turns: `step`, `backward` and `update` then name one.
        """
        ...

    def batches(self, dataset: Any) -> Iterator[Batch]:
        """Yield this worker's parts of every remaining global batch of every remaining epoch.

        `dataset` has `__len__` and `__getitem__`, or is a tuple of equally long tensors. Each sample of an epoch is
        used exactly once, also across resizes and crashes. Random numbers drawn between two batches come from the
        part's own stream.
        """
        ...

    def step(self, loss: Any, *, clip_grad_norm: float | None = None, optimizer: Any = None) -> bool:
        """Run the backward pass; after the worker's last part of the global batch, update with all workers' gradients.

        With `clip_grad_norm` the norm of the global gradient is at most that. Returns True if this completed an
        optimizer step, False if parts of the batch are left, as in an exact job, or if the step is to be done again.
        It is the same as `backward`, `clip_grad_norm` if it was given, and `update`.
        """
        ...

    def backward(self, loss: Any, *, optimizer: Any = None) -> None:
        """Run the backward pass; after the worker's last part of the global batch, sum all workers' gradients.

        Of several optimizers, `optimizer` is the one whose turn it is: only its parameters get gradients. A batch may
        have any number of turns, the same on all workers, and its step is completed when the next batch is asked for.
        """
        ...

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the global gradient down to `max_norm` between `backward` and `update`; returns the norm that it had.

        NaN, without effect, where `update` will return False.
        """
        ...

    def update(self, optimizer: Any = None) -> bool:
        """Take the step of the optimizer that `backward` has named. Returns what `step` does."""
        ...

    def metrics(self, **values: float) -> None:
        """Attach numbers (an accuracy, say) to the progress report."""
        ...

    def save(self, name: str = "model") -> str:
        """Write the model's weights to the job's artifacts as safetensors and return the path (rank 0 writes)."""
        ...
