"""`springtide artifacts`: what is listed and fetched, and what is said of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.status.platform import JobStatus

Run = Callable[..., Result]


@pytest.fixture
def left(client: Any, make_job: Callable[..., JobStatus]) -> dict[str, bytes]:
    """The double's artifacts of its one job."""
    files = {"model.safetensors": b"w" * 34_000, "plots/loss.png": b"plot"}
    client.add(make_job())

    def artifacts(job_id: str, *, with_digests: bool = False) -> list[ArtifactStatus]:
        return [
            ArtifactStatus(
                name=name,
                num_bytes=len(data),
                modified_unix_s=1e9 if "plots" in name else None,
                sha256=hashlib.sha256(data).hexdigest() if with_digests else "",
            )
            for name, data in files.items()
        ]

    def artifact(job_id: str, name: str) -> Iterator[bytes]:
        yield files[name]

    client.artifacts, client.artifact = artifacts, artifact
    return files


def test_artifacts_are_listed_with_their_size(springtide: Run, left: dict[str, bytes]) -> None:
    lines = springtide("artifacts", "list", "fit").output.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "WRITTEN"]
    assert lines[1].split() == ["model.safetensors", "34", "kB", "-"]
    assert lines[2].split()[:3] == ["plots/loss.png", "4", "B"]
    assert lines[3] == "fetch them: springtide artifacts get fit-3f2a"
    listed = json.loads(springtide("artifacts", "list", "fit", "--json").output)
    assert listed[1]["sha256"] == hashlib.sha256(b"plot").hexdigest()
    left.clear()
    assert "has left nothing so far" in springtide("artifacts", "list", "fit").output


def test_artifacts_are_fetched_into_a_folder_of_the_jobs_name(
    springtide: Run, left: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = springtide("artifacts", "get", "fit")
    assert result.output == "model.safetensors  34 kB\nplots/loss.png  4 B\n2 files of fit-3f2a in fit-3f2a\n"
    assert (tmp_path / "fit-3f2a/plots/loss.png").read_bytes() == b"plot"
    answer = springtide("artifacts", "get", "fit", "plots/loss.png", "--to", "out", "--json")
    assert json.loads(answer.stdout) == ["out/plots/loss.png"]
    (tmp_path / "out/plots/loss.png").write_bytes(b"mine")
    refused = springtide("artifacts", "get", "fit", "--to", "out")
    assert (refused.exit_code, "--to" in refused.output) == (2, True)
    assert springtide("artifacts", "get", "fit", "--to", "out", "--force").exit_code == 0
    assert (tmp_path / "out/plots/loss.png").read_bytes() == b"plot"


def test_a_service_has_none(springtide: Run, client: Any, make_service: Callable[..., Any]) -> None:
    client.add(make_service())
    assert "is a service, and only jobs leave artifacts" in springtide("artifacts", "list", "sentiment").output
