"""A job's objects: which states are whole, the model's file made of them, and what is left when the job has ended."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kits.service.sent_folders import folder_of_tree, sent_tree
from springtide.backends.functions.shell.notes import CoordinatorFiles, NotedInvocation, Notes, read_status
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.functions import Usage
from springtide.core.wire.functions import Keys, Place, StageState
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.runtime.functions.source import user_source
from springtide.storage.folders.contents import ContentDirectory, write_archive
from springtide.storage.folders.copies import make_copy
from springtide.storage.folders.tree import folder_name
from springtide.storage.frames import decode, encode, tensor_of
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.artifacts import fetch_code


@pytest.fixture
def objects(tmp_path: Path) -> JobObjects:
    return JobObjects(open_store(f"file://{tmp_path}/store"), Keys("jobs/j"))


def save(objects: JobObjects, step: int, stage: int, layers: tuple[int, int], *, is_torn: bool = False) -> None:
    key = objects.keys.state(step, stage)
    values = np.full(2, float(10 * step + stage), dtype=np.float32)
    data = encode({f"model/{stage}.weight": tensor_of(values), "optimizer/m": tensor_of(values)})
    objects.store.put(key, data)
    meta = StageState(
        stage=stage,
        step=step,
        num_seen=step,
        key=key,
        num_bytes=len(data),
        sha256="",
        first_layer=layers[0],
        end_layer=layers[1],
    )
    if not is_torn:
        objects.store.put(objects.keys.state_meta(step, stage), msgspec.json.encode(meta))


def test_the_newest_whole_state_is_found_and_newer_parts_named(objects: JobObjects) -> None:
    assert objects.find_states(4).step == 0
    for step in (2, 4):
        save(objects, step, 0, (0, 2))
        save(objects, step, 1, (2, 4))
    save(objects, 6, 0, (0, 2))
    save(objects, 6, 1, (2, 4), is_torn=True)
    found = objects.find_states(4)
    assert found.step == 4
    assert [meta.stage for meta in found.metas] == [0, 1]
    assert all("000000006" in key for key in found.torn)
    assert len(found.torn) == 3


def test_a_step_of_which_not_all_is_known_is_done_again(objects: JobObjects) -> None:
    for step in (2, 4, 6):
        save(objects, step, 0, (0, 4))
    assert objects.find_states(4).step == 6
    assert objects.find_states(4, newest=5).step == 4
    assert len(objects.find_states(4, newest=5).torn) == 2
    assert objects.find_states(4, newest=9).step == 6
    # There is no earlier one: better with a gap than from the beginning.
    assert objects.find_states(4, newest=1).step == 6
    # Where nothing has been removed yet, the beginning is earlier than all of them.
    anew = objects.find_states(4, newest=1, may_begin_anew=True)
    assert (anew.step, anew.metas) == (0, ())
    assert objects.find_states(4, newest=5, may_begin_anew=True).step == 4


def test_parts_of_two_cuts_are_no_state(objects: JobObjects) -> None:
    save(objects, 3, 0, (0, 1))
    save(objects, 3, 1, (2, 4))
    assert objects.find_states(4).step == 0
    save(objects, 3, 1, (1, 4))
    assert objects.find_states(4).step == 3
    assert objects.find_states(5).step == 0


def test_the_model_s_file_has_the_user_s_names_alone(objects: JobObjects, tmp_path: Path) -> None:
    save(objects, 2, 0, (0, 2))
    save(objects, 2, 1, (2, 4))
    path = objects.assemble(objects.find_states(4), tmp_path / "artifacts")
    tensors = decode(path.read_bytes()).tensors
    assert sorted(tensors) == ["0.weight", "1.weight"]
    assert tensors["1.weight"].array().tolist() == [21.0, 21.0]
    with pytest.raises(StorageError, match="hold no model"):
        objects.assemble(objects.find_states(9), tmp_path / "artifacts")


def test_a_job_that_succeeded_leaves_nothing_and_another_its_states(objects: JobObjects) -> None:
    keys = objects.keys
    for key in (keys.control, keys.job, keys.bundle, keys.left(Place(0, 0), 1), f"{keys.wire(1, 1, 3)}/x"):
        objects.store.put(key, b"1")
    save(objects, 2, 0, (0, 2))
    objects.clear(keeps_states=True)
    left = objects.store.keys("jobs/j/")
    assert {key.split("/")[2] for key in left} == {"control", "job", "bundle", "state"}
    objects.clear(keeps_states=False)
    assert objects.store.keys("jobs/j/") == []


def test_what_travels_is_swept_where_it_is(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/parameters"
    objects = JobObjects(open_store(f"file://{tmp_path}/store"), Keys("jobs/j"), url)
    parameters = open_store(url)
    prefix = objects.keys.wire(1, 1, 3)
    parameters.put(f"{prefix}/activations", b"1")
    objects.store.put(objects.keys.left(Place(0, 0), 1), b"1")
    objects.delete((), ("jobs/j/wire/1.1/", "jobs/j/left/"))
    assert parameters.keys("jobs/j/") == []
    assert objects.store.keys("jobs/j/") == []


def test_the_code_is_shipped_as_it_stands(objects: JobObjects, tmp_path: Path) -> None:
    source = tmp_path / "task.py"
    source.write_text("x = 1\n")
    job = TrainingJob(job_id=WorkloadId("j"), name="j", entrypoint=Entrypoint(source_path=str(source)))
    objects.put_job(job)
    fetch_code(objects.store, objects.store.get(objects.keys.bundle), tmp_path / "there")
    assert (tmp_path / "there" / "task.py").read_text() == "x = 1\n"
    assert msgspec.json.decode(objects.store.get(objects.keys.job), type=TrainingJob) == job
    another = JobObjects(objects.store, Keys("jobs/another"))
    another.put_job(job)
    assert len([key for key in objects.store.keys("artifacts/") if not key.endswith(".mark")]) == 1
    source.unlink()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        objects.put_job(job)


def test_the_folder_of_a_job_is_shipped_whole_from_its_copy_or_its_archive(objects: JobObjects, tmp_path: Path) -> None:
    contents = ContentDirectory(tmp_path / "contents")
    files = {"pkg/task.py": b"x = 1\n", "pkg/data.csv": b"1,2\n", "weights.bin": b"w"}
    tree = sent_tree(contents, files)
    folder = folder_of_tree(tree, "pkg/task.py", "pkg")
    make_copy(tree, contents.open, tmp_path / "copy")
    write_archive(contents.open, tree, tmp_path / "folder.zip")
    objects.store.put(f"workloads/j/{folder_name(folder)}", (tmp_path / "folder.zip").read_bytes())
    for place in (str(tmp_path / "copy/pkg/task.py"), "workloads/j/source/task.py"):
        entrypoint = Entrypoint(source_path=place, folder=folder)
        objects.put_job(TrainingJob(job_id=WorkloadId("j"), name="j", entrypoint=entrypoint))
        began_in = os.getcwd()
        with user_source(objects.store, objects.keys) as source:
            assert {path: (source.root / path).read_bytes() for path in files} == files
            assert source.path == str(source.root / "pkg/task.py")
            assert os.getcwd() == str(source.root / "pkg")
        assert os.getcwd() == began_in
    # Both are the same bundle.
    assert len([key for key in objects.store.keys("artifacts/") if not key.endswith(".mark")]) == 1


def test_records_that_are_no_records_are_refused(objects: JobObjects) -> None:
    assert objects.read_control() is None
    assert objects.read_report(Place(0, 0), 1) is None
    objects.store.put(objects.keys.control, b"{")
    with pytest.raises(StorageError, match="control record is unreadable"):
        objects.read_control()


def test_notes_outlive_their_writer(tmp_path: Path) -> None:
    files = CoordinatorFiles(tmp_path, "j")
    assert files.read() == Notes()
    notes = Notes(
        used_incarnations=7,
        usage=Usage(num_puts=3),
        invocations=(NotedInvocation(incarnation=7, memory_mb=1024, invoked_at_s=1.5),),
    )
    files.write(notes)
    assert CoordinatorFiles(tmp_path, "j").read() == notes
    (tmp_path / "functions-notes.json").write_text("{")
    assert files.read() == Notes()
    assert read_status(tmp_path) is None


def test_losses_go_on_where_they_ended(tmp_path: Path) -> None:
    files = CoordinatorFiles(tmp_path, "j")
    assert files.last_loss() is None
    files.add_losses([(1, 0.5, 8), (2, 0.25, 8)])
    assert CoordinatorFiles(tmp_path, "j").last_loss() == (2, 0.25, 8)


def test_logs_hold_no_line_twice(tmp_path: Path) -> None:
    files = CoordinatorFiles(tmp_path, "j")
    files.add_lines("0.1", ["(1) step 3/9"])
    files.add_tail(Place(0, 1), 1, "hello\n\nstage 0 replica 1 step 3/9\n")
    assert (tmp_path / "logs" / "j.0.1.log").read_text() == "(1) step 3/9\n(1) hello\n"
