"""Fetching artifacts: checked, complete or not there, and nothing of the user's is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.client.artifacts import fetch_artifacts
from springtide.client.handles import JobHandle
from springtide.core.errors import BackendError, InvalidRequest, NotFound
from springtide.core.status.artifacts import ArtifactStatus


class FakeClient:
    """Has artifacts; sends what it is told to."""

    def __init__(self, **files: bytes) -> None:
        self.files = {"model.safetensors": b"weights", "plots/loss.png": b"plot", **files}
        self.sent: dict[str, bytes] = {}
        self.asked: list[str] = []

    def artifacts(self, job_id: str, *, with_digests: bool = False) -> list[ArtifactStatus]:
        return [
            ArtifactStatus(
                name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest() if with_digests else ""
            )
            for name, data in self.files.items()
        ]

    def artifact(self, job_id: str, name: str) -> Iterator[bytes]:
        self.asked.append(name)
        yield from (bytes([byte]) for byte in self.sent.get(name, self.files[name]))


def fetch(client: FakeClient, to: Path, *names: str, overwrites: bool = False) -> list[Path]:
    return fetch_artifacts(client, "fit-1", to, names, overwrites=overwrites)  # type: ignore[arg-type]


def test_all_or_those_that_are_named_come_and_none_twice(tmp_path: Path) -> None:
    client = FakeClient()
    assert fetch(client, tmp_path / "a", "plots/loss.png") == [tmp_path / "a/plots/loss.png"]
    handle = JobHandle(client, "fit-1")  # type: ignore[arg-type]
    assert handle.fetch_artifacts(tmp_path / "a") == [tmp_path / "a/model.safetensors", tmp_path / "a/plots/loss.png"]
    assert [found.name for found in handle.artifacts()] == ["model.safetensors", "plots/loss.png"]
    assert client.asked == ["plots/loss.png", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["loss.png", "model.safetensors", "plots"]
    with pytest.raises(NotFound, match="has no artifact 'x'; it has model"):
        fetch(client, tmp_path, "x")


def test_a_file_of_the_users_is_not_replaced_unless_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    client = FakeClient()
    with pytest.raises(InvalidRequest, match="is there already and is another file"):
        fetch(client, tmp_path)
    assert client.asked == []
    fetch(client, tmp_path, overwrites=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_what_does_not_come_whole_leaves_nothing(tmp_path: Path) -> None:
    client = FakeClient()
    client.sent["model.safetensors"] = b"weig"
    with pytest.raises(BackendError, match="did not come whole"):
        fetch(client, tmp_path / "a", "model.safetensors")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_name_that_leaves_the_folder_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="which cannot be"):
        fetch(FakeClient(**{"../evil": b"x"}), tmp_path / "a")
    assert not (tmp_path / "evil").exists()
