"""The first process of a worker's container: what it reads, what it keeps, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from kits.service.sent_folders import folder_of_tree, sent_tree
from springtide.core.errors import InvalidRequest
from springtide.core.tokens import replica_token
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob, WorkloadId
from springtide.runtime.pod import PodLog, upload_output
from springtide.runtime.prestop import run_prestop
from springtide.runtime.process.exits import EXIT_UNFIT
from springtide.runtime.process.job_folder import hand_in_results
from springtide.runtime.process.pod_place import fetch_source, open_prestop, read_spec, write_termination_message
from springtide.storage.folders.contents import ContentDirectory, write_archive
from springtide.storage.folders.tree import folder_name
from springtide.storage.workloads.store import open_workload_store

SCRIPT = """
import os, sys
from pkg import helper
print("works in", os.getcwd(), "with", helper.VALUE, open("../data.txt").read())
"""


def make_spec(tmp_path, **fields):
    job = TrainingJob(
        job_id=WorkloadId("job"),
        name="job",
        entrypoint=Entrypoint(source_path="workloads/job/source/main.py", object_name="fit"),
        grace_s=7.0,
    )
    defaults = {
        "workload": job,
        "replica_id": ReplicaId("job.1"),
        "generation": 3,
        "control_address": "tcp://127.0.0.1:9",
        "token": "",
        "work_dir": str(tmp_path / "work"),
        "log_path": "",
        "ordered_at_s": 12.0,
        "store_url": f"file://{tmp_path}/objects",
    }
    return WorkerSpec(**{**defaults, **fields})


def environment_of(spec, tmp_path, **variables):
    (tmp_path / "key").write_text("abcd\n")
    return {
        "SPRINGTIDE_SPEC": msgspec.json.encode(spec).decode(),
        "SPRINGTIDE_KEY_FILE": str(tmp_path / "key"),
        "POD_IP": "10.0.0.7",
        **variables,
    }


def run(command, environment):
    return subprocess.run(
        [sys.executable, "-m", "springtide.runtime", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_spec_is_completed_by_what_only_the_container_knows(tmp_path):
    spec = read_spec(environment_of(make_spec(tmp_path), tmp_path))
    assert spec.token == replica_token("abcd", ReplicaId("job.1"))
    assert (spec.listen_host, spec.ordered_at_s) == ("10.0.0.7", 0.0)
    assert spec.log_path == f"{tmp_path}/work/logs/job.1.log"
    assert Path(spec.log_path).parent.is_dir()
    given = make_spec(tmp_path, listen_host="10.0.0.9")
    assert read_spec(environment_of(given, tmp_path)).listen_host == "10.0.0.9"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SPRINGTIDE_SPEC": ""}, "has no SPRINGTIDE_SPEC"),
        ({"SPRINGTIDE_SPEC": "{}"}, "is not the spec of a worker"),
        ({"SPRINGTIDE_KEY_FILE": ""}, "has no SPRINGTIDE_KEY_FILE"),
        ({"SPRINGTIDE_KEY_FILE": "/nowhere/key"}, "/nowhere/key cannot be read"),
    ],
)
def test_what_a_container_lacks_is_one_sentence(tmp_path, variables, words):
    with pytest.raises(InvalidRequest, match=words):
        read_spec(environment_of(make_spec(tmp_path), tmp_path, **variables))


def test_a_container_that_lacks_its_spec_ends_with_a_code_of_its_own_and_says_why(tmp_path):
    (tmp_path / "words").touch()
    ended = run("pod", {"SPRINGTIDE_SPEC": "", "SPRINGTIDE_TERMINATION_LOG": str(tmp_path / "words")})
    assert ended.returncode == EXIT_UNFIT
    assert "has no SPRINGTIDE_SPEC" in ended.stderr
    assert "has no SPRINGTIDE_SPEC" in (tmp_path / "words").read_text()


def test_a_source_that_is_not_in_the_store_ends_the_container_and_its_output_is_kept(tmp_path):
    (tmp_path / "words").touch()
    environment = environment_of(make_spec(tmp_path), tmp_path, SPRINGTIDE_TERMINATION_LOG=str(tmp_path / "words"))
    ended = run("pod", environment)
    assert ended.returncode == EXIT_UNFIT, ended
    sentence = "the store holds no source workloads/job/source/main.py of job"
    assert sentence in ended.stdout
    assert sentence in (tmp_path / "words").read_text()
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    assert sentence in store.read_log(ReplicaId("job.1")).decode()


def test_a_value_of_a_secret_is_in_no_output_of_a_container(tmp_path):
    (tmp_path / "words").touch()
    told = {"SPRINGTIDE_SECRETS": "TOKEN,NONE", "TOKEN": "workloads/job/source"}
    environment = environment_of(make_spec(tmp_path), tmp_path, SPRINGTIDE_TERMINATION_LOG=str(tmp_path / "words"))
    ended = run("pod", {**environment, **told})
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    for text in (ended.stdout, (tmp_path / "words").read_text(), store.read_log(ReplicaId("job.1")).decode()):
        assert "the store holds no source ***TOKEN***/main.py of job" in text
        assert "workloads/job/source" not in text


def test_the_source_comes_with_its_neighbours_and_they_can_be_imported(tmp_path):
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    store.put_source("main.py", b"import helper\n")
    store.put_source("helper.py", b"")
    fetched = fetch_source(read_spec(environment_of(make_spec(tmp_path), tmp_path)))
    entrypoint = fetched.workload.entrypoint
    assert entrypoint.source_path == f"{tmp_path}/work/source/main.py"
    assert entrypoint.import_root == f"{tmp_path}/work/source"
    assert sorted(path.name for path in (tmp_path / "work/source").iterdir()) == ["helper.py", "main.py"]


def with_folder(tmp_path, **fields):
    """A spec of a script in a folder, and the archive of that in the store."""
    contents = ContentDirectory(tmp_path / "contents")
    files = {"run.py": SCRIPT.encode(), "pkg/helper.py": b"VALUE = 7\n", "data.txt": b"data"}
    tree = sent_tree(contents, files, ["logs"])
    write_archive(contents.open, tree, tmp_path / "folder.zip")
    folder = folder_of_tree(tree, "run.py", "logs")
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    store.store.put_file(store.key(folder_name(folder)), tmp_path / "folder.zip")
    entrypoint = Entrypoint(source_path="workloads/job/source/run.py", kind="script", folder=folder)
    job = TrainingJob(job_id=WorkloadId("job"), name="job", entrypoint=entrypoint, elastic=False)
    return make_spec(tmp_path, workload=job, **fields)


def test_the_folder_comes_as_one_archive(tmp_path):
    fetched = fetch_source(read_spec(environment_of(with_folder(tmp_path), tmp_path)))
    entrypoint = fetched.workload.entrypoint
    root = tmp_path / "work/folder"
    assert (entrypoint.source_path, entrypoint.import_root) == (str(root / "run.py"), str(root))
    assert (root / "pkg/helper.py").read_bytes() == b"VALUE = 7\n"
    assert (root / "logs").is_dir()
    assert not list((tmp_path / "work").glob("*.zip"))


def test_a_folder_whose_archive_is_gone_or_another_one_ends_the_container(tmp_path):
    spec = with_folder(tmp_path)
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    [key] = store.store.keys(store.key("folder-"))
    store.store.delete([key])
    ended = run("pod", environment_of(spec, tmp_path))
    assert ended.returncode == EXIT_UNFIT, ended
    assert "the store holds no archive of the folder of job" in ended.stdout


def test_what_a_job_wrote_to_its_results_is_handed_in_when_it_succeeds(tmp_path, capsys):
    spec = read_spec(environment_of(with_folder(tmp_path), tmp_path))
    out = tmp_path / "work/artifacts"
    (out / "plots").mkdir(parents=True)
    (out / "plots/loss.png").write_bytes(b"plot")
    (out / "a name with spaces.txt").write_bytes(b"x")
    hand_in_results(spec, 3, 8)
    store = open_workload_store(f"file://{tmp_path}/objects", WorkloadId("job"))
    assert store.artifacts() == {"plots/loss.png": "workloads/job/artifacts/00000003-0000000008/plots/loss.png"}
    assert store.read_artifact("plots/loss.png") == b"plot"
    assert "a name with spaces.txt in SPRINGTIDE_OUT could not be handed in" in capsys.readouterr().err
    hand_in_results(msgspec.structs.replace(spec, store_url=""), 3, 8)


def test_the_newest_output_is_kept_within_its_bounds(tmp_path):
    log = PodLog(tmp_path / "log", limit_bytes=100)
    for number in range(50):
        log.write(f"line {number}\n".encode())
    kept = log.read()
    assert len(kept) <= 200
    assert kept.endswith(b"line 48\nline 49\n")
    assert log.last_line() == "line 49"
    log.write(b"\n  \n")
    assert log.last_line() == "line 49"
    log.close()
    empty = PodLog(tmp_path / "other")
    assert empty.last_line() == ""
    empty.close()


def test_output_is_uploaded_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.runtime.pod._UPLOAD_S", 0.05)
    hang = threading.Event()
    upload_output(make_spec(tmp_path), b"words", upload=lambda spec, output: hang.wait(60))
    hang.set()


def test_last_words_go_where_the_cluster_made_a_place_for_them(tmp_path):
    write_termination_message({"SPRINGTIDE_TERMINATION_LOG": str(tmp_path / "none")}, "bye")
    assert not (tmp_path / "none").exists()
    (tmp_path / "words").touch()
    write_termination_message({"SPRINGTIDE_TERMINATION_LOG": str(tmp_path / "words")}, "x" * 9999)
    assert len((tmp_path / "words").read_text()) == 2048


def test_a_hook_waits_until_the_worker_is_gone(tmp_path):
    deep = tmp_path / ("d" * 100)
    spec = make_spec(tmp_path, work_dir=str(deep / "work"))
    environment = environment_of(spec, tmp_path)
    listener = open_prestop(read_spec(environment))
    order = []

    def first_process():
        connection, _ = listener.accept()
        order.append("asked")
        order.append("gone")
        connection.close()

    thread = threading.Thread(target=first_process)
    thread.start()
    assert run_prestop(environment) == 0
    order.append("returned")
    thread.join()
    assert order == ["asked", "gone", "returned"]
    listener.close()


def test_a_hook_gives_up_after_the_workloads_grace(tmp_path, capsys):
    environment = environment_of(make_spec(tmp_path), tmp_path)
    listener = open_prestop(read_spec(environment))
    assert run_prestop(environment, grace_s=0.05) == 0
    assert "not ended within its grace of 0.05 s" in capsys.readouterr().err
    listener.close()
    assert run_prestop(environment, grace_s=0.05) == 1
    assert "no worker here" in capsys.readouterr().err


def test_a_hook_imports_next_to_nothing():
    program = (
        "import json, sys, springtide.runtime.__main__, springtide.runtime.prestop; "
        "print(json.dumps([name for name in ('torch', 'msgspec', 'numpy', 'obstore') if name in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []


def test_the_first_process_itself_has_neither_torch_nor_threads_of_a_store():
    program = (
        "import json, sys, threading, springtide.runtime.pod; "
        "loaded = [name for name in ('torch', 'safetensors', 'obstore') if name in sys.modules]; "
        "print(json.dumps([loaded, threading.active_count()]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[], 1]


def test_a_socket_of_the_past_does_not_stand_in_the_way(tmp_path):
    spec = read_spec(environment_of(make_spec(tmp_path), tmp_path))
    open_prestop(spec).close()
    listener = open_prestop(spec)
    assert isinstance(listener, socket.socket)
    listener.close()
