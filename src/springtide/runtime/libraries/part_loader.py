"""A DataLoader of a library's program, of which this worker reads its part of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.batch_loader import BatchLoader, PartIds, kept_random_state
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.libraries.loop import LibraryLoop, NotDivisible


class PartLoader:
    """Stands in the place of a DataLoader in a library's loop. To the library each batch is a whole one.

    Each worker walks the program's own sampler, from the same random state in every epoch, so that all have the same
    order. A step begins when its first batch is asked for: everything of the step before is over then.
    """

    def __init__(self, loader: DataLoader[Any], loop: LibraryLoop, device: torch.device) -> None:
        """Raises InvalidRequest for a loader that cannot be cut by ids."""
        _check(loader)
        self._inner = loader
        self._loop = loop
        self._reader = BatchLoader(loader, loop.seed, device)
        # What libraries look for in a DataLoader.
        self.dataset = loader.dataset
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._pass_size = 1
        # The position in the epoch of the present step's first batch, and which batch of the step was read last.
        self._began_at = 0
        self.number = 0
        # Whether a step goes on until something of it is exchanged, with further batches.
        self.is_open = False
        # How many batches of the next iteration the library leaves out because they are done.
        self.skipped = 0
        # Where the library is when an iteration begins: (epoch, number of batches of it that are done).
        self.where: Callable[[], tuple[int, int]] = lambda: (0, 0)
        # What it will do when a step begins: (number of its batches, number of steps to the end or None).
        self.plan: Callable[[], tuple[int, int | None]] = lambda: (1, None)

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.where()
        num_batches = self.walk(epoch)
        while position < num_batches:
            for number in self._next_passes(position):
                self.number = number
                position += 1
                yield self.read(number)

    def _next_passes(self, position: int) -> range:
        if self.is_open and self._loop.is_under_way and position == self._began_at + self.number + 1:
            self.extend(position)
            return range(self.number + 1, self.number + 2)
        return range(self.begin(position, *self.plan()))

    def extend(self, position: int) -> None:
        """The present step has the batch at `position` as one more pass."""
        self._loop.extend(self._batches[position])

    def begin(self, position: int, num_passes: int, num_left: int | None) -> int:
        """Begin a step on the batches of the epoch from `position` on; returns how many of `num_passes` there are.

        `num_left` counts the steps to the end, this one too; None: not known.
        """
        step = self._batches[position : position + num_passes]
        self._began_at = position
        self._loop.begin(step, self._pass_size, self._epoch, num_left)
        return len(step)

    def read_first(self) -> Any:
        """This worker's part of the first batch of the epoch, outside of a step."""
        return self._reader.fetch(next(self._ahead(0)), lambda: self._ahead(0))

    def read(self, number: int) -> Any:
        """This worker's part of a batch of the present step, counted from 0."""
        position = self._began_at + number
        part = PartIds(self._epoch, self._loop.part(number))
        data = self._reader.fetch(part, lambda: self._ahead(position))
        self._loop.seed_pass(number)
        return data

    def _ahead(self, position: int) -> Iterator[PartIds]:
        for ids in self._batches[position:]:
            yield PartIds(self._epoch, self._loop.part_of(ids, self._pass_size))

    def walk(self, epoch: int) -> int:
        """Take up the order of an epoch; returns how many batches it has."""
        if epoch == self._epoch:
            return len(self._batches)
        with kept_random_state():
            seed_everything(self._loop.seed, epoch)
            generator = getattr(self.sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(torch.initial_seed())
            self._batches = [_whole_numbers(ids) for ids in self.batch_sampler or ()]
        self._pass_size = max((len(ids) for ids in self._batches), default=1)
        self._epoch = epoch
        return len(self._batches)


def watch_loaders(note: Callable[[], None]) -> None:
    """Have `note` called after each batch that a program reads from a DataLoader by itself."""
    read = _BaseDataLoaderIter.__next__

    def __next__(iterator: _BaseDataLoaderIter) -> Any:
        batch = read(iterator)
        note()
        return batch

    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign, assignment]


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise NotDivisible(
            f"the program trains on a {type(loader).__name__}, and only a torch DataLoader can be divided"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise NotDivisible(
            "the DataLoader reads an IterableDataset, whose samples have no numbers, so that workers cannot divide it; "
            "give it a dataset with __len__ and __getitem__"
        )
    if loader.batch_sampler is None:
        raise NotDivisible("the DataLoader has batch_size=None, and its batches cannot be divided")
    if isinstance(loader.sampler, DistributedSampler):
        raise InvalidRequest(
            "the DataLoader has a DistributedSampler, and the platform divides the batches; give it shuffle=True"
        )


def _whole_numbers(ids: Any) -> list[int]:
    try:
        return [int(index) for index in ids]
    except (TypeError, ValueError):
        raise NotDivisible(
            "the DataLoader's sampler gives other ids than whole numbers, which cannot be divided"
        ) from None
