"""The product's wheel alone, in an environment that has its dependencies and nothing of this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from kits.releases.installed import ROOT, build_wheels, install

pytestmark = pytest.mark.slow

MEND = "comes with springtide[studies]: pip install 'springtide[studies]'"
IMPORT_ALL = """
import importlib, pkgutil, sys
import springtide
for module in pkgutil.walk_packages(springtide.__path__, "springtide."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert springtide.__file__.startswith(sys.prefix), springtide.__file__
print(sum(name.startswith("springtide.") for name in sys.modules))
print([name for name in sys.modules if name.startswith("springtide_studies")])
"""


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.removeprefix(f"{folder}/") for name in listed.stdout.split()}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"), ROOT, ROOT / "studies")


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheels["springtide"], tmp_path_factory.mktemp("installed"))


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=python.parent, env=environment, capture_output=True, text=True, check=False)


def test_wheels_hold_every_file_of_their_sources(wheels: dict[str, Path]) -> None:
    product = set(zipfile.ZipFile(wheels["springtide"]).namelist())
    studies = set(zipfile.ZipFile(wheels["springtide_studies"]).namelist())
    assert not tracked("src") - product
    assert not tracked("studies/src") - studies
    native = {f"springtide/backends/sharing/gpu/native/{name}" for name in tracked("native")}
    assert {name for name in native if "/native/src/" in name or "/native/include/" in name} <= product
    assert not {name for name in product if name.startswith("springtide_studies/")}
    assert not {name for name in studies if name.startswith("springtide/")}


def test_every_module_of_the_product_imports_without_the_studies(installed: Path) -> None:
    ran = run(installed, "-c", IMPORT_ALL)
    assert ran.returncode == 0, ran.stderr
    count, of_studies = ran.stdout.strip().splitlines()[-2:]
    assert int(count) > 500
    assert of_studies == "[]"


def test_the_commands_work_and_say_how_to_get_the_studies(installed: Path) -> None:
    listed = run(installed, "-m", "springtide", "bench", "--list", "--json")
    assert len(json.loads(listed.stdout)) == 25
    for arguments, what in (
        (["bench", "jct"], "bench jct"),
        (["simulate", "--study", "loaning"], "study loaning"),
        (["simulate", "--trace", "generated:3", "--cluster", "1x2", "--policy", "sia"], "the policy sia"),
    ):
        refused = run(installed, "-m", "springtide", *arguments)
        assert refused.returncode == 2
        assert f"{what} {MEND}" in refused.stderr
    policies = json.loads(run(installed, "-m", "springtide", "policies", "--json").stdout)
    assert [entry["name"] for entry in policies if entry["kind"] == "policy"] == [
        *("springtide", "elastic", "edf", "fifo", "fapes", "goodput"),
    ]
    asked = ["--trace", "generated:30", "--cluster", "4x4", "--policy", "springtide,fifo", "--json", "-"]
    played = run(installed, "-m", "springtide", "simulate", *asked)
    assert set(json.loads(played.stdout)["policies"]) == {"springtide", "fifo"}
    assert "python" in run(installed, "-m", "springtide", "doctor").stdout
