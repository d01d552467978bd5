"""A DataLoader's batches by ids that a worker gets: what is fetched ahead, dropped, ordered and drawn at random."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from springtide.core.errors import InvalidRequest
from springtide.runtime.data import batch_loader
from springtide.runtime.data.batch_loader import (
    BatchLoader,
    LoaderProcessLost,
    PartIds,
    SampleError,
    is_loader_lost,
    is_plain,
    order_of,
)

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Samples that draw from all three generators, and say which process read them."""

    def __init__(self, num_samples=64):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if index == 63:
            raise KeyError("sample 63 is damaged")
        drawn = float(torch.rand(())), np.random.rand(), random.random()  # noqa: NPY002
        return {"index": index, "drawn": torch.tensor(drawn), "pid": os.getpid()}


def parts(size, first=0, last=60, epoch=0):
    return [PartIds(epoch, tuple(range(low, low + size))) for low in range(first, last, size)]


def read(loader, wanted, ahead=None):
    """What each of these parts is, if `ahead` are the parts that the loader is told to expect."""
    found = []
    for number, part in enumerate(wanted):
        rest = wanted[number:] if ahead is None else ahead(part)
        found.append(loader.fetch(part, lambda rest=rest: iter(rest)))
    return found


@pytest.fixture
def opened():
    loaders = []

    def make(loader, seed=7):
        loaders.append(BatchLoader(loader, seed, CPU))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_are_read_in_order_and_processes_are_kept_when_they_change(opened, num_workers):
    loader = opened(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=num_workers))
    wanted = parts(4)
    first = read(loader, wanted[:5], ahead=lambda part: wanted[wanted.index(part) :])
    # Another group: halves of the parts from the fifth on, then the whole ones again, one of them a second time.
    halves = [PartIds(0, part.ids[:2]) for part in wanted[4:9]]
    second = read(loader, halves)
    third = read(loader, [wanted[7], wanted[7], wanted[8]])
    assert [batch["index"].tolist() for batch in first] == [list(part.ids) for part in wanted[:5]]
    assert [batch["index"].tolist() for batch in second] == [list(part.ids) for part in halves]
    assert [batch["index"].tolist() for batch in third] == [list(wanted[at].ids) for at in (7, 7, 8)]
    pids = {int(pid) for batch in (*first, *second, *third) for pid in batch["pid"]}
    assert len(pids) == max(1, num_workers)
    assert (os.getpid() in pids) is (num_workers == 0)


def test_a_sample_draws_the_same_wherever_and_with_whatever_it_is_read(opened):
    drawn = {}
    for num_workers, size in [(0, 4), (1, 4), (2, 10)]:
        loader = opened(DataLoader(Noisy(), batch_size=4, num_workers=num_workers))
        drawn[num_workers] = torch.cat([batch["drawn"] for batch in read(loader, parts(size))])
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique(dim=0)) == 60
    loader = opened(DataLoader(Noisy(), batch_size=4))
    other_epoch = torch.cat([batch["drawn"] for batch in read(loader, parts(4, epoch=1))])
    other_seed = opened(DataLoader(Noisy(), batch_size=4), seed=8)
    assert not (other_epoch == drawn[0]).any()
    assert not (torch.cat([batch["drawn"] for batch in read(other_seed, parts(4))]) == drawn[0]).any()


