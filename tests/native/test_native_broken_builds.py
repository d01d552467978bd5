"""A test that cannot fail proves nothing: each build here is broken on purpose, and the test named must fail on it.

Every module of kits.native.broken has a tuple BROKEN: what is broken in words, the file, the text that stands there
once, the text put in its place, and the test that must see it. The stub driver and the programs are those of the whole
tree. The first of each file is built in the slow lane; all of them, which takes a quarter of an hour, by `make broken`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kits.native.broken_builds import ALL_BROKEN, BROKEN_BY_FILE, Broken
from kits.native.native_build import BROKEN_TREE, ROOT, SHARED_BUILD, Native

SANITIZED = False
LIMIT_S = 240.0
FAILED = 1  # pytest's exit code where tests ran and one failed; anything else is no verdict


MARKED = [
    pytest.param(broken, marks=pytest.mark.slow if broken is of_file[0] else pytest.mark.broken)
    for of_file in BROKEN_BY_FILE
    for broken in of_file
]


def run_tests(
    tests: Sequence[str], environment: dict[str, str], limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    # The path of a socket has at most 107 characters: a test's folder within another test's would be too deep.
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", f"{folder}/t"]
        command += ["-m", "slow or not slow", "-k", "not sanitized", "--timeout", "90", *tests]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )


def environment_of(tree: Path, native: Native) -> dict[str, str]:
    around = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    python_path = os.pathsep.join([str(tree / "src"), around.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return around | {BROKEN_TREE: str(tree), SHARED_BUILD: str(native.shared), "PYTHONPATH": python_path}


def copy_tree(target: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "native", target / "native", ignore=ignored)
    shutil.copytree(ROOT / "src", target / "src", ignore=ignored)
    return target


@pytest.mark.parametrize("broken", ALL_BROKEN, ids=lambda broken: broken.what.replace(" ", "-"))
def test_the_text_that_is_broken_stands_there_once(broken: Broken) -> None:
    assert (ROOT / broken.file).read_text(encoding="utf-8").count(broken.old) == 1
    assert broken.new != broken.old


@pytest.mark.parametrize("broken", MARKED, ids=lambda broken: broken.what.replace(" ", "-"))
def test_a_broken_build_is_found_out(broken: Broken, native: Native, tmp_path: Path) -> None:
    _ = native.stub_dir
    tree = copy_tree(tmp_path / "tree")
    file = tree / broken.file
    file.write_text(file.read_text(encoding="utf-8").replace(broken.old, broken.new), encoding="utf-8")
    done = run_tests(["-x", broken.test], environment_of(tree, native))
    # Failed, not merely unable to begin.
    is_found_out = done.returncode == FAILED and "\nFAILED " in done.stdout
    assert is_found_out, done.stdout[-3000:] + done.stderr[-1000:]
    assert "could not compile" not in done.stdout, done.stdout[-3000:]


@pytest.mark.broken
@pytest.mark.timeout(1200)
def test_the_tests_named_pass_where_nothing_is_broken(native: Native, tmp_path: Path) -> None:
    """Else they would fail on a broken build for another reason than what is broken."""
    _ = native.stub_dir
    environment = environment_of(copy_tree(tmp_path / "tree"), native)
    tests = sorted({broken.test for broken in ALL_BROKEN})
    done = run_tests(tests, environment, limit_s=1100.0)
    assert done.returncode == 0, done.stdout[-3000:]
