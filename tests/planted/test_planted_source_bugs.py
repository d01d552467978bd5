"""What the tests are worth: bugs are planted in the source, and the test that is named beside each must find it.

The table is kits.planted_bugs. Each bug is planted in a copy of the package, which stands before the real one on the
path of the test's process. CI runs a fixed part of them with the rest of the slow lane; all are `make planted`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kits.planted_bugs import PLANTED_BUGS, PlantedBug
from kits.simulation.sweeps import sampled

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code where tests ran and one failed; anything else is no verdict


def of_what(bug: PlantedBug) -> str:
    return bug.what.replace(" ", "-")


@pytest.mark.parametrize("bug", PLANTED_BUGS, ids=of_what)
def test_the_text_that_is_replaced_stands_there_once(bug: PlantedBug) -> None:
    assert (ROOT / bug.file).read_text(encoding="utf-8").count(bug.old) == 1
    assert (ROOT / bug.test.partition("::")[0]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("bug", sampled(PLANTED_BUGS), ids=of_what)
def test_a_planted_bug_is_found(bug: PlantedBug, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / bug.file
    file.write_text(file.read_text(encoding="utf-8").replace(bug.old, bug.new), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-m", "slow or not slow", "--timeout", "90", "--basetemp", str(tmp_path / "t"), bug.test),
        ],
        cwd=ROOT,
        env=without_coordinates(os.environ) | {"PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == FAILED, done.stdout[-3000:] + done.stderr[-1000:]
    assert "\nFAILED " in done.stdout, done.stdout[-3000:]
    print(next(line for line in done.stdout.splitlines() if line.startswith("FAILED ")))


def without_coordinates(environment: os._Environ[str]) -> dict[str, str]:
    """The environment without what pytest and its workers tell each other."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
