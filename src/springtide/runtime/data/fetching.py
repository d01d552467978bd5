"""Samples by their ids, from whatever a training function hands over as its dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.dataset_reader import SampleReader, open_dataset
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.stores.open import open_store

Fetch = Callable[[Sequence[int]], Any]


def sample_fetcher(dataset: Any, state_dir: Path | None = None, store_url: str = "") -> tuple[Fetch, int]:
    """A function from sample ids to these samples in one batch, and their number. Raises InvalidRequest, StorageError.

    A named dataset is read from the store at `store_url`; without one, from that of the platform with this state
    directory (None: the user's default).
    """
    if isinstance(dataset, DatasetReference):
        return _named(dataset, state_dir, store_url)
    tensors = getattr(dataset, "tensors", None)
    if isinstance(dataset, torch.Tensor):
        return _slicer((dataset,)), len(dataset)
    if isinstance(dataset, tuple) or (isinstance(tensors, tuple) and is_tensor_dataset(dataset)):
        arrays = tuple(torch.as_tensor(array) for array in (dataset if isinstance(dataset, tuple) else tensors or ()))
        if len({len(array) for array in arrays}) != 1:
            raise InvalidRequest(f"the dataset's tensors differ in length: {[len(array) for array in arrays]}")
        return _slicer(arrays), len(arrays[0])
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidRequest("the dataset needs __len__ and __getitem__, or must be a tuple of equally long tensors")
    return (lambda ids: default_collate([dataset[index] for index in ids])), len(dataset)


def is_tensor_dataset(dataset: Any) -> bool:
    """Whether its samples are rows of tensors, so that many are read at once."""
    return type(dataset).__name__ == "TensorDataset"


class NamedFetch:
    """Reads samples of a named dataset as tensors; `reader` also gives the order that reads each shard once."""

    def __init__(self, reader: SampleReader) -> None:
        self.reader = reader

    def __call__(self, ids: Sequence[int]) -> Any:
        """The samples with these ids, a tensor for each array. Raises StorageError."""
        return [torch.from_numpy(array) for array in self.reader.fetch(ids)]


def _named(dataset: DatasetReference, state_dir: Path | None, store_url: str) -> tuple[Fetch, int]:
    if dataset.is_stream:
        raise InvalidRequest(
            f'the stream {dataset.name!r} grows while it is trained on, which jobs on functions do: on="functions"'
        )
    store = open_store(store_url) if store_url else None
    reader = open_dataset(dataset, store, state_dir=state_dir)
    return NamedFetch(reader), reader.num_samples


def _slicer(arrays: tuple[torch.Tensor, ...]) -> Fetch:
    def fetch(ids: Sequence[int]) -> Any:
        index = torch.as_tensor(ids, dtype=torch.int64)
        return [array[index] for array in arrays] if len(arrays) > 1 else arrays[0][index]

    return fetch


def x_and_y(data: Any) -> tuple[Any, Any]:
    """The input and the target of a batch: its entries "x" and "y", or its first two parts; y may be None."""
    if isinstance(data, Mapping):
        return data.get("x"), data.get("y")
    if isinstance(data, list | tuple):
        return data[0] if data else None, data[1] if len(data) > 1 else None
    return data, None


def fields_of(data: Any) -> Any:
    """All parts of a batch: a dict of a mapping, a tuple of a list or tuple, None of anything else."""
    if isinstance(data, Mapping):
        return dict(data)
    return tuple(data) if isinstance(data, list | tuple) else None


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on the device, through mappings, lists, tuples, dataclasses and what has `to`."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: to_device(getattr(value, name), device) for name in names})
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
