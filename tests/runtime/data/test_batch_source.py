"""What a loop may hand over as its dataset, and what its batches then are."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from kits.runtime.runtime_plane import make_job
from springtide.core.errors import InvalidRequest
from springtide.runtime.data.fetching import fields_of, to_device, x_and_y
from springtide.runtime.local.inprocess import run_local

X = torch.arange(24.0).view(12, 2)
Named = collections.namedtuple("Named", "x y z")


class Rows(Dataset):
    """Samples as a function makes them of a number."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.sample(index)


@dataclasses.dataclass
class Tokens:
    ids: torch.Tensor
    names: list


def seen(tmp_path, dataset, **options):
    """The batches of one epoch in a run of this process."""
    batches = []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for batch in ctx.batches(dataset, **options):
            batches.append(batch)
            ctx.step(model(X[list(batch.ids)]).mean())

    job = make_job(tmp_path, "", global_batch_size=4, num_epochs=1, exact=False)
    run_local(fit, job, tmp_path / "out", lambda line: None)
    return batches


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: DataLoader(rows, batch_size=4, shuffle=True)])
def test_a_batch_of_mappings_reads_like_a_mapping(tmp_path, wrap):
    batches = seen(tmp_path, wrap(Rows(lambda index: {"input_ids": X[index], "labels": index})))
    for batch in batches:
        assert batch["labels"].tolist() == list(batch.ids)
        assert (lambda input_ids, labels: labels)(**batch) is batch["labels"]
        assert list(batch) == ["input_ids", "labels"]
        assert dict(batch) == dict(batch.items()) == batch.fields == batch.data
        assert (batch.x, batch.y) == (None, None)
    assert sorted(index for batch in batches for index in batch.ids) == list(range(12))


def test_a_batch_of_tuples_reads_like_a_tuple(tmp_path):
    loader = DataLoader(Rows(lambda index: (X[index], index, -index)), batch_size=4, shuffle=True)
    for batch in seen(tmp_path, loader):
        x, y, z = batch
        assert x is batch.x is batch[0] is batch.fields[0]
        assert y.tolist() == list(batch.ids)
        assert batch.y is y
        assert batch[2] is z
        with pytest.raises(TypeError, match="have no names"):
            batch.keys()


def test_pairs_and_single_values_are_x_and_y_as_ever(tmp_path):
    for dataset in ((X, X[:, 0]), TensorDataset(X, X[:, 0]), DataLoader(TensorDataset(X, X[:, 0]), batch_size=4)):
        for batch in seen(tmp_path, dataset):
            x, y = batch
            assert x is batch.x
            assert y is batch.y
            assert torch.equal(batch.x, X[list(batch.ids)])
    for batch in seen(tmp_path, X):
        assert batch.y is batch.fields is None
        assert list(batch) == [batch.x]


def test_a_collate_function_may_return_anything(tmp_path):
    def collate(samples):
        return Tokens(torch.stack([X[sample] for sample in samples]), [f"row {sample}" for sample in samples])

    rows = Rows(lambda index: index)
    for options in ({}, {"num_workers": 2}, {"num_workers": 1, "prefetch": 3}):
        for batch in seen(tmp_path, rows, collate=collate, **options):
            assert isinstance(batch.data, Tokens)
            assert batch.data.names == [f"row {index}" for index in batch.ids]
            assert batch.x is batch.data
            assert batch.fields is None


def test_a_loader_without_shuffle_keeps_the_order_of_the_dataset(tmp_path):
    batches = seen(tmp_path, DataLoader(Rows(lambda index: index), batch_size=4))
    assert [batch.ids for batch in batches] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_the_jobs_batch_decides_and_the_log_says_so(tmp_path, capsys):
    batches = seen(tmp_path, DataLoader(Rows(lambda index: index), batch_size=6))
    assert [len(batch.ids) for batch in batches] == [4, 4, 4]
    said = capsys.readouterr().err
    assert "the DataLoader has batch_size=6, and the job's global batch is 4, which decides" in said
    assert "global_batch=6" in said
    for size in (1, 4):
        seen(tmp_path, DataLoader(Rows(lambda index: index), batch_size=size))
    assert capsys.readouterr().err == ""


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "options", "way_out"),
    [
        (DataLoader(Rows(int), batch_size=4), {"num_workers": 1}, "set them there"),
        ((X, X), {"num_workers": 1}, "leave them out for tensors"),
        (X, {"collate": list}, "leave them out for tensors"),
        (Rows(int), {"num_workers": -1}, "at least 0"),
        (Rows(int), {"num_workers": 1, "prefetch": 0}, "at least 1"),
        (Endless(), {}, "an IterableDataset has no numbers of samples"),
        (3, {}, "needs __len__ and __getitem__"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, dataset, options, way_out):
    with pytest.raises(InvalidRequest, match=way_out):
        seen(tmp_path, dataset, **options)


class Moved:
    def to(self, device):
        return f"moved to {device}"


def test_everything_of_a_batch_goes_to_the_device():
    meta = torch.device("meta")
    data = {"a": [X, "text"], "b": Tokens(X, [1]), "c": Named(X, (X,), None), "d": Moved()}
    moved = to_device(data, meta)
    assert moved["a"][0].device == moved["b"].ids.device == moved["c"].x.device == moved["c"].y[0].device == meta
    assert moved["a"][1] == "text"
    assert moved["b"].names == [1]
    assert isinstance(moved["c"], Named)
    assert moved["d"] == "moved to meta"
    assert to_device(data, torch.device("cpu")) is data


def test_parts_of_other_containers():
    assert x_and_y([]) == (None, None)
    assert x_and_y({"y": 1}) == (None, 1)
    assert fields_of(collections.OrderedDict(x=1)) == {"x": 1}
    assert fields_of([1, 2]) == (1, 2)
