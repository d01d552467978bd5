"""Records of datasets come from a store that others write: whatever is not wholly one is a sentence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.storage.dataset_arrays import append, put
from springtide.core.errors import StorageError
from springtide.storage.datasets.log import DatasetLog
from springtide.storage.datasets.manifest import (
    MAX_PAGES,
    MAX_RECORD_BYTES,
    PAGE_SHARDS,
    DatasetManifest,
    PageEntry,
    ShardEntry,
    decode_manifest,
    decode_page,
    decode_part,
    sealed,
)
from springtide.storage.datasets.reading import DatasetReader
from springtide.storage.datasets.store import list_datasets, remove_dataset
from springtide.storage.stores.open import memory_store

MANIFEST = "datasets/digits/manifest"


@pytest.fixture
def store():
    made = memory_store()
    put(made)
    return made


def changed(store, **changes):
    manifest = msgspec.json.decode(store.get(MANIFEST))
    manifest.update(changes)
    return msgspec.json.encode(manifest)


BROKEN = {
    "nothing": lambda store: b"",
    "another thing": lambda store: b"[]",
    "half of it": lambda store: store.get(MANIFEST)[:-20],
    "bad text": lambda store: b'{"name": "\xff"}',
    "too large": lambda store: bytes(MAX_RECORD_BYTES + 1),
    "nested": lambda store: b"[" * 100_000,
    "another name": lambda store: changed(store, name="other"),
    "a count that is not the sum": lambda store: changed(store, num_samples=99),
    "shards that are not listed": lambda store: changed(store, num_shards=11),
    "a negative count": lambda store: changed(store, num_bytes=-1),
    "no digest": lambda store: changed(store, tail=[["../../etc/passwd", 100, 5]]),
    "a moment without end": lambda store: changed(store, arrivals=[[1e300, 5, "a"]]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_manifest_is_one_sentence(store, what):
    store.put(MANIFEST, BROKEN[what](store))
    with pytest.raises(StorageError, match="the manifest of the dataset 'digits' cannot be read") as caught:
        DatasetLog(store, "digits").read()
    assert "remove the dataset and put it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_dataset_does_not_hide_the_others_and_can_be_removed(store):
    put(store, "other")
    store.put(MANIFEST, b"{}")
    assert [(status.name, status.kind) for status in list_datasets(store)] == [
        ("digits", "unreadable"),
        ("other", "whole"),
    ]
    remove_dataset(store, "digits")
    assert [status.name for status in list_datasets(store)] == ["other"]


def test_broken_parts_and_pages_are_sentences(store):
    with pytest.raises(StorageError, match="version 2 of the dataset 'digits' cannot be read"):
        decode_part("digits", 2, b"{}")
    page = PageEntry("0" * 64, 10, 5)
    for data in (b"{}", b"[]", msgspec.json.encode([["0" * 64, 1, 1]] * PAGE_SHARDS)):
        with pytest.raises(StorageError, match="a list of shards of the dataset 'digits' cannot be read"):
            decode_page("digits", page, data)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_storage_error(data):
    with pytest.raises(StorageError):
        decode_manifest("digits", data)


def test_a_list_of_shards_that_vanished_is_one_sentence():
    store = memory_store()
    manifest = put(store, num_samples=2 * PAGE_SHARDS, per_shard=1)
    store.delete([f"dataset-shards/digits/sha256/{manifest.pages[0].sha256}"])
    reader = DatasetReader(store, "digits")
    assert reader.read([PAGE_SHARDS])["y"].tolist() == [PAGE_SHARDS]
    with pytest.raises(StorageError, match=r"'digits' has vanished \(its list of shards from 0 on is gone"):
        reader.read([0])
    reader.close()


def test_more_shards_than_a_dataset_may_have():
    store = memory_store()
    append(store, 0, 1)
    manifest = DatasetLog(store, "clicks").read()
    many = msgspec.structs.replace(
        manifest,
        pages=tuple(PageEntry("0" * 64, 1, PAGE_SHARDS) for _ in range(MAX_PAGES)),
        tail=tuple(ShardEntry("0" * 64, 1, 1) for _ in range(2 * PAGE_SHARDS)),
    )
    with pytest.raises(StorageError, match="append more samples at a time"):
        sealed(many)


def test_a_manifest_survives_its_journey(store):
    manifest = DatasetLog(store, "digits").read()
    assert decode_manifest("digits", msgspec.json.encode(manifest)) == manifest
    assert isinstance(manifest, DatasetManifest)
