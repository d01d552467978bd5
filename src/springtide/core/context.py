"""What a training function is handed: the TrainContext contract. The runtime implements it; nothing here needs torch.

User code is written for a single device and never sees how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")


@dataclass(frozen=True, slots=True)
class Batch:
    """One virtual shard's part of a global batch.

    `x` and `y` are the stacked samples (a dataset of single values leaves `y` None; of longer tuples or mappings,
    `fields` holds all). `ids` are the dataset indices, in order.
    """

    x: Any
    y: Any
    ids: tuple[int, ...]
    epoch: int
    step: int
    shard: int
    fields: Any = None


class TrainContext(Protocol):
    """The one object that a training function gets."""

    @property
    def params(self) -> Mapping[str, str]:
        """What the user passed with `--param name=value`."""
        ...

    @property
    def step_number(self) -> int:
        """How many optimizer steps are committed."""
        ...

    @property
    def progress(self) -> float:
        """What is done, in optimizer steps of the first batch size: a schedule goes by it where the batch may change.

        With one batch size throughout it is `step_number`.
        """
        ...

    @property
    def epoch(self) -> int:
        """The pass over the dataset that is under way, from 0."""
        ...

    @property
    def device(self) -> Any:
        """The torch device of this worker."""
        ...

    def prepare(self, model: ModelT, optimizer: OptimizerT | Callable[[Any], OptimizerT]) -> tuple[ModelT, OptimizerT]:
        """Take over the model and its optimizer (or a factory that gets the parameters); call it exactly once.

        The state is restored from a checkpoint or received from a running worker where there is one.
        """
        ...

    def batches(self, dataset: Any) -> Iterator[Batch]:
        """Yield this worker's shards of every remaining global batch of every remaining epoch.

        `dataset` has `__len__` and `__getitem__`, or is a tuple of equally long tensors. Each sample of an epoch is
        used exactly once, whatever resizes and crashes happen. Random numbers drawn between two batches come from
        the shard's own stream.
        """
        ...

    def step(self, loss: Any) -> bool:
        """Backward now; after the last shard of the global batch exchange gradients and update the model.

        Returns True where this completed a global step (an optimizer step), False where shards of the batch are left.
        A worker whose shards of a small batch are all empty makes no call for it: code that must be exact
        uses `step_number` instead of counting calls.
        """
        ...

    def metrics(self, **values: float) -> None:
        """Attach numbers (an accuracy, say) to the progress report."""
        ...

    def save(self, name: str = "model") -> str:
        """Write the model's weights to the job's artifacts as safetensors and return the path (rank 0 writes)."""
        ...
