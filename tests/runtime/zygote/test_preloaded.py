"""Workers that are forked with their libraries, by a real zygote. The libraries are doubles, found before installed
ones."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from kits.runtime.runtime_plane import Plane, ZygoteProcess, make_job
from springtide.core.wire.workers import Failed, WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId, SecretSet, TrainingJob, WorkloadId
from springtide.runtime.zygote.messages import Imported
from springtide.runtime.zygote.preloaded import Asked, LibraryProcess
from springtide.runtime.zygote.program_imports import ProgramImports

ACCELERATE = """
import os, random, sys
PID = os.getpid()
HOME = os.environ.get("ACCELERATE_HOME")
random.random()
LOG = sys.stderr
try:
    import accelerate_extra as EXTRA
except ImportError:
    EXTRA = None
"""
PROGRAM = """
import json, os, random
from accelerate import EXTRA, HOME, LOG, PID
LOG.write("said by the library")
def fit(ctx):
    raise RuntimeError(json.dumps({
        "is_ahead": PID != os.getpid(), "parent": os.getppid(), "home": HOME, "extra": EXTRA is not None,
        "drawn": random.random(), "unread": os.environ.get("UNREAD"),
    }))
"""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    directory = tmp_path_factory.mktemp("zygote")
    doubles = directory / "doubles"
    doubles.mkdir()
    (doubles / "accelerate.py").write_text(ACCELERATE)
    (doubles / "lightning.py").write_text(
        f"{ACCELERATE}\nimport threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (doubles / "transformers.py").write_text("raise OSError('no such library')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(doubles))
        zygote = ZygoteProcess(directory)
    yield zygote
    zygote.close()


@pytest.fixture
def run(zygote, tmp_path):
    """A function that runs the program of one worker to its end, and returns what that says."""

    def run(source=PROGRAM, files=None, **fields):
        directory = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        plane = Plane(zygote.path, directory, make_job(directory, source, **fields))
        plane.job = msgspec.structs.replace(
            plane.job, entrypoint=msgspec.structs.replace(plane.job.entrypoint, import_root=str(directory))
        )
        try:
            plane.start("a")
            plane.wait(lambda: plane.of(Failed, "a"), "Failed")
            plane.wait_exit("a", code=1)
            assert "said by the library" in plane.logs()
            (told,) = plane.of(Failed, "a")
        finally:
            plane.close()
        text = told.error
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    return run


def library_processes(zygote):
    """The ids of its processes with libraries."""
    children = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"springtide libraries" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_worker_has_its_library_from_before_and_is_the_zygotes_child(zygote, run):
    first, second = run(), run(env={"UNREAD": "2"})
    assert first["is_ahead"]
    assert second["is_ahead"]
    assert first["parent"] == second["parent"] == zygote.process.pid
    # The library has not read this variable.
    assert second["unread"] == "2"
    (pid,) = library_processes(zygote)
    # The library has drawn a random number, which changes nothing for the program.
    alone = run(files={"accelerate_extra.py": ""})
    assert not alone["is_ahead"]
    assert first["drawn"] == alone["drawn"]
    assert library_processes(zygote) == [pid]


@pytest.mark.slow
def test_the_library_sees_the_jobs_own_variables(run):
    assert run()["home"] is None
    assert run(env={"ACCELERATE_HOME": "/a"})["home"] == "/a"
    assert run(env={"ACCELERATE_HOME": "/b"})["home"] == "/b"
    assert run()["home"] is None
    changing = f"import os\nos.environ['ACCELERATE_HOME'] = '/c'\n{PROGRAM}"
    assert run(changing)["home"] == "/c"


@pytest.mark.slow
def test_the_jobs_own_files_go_before_installed_packages(run):
    run()
    own = f"{ACCELERATE}\nHOME = 'own'"
    assert run(files={"accelerate.py": own})["home"] == "own"
    # The library looks for this one when it is imported.
    assert run(files={"accelerate_extra.py": ""})["extra"]
    assert run(files={"other.py": ""})["is_ahead"]


@pytest.mark.slow
def test_killed_processes_with_libraries_are_replaced(zygote, run):
    run()
    for _ in range(2):
        killed = library_processes(zygote)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert run()["parent"] == zygote.process.pid
        assert run()["is_ahead"]
        assert not set(killed) & set(library_processes(zygote))


@pytest.mark.slow
def test_a_library_that_starts_a_thread_or_cannot_be_imported_is_left_to_workers(run):
    assert not run(PROGRAM.replace("accelerate", "lightning"))["is_ahead"]
    assert not run(f"try:\n    import transformers\nexcept OSError:\n    pass\n{PROGRAM}")["is_ahead"]


# --- which workers a process is forked for --------------------------------------------------------------------------


def verdict(*, imports=None, secrets=(), env=None, environment=None):
    ours, theirs = socket.socketpair()
    theirs.close()
    facts = Imported(
        found=frozenset({"accelerate", "yaml"}), missing=frozenset({"rich"}), variables=frozenset({"HF_HOME"})
    )
    variables = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "NAME": "first"}
    process = LibraryProcess(0, ours, frozenset({("accelerate", "")}), variables, 0.0, facts)
    job = TrainingJob(
        job_id=WorkloadId("job"),
        name="job",
        entrypoint=Entrypoint(source_path="job.py"),
        env=env or {},
        secrets=SecretSet(names=secrets, reference="") if secrets else None,
    )
    spec = WorkerSpec(
        workload=job,
        replica_id=ReplicaId("a"),
        generation=1,
        control_address="",
        token="",
        work_dir="",
        log_path="",
        environment={"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"} if environment is None else environment,
    )
    try:
        return process.verdict(Asked(spec, imports or ProgramImports(names=(("accelerate", ""),))))
    finally:
        ours.close()


def test_variables_that_were_read_or_that_other_languages_read_must_be_the_same(monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    assert verdict() == "fits"
    assert verdict(env={"NAME": "second", "MY_OWN": "1"}) == "fits"
    assert verdict(env={"HF_HOME": "/tmp"}) == "other"
    assert verdict(env={"TOKENIZERS_PARALLELISM": "true"}) == "other"
    assert verdict(environment={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0"}) == "other"
    # As many GPUs, whichever these are.
    assert verdict(environment={"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "2,3"}) == "other"
    assert verdict(environment={"OMP_NUM_THREADS": "2"}) == "other"


def test_no_process_with_libraries_has_secrets(monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    assert verdict(secrets=("HF_TOKEN",)) == "fits"
    assert verdict(secrets=("HF_TOKEN", "HF_HOME")) == "never"
    assert verdict(secrets=("LD_PRELOAD",)) == "never"


def test_no_file_of_the_program_has_a_name_that_the_import_looked_for():
    names = (("accelerate", ""),)
    for name in ("yaml", "rich"):
        assert verdict(imports=ProgramImports(names=names, modules=frozenset({name}))) == "never"
    # A plain folder gives way to an installed package, and is one where none is installed.
    assert verdict(imports=ProgramImports(names=names, folders=frozenset({"yaml"}))) == "fits"
    assert verdict(imports=ProgramImports(names=names, folders=frozenset({"rich"}))) == "never"
    assert verdict(imports=ProgramImports(names=(("lightning", ""),))) == "other"
