"""A reader fetches the shards it needs and no others, keeps them within bounds, and says clearly what is wrong."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.storage.dataset_arrays import append, numbered, put
from springtide.core.errors import ObjectMissing, StorageError
from springtide.storage.datasets.cache import ShardCache
from springtide.storage.datasets.manifest import DatasetLost
from springtide.storage.datasets.reading import DatasetReader, ServedSamples
from springtide.storage.datasets.store import remove_dataset
from springtide.storage.stores.open import memory_store

# A frame of ten samples: 200 bytes of numbers behind a header.
FRAME_BYTES = 360


@pytest.fixture
def store():
    return memory_store()


@pytest.fixture
def reader(store, tmp_path):
    put(store)
    opened = DatasetReader(store, "digits", ShardCache(tmp_path))
    yield opened
    opened.close()


def gets(store):
    return store.requests().num_gets


def test_samples_come_in_the_order_asked_for_from_the_shards_that_hold_them(store, reader):
    before = gets(store)
    found = reader.read([57, 3, 51, 3])
    assert found["y"].tolist() == [57, 3, 51, 3]
    assert np.array_equal(found["x"], numbered(0, 100)["x"][[57, 3, 51, 3]])
    assert (gets(store) - before, reader.num_fetched) == (2, 2)
    reader.read([0, 9, 50])
    assert reader.num_fetched == 2
    assert reader.read([])["x"].shape == (0, 3)
    assert reader.read(np.array([4], "uint8"))["y"].dtype == np.int64


def test_what_is_handed_out_is_the_callers_own(reader):
    reader.read([1])["x"][:] = -1.0
    assert reader.read([1])["x"].tolist() == [[1.0, 1.0, 1.0]]


def test_it_knows_what_it_has_served(reader):
    reader.read([5, 99, 5])
    reader.read([0])
    assert reader.served.ids().tolist() == [0, 5, 99]
    assert reader.served.num_reads == 4
    reader.served.forget()
    assert reader.served.ids().tolist() == []


@given(st.lists(st.lists(st.integers(0, 3000), max_size=20), max_size=6))
def test_served_samples_are_a_set(reads):
    served = ServedSamples()
    for ids in reads:
        served.add(np.asarray(ids, dtype=np.int64))
    assert served.ids().tolist() == sorted({each for ids in reads for each in ids})
    assert served.num_reads == sum(map(len, reads))


def test_the_cache_keeps_to_its_bounds_and_every_read_is_right(store, tmp_path):
    # The last shard is shorter than the others.
    put(store, num_samples=293)
    cache = ShardCache(tmp_path, disk_bytes=4 * FRAME_BYTES, memory_bytes=2 * FRAME_BYTES)
    reader = DatasetReader(store, "digits", cache)
    draws = np.random.default_rng(5)
    for _ in range(60):
        ids = draws.integers(0, 293, size=7)
        assert reader.read(ids)["y"].tolist() == ids.tolist()
        assert cache.memory_used_bytes <= 2 * FRAME_BYTES
        assert cache.disk_used_bytes <= 4 * FRAME_BYTES
        on_disk = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in on_disk) == cache.disk_used_bytes
    assert reader.num_fetched > 30
    assert cache.disk_used_bytes > 0
    reader.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cache_that_is_never_closed_leaves_nothing_on_the_disk(store, tmp_path):
    put(store)
    reader = DatasetReader(store, "digits", ShardCache(tmp_path, memory_bytes=1))
    reader.read([0])
    assert len(list(tmp_path.iterdir())) == 1
    del reader
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_shard_goes_first(store, tmp_path):
    put(store)
    reader = DatasetReader(store, "digits", ShardCache(tmp_path, disk_bytes=0, memory_bytes=2 * FRAME_BYTES))
    for ids, fetched in (([0], 1), ([10], 2), ([1], 2), ([20], 3), ([2], 3), ([11], 4)):
        reader.read(ids)
        assert reader.num_fetched == fetched, ids
    reader.close()


def test_a_shard_larger_than_memory_goes_to_the_disk_and_one_larger_than_both_is_kept_alone(store, tmp_path):
    put(store)
    cache = ShardCache(tmp_path, disk_bytes=10_000, memory_bytes=10)
    reader = DatasetReader(store, "digits", cache)
    assert reader.read([15])["y"].tolist() == [15]
    assert (cache.memory_used_bytes, cache.disk_used_bytes > 0) == (0, True)
    assert reader.read([16])["y"].tolist() == [16]
    assert reader.num_fetched == 1
    reader.close()
    small = DatasetReader(store, "digits", ShardCache(tmp_path, disk_bytes=10, memory_bytes=10))
    for ids in ([15], [16], [25], [26]):
        assert small.read(ids)["y"].tolist() == ids
    assert small.num_fetched == 2
    small.close()


def test_a_disk_that_cannot_be_written_to_is_done_without(store, tmp_path):
    put(store)
    reader = DatasetReader(store, "digits", ShardCache(tmp_path / "nowhere", memory_bytes=FRAME_BYTES))
    for ids in ([15], [25], [15]):
        assert reader.read(ids)["y"].tolist() == ids
    assert reader.num_fetched == 3
    reader.close()


def test_arrays_stay_valid_while_their_shard_is_forgotten(store, tmp_path):
    put(store, num_samples=1000, per_shard=10)
    cache = ShardCache(tmp_path, disk_bytes=FRAME_BYTES, memory_bytes=10)
    reader = DatasetReader(store, "digits", cache)
    # One read that needs a hundred shards where one fits.
    assert reader.read(np.arange(999, -1, -1))["y"].tolist() == list(range(999, -1, -1))
    reader.close()


def test_a_shard_that_vanished_is_one_sentence_that_names_the_dataset(store, reader):
    reader.read([0])
    remove_dataset(store, "digits")
    # What is at hand goes on being served.
    assert reader.read([5])["y"].tolist() == [5]
    with pytest.raises(DatasetLost, match="the dataset 'digits' has vanished") as caught:
        reader.read([1, 42])
    assert "shard 5 of 10 is gone" in str(caught.value)
    assert "springtide data put digits FILE" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ObjectMissing, match="there is no dataset 'digits'"):
        DatasetReader(store, "digits")


def test_a_damaged_shard_is_one_sentence_and_is_not_kept(store, reader):
    key = next(key for key in store.keys("dataset-shards/") if not key.endswith(".mark"))
    whole = store.get(key)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StorageError, match=r"the dataset 'digits' is damaged .*springtide data rm digits"):
        reader.read(np.arange(100))
    store.put(key, whole)
    assert reader.read(np.arange(100))["y"].tolist() == list(range(100))


def test_samples_that_are_not_there(reader):
    for ids in ([100], [-1], [3, 1000]):
        with pytest.raises(StorageError, match="'digits' has 100 samples; sample"):
            reader.read(ids)


def test_a_growing_dataset_is_seen_to_grow(store):
    append(store, 0, 5)
    reader = DatasetReader(store, "clicks")
    assert reader.read([4])["y"].tolist() == [4]
    append(store, 5, 8)
    append(store, 8, 9)
    with pytest.raises(StorageError, match="has 5 samples"):
        reader.read([5])
    before = gets(store)
    assert reader.refresh() == 9
    assert gets(store) - before == 3
    assert reader.read([8, 4, 5])["y"].tolist() == [8, 4, 5]
    before = gets(store)
    assert reader.refresh() == 9
    assert gets(store) - before == 1
    reader.close()


def test_a_dataset_put_anew_under_the_name_is_noticed(store):
    append(store, 0, 5)
    append(store, 5, 6)
    reader = DatasetReader(store, "clicks")
    remove_dataset(store, "clicks")
    for first in range(3):
        append(store, first, first + 1, part_id=f"new-{first}")
    with pytest.raises(DatasetLost, match="was removed and put anew"):
        reader.refresh()
    reader.close()
