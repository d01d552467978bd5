"""The contract of TrainContext, the argument of training functions. The runtime implements it; no torch here.

User code is written for a single device and does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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

    def prepare(self, model: ModelT, optimizer: OptimizerT | Callable[[Any], OptimizerT]) -> tuple[ModelT, OptimizerT]:
        """Register the model and its optimizer (or a factory that gets the parameters). Must be called exactly once.

        Restores the state from a checkpoint, or receives it from a running worker, if there is one.
        """
        ...

    def batches(self, dataset: Any) -> Iterator[Batch]:
        """Yield this worker's parts of every remaining global batch of every remaining epoch.

        `dataset` has `__len__` and `__getitem__`, or is a tuple of equally long tensors. Each sample of an epoch is
        used exactly once, also across resizes and crashes. Random numbers drawn between two batches come from the
        part's own stream.
        """
        ...

    def step(self, loss: Any) -> bool:
        """Run the backward pass; after the worker's last part of the global batch, update with all workers' gradients.

        Returns True if this completed an optimizer step, False if parts of the batch are left, as in an exact job. A
        worker that has no part of a small batch makes no call for that step, so use `step_number` instead of counting.
        """
        ...

    def metrics(self, **values: float) -> None:
        """Attach numbers (an accuracy, say) to the progress report."""
        ...

    def save(self, name: str = "model") -> str:
        """Write the model's weights to the job's artifacts as safetensors and return the path (rank 0 writes)."""
        ...
