"""Jobs with a folder: what was sent is checked, each job has its own copy, and what no job needs is removed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from kits.service.api_fixtures import SOURCE, job_body
from kits.service.expiring_objects import House
from kits.service.sent_folders import sent_tree
from springtide.backends.kubernetes.client.kinds import key_of
from springtide.backends.kubernetes.resources.from_object import FOLDER_ANNOTATION
from springtide.core.errors import InvalidRequest, NotFound
from springtide.core.events import CancelRequested
from springtide.core.workload import WorkloadId
from springtide.service.reconciler.admission import SourceMissing
from springtide.service.submission.folders import FolderSweep, check_fits_functions
from springtide.storage.folders.contents import ContentDirectory, write_archive
from springtide.storage.folders.tree import FolderFile, FolderTree, encode_tree
from springtide.storage.workloads.store import WorkloadStore

LONG_AGO_S = 1_000.0


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def send(platform, files, folders=()):
    """Keep the contents of a folder; the digest of its list."""
    return encode_tree(sent_tree(platform.source_store.contents, files, folders))[0]


def folder(digest, **changes):
    return {"sha256": digest, "path": "digits.py", "directory": "", "origin": "/projects/mine"} | changes


def submit(http, asked, key=None, **changes):
    headers = {} if key is None else {"Idempotency-Key": key}
    return http.post("/v1/jobs", json=job_body(source__folder=asked, **changes), headers=headers)


def sentence(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


FILES = {"digits.py": SOURCE.encode(), "pkg/helper.py": b"x = 1\n"}


def test_each_job_has_a_copy_of_its_own_and_says_so(http, platform):
    digest = send(platform, FILES, folders=["logs"])
    first = submit(http, folder(digest, directory="logs")).json()
    second = submit(http, folder(digest)).json()
    root = platform.workload_dir(first["job_id"]) / "folder"
    assert (root / "pkg/helper.py").read_bytes() == b"x = 1\n"
    assert (first["directory"], first["folder"]) == (str(root / "logs"), "/projects/mine")
    entrypoint = platform.view().jobs[first["job_id"]].job.entrypoint
    assert (entrypoint.source_path, entrypoint.import_root) == (str(root / "digits.py"), str(root))
    assert (entrypoint.folder.num_files, entrypoint.folder.num_bytes) == (2, len(SOURCE) + 6)
    (root / "pkg/helper.py").write_bytes(b"changed")
    other = platform.workload_dir(second["job_id"]) / "folder"
    assert (other / "pkg/helper.py").read_bytes() == b"x = 1\n"
    evidence = http.get(f"/v1/workloads/{first['job_id']}/why").json()["evidence"]
    assert any("its copy of /projects/mine (2 files, " in line for line in evidence), evidence
    readable = [path for path in platform.state_dir.rglob("*") if path.lstat().st_mode & 0o077]
    assert not readable, "others may read or enter these"


def test_nothing_that_was_half_sent_becomes_a_job(http, platform):
    digest = send(platform, FILES)
    platform.source_store.contents.discard(sha256(b"x = 1\n"))
    assert "1 contents of the folder were not sent" in sentence(submit(http, folder(digest)), 409)
    assert "is not here; send it" in sentence(submit(http, folder("0" * 64)), 409)
    assert platform.view().jobs == {}
    assert not (platform.state_dir / "workloads").exists()


def test_a_content_that_was_damaged_where_it_was_kept_makes_no_job(http, platform):
    digest = send(platform, FILES)
    platform.source_store.contents.path(sha256(b"x = 1\n")).write_bytes(b"x = 2\n")
    assert "pkg/helper.py was damaged" in sentence(submit(http, folder(digest)), 409)
    assert platform.view().jobs == {}
    assert "were not sent" in sentence(submit(http, folder(digest)), 409)
    send(platform, FILES)
    assert submit(http, folder(digest)).status_code == 201


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"path": "pkg/helper.py"}, "is not the file digits.py"),
        ({"path": "other/digits.py"}, "is not the file digits.py"),
        ({"path": "../digits.py"}, "leads outside its root"),
        ({"directory": "../.."}, "leads outside its root"),
        ({"directory": "/tmp"}, "must be relative"),
        ({"directory": "pkg/helper.py"}, "is a file"),
        ({"directory": "pkg/helper.py/in"}, "is a file"),
    ],
)
def test_places_outside_of_the_folder_are_refused(http, platform, changes, told):
    assert told in sentence(submit(http, folder(send(platform, FILES), **changes)), 422)
    assert platform.view().jobs == {}


def test_a_list_with_a_path_that_leaves_the_folder_is_refused(http, platform):
    digest = send(platform, {**FILES, "../../evil.py": b"x"})
    assert "leads outside its root" in sentence(submit(http, folder(digest)), 422)
    assert not list(platform.state_dir.rglob("evil.py"))


def test_the_text_and_the_folder_are_of_one_moment(http, platform):
    digest = send(platform, {**FILES, "digits.py": b"another = 1\n"})
    assert "another text than digits.py" in sentence(submit(http, folder(digest)), 422)
    asked = folder(send(platform, FILES))
    assert "no meaning with source.folder" in sentence(submit(http, asked, source__import_root="/tmp"), 422)


def test_a_repeated_request_is_the_same_job_and_another_folder_is_another_request(http, platform):
    digest = send(platform, FILES)
    first = submit(http, folder(digest), key="k")
    again = submit(http, folder(digest), key="k")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["job_id"] == first.json()["job_id"]
    other = send(platform, {**FILES, "pkg/helper.py": b"x = 3\n"})
    assert "another body" in sentence(submit(http, folder(other), key="k"), 409)


def test_more_than_functions_take_is_refused_with_the_largest() -> None:
    tree = FolderTree((FolderFile("data.csv", "0" * 64, 33 << 20), FolderFile("train.py", "0" * 64, 10)))
    with pytest.raises(InvalidRequest, match=r"data\.csv \(35 MB\); on functions"):
        check_fits_functions(tree)


def age(path: Path) -> None:
    then_s = time.time() - 2 * LONG_AGO_S
    os.utime(path, (then_s, then_s))


def test_what_unfinished_jobs_have_stays_and_the_rest_goes(http, platform):
    digest = send(platform, FILES)
    # The first one has all devices, so that the second one has no worker when it ends.
    assert http.post("/v1/jobs", json=job_body(options__min_workers=2)).status_code == 201
    job_id = submit(http, folder(digest), options__min_workers=2).json()["job_id"]
    contents = platform.source_store.contents
    contents.put(sha256(b"left"), b"left")
    for path in (platform.state_dir / "contents").rglob("?" * 64):
        age(path)
    assert FolderSweep(platform).sweep(LONG_AGO_S) == 1
    known = [digest, *map(sha256, FILES.values())]
    assert contents.missing(known) == []
    root = platform.workload_dir(job_id)
    (root / "folder/results.txt").write_text("of the job")
    platform.submit(CancelRequested(workload_id=job_id))
    for path in (platform.state_dir / "contents").rglob("?" * 64):
        age(path)
    FolderSweep(platform).sweep(LONG_AGO_S)
    assert contents.missing(known) == known
    assert (root / "folder/pkg/helper.py").exists(), "it ended only now"
    for path in (*(root / "folder").rglob("*.py"), root / "folder.json"):
        age(path)
    FolderSweep(platform).sweep(LONG_AGO_S)
    assert [path.name for path in (root / "folder").iterdir()] == ["results.txt"]
    assert not (root / "folder.json").exists()


def test_a_sweep_begins_once_in_an_hour(platform, monkeypatch):
    runs = []
    monkeypatch.setattr(FolderSweep, "_run", lambda self: runs.append(self))
    sweep = FolderSweep(platform)
    for _ in range(3):
        sweep.begin()
    deadline_s = time.monotonic() + 10.0
    while not runs and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert len(runs) == 1


def test_a_job_of_an_earlier_release_has_no_folder(http, platform):
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    job = platform.view().jobs[job_id].job
    older = msgspec.to_builtins(job)
    del older["entrypoint"]["folder"]
    assert msgspec.convert(older, type(job)).entrypoint.folder is None
    assert (http.get(f"/v1/jobs/{job_id}").json()["directory"], job.entrypoint.import_root) == ("", "")


SERVED = b"class Sentiment: ...\n"


def deploy(http, digest, **changes):
    source = {"filename": "serve.py", "text": SERVED.decode(), "object_name": "Sentiment"}
    asked = folder(digest, path="serve.py", **changes)
    return http.put("/v1/services/echo", json={"source": {**source, "folder": asked}})


def test_a_service_names_its_folder_whose_contents_stay_for_it(http, platform):
    first = send(platform, {"serve.py": SERVED, "labels.txt": b"good bad"})
    answer = deploy(http, first)
    assert (answer.status_code, answer.json()["folder"]) == (200, "/projects/mine")
    assert deploy(http, first).json()["revision"] == 1
    assert deploy(http, first, directory="logs").json()["revision"] == 2
    second = send(platform, {"serve.py": SERVED, "labels.txt": b"new"})
    assert deploy(http, second).json()["revision"] == 3
    evidence = http.get("/v1/workloads/echo/why").json()["evidence"]
    assert "each replica runs in its own copy of /projects/mine (2 files, 24 B)" in evidence
    for path in (platform.state_dir / "contents").rglob("?" * 64):
        age(path)
    # Of the first one, the list and the labels.
    assert FolderSweep(platform).sweep(LONG_AGO_S) == 2
    kept = [second, sha256(SERVED), sha256(b"new")]
    assert platform.source_store.contents.missing(kept) == []
    assert "is not here; send it" in sentence(deploy(http, first), 409)
    http.delete("/v1/services/echo")
    for path in (platform.state_dir / "contents").rglob("?" * 64):
        age(path)
    assert FolderSweep(platform).sweep(LONG_AGO_S) == 3


def test_copies_of_replicas_that_were_killed_go_with_a_sweep(http, platform):
    deploy(http, send(platform, {"serve.py": SERVED}))
    copies = platform.workload_dir("echo") / "folders"
    (copies / "echo.0").mkdir(parents=True)
    (copies / "echo.0.lock").touch()
    FolderSweep(platform).sweep(LONG_AGO_S)
    assert list(copies.iterdir()) == []


def of_object(house, kind, digest, path, **more):
    """An object with a folder, as the server has it."""
    obj = house.cluster.put(kind)
    found = house.cluster.server[kind, key_of(obj)]
    found["spec"]["source"]["folder"] = {"sha256": digest, "path": path, "origin": "/projects/mine", **more}
    return house.cluster.read(kind, key_of(obj))


def test_a_platform_of_pods_puts_the_folder_into_its_store_as_one_archive(platform, tmp_path):
    house = House(platform, tmp_path / "store")
    digest = send(platform, {"train.py": b"def fit(ctx):\n    pass\n", "helper.py": b"x = 1\n"})
    job = house.admission.submit_job(of_object(house, "TrainingFunction", digest, "train.py")).job
    assert job.entrypoint.folder.sha256 == digest
    kept = WorkloadStore(house.store, job.job_id)
    assert kept.fetch_folder(job.entrypoint.folder, tmp_path / "pod/folder") == tmp_path / "pod/folder/train.py"
    assert sorted(path.name for path in (tmp_path / "pod").rglob("*")) == ["folder", "helper.py", "train.py"]
    platform.source_store.retire(job.job_id, keeps_artifacts=False)
    assert kept.fetch_folder(job.entrypoint.folder, tmp_path / "another/folder") is None


def test_a_folder_in_an_annotation_of_an_earlier_release_is_read(platform, tmp_path):
    house = House(platform, tmp_path / "store")
    asked = {"sha256": send(platform, {"train.py": b"def fit(ctx):\n    pass\n"}), "path": "train.py"}
    key = key_of(house.cluster.put())
    for text in (json.dumps(asked), "[1]"):
        house.cluster.server["TrainingFunction", key]["metadata"]["annotations"] = {FOLDER_ANNOTATION: text}
        read = house.cluster.read("TrainingFunction", key)
        if text == "[1]":
            with pytest.raises(InvalidRequest, match="is no folder"):
                house.admission.submit_job(read)
        else:
            assert house.admission.submit_job(read).job.entrypoint.folder.sha256 == asked["sha256"]


def test_a_service_of_pods_has_the_archives_of_its_versions_and_needs_no_content_again(platform, tmp_path):
    house = House(platform, tmp_path / "store")
    files = {"serve.py": b"class Echo: ...\n", "labels.txt": b"good"}
    first, second = send(platform, files), send(platform, {**files, "labels.txt": b"new"})

    def archives():
        return [key.rpartition("/")[2] for key in house.store.keys("workloads/digits/folder-")]

    house.admission.deploy_service(of_object(house, "InferenceFunction", first, "serve.py"))
    assert archives() == [f"folder-{first[:16]}.zip"]
    obj = of_object(house, "InferenceFunction", second, "serve.py")
    record = house.admission.deploy_service(obj)
    assert (record.service.revision, archives()) == (2, [f"folder-{second[:16]}.zip"])
    # Another leader, on another machine, compares the object anew.
    for path in (platform.state_dir / "contents").rglob("?" * 64):
        path.unlink()
    assert house.admission.deploy_service(obj).service.revision == 2
    house.submissions.remove_service("digits")
    assert archives() == []


def packed(tmp_path, files):
    """The digest of a folder, and its archive in two parts."""
    sender = ContentDirectory(tmp_path / "sender")
    tree = sent_tree(sender, files)
    write_archive(sender.open, tree, tmp_path / "folder.zip")
    data = (tmp_path / "folder.zip").read_bytes()
    return encode_tree(tree)[0], data[:100], data[100:]


def test_a_folder_in_config_maps_is_taken_in_whole_or_not_at_all(platform, tmp_path):
    house = House(platform, tmp_path / "store")
    digest, first, second = packed(tmp_path, {"serve.py": b"class Echo: ...\n", "labels.txt": b"good"})
    obj = of_object(house, "InferenceFunction", digest, "serve.py", configMaps=["a", "b"])
    house.cluster.config_maps = {"a": first}
    with pytest.raises(SourceMissing, match="names the ConfigMap 'b'"):
        house.admission.deploy_service(obj)
    for broken in (b"", b"x" * len(second), second[:-30], first):
        house.cluster.config_maps["b"] = broken
        with pytest.raises(InvalidRequest, match="was not sent whole"):
            house.admission.deploy_service(obj)
    house.cluster.config_maps["b"] = second
    another = copy.deepcopy(obj)
    another["spec"]["source"]["folder"]["sha256"] = "0" * 64
    with pytest.raises(InvalidRequest, match="another one than was submitted"):
        house.admission.deploy_service(another)
    assert house.admission.deploy_service(obj).service.entrypoint.folder.num_files == 2
    house.cluster.config_maps = {}
    assert house.admission.deploy_service(obj).service.revision == 1


def test_artifacts_in_a_store_are_listed_hashed_and_sent(platform, tmp_path):
    house = House(platform, tmp_path / "store")
    kept = WorkloadStore(house.store, WorkloadId("fit-1"))
    kept.publish_artifact("model.safetensors", b"weights", 1, 5)
    (tmp_path / "loss.png").write_bytes(b"plot")
    kept.publish_artifact("plots/loss.png", tmp_path / "loss.png", 1, 5)
    found = platform.source_store.artifacts(WorkloadId("fit-1"), with_digests=True)
    assert [(each.name, each.num_bytes, each.sha256) for each in found] == [
        ("model.safetensors", 7, sha256(b"weights")),
        ("plots/loss.png", 4, sha256(b"plot")),
    ]
    file, num_bytes = platform.source_store.open_artifact(WorkloadId("fit-1"), "plots/loss.png")
    with file:
        assert (file.read(), num_bytes) == (b"plot", 4)
    with pytest.raises(NotFound, match="has no artifact 'x'"):
        platform.source_store.open_artifact(WorkloadId("fit-1"), "x")
    assert not list(platform.state_dir.glob(".artifact-*"))
