"""`springtide simulate --study dilu-...`: which module plays it, what it is given, and what does not belong to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result

from springtide_studies.commands.study import SHARING_STUDIES

Run = Callable[..., Result]


def run_study(*, data: Path | None, seed: int, is_small: bool, on_progress: Any) -> dict[str, Any]:
    on_progress("part", 1, 2)
    return {"study": "a stand-in", "data": str(data), "seed": seed, "is_small": is_small}


def study_text(answer: dict[str, Any]) -> str:
    return f"the table of seed {answer['seed']}"


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for study in SHARING_STUDIES:
        name = f"springtide_studies.dilu.{study.removeprefix('dilu-')}"
        module = ModuleType(name)
        module.__dict__.update(run_study=run_study, study_text=study_text)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("study", SHARING_STUDIES)
def test_each_study_is_played_by_its_module(springtide: Run, tmp_path: Path, study: str) -> None:
    done = springtide("simulate", "--study", study, "--data", str(tmp_path), "--seed", "7", "--small", "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"study": "a stand-in", "data": str(tmp_path), "seed": 7, "is_small": True}
    output = tmp_path / "out.json"
    done = springtide("simulate", "--study", study, "--json", str(output))
    assert done.stdout.startswith("the table of seed 0\n")
    assert json.loads(output.read_text()) == {"study": "a stand-in", "data": "None", "seed": 0, "is_small": False}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--study", "dilu-packing", "--data", "/nowhere/at/all"), "there is no folder '/nowhere/at/all'"),
        (("--study", "dilu-packing", "--days", "2"), "leave --days out"),
        (("--study", "dilu-packing", "--html", "out.html"), "leave --html out"),
        (("--study", "dilu-packing", "--policy", "fifo"), "leave --policy out"),
        (("--study", "loaning", "--data", "."), "--data belongs to a study of shared devices"),
        (("--trace", "generated:2", "--cluster", "1x1", "--policy", "fifo", "--small"), "--small belongs to a study"),
    ],
)
def test_what_does_not_belong_to_it_is_refused(springtide: Run, asked: tuple[str, ...], sentence: str) -> None:
    done = springtide("simulate", *asked)
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.stderr.split())
