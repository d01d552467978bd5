"""A probe sees that a store is there and honest, and leaves nothing behind."""

from __future__ import annotations

import pytest

from kits.storage.virtual_pace import VirtualTime
from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.stores import probe
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.memory import MemoryStore
from springtide.storage.stores.open import open_store
from springtide.storage.stores.probe import probe_store


def test_a_store_in_order_is_timed_and_left_as_it_was(tmp_path):
    url = f"file://{tmp_path}/objects"
    seen = probe_store(url)
    assert seen.put_s >= 0.0
    assert seen.get_s >= 0.0
    assert open_store(url).keys("") == []
    assert probe_store("memory://test-probe", VirtualTime().pace()).put_s == 0.0


@pytest.mark.slow
def test_real_servers_are_in_order(redis_server, s3_server, s3_credentials):
    for url in (redis_server.redis_url, s3_server.s3_url("tests", "probed")):
        assert probe_store(url).get_s < 60.0
        store = open_store(url)
        assert store.keys(probe.PROBE_PREFIX) == []
        store.close()


def test_a_store_that_ignores_the_condition_is_found_out(monkeypatch):
    class Careless(MemoryStore):
        def write(self, key, data, *, only_if_absent):
            return super().write(key, data, only_if_absent=False)

    store = CheckedStore(Careless())
    monkeypatch.setattr(probe, "open_store", lambda url, environment: store)
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        probe_store("memory://any")
    assert store.keys("") == []


def test_what_is_not_there_is_said(s3_server, s3_credentials):
    with pytest.raises(StorageError, match="the bucket nowhere does not exist"):
        probe_store(s3_server.s3_url("nowhere"))
    with pytest.raises(InvalidRequest, match="no store has the scheme"):
        probe_store("gs://bucket")
