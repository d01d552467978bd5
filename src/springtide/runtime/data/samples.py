"""The samples of a declared task as numpy arrays, and the schedule of samples by step. No framework is imported here.

A dataset is a tuple of arrays, an object with `__len__` and `__getitem__`, or a reference to a named dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import batch_at
from springtide.core.model import call_factory
from springtide.core.ports import Store
from springtide.core.workload import TrainingJob
from springtide.runtime.data.shards import SampleSchedule, StreamSchedule
from springtide.storage.datasets.reference import DatasetReference

if TYPE_CHECKING:
    from springtide.runtime.data.dataset_reader import SampleReader

Fetch = Callable[[Sequence[int]], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Samples:
    """`fetch(ids)` returns inputs and targets (None without targets); `num_samples` is the length, for a stream so far.

    `reader` is set for named datasets.
    """

    fetch: Fetch
    num_samples: int
    reader: SampleReader | None = None

    @property
    def stream(self) -> str:
        """The name of the stream that the samples come from; empty for a dataset."""
        return self.reader.name if self.reader is not None and self.reader.is_stream else ""

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


def dataset_of(task: Any, params: Mapping[str, str]) -> Any:
    """The task's dataset: its value, or what its factory returns."""
    dataset = task.dataset
    is_factory = callable(dataset) and not hasattr(dataset, "__getitem__")
    return call_factory(dataset, params=params) if is_factory or isinstance(dataset, type) else dataset


def named_samples(dataset: Any, store: Store | None) -> Samples | None:
    """The samples of a named dataset; None for any other. Raises StorageError, InvalidRequest if it is empty."""
    if not isinstance(dataset, DatasetReference):
        return None
    from springtide.runtime.data.dataset_reader import open_dataset

    reader = open_dataset(dataset, store)

    def fetch(ids: Sequence[int]) -> tuple[Any, Any]:
        arrays = reader.fetch(ids)
        return arrays[0], arrays[1] if len(arrays) > 1 else None

    if reader.num_samples <= 0 and not reader.is_stream:
        reader.close()
        raise InvalidRequest(_EMPTY)
    return Samples(fetch, reader.num_samples, reader)


def array_samples(dataset: Any, store: Store | None = None) -> Samples:
    """The samples of any dataset as numpy arrays. Raises InvalidRequest for other objects, StorageError."""
    named = named_samples(dataset, store)
    if named is not None:
        return named
    tensors = getattr(dataset, "tensors", None)
    if isinstance(dataset, tuple) or isinstance(tensors, tuple):
        parts = dataset if isinstance(dataset, tuple) else tensors
        arrays = tuple(np.asarray(part) for part in parts or ())
        if not arrays or not all(array.ndim for array in arrays):
            raise InvalidRequest("the dataset must be a tuple of arrays that have its samples along the first axis")
        if len({len(array) for array in arrays}) != 1:
            raise InvalidRequest(f"the dataset's arrays differ in length: {[len(array) for array in arrays]}")
        return _checked(_slicer(arrays), len(arrays[0]))
    if isinstance(dataset, np.ndarray):
        return _checked(_slicer((dataset,)), len(dataset))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidRequest("the dataset needs __len__ and __getitem__, or must be a tuple of equally long arrays")
    return _checked(lambda ids: _stacked([dataset[int(index)] for index in ids]), len(dataset))


_EMPTY = "the dataset is empty; hand over at least one sample"


def _checked(fetch: Fetch, num_samples: int) -> Samples:
    if num_samples <= 0:
        raise InvalidRequest(_EMPTY)
    return Samples(fetch, num_samples)


def _slicer(arrays: tuple[npt.NDArray[Any], ...]) -> Fetch:
    def fetch(ids: Sequence[int]) -> tuple[Any, Any]:
        index = np.asarray(ids, dtype=np.int64)
        return arrays[0][index], arrays[1][index] if len(arrays) > 1 else None

    return fetch


def _stacked(samples: list[Any]) -> tuple[Any, Any]:
    """Stack single samples into arrays (x, y); a sample is (x, y), {"x": ..., "y": ...} or x alone."""
    first = samples[0]
    if isinstance(first, Mapping):
        y = np.stack([np.asarray(sample["y"]) for sample in samples]) if "y" in first else None
        return np.stack([np.asarray(sample["x"]) for sample in samples]), y
    if isinstance(first, tuple | list):
        y = np.stack([np.asarray(sample[1]) for sample in samples]) if len(first) > 1 else None
        return np.stack([np.asarray(sample[0]) for sample in samples]), y
    return np.stack([np.asarray(sample) for sample in samples]), None


def schedule_of(job: TrainingJob, samples: Samples) -> SampleSchedule | StreamSchedule:
    """The schedule of a job's samples: shuffled epochs of a dataset, or a stream in order of arrival."""
    reader = samples.reader
    if samples.stream:
        return StreamSchedule(global_batch_size=batch_at(job.batch_schedule, 0, job.global_batch_size))
    return SampleSchedule(
        num_samples=samples.num_samples,
        global_batch_size=job.global_batch_size,
        num_epochs=job.num_epochs,
        seed=job.seed,
        phases=job.batch_schedule,
        order=None if reader is None else reader.order,
        arrange=None if reader is None else reader.arranged,
    )
