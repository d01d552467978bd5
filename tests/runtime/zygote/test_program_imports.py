"""What is imported ahead of a program, by its text; nothing where the import could notice that it came first."""

from __future__ import annotations

import pytest

from springtide.core.workload import Entrypoint, JobFolder
from springtide.runtime.zygote.program_imports import imports_of


def names(tmp_path, text, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    (tmp_path / "program.py").write_text(text)
    entrypoint = Entrypoint(source_path=str(tmp_path / "program.py"), kind="script")
    return imports_of(entrypoint, "").names


def test_the_names_of_libraries_are_found_in_the_program_and_its_own_files(tmp_path):
    text = "import os, torch\nimport lightning as L\nfrom model import Net\n"
    model = "import numpy\n\ndef make():\n    from transformers import Trainer, GPT2Config\n"
    assert names(tmp_path, text, model=model) == (
        ("lightning", ""),
        ("transformers", "GPT2Config"),
        ("transformers", "Trainer"),
    )
    assert names(tmp_path, "import torch") == ()
    assert names(tmp_path, "import lightning\nthis is no Python") == ()


def test_what_an_accelerator_imports_later_is_imported_ahead_too(tmp_path):
    assert names(tmp_path, "from accelerate import Accelerator") == (
        ("accelerate", "Accelerator"),
        ("torch._dynamo", ""),
    )


def test_relative_imports_are_followed(tmp_path):
    (tmp_path / "pack" / "deep").mkdir(parents=True)
    for place in ("pack", "pack/deep"):
        (tmp_path / place / "__init__.py").touch()
    (tmp_path / "pack" / "deep" / "a.py").write_text("from .. import b")
    (tmp_path / "pack" / "b.py").write_text("import accelerate")
    assert names(tmp_path, "import pack.deep.a") == (("accelerate", ""),)


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['HF_HOME'] = '/tmp'",
        "os.environ.setdefault('HF_HOME', '/tmp')",
        "os.environ |= {'HF_HOME': '/tmp'}",
        "variables = os.environ",
        "os.putenv('HF_HOME', '/tmp')",
        "del os.environ['HF_HOME']",
        "from os import environ as e",
        "sys.path.insert(0, 'src')",
        "from sys import path",
        "sys.modules.pop('accelerate')",
        "import unheard_of_patches",
    ],
)
def test_nothing_is_imported_ahead_of_a_program_that_changes_what_the_library_sees(tmp_path, change):
    text = f"import os, sys\n{change}\nimport accelerate\n"
    assert names(tmp_path, text) == ()
    # Also where a file of its own does so.
    assert names(tmp_path, "import before\nimport accelerate", before=f"import os, sys\n{change}") == ()


@pytest.mark.parametrize(
    "use", ["os.environ['HOME']", "os.environ.get('HOME')", "'HOME' in os.environ", "{**os.environ}", "sys.argv"]
)
def test_reading_the_environment_changes_nothing(tmp_path, use):
    assert names(tmp_path, f"import os, sys\nprint({use})\nimport accelerate") == (("accelerate", ""),)


def test_a_file_of_the_librarys_name_is_the_programs_own(tmp_path):
    assert names(tmp_path, "import lightning", lightning="Trainer = 1") == ()
    (tmp_path / "accelerate").mkdir()
    # A folder without __init__.py gives way to an installed package.
    assert names(tmp_path, "import accelerate") == (("accelerate", ""),)
    (tmp_path / "accelerate" / "__init__.py").touch()
    assert names(tmp_path, "import accelerate") == ()


def test_what_lies_in_all_folders_of_the_program_is_told(tmp_path):
    for place in ("jobs", "src", "elsewhere"):
        (tmp_path / place).mkdir()
    (tmp_path / "jobs" / "train.py").write_text("import accelerate")
    (tmp_path / "src" / "datasets.py").touch()
    (tmp_path / "Rich-13.0.dist-info").mkdir()
    (tmp_path / "elsewhere" / "tokenizers.py").touch()
    folder = JobFolder(sha256="0", path="jobs/train.py")
    entrypoint = Entrypoint(source_path=str(tmp_path / "jobs" / "train.py"), kind="script", folder=folder)
    found = imports_of(entrypoint, str(tmp_path / "elsewhere"))
    assert found.modules == {"train", "datasets", "rich"}
    assert found.folders == {"jobs", "src", "elsewhere"}
    alone = Entrypoint(source_path=str(tmp_path / "jobs" / "train.py"), kind="script")
    assert imports_of(alone, str(tmp_path / "elsewhere")).modules == {"train", "tokenizers"}


def test_a_folder_that_is_too_large_or_gone_is_not_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.runtime.zygote.program_imports._MAX_ENTRIES", 2)
    assert names(tmp_path, "import accelerate", a="", b="") == ()
    assert imports_of(Entrypoint(source_path=str(tmp_path / "no" / "file.py")), "").names == ()
