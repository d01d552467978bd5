"""From URL to store, and from a wrong URL to a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.stores.open import open_store


def test_a_name_in_memory_is_the_same_store_to_everyone_in_the_process():
    open_store("memory://test-open").put("a", b"1")
    assert open_store("memory://test-open").get("a") == b"1"
    assert open_store("memory://test-open-other").keys("") == []
    open_store("memory://test-open").delete(["a"])


def test_a_directory_is_the_same_store_to_other_processes(tmp_path):
    url = f"file://{tmp_path}/with%20space"
    open_store(url).put("a/b", b"1")
    code = f"from springtide.storage.stores.open import open_store; print(open_store({url!r}).get('a/b'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "b'1'\n"
    assert (tmp_path / "with space" / "a+" / "b").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no store has the scheme ''"),
        ("/var/objects", "no store has the scheme"),
        ("gs://bucket", "no store has the scheme 'gs'"),
        ("file://relative/path", "absolute path with three slashes"),
        ("file:///", "absolute path"),
        ("file:///a?durable=perhaps", "must be true or false"),
        ("file:///a?colour=red", "no option colour; it takes durable"),
        ("file:///a?durable", "must look like one of"),
        ("memory://", "needs a name"),
        ("memory://a/b", "needs a name"),
        ("memory://a?b=c", "it takes none"),
        ("shm://..", "needs a name"),
        ("s3://", "no name of a bucket"),
        ("s3://Bucket_1/x", "no name of a bucket"),
        ("s3://bucket/a b", "is no key"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "must look like https"),
        ("s3://bucket?endpoint=http://storage.example.com", "is not encrypted; use https"),
        ("s3://bucket?style=odd", "must be path or virtual"),
        ("redis://localhost:6379/zero", "ends with the number of a database"),
        ("redis://localhost:99999/0", "redis"),
        ("redis://localhost/0?name=a*b", "letters, digits"),
        ("http://[::1/", "must look like one of"),
    ],
)
def test_a_wrong_url_is_one_sentence(url, words, s3_credentials):
    with pytest.raises((InvalidRequest, StorageError)) as caught:
        open_store(url)
    assert words.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_opening_a_directory_loads_no_client_of_other_stores(tmp_path):
    code = (
        "import sys; from springtide.storage.stores.open import open_store\n"
        f"open_store('file://{tmp_path}/a').put('a', b''); open_store('memory://a')\n"
        "clients = ('obstore', 'redis', 'boto3', 'torch', 'safetensors', 'numpy')\n"
        "print([name for name in clients if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("url", "module"), [("s3://bucket/x", "obstore"), ("redis://localhost", "redis")])
def test_a_missing_client_is_said_with_what_to_install(url, module, monkeypatch, s3_credentials):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequest, match=r"pip install 'springtide\[functions\]'"):
        open_store(url)
