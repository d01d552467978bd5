"""Where a replica works: in a copy that is made from the platform's contents, or that its container has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from kits.service.sent_folders import folder_of_tree, sent_tree
from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId
from springtide.runtime.serving.folder import entered_copy
from springtide.runtime.serving.replica import load_served_class
from springtide.storage.folders.contents import ContentDirectory

SERVE = b"import beside\nclass Echo:\n    where = beside.__file__\n"


@pytest.fixture(autouse=True)
def whole_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    contents = ContentDirectory(tmp_path / "state/contents")
    tree = sent_tree(contents, {"pkg/serve.py": SERVE, "pkg/beside.py": b"", "labels.txt": b"good"})
    entrypoint = Entrypoint(
        source_path="/elsewhere/serve.py",
        object_name="Echo",
        kind="class",
        folder=folder_of_tree(tree, "pkg/serve.py", "data"),
    )
    return WorkerSpec(
        workload=InferenceService(service_id=WorkloadId("echo"), name="echo", entrypoint=entrypoint),
        replica_id=ReplicaId("echo.0"),
        generation=1,
        control_address="",
        token="",
        work_dir=str(tmp_path / "state/workloads/echo"),
        log_path="",
    )


def test_a_replica_imports_and_works_in_its_copy(spec: WorkerSpec) -> None:
    copy = Path(spec.work_dir) / "folders/echo.0"
    with entered_copy(spec) as entrypoint:
        assert entrypoint.source_path == str(copy / "pkg/serve.py")
        assert os.getcwd() == str(copy / "data")
        assert Path("../labels.txt").read_text() == "good"
        assert load_served_class(entrypoint).where == str(copy / "pkg/beside.py")
    assert not copy.exists()


def test_a_content_that_is_damaged_is_told_and_is_lacking_from_then_on(spec: WorkerSpec, tmp_path: Path) -> None:
    contents = ContentDirectory(tmp_path / "state/contents")
    folder = spec.workload.entrypoint.folder
    assert folder is not None
    damaged = contents.read_tree(folder.sha256).files[0].sha256
    contents.path(damaged).write_bytes(b"other")
    for told in ("labels.txt was damaged", f"{damaged} is not here"):
        with (
            pytest.raises(InvalidRequest, match=rf"not whole any more \(.*{told}.*; deploy it again"),
            entered_copy(spec),
        ):
            pass


def test_in_a_container_the_copy_is_there_already(spec: WorkerSpec, tmp_path: Path) -> None:
    (tmp_path / "folder/data").mkdir(parents=True)
    here = msgspec.structs.replace(
        spec.workload.entrypoint, source_path=str(tmp_path / "folder/pkg/serve.py"), import_root=""
    )
    (tmp_path / "folder/pkg").mkdir()
    workload = msgspec.structs.replace(spec.workload, entrypoint=here)
    in_pod = msgspec.structs.replace(spec, workload=workload, store_url="file:///store")
    with entered_copy(in_pod) as entrypoint:
        assert entrypoint == here
        assert os.getcwd() == str(tmp_path / "folder/data")
    assert (tmp_path / "folder").exists()
