"""A task's dataset by name: the same samples as in memory, without torch, found through the store or the state."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from springtide.core.errors import InvalidRequest, StorageError
from springtide.runtime.data.dataset_reader import open_dataset
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reference import DatasetReference
from springtide.storage.datasets.store import append_dataset, close_dataset, put_dataset, remove_dataset
from springtide.storage.stores.open import memory_store, open_store

DIGITS = DatasetReference(name="digits")
CLICKS = DatasetReference(name="clicks", is_stream=True)


def samples(first, end):
    return {"x": np.arange(first, end, dtype="float32")[:, None], "y": np.arange(first, end)}


def put(store, count=200, shard_bytes=12 * 10, name="digits"):
    put_dataset(store, name, samples(0, count), at_unix_s=0.0, part_id="p", shard_bytes=shard_bytes)


def append(store, first, end):
    append_dataset(store, "clicks", samples(first, end), at_unix_s=float(first), part_id=f"a{first}")


@pytest.fixture
def store():
    return memory_store()


def test_batches_are_the_arrays_in_order(store, tmp_path):
    put(store)
    reader = open_dataset(DIGITS, store, tmp_path)
    x, y = reader.fetch((7, 150, 3))
    assert (x.tolist(), y.tolist()) == ([[7.0], [150.0], [3.0]], [7, 150, 3])
    assert (reader.name, reader.num_samples, reader.is_closed, reader.is_stream) == ("digits", 200, True, False)
    assert reader.array_names == ("x", "y")
    assert reader.served.ids().tolist() == [3, 7, 150]
    assert reader.num_fetched == 2
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_visits_every_sample_once_whoever_reads_which_part(store):
    put(store)
    readers = [open_dataset(DIGITS, store) for _ in range(4)]
    order = readers[0].order(3, 1)
    assert np.array_equal(order, readers[1].order(3, 1))
    for first in range(0, 200, 40):
        ids = readers[0].arranged(order[first : first + 40])
        assert sorted(ids.tolist()) == sorted(order[first : first + 40].tolist())
        for reader, part in zip(readers, np.array_split(ids, 4), strict=True):
            x, y = reader.fetch(part)
            assert np.array_equal(x[:, 0], part.astype("float32"))
            assert np.array_equal(y, part)
    served = np.concatenate([reader.served.ids() for reader in readers])
    assert sorted(served.tolist()) == list(range(200))
    # Each of the twenty shards is fetched by those who need it, not by all.
    assert sum(reader.num_fetched for reader in readers) < 4 * 20
    for reader in readers:
        reader.close()


def test_large_shards_are_visited_a_few_at_a_time(store):
    put(store, count=40, shard_bytes=120)
    reference = msgspec.structs.replace(DIGITS, num_mixed=1)
    reader = open_dataset(reference, store, disk_bytes=0, memory_bytes=1)
    for number in reader.order(0, 0):
        reader.fetch([number])
    assert reader.num_fetched == 4
    reader.close()


def test_a_stream_comes_in_order_of_arrival_and_is_followed(store):
    append(store, 0, 5)
    reader = open_dataset(CLICKS, store)
    assert reader.order(9, 0).tolist() == [0, 1, 2, 3, 4]
    append(store, 5, 9)
    assert reader.num_samples == 5
    _, y = reader.fetch(range(3, 8))
    assert y.tolist() == [3, 4, 5, 6, 7]
    assert reader.num_samples == 9
    assert reader.arranged([8, 2]).tolist() == [8, 2]
    with pytest.raises(StorageError, match="'clicks' has 9 samples; sample 9"):
        reader.fetch([9])
    close_dataset(store, "clicks", at_unix_s=9.0, part_id="c")
    assert not reader.is_closed
    reader.refresh()
    assert reader.is_closed
    reader.close()


def test_what_is_not_there_or_still_grows_is_one_sentence(store):
    with pytest.raises(StorageError, match=r"there is no dataset 'digits' .* `springtide data put digits"):
        open_dataset(DIGITS, store)
    with pytest.raises(StorageError, match=r"there is no stream 'clicks' .* `springtide data append clicks"):
        open_dataset(CLICKS, store)
    append(store, 0, 5)
    with pytest.raises(StorageError, match=r"'clicks' still grows.*st\.stream\('clicks'\)"):
        open_dataset(DatasetReference(name="clicks"), store)
    close_dataset(store, "clicks", at_unix_s=9.0, part_id="c")
    assert open_dataset(DatasetReference(name="clicks"), store).num_samples == 5
    put(store)
    # A whole dataset is a stream that has ended.
    assert open_dataset(DatasetReference(name="digits", is_stream=True), store).is_closed


def test_a_dataset_that_vanishes_while_it_is_read_is_one_sentence(store):
    put(store)
    reader = open_dataset(DIGITS, store)
    reader.fetch([0])
    remove_dataset(store, "digits")
    with pytest.raises(StorageError, match=r"the dataset 'digits' has vanished .* run the job again") as caught:
        reader.fetch([100])
    assert "\n" not in str(caught.value)
    reader.close()


def test_without_a_store_it_is_that_of_the_state_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_STATE", str(tmp_path / "state"))
    assert data_store_url(tmp_path / "state") == f"file://{tmp_path}/state/functions/store"
    put(open_store(data_store_url(tmp_path / "state")))
    reader = open_dataset(DIGITS)
    assert reader.fetch([5])[1].tolist() == [5]
    reader.close()
    (tmp_path / "state" / "functions.json").write_text(
        f'{{"provider": "emulator", "store": "file://{tmp_path}/other"}}'
    )
    with pytest.raises(StorageError, match="there is no dataset 'digits'"):
        open_dataset(DIGITS)
    put(open_store(f"file://{tmp_path}/other"))
    reader = open_dataset(DIGITS)
    assert reader.num_samples == 200
    reader.close()
    (tmp_path / "state" / "functions.json").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        open_dataset(DIGITS)


def test_it_loads_neither_torch_nor_jax():
    program = (
        "import sys, springtide.runtime.data.dataset_reader; "
        "print([name for name in ('torch', 'jax', 'scipy', 'obstore', 'redis') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
