"""The programs of docs/bring-your-code.md, from the page's own text: plain ones alone, elastic ones with a resize."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.examples.terminal import EXAMPLES, Terminal
from kits.simulation.sweeps import only_in_full

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]
# By program: the library that it is a program of, and others that it needs.
_LIBRARIES = {
    "digits": ("lightning",),
    "points": ("lightning",),
    "causal": ("transformers", "accelerate"),
    "accelerated": ("accelerate",),
    "fabricated": ("lightning",),
}
PAGE = EXAMPLES.parent / "docs" / "bring-your-code.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each block of the page that begins with the name of its file."""
    found = tmp_path_factory.mktemp("code") / "project"
    found.mkdir()
    blocks = re.findall(r"(?m)^    # (\w+\.py)\n((?:    .*\n|\n)+)", PAGE.read_text(encoding="utf-8"))
    for name, text in blocks:
        (found / name).write_text(textwrap.dedent(text), encoding="utf-8")
    assert len(blocks) == 14
    return found


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    typed = Terminal(tmp_path_factory.mktemp("examples") / "state")
    typed.type("up", "--slots", "2", "--port", "0")
    try:
        yield typed
    finally:
        typed.type("down")


@pytest.mark.parametrize(
    ("name", "last_epoch"),
    [
        ("classifier", 2),
        ("language", 2),
        ("gan", 2),
        ("digits", 8),
        ("points", 4),
        ("causal", 4),
        ("accelerated", 6),
        ("fabricated", 5),
    ],
)
def test_the_program_as_it_was(folder, name, last_epoch):
    _skip_without_libraries(name)
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert f"epoch {last_epoch}" in done.stdout


@pytest.mark.parametrize(
    ("name", "epochs", "num_steps", "most_loss"),
    [("classifier", 15, 15 * 23, 1.0), ("language", 60, 60 * 8, 4.0), ("gan", 60, 60 * 16, 2.0)],
)
def test_the_program_as_it_became(terminal, folder, name, epochs, num_steps, most_loss):
    path = folder / f"{name}_elastic.py"
    # Longer than on the page, so that there is time for a resize.
    path.write_text(path.read_text().replace("3 * 23", f"{epochs} * 23").replace('["bad"] == 2', '["bad"] == 99'))
    job_id = terminal.ask("run", str(path), "--epochs", str(epochs), "--detach")["job_id"]
    status = _shrunk_to_its_end(terminal, job_id)
    assert (status["step"], status["total_steps"]) == (num_steps, num_steps)
    assert status["loss"] < most_loss
    if name == "classifier":
        assert status["metrics"]["accuracy"] > 0.6


@pytest.mark.parametrize(
    ("name", "few", "epochs", "num_steps", "most_loss"),
    [
        pytest.param("digits", 8, 60, 60 * 46, 0.5, marks=only_in_full),
        pytest.param("points", 4, 60, 60 * 16, 4.0, marks=only_in_full),
        ("causal", 4, 30, 30 * 16, 3.0),
        ("accelerated", 6, 60, 60 * 47, 0.5),
        pytest.param("fabricated", 5, 60, 60 * 47, 0.5, marks=only_in_full),
    ],
)
def test_an_unchanged_program_of_a_library(terminal, folder, name, few, epochs, num_steps, most_loss):
    _skip_without_libraries(name)
    # The page's program, longer; nothing else of it differs.
    text = (folder / f"{name}.py").read_text()
    assert text.count(f"epochs={few}") == 1
    path = folder / f"{name}_longer.py"
    path.write_text(text.replace(f"epochs={few}", f"epochs={epochs}"))
    job_id = terminal.ask("run", str(path), "--workers", "1..2", "--detach")["job_id"]
    status = _shrunk_to_its_end(terminal, job_id)
    assert status["library"] == _LIBRARIES[name][0]
    assert (status["step"], status["total_steps"]) == (num_steps, num_steps)
    assert status["loss"] < most_loss
    assert f"epoch {epochs}" in terminal.type("logs", job_id)


@pytest.mark.parametrize("name", ["ddp", "ddp_elastic"])
def test_a_script_of_torchrun_without_the_platform(folder, name):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"{name}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 5 loss") == 1


def test_a_script_of_torchrun_adopted(terminal, folder):
    path = folder / "ddp_longer.py"
    path.write_text((folder / "ddp_elastic.py").read_text().replace("epochs=6", "epochs=60"))
    job_id = terminal.ask("run", str(path), "--workers", "1..2", "--detach")["job_id"]
    status = _shrunk_to_its_end(terminal, job_id)
    assert status["library"] == "springtide"
    assert (status["step"], status["total_steps"]) == (60 * 29, 60 * 29)
    assert status["loss"] < 0.5
    assert "epoch 59 loss" in terminal.type("logs", job_id)


def _shrunk_to_its_end(terminal: Terminal, job_id: str) -> dict[str, Any]:
    """The status of a job on two workers that has one less from its first steps on, and has succeeded."""
    while terminal.ask("status", job_id)["step"] < 1:
        time.sleep(0.05)
    terminal.type("scale", job_id, "1")
    while (status := terminal.ask("status", job_id))["state"] not in ("SUCCEEDED", "FAILED"):
        time.sleep(0.2)
    assert status["state"] == "SUCCEEDED", status["reason"]
    assert (status["num_resizes"], status["num_restarts"]) == (1, 0)
    return status


def _skip_without_libraries(name: str) -> None:
    for package in _LIBRARIES.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_a_script_that_reports(terminal, folder):
    told = terminal.type("run", str(folder / "script.py"), "--workers", "2")
    assert "step 40/40" in told
    assert terminal.ask("quote", str(folder / "script.py"), "--workers", "2", "--deadline", "10m")["is_promised"]
