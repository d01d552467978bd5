"""Where a job works and what it imports, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from springtide.core.workload import Entrypoint, JobFolder

PROGRAM = """
import json, os, sys
from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint
from springtide.runtime.process.job_folder import enter_folder
try:
    enter_folder(decode_json(sys.argv[1], Entrypoint))
    import helper
    print(json.dumps({"cwd": os.getcwd(), "pwd": os.environ.get("PWD"), "helper": helper.__file__, "path": sys.path}))
except InvalidRequest as error:
    print(json.dumps({"error": str(error)}))
"""


def entered(entrypoint: Entrypoint, began_in: Path) -> dict[str, object]:
    text = msgspec.json.encode(entrypoint).decode()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, text], cwd=began_in, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_job_works_and_imports_in_its_copy_and_not_where_its_process_began(tmp_path: Path) -> None:
    copy, began_in = tmp_path / "folder", tmp_path / "began"
    for folder in (copy / "scripts" / "here", copy / "src", began_in):
        folder.mkdir(parents=True)
    (began_in / "helper.py").write_text("")
    (copy / "scripts" / "helper.py").write_text("")
    folder = JobFolder(sha256="0" * 64, path="scripts/train.py", directory="scripts/here")
    entrypoint = Entrypoint(source_path=str(copy / "scripts/train.py"), kind="script", folder=folder)
    found = entered(entrypoint, began_in)
    assert found["cwd"] == found["pwd"] == str(copy / "scripts/here")
    assert found["helper"] == str(copy / "scripts/helper.py")
    path = found["path"]
    assert isinstance(path, list)
    assert path[:3] == [str(copy / "scripts"), str(copy), str(copy / "src")]
    assert not {"", str(began_in)} & set(path)


def test_a_job_without_a_folder_stays_where_its_process_began(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    found = entered(Entrypoint(source_path="/elsewhere/train.py", kind="script"), tmp_path)
    assert (found["cwd"], found["helper"]) == (str(tmp_path), str(tmp_path / "helper.py"))


def test_a_copy_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = JobFolder(sha256="0" * 64, path="train.py")
    entrypoint = Entrypoint(source_path=str(tmp_path / "gone/train.py"), kind="script", folder=folder)
    assert "cannot be entered (No such file or directory); submit the job again" in str(entered(entrypoint, tmp_path))
