"""A library's loader reads this worker's part of each batch, in an order that is the same on all workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from springtide.core.errors import InvalidRequest
from springtide.runtime.libraries.loop import LibraryLoop
from springtide.runtime.libraries.part_loader import PartLoader

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(22))


class LoopDouble:
    """What a PartLoader asks of a loop: the group, which the test sets, and the steps that were begun."""

    seed = 7

    def __init__(self, rank=0, world_size=1):
        self.rank, self.world_size, self.begun = rank, world_size, []

    def begin(self, passes, pass_size, epoch, num_left):
        self.begun.append((passes, pass_size, epoch, num_left))

    part_of = LibraryLoop.part_of

    def part(self, number):
        passes, pass_size, *_ = self.begun[-1]
        return self.part_of(passes[number], pass_size)

    def seed_pass(self, number):
        torch.manual_seed(number)


def loader_of(loop, where=lambda: (0, 0), plan=lambda: (1, None), **options):
    loader = PartLoader(DataLoader(Numbers(), batch_size=4, **options), loop, CPU)
    loader.where, loader.plan = where, plan
    return loader


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"sampler": WeightedRandomSampler([1.0] * 22, 22)}], ids=["shuffle", "weighted"]
)
def test_all_workers_have_one_order_whatever_they_drew_before(options):
    torch.manual_seed(1)
    whole = read(loader_of(LoopDouble(), **options))
    parts = []
    for rank in range(2):
        torch.manual_seed(10 + rank)
        parts.append(read(loader_of(LoopDouble(rank, 2), **options)))
    assert [first + second for first, second in zip(*parts, strict=True)][:-1] == whole[:-1]
    # Too few for two: the second gets those of the first, which count for nothing.
    assert [part[-1] for part in parts] == [whole[-1]] * 2
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 2]
    other = read(loader_of(LoopDouble(), where=lambda: (1, 0), **options))
    assert sorted(map(len, other)) == sorted(map(len, whole))
    assert other != whole


def test_it_goes_on_in_the_midst_of_an_epoch():
    whole = read(loader_of(LoopDouble(), shuffle=True))
    assert read(loader_of(LoopDouble(), where=lambda: (0, 4), shuffle=True)) == whole[4:]


def test_a_step_of_several_batches_begins_once_and_can_be_read_again_by_another_group():
    loop = LoopDouble()
    steps_left = iter([3, 2, 1])
    loader = loader_of(loop, plan=lambda: (2, next(steps_left)), shuffle=True)
    batches = iter(loader)
    first, second = next(batches).tolist(), next(batches).tolist()
    assert loop.begun == [([first, second], 4, 0, 3)]
    assert loader.number == 1
    loop.rank, loop.world_size = 1, 2
    assert [loader.read(number).tolist() for number in range(2)] == [first[2:], second[2:]]
    rest = [batch.tolist() for batch in batches]
    assert [len(passes) for passes, *_ in loop.begun] == [2, 2, 2]
    assert loop.begun[1][0][0][2:] == rest[0]


def test_the_program_draws_what_it_drew_without_the_loader():
    loop = LoopDouble()
    loop.seed_pass = lambda number: None
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(2), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    read(loader_of(loop, shuffle=True))
    drawn = torch.rand(2), np.random.rand()  # noqa: NPY002
    assert torch.equal(drawn[0], expected[0])
    assert drawn[1] == expected[1]


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ([1, 2], "only a torch DataLoader"),
        (DataLoader(Stream(), batch_size=4), "IterableDataset"),
        (DataLoader(Numbers(), batch_size=None), "batch_size=None"),
        (DataLoader(Numbers(), sampler=torch.utils.data.DistributedSampler(Numbers(), 2, 0)), "DistributedSampler"),
    ],
)
def test_what_cannot_be_divided_is_refused(loader, told):
    with pytest.raises(InvalidRequest, match=told):
        PartLoader(loader, LoopDouble(), CPU)


def test_ids_that_are_no_numbers_are_refused():
    loader = PartLoader(DataLoader(Numbers(), batch_sampler=[["a", "b"]]), LoopDouble(), CPU)
    with pytest.raises(InvalidRequest, match="whole numbers"):
        next(iter(loader))
