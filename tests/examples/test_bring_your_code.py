"""The programs of docs/bring-your-code.md, from the page's own text: plain ones alone, elastic ones with a resize."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.examples.terminal import EXAMPLES, Terminal

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]
PAGE = EXAMPLES.parent / "docs" / "bring-your-code.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each block of the page that begins with the name of its file."""
    found = tmp_path_factory.mktemp("code") / "project"
    found.mkdir()
    blocks = re.findall(r"(?m)^    # (\w+\.py)\n((?:    .*\n|\n)+)", PAGE.read_text(encoding="utf-8"))
    for name, text in blocks:
        (found / name).write_text(textwrap.dedent(text), encoding="utf-8")
    assert len(blocks) == 7
    return found


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    typed = Terminal(tmp_path_factory.mktemp("examples") / "state")
    typed.type("up", "--slots", "2", "--port", "0")
    try:
        yield typed
    finally:
        typed.type("down")


@pytest.mark.parametrize("name", ["classifier", "language", "gan"])
def test_the_program_as_it_was(folder, name):
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 2" in done.stdout


@pytest.mark.parametrize(
    ("name", "epochs", "num_steps", "most_loss"),
    [("classifier", 15, 15 * 23, 1.0), ("language", 60, 60 * 8, 4.0), ("gan", 60, 60 * 16, 2.0)],
)
def test_the_program_as_it_became(terminal, folder, name, epochs, num_steps, most_loss):
    path = folder / f"{name}_elastic.py"
    # Longer than on the page, so that there is time for a resize.
    path.write_text(path.read_text().replace("3 * 23", f"{epochs} * 23"))
    job_id = terminal.ask("run", str(path), "--epochs", str(epochs), "--detach")["job_id"]
    while terminal.ask("status", job_id)["step"] < 1:
        time.sleep(0.05)
    terminal.type("scale", job_id, "1")
    while (status := terminal.ask("status", job_id))["state"] not in ("SUCCEEDED", "FAILED"):
        time.sleep(0.2)
    assert status["state"] == "SUCCEEDED", status["reason"]
    assert (status["step"], status["total_steps"], status["num_restarts"]) == (num_steps, num_steps, 0)
    assert status["num_resizes"] == 1
    assert status["loss"] < most_loss
    if name == "classifier":
        assert status["metrics"]["accuracy"] > 0.6


def test_a_script_that_reports(terminal, folder):
    told = terminal.type("run", str(folder / "script.py"), "--workers", "2")
    assert "step 40/40" in told
    assert terminal.ask("quote", str(folder / "script.py"), "--workers", "2", "--deadline", "10m")["is_promised"]
