"""`st.model_path`: the newest model of a name, inside of a replica and without any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import springtide as st
from springtide.core.errors import InvalidRequest


def _saved(state: Path, job_id: str, age_s: int) -> Path:
    path = state / "workloads" / job_id / "artifacts" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))
    return path


@pytest.mark.parametrize("folder", ["source", "source/3c773d4b", "folder", "folder/scripts"])
def test_model_path_inside_a_replica_is_the_newest_on_disk(folder: str, tmp_path: Path) -> None:
    _saved(tmp_path, "digits-1", 50)
    newest = _saved(tmp_path, "digits-2", 10)
    _saved(tmp_path, "digits-big-3", 0)
    shipped = tmp_path / "workloads" / "service-1" / folder / "serve.py"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("import springtide as st\nfound = st.model_path('digits')\n", encoding="utf-8")
    namespace: dict[str, Any] = {"__file__": str(shipped)}
    exec(compile(shipped.read_text(encoding="utf-8"), str(shipped), "exec"), namespace)
    assert namespace["found"] == str(newest)


def test_model_path_says_what_to_do_when_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_STATE", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"ctx\.save"):
        st.model_path("digits")
