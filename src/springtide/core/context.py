"""The contract of TrainContext, the argument of training functions. The runtime implements it; no torch here.

User code is written for a single device and does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's part of a global batch; in an exact job, that of one of its virtual shards.

    `shard` is the part's number: the worker's rank, or the number of the virtual shard. `data` is the stacked samples
    as the dataset's collate function returned them. `x` and `y` are its entries of these names, or its first two parts
    (`y` is None for a dataset of single values); `fields` is all of its parts, as a dict or a tuple. `ids` are the
    dataset indices, in order. `is_last` says that no batch of its epoch comes after it.

    A batch reads like its data: `batch["labels"]`, `model(**batch)`, `images, labels = batch`.
    """

    x: Any
    y: Any
    ids: tuple[int, ...]
    epoch: int
    step: int
    shard: int
    fields: Any = None
    data: Any = None
    is_last: bool = False

    def __getitem__(self, key: Any) -> Any:
        """One part of the data, by its name or its number. Raises KeyError, IndexError, TypeError as the data does."""
        return self.data[key]

    def keys(self) -> Iterable[str]:
        """The names of the data's parts. Raises TypeError if they have none."""
        if not isinstance(self.data, Mapping):
            raise TypeError(f"the parts of this batch have no names: its data is a {type(self.data).__name__}")
        return self.data.keys()

    def items(self) -> Iterable[tuple[str, Any]]:
        """The data's parts with their names. Raises TypeError if they have none."""
        return [(name, self.data[name]) for name in self.keys()]

    def __iter__(self) -> Iterator[Any]:
        """The data's parts, or their names if they have some; of a dataset of single values, these alone."""
        return iter(self.data if isinstance(self.data, Mapping | tuple | list) else (self.data,))


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
        """The torch device of this worker; of several the first."""
        ...

    @property
    def devices(self) -> list[Any]:
        """The torch devices of this worker, as many as `gpu` says: cuda:0, cuda:1, ..., or as often cpu on CPU slots.

        `prepare` puts the model on the first, unless the worker has several and the model is on them already.
        """
        ...

    @property
    def is_leader(self) -> bool:
        """True on exactly one worker of the present group: the one that writes logs and files for all.

        It may change between two batches, so ask again each time.
        """
        ...

    @property
    def num_workers(self) -> int:
        """How many workers the present group has; it may change between two batches."""
        ...

    @property
    def loss(self) -> float | None:
        """The mean loss over the whole batch of the last step, or turn, alike on every worker; None before it."""
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

    def epochs(self, number: int | None = None) -> Iterator[int]:
        """Yield the number of each epoch that is left, from 0: `batches`, called once in each, then ends with it.

        What follows the pass over the data (a validation, a scheduler of epochs) belongs to the epoch's last step. A
        worker that joins begins with the present epoch. `number` is how many there are; only a script that was adopted
        says it, since the job of a training function has it.
        """
        ...

    def batches(
        self,
        dataset: Any,
        *,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
    ) -> Iterator[Batch]:
        """Yield this worker's parts of every remaining global batch of every remaining epoch.

        `dataset` has `__len__` and `__getitem__`, or is a tuple of equally long tensors, or a torch DataLoader, of
        which the dataset, the order of its sampler, `collate_fn` and the processes are used. Each sample of an epoch is
        used exactly once, also across resizes and crashes. Random numbers drawn between two batches come from the
        part's own stream. `num_workers` processes read a dataset's samples, each `prefetch` parts ahead (2); `collate`
        stacks a list of samples.
        """
        ...

    def step(
        self, loss: Any, *, weight: Any = None, clip_grad_norm: float | None = None, optimizer: Any = None
    ) -> bool:
        """Run the backward pass; after the worker's last part of the global batch, update with all workers' gradients.

        `loss` is the mean over the batch. The global loss is the mean over all samples, or, with `weight` (a number of
        tokens, say), the sum of loss times weight divided by the sum of weights, over all workers' parts. A part that
        counts for nothing may have a loss of NaN. With `clip_grad_norm` the norm of the global gradient is at most
        that. Returns True if this completed an optimizer step, False if parts of the batch are left, as in an exact
        job, or if the step is to be done again.
        It is the same as `backward`, `clip_grad_norm` if it was given, and `update`.
        """
        ...

    def backward(self, loss: Any, *, weight: Any = None, optimizer: Any = None) -> None:
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
        """Means over a whole dataset, which the workers of the group divide between them.

        `function` gets batches of `batch` samples (by default, those of the DataLoader or of the job) and returns a
        dict of means over each, or a pair of such a dict and the batch's weight, if that is not its number of samples.
        It runs without gradients, with the model in evaluation mode. The result is the same on all workers that call
        this after the same step, and does not depend on their number. Call it after `step`, or after the loop.
        Evaluations of equally large datasets after the same step need names if not all workers call all of them.
        """
        ...

    def metrics(self, **values: float) -> None:
        """Attach numbers (an accuracy, say) to the progress report."""
        ...

    def save(self, name: str = "model") -> str:
        """Write the model's weights to the job's artifacts as safetensors and return the path (rank 0 writes)."""
        ...
