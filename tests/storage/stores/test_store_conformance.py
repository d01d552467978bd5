"""Every store keeps the same contract."""

from __future__ import annotations

import os
import secrets

import pytest

from springtide.core.errors import StorageError
from springtide.storage.stores.linked import DuplexLink, LinkedStore
from springtide.storage.stores.open import open_store
from springtide.testing import store as kit

STORES = ("memory", "file", "durable", "shm", "redis", "s3", "linked")


@pytest.fixture
def url(request, tmp_path):
    kind = request.param
    name = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    if kind == "s3":
        request.getfixturevalue("s3_credentials")
        return request.getfixturevalue("s3_server").s3_url("tests", name)
    if kind == "redis":
        return f"{request.getfixturevalue('redis_server').redis_url}?name={name}"
    return {
        "memory": f"memory://{name}",
        "linked": f"memory://{name}",
        "file": f"file://{tmp_path}/objects",
        "durable": f"file://{tmp_path}/objects?durable=true",
        "shm": f"shm://{name}",
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("url", STORES, indirect=True)
def test_a_store_keeps_the_contract(url, request):
    link = DuplexLink(up_bytes_per_s=1e9, down_bytes_per_s=1e9, latency_s=0.0001)
    is_linked = "linked" in request.node.name

    def open_handle():
        return LinkedStore(open_store(url), link) if is_linked else open_store(url)

    checked = kit.check_store(open_handle, "run-1")
    assert len(checked) == 9
    last = open_store(url)
    assert last.keys("") == []
    last.close()


class _Forgetful:
    """A store with one fault, to see that the kit finds it."""

    def __init__(self, fault):
        self.store = open_store(f"memory://{secrets.token_hex(8)}")
        self.fault = fault

    def __getattr__(self, name):
        return getattr(self.store, name)

    def put_if_absent(self, key, data):
        if self.fault == "no winner":
            self.store.put(key, data)
            return True
        return self.store.put_if_absent(key, data)

    def put(self, key, data):
        is_cut = self.fault == "half" and len(data) > 1000
        self.store.put(key, bytes(data)[: len(data) // 2] if is_cut else data)

    def keys(self, prefix):
        names = self.store.keys(prefix)
        return names[::-1] if self.fault == "order" else names

    def wait(self, key, timeout_s):
        if self.fault == "lists":
            self.store.keys("")
        return self.store.wait(key, timeout_s)

    def get(self, key):
        if self.fault == "any key":
            try:
                return self.store.get(key)
            except StorageError:
                return b""
        return self.store.get(key)


@pytest.mark.parametrize("fault", ["no winner", "half", "order", "lists", "any key"])
def test_the_kit_finds_what_is_wrong(fault):
    broken = _Forgetful(fault)
    with pytest.raises(AssertionError):
        kit.check_store(lambda: broken, "run-1")


def test_the_kit_as_a_command(tmp_path, capsys):
    assert kit.main([f"file://{tmp_path}/objects"]) == 0
    assert "it keeps the contract: objects, buffers" in capsys.readouterr().out
    assert kit.main([]) == 2
    assert kit.main(["gopher://x"]) == 1
    assert "memory://NAME" in capsys.readouterr().err