def test_a_subset_draws_by_sample_too(opened):
    whole = opened(DataLoader(Subset(Noisy(), list(range(60))), batch_size=4))
    cut = opened(DataLoader(Subset(Noisy(), list(range(60))), batch_size=4))
    assert torch.equal(read(whole, parts(10))[0]["drawn"][2:4], read(cut, parts(2))[1]["drawn"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_draws_the_same_however_samples_are_read(opened, num_workers):
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    read(opened(DataLoader(Noisy(), batch_size=4, num_workers=num_workers)), parts(4)[:3])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002


class Held(Dataset):
    """Samples that are written down as they are read, from the eleventh on only once other parts are wanted."""

    def __init__(self, path):
        self.path = path

    def __getitem__(self, index):
        while index >= 10 and self.newest[0] < 2:
            time.sleep(0.001)
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return index

    def __len__(self):
        return 1000


def test_what_was_to_be_fetched_for_other_parts_is_not_read(opened, tmp_path):
    path = tmp_path / "read"
    dataset = Held(path)
    loader = opened(DataLoader(dataset, batch_size=10, num_workers=1, prefetch_factor=40))
    # What the loader counts in memory that its processes share, which they get with the dataset.
    dataset.newest = loader._newest
    wanted = parts(10, last=400)
    loader.fetch(wanted[0], lambda: iter(wanted))
    loader.fetch(PartIds(0, (999,)), lambda: iter([PartIds(0, (999,))]))
    # 39 parts of ten were asked for; only the sample that was being read is read to its end.
    seen = [int(line) for line in path.read_text().split()]
    assert seen in ([*range(10), 999], [*range(11), 999])


def test_errors_of_samples_name_what_was_wrong(opened):
    with pytest.raises(SampleError, match="sample 63 is damaged"):
        opened(DataLoader(Noisy(), batch_size=4, num_workers=1)).fetch(
            PartIds(0, (63,)), lambda: iter(parts(1, 63, 64))
        )
    with pytest.raises(KeyError, match="sample 63 is damaged"):
        opened(DataLoader(Noisy(), batch_size=4)).fetch(PartIds(0, (63,)), lambda: iter(parts(1, 63, 64)))


class Unreachable(Dataset):
    def __getitem__(self, index):
        raise ConnectionResetError("the file server went away")

    def __len__(self):
        return 8


class Dying:
    """What a loader's iterator does between the death of its process and its exit."""

    def __init__(self):
        read, self._write = os.pipe()
        self._workers = [multiprocessing.get_context("fork").Process(target=self._die, args=(read,))]
        self._workers[0].start()

    def _die(self, read):
        os.read(read, 1)
        time.sleep(0.2)
        os._exit(9)

    def __next__(self):
        os.write(self._write, b"x")
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_process_that_dies_while_it_hands_over_samples_is_not_an_error_of_the_dataset(opened):
    loader = opened(DataLoader(Unreachable(), batch_size=4, num_workers=1))
    with pytest.raises(SampleError, match="the file server went away"):
        loader.fetch(PartIds(0, (1,)), lambda: iter(parts(1, 1, 2)))
    loader._begin_anew(iter(parts(1, 1, 2)))
    loader._fetched = Dying()
    with pytest.raises(LoaderProcessLost, match="exit code 9"):
        loader._next()


@pytest.mark.parametrize("catches", [False, True])
def test_a_killed_process_of_torchs_own_loader_is_a_lost_one_too(catches):
    class Deadly(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                os.kill(os.getpid(), 9)
            return torch.zeros(1)

    def read():
        try:
            list(DataLoader(Deadly(), 1, num_workers=1))
        # Of the death it may hear as a RuntimeError or by a connection that ends.
        except Exception as error:
            if not catches:
                raise
            raise ValueError("the data are not there") from error

    with pytest.raises((RuntimeError, OSError, EOFError, ValueError)) as raised:
        read()
    assert is_loader_lost(raised.value)
    assert not is_loader_lost(RuntimeError("DataLoader worker is not there"))


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


def pair(samples):
    return Pair(torch.tensor([sample["index"] for sample in samples]), [sample["pid"] for sample in samples])


def begun(number):
    info = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Noisy)
    info.dataset.__class__.__getitem__ = lambda self, index: {"index": index + 100 * (number + 1), "pid": 0}


def test_the_loaders_own_functions_are_called(opened):
    loader = opened(DataLoader(Noisy(), batch_size=2, num_workers=1, collate_fn=pair, worker_init_fn=begun))
    (batch,) = read(loader, parts(2)[:1])
    assert batch == Pair(batch.left, [0, 0])
    assert batch.left.tolist() == [100, 101]


def order(loader, epoch=0, seed=7, global_batch=4):
    return order_of(loader, global_batch).order(seed, epoch).tolist()


def test_orders_follow_the_sampler():
    data = Noisy(10)
    assert order(DataLoader(data, batch_size=4)) == list(range(10))
    assert order(DataLoader(data, batch_size=4, drop_last=True)) == list(range(8))
    shuffled = DataLoader(data, batch_size=4, shuffle=True)
    assert sorted(order(shuffled)) == list(range(10))
    assert order(shuffled) == order(shuffled) != order(shuffled, epoch=1)
    dropping = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    assert order(dropping) == order(shuffled)[:8]
    assert order(dropping, global_batch=0) == order(shuffled)
    # The platform divides an epoch, whatever part of it the sampler would have had.
    for rank in (0, 1):
        divided = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, rank))
        assert order(divided, epoch=1) == order(shuffled, epoch=1)
        in_order = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        assert order(in_order) == list(range(10))
    chosen = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler([2, 5, 7]))
    assert sorted(order(chosen)) == [2, 5, 7]
    weighted = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([0, 1] * 5, 40))
    assert len(order(weighted)) == 40
    assert {index % 2 for index in order(weighted)} == {1}
    assert order(weighted) == order(weighted) != order(weighted, seed=8)
    repeated = DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=30))
    assert len(order(repeated)) == 30 > len(set(order(repeated)))


class Odd(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter([1, 3])

    def __len__(self):
        return 2


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


@pytest.mark.parametrize(
    ("loader", "way_out"),
    [
        (lambda data: DataLoader(Endless(), batch_size=4), "__getitem__"),
        (lambda data: DataLoader(data, batch_size=None), "batch_size=N"),
        (
            lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)),
            "a batch_sampler of its own.*batch_size=N",
        ),
        (lambda data: DataLoader(data, sampler=Odd(), batch_size=4), "Odd.*Subset"),
        (lambda data: DataLoader(data, batch_size=4, drop_last=True), "10 samples.*global batch of 64"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_way_out(loader, way_out):
    with pytest.raises(InvalidRequest, match=way_out):
        order_of(loader(Noisy(10)), 64)


def test_rows_of_tensors_need_no_loader():
    rows = TensorDataset(torch.arange(10), torch.arange(10))
    assert is_plain(DataLoader(rows, batch_size=4, shuffle=True))
    assert not is_plain(DataLoader(rows, batch_size=4, num_workers=1))
    assert not is_plain(DataLoader(rows, batch_size=4, collate_fn=list))
    assert not is_plain(DataLoader(Noisy(), batch_size=4))


def test_seeds_differ_by_every_number():
    seeds = {batch_loader._mixed(*numbers) for numbers in itertools.product((0, 1, -1), repeat=3)}
    assert len(seeds) == 27
