"""Where the batches of a loop come from: tensors, a dataset, a named dataset or a DataLoader, behind one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.batch_loader import BatchLoader, PartIds, is_plain, order_of
from springtide.runtime.data.fetching import Fetch, NamedFetch, is_tensor_dataset, sample_fetcher
from springtide.runtime.data.shards import SampleOrder
from springtide.storage.datasets.reference import DatasetReference


@dataclass(frozen=True, slots=True)
class BatchSource:
    """`fetch` returns one part of a batch, stacked; it is told how to find the parts that will be asked for next.

    `fetch_all` yields parts one after the other, and takes them ahead. `order` is the source's own order of samples, if
    it has one. `batch_size` is what the source itself says (0: none).
    """

    num_samples: int
    fetch: Callable[[PartIds, Callable[[], Iterator[PartIds]]], Any]
    fetch_all: Callable[[Iterator[PartIds]], Iterator[Any]]
    close: Callable[[], None]
    order: SampleOrder | None = None
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """What a source depends on beside its dataset: the job's seed, the device, and where named datasets are."""

    seed: int
    device: torch.device
    state_dir: Path | None = None
    store_url: str = ""


def open_source(
    dataset: Any,
    place: SourcePlace,
    global_batch_size: int,
    *,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    prefetch: int | None = None,
) -> BatchSource:
    """The source of a dataset's batches. Raises InvalidRequest, StorageError.

    `global_batch_size` says what `drop_last` of a DataLoader leaves out (0: nothing). `num_workers` processes read
    samples, `prefetch` parts ahead each; `collate` makes a batch of a list of samples. A DataLoader has these itself.
    """
    is_loader = isinstance(dataset, DataLoader)
    if num_workers < 0 or (prefetch is not None and prefetch < 1):
        raise InvalidRequest("num_workers must be at least 0 and prefetch at least 1")
    if num_workers or collate is not None or prefetch is not None:
        if is_loader:
            raise InvalidRequest(
                "the DataLoader has its own num_workers, collate_fn and prefetch_factor; set them there"
            )
        dataset = _loader_of(dataset, num_workers, collate, prefetch)
    if isinstance(dataset, DataLoader):
        order = order_of(dataset, global_batch_size)
        batch_size = dataset.batch_size if is_loader and dataset.batch_size else 0
        if is_plain(dataset):
            fetch, _ = sample_fetcher(dataset.dataset)
            return _direct(fetch, order.num_samples, _nothing, order, batch_size)
        loader = BatchLoader(dataset, place.seed, place.device)
        return BatchSource(order.num_samples, loader.fetch, loader.fetch_all, loader.close, order, batch_size)
    if isinstance(dataset, IterableDataset):
        raise InvalidRequest(
            "an IterableDataset has no numbers of samples, so that workers cannot divide it; hand over a dataset with "
            "__len__ and __getitem__"
        )
    fetch, num_samples = sample_fetcher(dataset, place.state_dir, place.store_url)
    reader = fetch.reader if isinstance(fetch, NamedFetch) else None
    return _direct(fetch, num_samples, _nothing if reader is None else reader.close, reader)


def _direct(
    fetch: Fetch, num_samples: int, close: Callable[[], None], order: SampleOrder | None, batch_size: int = 0
) -> BatchSource:
    """A source that reads samples when they are asked for, in the training process."""
    return BatchSource(
        num_samples,
        lambda part, _: fetch(part.ids),
        lambda parts: (fetch(part.ids) for part in parts),
        close,
        order,
        batch_size,
    )


def _nothing() -> None:
    pass


def _loader_of(dataset: Any, num_workers: int, collate: Any, prefetch: int | None) -> DataLoader[Any]:
    is_read_whole = isinstance(dataset, tuple | torch.Tensor | DatasetReference) or is_tensor_dataset(dataset)
    if is_read_whole or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidRequest(
            "num_workers, collate and prefetch are for a dataset that is read sample by sample, with __len__ and "
            "__getitem__; leave them out for tensors and named datasets"
        )
    return DataLoader(
        dataset,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        prefetch_factor=(prefetch or 2) if num_workers else None,
    )


def say_who_decides(batch_size: int, global_batch_size: int) -> None:
    """Say in the log that the loader's own batch size has no effect, if it is set and differs from the job's."""
    if batch_size > 1 and global_batch_size and batch_size != global_batch_size:
        sys.stderr.write(
            f"springtide: the DataLoader has batch_size={batch_size}, and the job's global batch is "
            f"{global_batch_size}, which decides; give the job global_batch={batch_size} to train with the loader's\n"
        )
