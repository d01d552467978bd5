"""Batches by a torch DataLoader: its sampler is replaced by the ids that this worker gets, fetched ahead in processes.

A position in the data is what was trained on, never what was fetched. When the parts that a worker gets change, what
was fetched for others is dropped, and the processes go on with the new ids.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import re
import signal
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.fetching import is_tensor_dataset
from springtide.runtime.data.loader_process import LoaderStart
from springtide.runtime.data.shards import permutation

# What torch raises in the process that trains.
_LOST = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")
_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class PartIds(NamedTuple):
    """The samples of one part of a batch, in order, and their epoch."""

    epoch: int
    ids: tuple[int, ...]


class _Wanted(NamedTuple):
    """A part as a process gets it. `stream` is the number of the sequence of parts that it belongs to."""

    stream: int
    part: PartIds


class BatchLoader:
    """Reads parts of batches through a DataLoader of the same dataset, `collate_fn` and processes as the user's."""

    def __init__(self, loader: DataLoader[Any], seed: int, device: torch.device) -> None:
        """Random numbers that a sample draws follow from `seed`, its epoch and its id."""
        self._stream = 0
        # Read by the processes: they skip parts of sequences before this one.
        self._newest = torch.zeros(1, dtype=torch.int64)
        self._ahead: Iterator[PartIds] = iter(())
        self._expected: deque[PartIds] = deque()
        self._fetched: Iterator[Any] | None = None
        self._has_processes = loader.num_workers > 0
        more: dict[str, Any] = {}
        if self._has_processes:
            self._newest.share_memory_()  # type: ignore[no-untyped-call]
            start = LoaderStart(os.getpid(), loader.worker_init_fn)
            more = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": True,
                "multiprocessing_context": "fork",
                "worker_init_fn": start,
                "timeout": loader.timeout,
            }
        # There is nothing to pin memory for without an accelerator.
        pins = loader.pin_memory and device.type != "cpu"
        self._samples = _SeededSamples(loader.dataset, seed, self._newest)
        self._collate = loader.collate_fn
        self._needs_loader = self._has_processes or pins
        self._loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]
            batch_sampler=_Parts(self),  # type: ignore[arg-type]
            collate_fn=_Collate(loader.collate_fn),
            num_workers=loader.num_workers,
            pin_memory=pins,
            # Of its own, so that training draws the same numbers however often this loader begins anew.
            generator=torch.Generator().manual_seed(seed & (2**63 - 1)),
            **more,
        )

    def fetch(self, part: PartIds, ahead: Callable[[], Iterator[PartIds]]) -> Any:
        """What `collate_fn` makes of this part's samples.

        `ahead` gives the parts that will be asked for, from this one on; it is called when others come than expected.
        Raises what the dataset raises.
        """
        if not self._needs_loader:
            with kept_random_state():
                return self._read(part)
        if not self._expected or self._expected[0] != part:
            self._begin_anew(ahead())
        with kept_random_state() if not self._has_processes else nullcontext():
            data = self._next()
        assert self._expected.popleft() == part, "the parts ahead begin with another one than was asked for"
        return data

    def fetch_all(self, parts: Iterator[PartIds]) -> Iterator[Any]:
        """What `collate_fn` makes of each of these parts, in order; parts are taken ahead of those that are fetched."""
        if not self._needs_loader:
            yield from map(self._read, parts)
            return
        self._begin_anew(parts)
        while True:
            try:
                data = self._next()
            except StopIteration:
                return
            self._expected.popleft()
            yield data

    def close(self) -> None:
        """End the processes."""
        self._fetched = None
        self._loader._iterator = None

    def _read(self, part: PartIds) -> Any:
        """A part, read here and without a loader's own effort for each."""
        samples = self._samples.read(part)
        assert samples is not None
        return self._collate(samples)

    def draw(self) -> Iterator[_Wanted]:
        """The parts ahead, each remembered as one that will be asked for."""
        stream, ahead = self._stream, self._ahead
        for part in ahead:
            self._expected.append(part)
            yield _Wanted(stream, part)

    def _begin_anew(self, ahead: Iterator[PartIds]) -> None:
        self._stream += 1
        self._newest[0] = self._stream
        self._ahead = ahead
        self._expected.clear()
        with _child_signals_as_before():
            self._fetched = iter(self._loader)

    def _next(self) -> Any:
        assert self._fetched is not None
        try:
            return next(self._fetched)
        except StopIteration:
            raise
        except Exception as error:
            if self._has_processes:
                processes = self._fetched._workers  # type: ignore[attr-defined]
                if _is_of_pipe(error):
                    _wait_for_end(processes)
                codes = [process.exitcode for process in processes]
                if any(codes):
                    raise LoaderProcessLost(
                        f"a process that loads samples ended (exit code {next(filter(None, codes))}); if it was killed "
                        "for memory, use fewer processes or fetch less ahead: num_workers, prefetch_factor"
                    ) from error
                # The first line says in which process it was, the last one what it was.
                last = str(error).strip().rpartition("\n")[2]
                raise SampleError(f"the DataLoader could not read a sample: {last}") from error
            raise


def _is_of_pipe(error: BaseException) -> bool:
    """Whether reading from a process failed; what a dataset raised there comes with a text and without a number."""
    return (isinstance(error, ConnectionError) and error.errno is not None) or (
        isinstance(error, EOFError) and not error.args
    )


def _wait_for_end(processes: Sequence[Any]) -> None:
    """Wait until the exit of one of these processes is known, at most 5 s: its pipes are closed before that."""
    end_s = time.monotonic() + 5.0
    while all(process.exitcode is None for process in processes) and time.monotonic() < end_s:
        time.sleep(0.01)


class LoaderProcessLost(RuntimeError):
    """A process that loads samples was killed or crashed: the training process cannot go on, but another one can."""


