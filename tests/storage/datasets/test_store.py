"""Datasets: whole ones never change, growing ones lose no append, and a writer that dies leaves all or nothing."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kits.storage.dataset_arrays import append, dying_store, put
from springtide.core.errors import Conflict, InvalidRequest, NotFound, StorageError
from springtide.storage.datasets import log as dataset_log
from springtide.storage.datasets import manifest as dataset_manifest
from springtide.storage.datasets import reading as dataset_reading
from springtide.storage.datasets.log import DatasetLog
from springtide.storage.datasets.manifest import status_of
from springtide.storage.datasets.reading import DatasetReader
from springtide.storage.datasets.store import append_dataset, close_dataset, list_datasets, put_dataset, remove_dataset
from springtide.storage.stores.open import memory_store, open_store


def everything(store, name):
    """All samples of a dataset, by their numbers."""
    reader = DatasetReader(store, name)
    try:
        found = reader.read(np.arange(reader.num_samples))
    finally:
        reader.close()
    assert np.array_equal(found["x"][:, 0], found["y"].astype("float32"))
    return found["y"].tolist()


@pytest.fixture
def store():
    return memory_store()


def test_a_whole_dataset_is_cut_and_listed(store):
    manifest = put(store, num_samples=95)
    assert (manifest.num_samples, manifest.num_shards, manifest.version, manifest.is_closed) == (95, 10, 1, True)
    assert [shard.num_samples for shard in manifest.tail] == [10] * 9 + [5]
    assert everything(store, "digits") == list(range(95))
    (status,) = list_datasets(store)
    assert (status.name, status.kind, status.num_samples) == ("digits", "whole", 95)
    assert [(array.name, array.dtype, array.shape) for array in status.arrays] == [("x", "F32", (3,)), ("y", "I64", ())]


def test_the_same_content_again_changes_nothing_and_other_content_is_refused(store):
    first = put(store)
    before = store.requests().num_puts
    assert put(store, part_id="again") == first
    assert store.requests().num_puts == before
    with pytest.raises(Conflict, match=r"dataset 'digits' already \(100 samples\).*springtide data rm digits"):
        put(store, num_samples=99)
    assert store.requests().num_puts == before
    with pytest.raises(Conflict, match=r"was put whole .* and does not grow"):
        append(store, 100, 110, name="digits")
    with pytest.raises(Conflict, match="nothing to close"):
        close_dataset(store, "digits", at_unix_s=0.0, part_id="c")
    assert store.requests().num_puts == before


def test_a_growing_dataset_takes_appends_until_it_is_closed(store):
    append(store, 0, 7)
    append(store, 7, 9)
    assert status_of(DatasetLog(store, "clicks").read()).kind == "growing"
    closed = close_dataset(store, "clicks", at_unix_s=1010.0, part_id="c")
    assert (closed.num_samples, closed.version, closed.is_closed) == (9, 3, True)
    assert close_dataset(store, "clicks", at_unix_s=1011.0, part_id="d").version == 3
    with pytest.raises(Conflict, match="'clicks' is closed at 9 samples"):
        append(store, 9, 10)
    assert everything(store, "clicks") == list(range(9))
    assert list_datasets(store)[0].kind == "closed"


def test_the_same_append_again_is_made_once(store):
    append(store, 0, 5)
    append(store, 5, 9)
    again = append(store, 5, 9)
    assert (again.version, again.num_samples) == (2, 9)


def test_what_is_appended_must_be_like_what_is_there(store):
    append(store, 0, 5)
    before = store.requests().num_puts
    with pytest.raises(InvalidRequest, match=r"must be like what it holds: x \(F32 \[3\]\), y \(I64 \[\]\), not x"):
        append_dataset(store, "clicks", {"x": np.zeros((2, 4), "f4")}, at_unix_s=0.0, part_id="p")
    assert store.requests().num_puts == before


BAD_ARRAYS = {
    "none": ({}, "1 to 64 named arrays"),
    "different lengths": ({"x": np.zeros(3), "y": np.zeros(4)}, r"differ in length \(x: 3, y: 4\)"),
    "no samples": ({"x": np.zeros((0, 3))}, "have no samples"),
    "a single number": ({"x": np.float32(1)}, "0 dimensions"),
    "objects": ({"x": np.array([{}, {}])}, "x holds object"),
    "words": ({"x": np.array(["a", "b"])}, "x holds <U1"),
    "moments": ({"x": np.array(["2026-01-01"], dtype="datetime64[D]")}, "x holds datetime64"),
    "a type that no frame has": ({"x": np.zeros(3, "complex128")}, "x cannot be stored"),
    "a name that is none": ({"x/y": np.zeros(3)}, "cannot name an array"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ARRAYS)
def test_arrays_that_cannot_be_are_one_sentence(store, what):
    arrays, words = BAD_ARRAYS[what]
    for call in (put_dataset, append_dataset):
        with pytest.raises(InvalidRequest, match=words):
            call(store, "digits", arrays, at_unix_s=0.0, part_id="p")
    assert store.keys("") == []


def test_names_and_sizes_that_cannot_be(store):
    for name in ("", "../x", "A", "a/b", "-a", "x" * 64):
        with pytest.raises(InvalidRequest, match="name"):
            put(store, name)
    with pytest.raises(InvalidRequest, match="a shard has 1 to 250,000,000 bytes"):
        put(store, shard_bytes=250_000_001)
    assert store.keys("") == []


def test_x_and_y_come_first_and_types_survive(store):
    arrays = {
        "weight": np.array([True, False]),
        "y": np.array([1, -2], "int8"),
        "x": np.array([[1.5, 2.5], [3.5, 4.5]], ">f8"),
        "z": np.asfortranarray(np.arange(8, dtype="uint16").reshape(2, 2, 2)),
    }
    put_dataset(store, "mixed", arrays, at_unix_s=0.0, part_id="p", shard_bytes=1)
    reader = DatasetReader(store, "mixed")
    assert [array.name for array in reader.manifest.arrays] == ["x", "y", "weight", "z"]
    assert reader.manifest.num_shards == 2
    found = reader.read([1, 0, 1])
    for name, array in arrays.items():
        assert np.array_equal(found[name], array[[1, 0, 1]])
        assert found[name].dtype == array.dtype.newbyteorder("=")
    reader.close()


def test_removing_leaves_nothing_and_the_name_is_free(store):
    put(store)
    put(store, "other")
    remove_dataset(store, "digits")
    assert [status.name for status in list_datasets(store)] == ["other"]
    assert not [key for key in store.keys("") if "digits" in key]
    with pytest.raises(NotFound, match="no dataset 'digits'"):
        remove_dataset(store, "digits")
    assert put(store, num_samples=5).num_samples == 5
    # A name that begins like another one is another one.
    put(store, "other.b")
    remove_dataset(store, "other")
    assert everything(store, "other.b") == list(range(100))


@pytest.fixture
def short_pages(monkeypatch):
    """Pages of a few shards: what is done with many is the same."""
    for module in (dataset_manifest, dataset_log, dataset_reading):
        monkeypatch.setattr(module, "PAGE_SHARDS", 8)
    return 8


def test_long_lists_of_shards_are_read_by_pages(store, short_pages):
    count = 3 * short_pages + 5
    manifest = put(store, num_samples=count, per_shard=1)
    assert len(manifest.pages) == 2
    assert short_pages <= len(manifest.tail) < 2 * short_pages
    assert manifest.num_shards == count
    assert everything(store, "digits") == list(range(count))
    reader = DatasetReader(store, "digits")
    assert reader.shard_sizes() == (1,) * count
    before = store.requests().num_gets
    assert reader.read([short_pages + 3])["y"].tolist() == [short_pages + 3]
    # One page of the list and one shard.
    assert store.requests().num_gets - before == 2
    reader.close()


def test_pages_are_the_same_for_every_writer(store, short_pages):
    for first in range(2 * short_pages + 5):
        append(store, first, first + 1)
    grown = DatasetLog(store, "clicks").read()
    assert len(grown.pages) == 1
    # The manifest is lost, and found again from the parts alone.
    store.delete(["datasets/clicks/manifest"])
    assert DatasetLog(store, "clicks").read().num_shards == grown.num_shards
    append(store, 2 * short_pages + 5, 2 * short_pages + 6)
    assert DatasetLog(store, "clicks").read().pages[:1] == grown.pages
    assert everything(store, "clicks") == list(range(2 * short_pages + 6))


@pytest.mark.parametrize("is_answer_lost", [False, True])
@pytest.mark.parametrize("dies_at", range(5))
def test_an_append_that_dies_anywhere_is_whole_or_not_there_and_is_made_once_when_repeated(dies_at, is_answer_lost):
    name = secrets.token_hex(8)
    store = memory_store(name)
    append(store, 0, 3)
    dying = dying_store(name, dies_at=dies_at, is_answer_lost=is_answer_lost)
    try:
        append(dying, 3, 8)
        assert dying.raw.left >= 0 or is_answer_lost
    except StorageError:
        assert everything(store, "clicks") in ([0, 1, 2], list(range(8)))
    append(store, 3, 8)
    append(store, 8, 9)
    assert everything(store, "clicks") == list(range(9))
    store.delete(store.keys(""))


@pytest.mark.parametrize("dies_at", range(8))
def test_a_put_that_dies_anywhere_is_finished_by_the_next_one(dies_at):
    name = secrets.token_hex(8)
    store = memory_store(name)
    dying = dying_store(name, dies_at=dies_at)
    try:
        put(dying, num_samples=20)
    except StorageError:
        assert [status.num_samples for status in list_datasets(store)] in ([], [20])
    put(store, num_samples=20, part_id="again")
    assert everything(store, "digits") == list(range(20))
    store.delete(store.keys(""))


@pytest.mark.parametrize("dies_at", range(4))
def test_a_removal_that_dies_anywhere_is_finished_by_the_next_one(dies_at):
    name = secrets.token_hex(8)
    store = memory_store(name)
    put(store, num_samples=20)
    dying = dying_store(name, dies_at=dies_at)
    try:
        remove_dataset(dying, "digits")
    except StorageError:
        assert store.keys("") != []
        remove_dataset(store, "digits")
    assert store.keys("") == []


def test_a_manifest_that_went_back_in_time_is_never_noticed(store):
    append(store, 0, 3)
    old = store.get("datasets/clicks/manifest")
    append(store, 3, 5)
    close_dataset(store, "clicks", at_unix_s=0.0, part_id="c")
    store.put("datasets/clicks/manifest", old)
    assert everything(store, "clicks") == list(range(5))
    assert DatasetLog(store, "clicks").read().is_closed
    with pytest.raises(Conflict, match="closed"):
        append(store, 5, 6)


STORES = ["file", "memory", "redis", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", STORES)
def test_many_writers_at_once_lose_nothing(kind, request, tmp_path):
    if kind == "s3":
        request.getfixturevalue("s3_credentials")
        url = request.getfixturevalue("s3_server").s3_url("tests", f"data-{os.getpid()}-{secrets.token_hex(4)}")
    elif kind == "redis":
        url = f"{request.getfixturevalue('redis_server').redis_url}?name=data-{secrets.token_hex(4)}"
    else:
        url = f"file://{tmp_path}/objects" if kind == "file" else f"memory://data-{secrets.token_hex(8)}"
    # The S3 server of the tests is slow, so it gets fewer writers.
    num_writers, num_appends = (3, 2) if kind == "s3" else (4, 5)
    stores = [open_store(url) for _ in range(num_writers)]

    def write(writer):
        for turn in range(num_appends):
            first = 1000 * writer + 10 * turn
            append(stores[writer], first, first + 2, part_id=f"{writer}-{turn}")

    with ThreadPoolExecutor(num_writers) as pool:
        list(pool.map(write, range(num_writers)))
    reader = DatasetReader(stores[0], "clicks")
    found = reader.read(np.arange(reader.num_samples))["y"].tolist()
    assert len(found) == num_writers * num_appends * 2
    for writer in range(num_writers):
        own = [number for number in found if number // 1000 == writer]
        assert own == [1000 * writer + 10 * turn + each for turn in range(num_appends) for each in (0, 1)]
    assert reader.manifest.version == num_writers * num_appends
    put(stores[0], num_samples=30)
    assert everything(stores[1], "digits") == list(range(30))
    reader.close()
    remove_dataset(stores[0], "clicks")
    remove_dataset(stores[0], "digits")
    assert stores[1].keys("") == []
    for store in stores:
        store.close()
