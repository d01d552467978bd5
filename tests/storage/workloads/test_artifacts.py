"""Artifacts are put once under their digest, and what does not have it is never handed out."""

from __future__ import annotations

import hashlib
import io
import zipfile

import msgspec
import pytest

from springtide.core.errors import InvalidRequest, ObjectMissing, StorageError
from springtide.storage.bundles import pack
from springtide.storage.stores.open import memory_store
from springtide.storage.workloads.artifacts import Artifact, ArtifactDamaged, Artifacts, fetch_code


@pytest.fixture
def store():
    return memory_store()


def test_bytes_come_back_under_their_digest(store):
    artifacts = Artifacts(store)
    artifact = artifacts.put(b"hello")
    assert artifact == Artifact(sha256=hashlib.sha256(b"hello").hexdigest(), num_bytes=5)
    assert artifacts.get(artifact) == b"hello"
    assert store.keys("") == [f"artifacts/sha256/{artifact.sha256}", f"artifacts/sha256/{artifact.sha256}.mark"]
    assert artifacts.get(artifacts.put(memoryview(b""))) == b""


def test_a_second_put_of_the_same_content_costs_one_look(store):
    artifacts = Artifacts(store)
    artifacts.put(bytes(100_000))
    before = store.requests()
    artifacts.put(bytearray(100_000))
    after = store.requests()
    assert (after.num_puts - before.num_puts, after.num_gets - before.num_gets) == (0, 1)
    assert after.bytes_down - before.bytes_down < 200


def test_bytes_whose_writer_died_before_the_mark_are_put_again(store):
    artifacts = Artifacts(store)
    artifact = artifacts.artifact_of(b"hello")
    store.put(artifacts.key(artifact.sha256), b"hel")
    assert artifacts.find(artifact.sha256) is None
    assert artifacts.get(artifacts.put(b"hello")) == b"hello"
    store.put(f"{artifacts.key(artifact.sha256)}.mark", b"{")
    assert artifacts.find(artifact.sha256) is None
    store.put(f"{artifacts.key(artifact.sha256)}.mark", bytes(5000))
    assert artifacts.find(artifact.sha256) is None


@pytest.mark.parametrize("damage", [b"hellO", b"hell", b"hello!", b""])
def test_what_does_not_have_its_digest_is_refused(store, damage):
    artifacts = Artifacts(store)
    artifact = artifacts.put(b"hello")
    store.put(artifacts.key(artifact.sha256), damage)
    with pytest.raises(ArtifactDamaged, match=r"is damaged: .* put it again"):
        artifacts.get(artifact)


def test_bounds_and_names(store):
    artifacts = Artifacts(store, max_bytes=10)
    with pytest.raises(StorageError, match="at most 10 bytes, this one 11; cut it into parts"):
        artifacts.put(bytes(11))
    with pytest.raises(StorageError, match="over 10"):
        artifacts.get(Artifact(sha256="0" * 64, num_bytes=11))
    for name in ("", "../../control", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(StorageError, match="is no digest"):
            artifacts.find(name)
    with pytest.raises(ObjectMissing):
        artifacts.get(Artifact(sha256="0" * 64, num_bytes=1))
    assert store.requests().num_puts == 0


def test_removed_artifacts_are_gone_and_prefixes_part_them(store):
    mine, others = Artifacts(store, "mine"), Artifacts(store, "others")
    artifact = mine.put(b"1")
    assert others.find(artifact.sha256) is None
    others.put(b"1")
    mine.remove([artifact.sha256])
    assert mine.find(artifact.sha256) is None
    assert others.get(artifact) == b"1"


def test_the_same_code_is_one_artifact_and_unpacks(store, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "blocks.py").write_text("size = 3\n")
    artifacts = Artifacts(store)
    bundle = artifacts.put_bundle("train.py", "import blocks\n", tmp_path / "code")
    before = store.requests().num_puts
    assert artifacts.put_bundle("train.py", "import blocks\n", tmp_path / "code") == bundle
    assert store.requests().num_puts == before
    paths = artifacts.get_bundle(bundle, tmp_path / "there")
    assert [path.name for path in paths] == ["blocks.py", "train.py"]
    with pytest.raises(InvalidRequest, match="leads outside its root"):
        artifacts.put_bundle("../train.py", "pass")


def test_a_bundle_with_a_path_outside_its_root_is_one_sentence_and_writes_nothing(store, tmp_path):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("train.py", "pass")
        archive.writestr("../evil.py", "pass")
    artifacts = Artifacts(store)
    artifact = artifacts.put(target.getvalue())
    with pytest.raises(StorageError, match="its path leads outside its root; nothing was written") as caught:
        artifacts.get_bundle(artifact, tmp_path / "code")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_code_is_fetched_by_its_name_or_as_it_is(store, tmp_path):
    bundle = Artifacts(store).put_bundle("train.py", "pass\n")
    assert [path.name for path in fetch_code(store, msgspec.json.encode(bundle), tmp_path / "a")] == ["train.py"]
    assert [path.name for path in fetch_code(store, pack("train.py", "pass\n"), tmp_path / "b")] == ["train.py"]
    for reference in (b"{", b'{"sha256": 1}', b"{" * 5000, b"", b"PK no zip"):
        with pytest.raises(StorageError, match="nothing was written; submit the job again"):
            fetch_code(store, reference, tmp_path / "c")
    store.delete(store.keys(""))
    with pytest.raises(ObjectMissing):
        fetch_code(store, msgspec.json.encode(bundle), tmp_path / "c")
    assert not (tmp_path / "c").exists()