def is_loader_lost(error: BaseException | None) -> bool:
    """Whether an error comes of a killed or crashed process that loads samples, also of a DataLoader of torch's own."""
    while error is not None:
        if isinstance(error, LoaderProcessLost) or (isinstance(error, RuntimeError) and _LOST.match(str(error))):
            return True
        if _is_of_pipe(error) and any(
            frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


class SampleError(RuntimeError):
    """What a dataset raised in a process that loads samples."""


class _Parts:
    """The `batch_sampler` of a DataLoader: an iteration goes through the parts that are ahead then."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_Wanted]:
        return self._loader.draw()


class _SeededSamples:
    """A dataset whose samples draw the same random numbers wherever they are read."""

    def __init__(self, dataset: Any, seed: int, newest: torch.Tensor) -> None:
        self.dataset = dataset
        self._seed = seed
        # A view of the same memory, which is faster to read.
        self._newest = newest.numpy()
        self._many = _reads_many(dataset)

    def __getitems__(self, wanted: _Wanted) -> list[Any] | None:
        """The samples of a part; None if it is not wanted any more."""
        return self.read(wanted.part, lambda: bool(wanted.stream == self._newest[0]))

    def read(self, part: PartIds, is_wanted: Callable[[], bool] = lambda: True) -> list[Any] | None:
        """The samples of a part; None as soon as it is not wanted."""
        epoch, ids = part
        if self._many and is_wanted():
            seed_sample(self._seed, epoch, ids[0])
            return self.dataset.__getitems__(list(ids))  # type: ignore[no-any-return]
        samples = []
        for index in ids:
            if not is_wanted():
                return None
            seed_sample(self._seed, epoch, index)
            samples.append(self.dataset[index])
        return samples


def _reads_many(dataset: Any) -> bool:
    """Whether the dataset itself reads many samples at once; a Subset only passes that on."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class _Collate:
    """The `collate_fn` of the user, for samples that were not dropped."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any] | None) -> Any:
        return None if samples is None else self._collate(samples)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the generators of torch (on the CPU), numpy and Python for one sample in one epoch."""
    drawn = _mixed(seed, epoch, index)
    torch.default_generator.manual_seed(drawn)
    np.random.seed(drawn & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from numpy's global generator.
    random.seed(drawn)


def _mixed(*numbers: int) -> int:
    """64 bits that follow from the numbers."""
    data = struct.pack(f"<{len(numbers)}Q", *(number & (2**64 - 1) for number in numbers))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@contextmanager
def _child_signals_as_before() -> Iterator[None]:
    """Without torch's handler for the end of a loader's process, which raises in whatever runs at that moment.

    The end is found when the next samples are asked for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of torch (on the CPU), numpy and Python as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


class LoaderOrder:
    """The order of samples that a DataLoader asks for: that of its sampler, without what `drop_last` leaves out."""

    def __init__(self, sampler: Any, num_samples: int) -> None:
        self._sampler = sampler
        self.num_samples = num_samples

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The ids (int64) of an epoch, the same on every worker."""
        sampler = self._sampler
        if isinstance(sampler, SequentialSampler):
            return np.arange(self.num_samples, dtype=np.int64)
        if isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(sampler.data_source):
            return permutation(len(sampler), seed, epoch)[: self.num_samples]
        drawing = copy.copy(sampler)
        drawing.generator = torch.Generator().manual_seed(_mixed(seed, epoch) >> 1)
        return np.fromiter(drawing, dtype=np.int64, count=len(sampler))[: self.num_samples]

    def arranged(self, ids: np.ndarray) -> np.ndarray:
        """The ids of one batch in the order in which they are read: as they are."""
        return ids


def order_of(loader: DataLoader[Any], global_batch_size: int) -> LoaderOrder:
    """The order of the loader's samples, if a batch has `global_batch_size`. Raises InvalidRequest for what has none.

    With a `global_batch_size` of 0, which is not known, nothing is left out.
    """
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, IterableDataset):
        raise InvalidRequest(
            "the DataLoader reads an IterableDataset, whose samples have no numbers, so that workers cannot divide it; "
            "give it a dataset with __len__ and __getitem__"
        )
    if loader.batch_size is None:
        given = "a batch_sampler of its own" if loader.batch_sampler is not None else "batch_size=None"
        raise InvalidRequest(
            f"the DataLoader has {given}, and the platform cuts the batches; give it batch_size=N, and sampler=... for "
            "an order of samples"
        )
    if type(sampler) is DistributedSampler:
        # The platform divides its epochs, as it does those of one process.
        sampler = (RandomSampler if sampler.shuffle else SequentialSampler)(sampler.dataset)  # type: ignore[arg-type]
    if type(sampler) not in _SAMPLERS:
        raise InvalidRequest(
            f"the DataLoader has the sampler {type(sampler).__name__}, of which it is not known that it draws the same "
            f"samples on every worker; use one of {', '.join(kind.__name__ for kind in _SAMPLERS)}, or choose samples "
            "by torch.utils.data.Subset"
        )
    num_samples = len(sampler)  # type: ignore[arg-type]
    if loader.drop_last and global_batch_size:
        num_samples -= num_samples % global_batch_size
        if not num_samples:
            raise InvalidRequest(
                f"the DataLoader has drop_last=True and {len(sampler)} samples, less than the job's global batch of "  # type: ignore[arg-type]
                f"{global_batch_size}; nothing is left to train on"
            )
    return LoaderOrder(sampler, num_samples)


def is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the loader reads rows of tensors in the training process: faster without a loader, with equal results."""
    return (
        not loader.num_workers
        and not loader.pin_memory
        and loader.collate_fn is default_collate
        and is_tensor_dataset(loader.dataset)
    )
