"""Versions that are not tested are named, and a torch that something else has replaced."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from springtide.cli.doctor.versions import TESTED, check_library_versions, check_torch_version, pinned_torch

ROOT = Path(__file__).parents[3]


def install(folder: Path, name: str, version: str, *, requested: bool = False) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    if requested:
        (info / "REQUESTED").touch()


def test_the_tested_torch_is_the_one_that_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (pin,) = [re.split("==", line)[1] for line in extras["runtime"] if line.startswith("torch")]
    assert (pin,) == TESTED["torch"]
    assert pinned_torch() == pin


def test_a_tested_torch_is_well_whatever_its_build() -> None:
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130"):
        assert (check_torch_version(version).verdict, check_torch_version(version).text) == ("ok", version)


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (True, "2.99.0 is not tested; tested: 2.13.0"),
        (False, "springtide[runtime] pins 2.13.0: the installation of another package has replaced it"),
    ],
)
def test_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: bool, words: str) -> None:
    install(tmp_path, "torch", "2.99.0", requested=requested)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    check = check_torch_version("2.99.0")
    assert check.verdict == "warn"
    assert words in check.text
    assert "pip install 'springtide[runtime]'" in check.mend


def test_libraries_are_named_where_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "transformers", TESTED["transformers"][-1])
    install(tmp_path, "accelerate", "0.1.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = {check.name: check for check in check_library_versions()}
    assert found["transformers"].verdict == "ok"
    assert found["accelerate"].verdict == "warn"
    assert "0.1.0 is not tested; tested: 1.15.0" in found["accelerate"].text
    assert "torch" not in found
    monkeypatch.setattr(sys, "path", [])
    assert list(check_library_versions()) == []
