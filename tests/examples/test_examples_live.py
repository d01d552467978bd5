"""Every example on a real platform, through the command a newcomer types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


class Terminal:
    """`springtide --state DIR ...` in a process of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def type(self, *words: str, expect: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "springtide", "--state", str(self.state), *words],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == expect, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ask(self, *words: str) -> dict:
        return json.loads(self.type(*words, "--json"))


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    typed = Terminal(tmp_path_factory.mktemp("examples") / "state")
    typed.type("up", "--slots", "4", "--port", "0")
    try:
        yield typed
    finally:
        typed.type("down")


def test_digits_learns_and_what_it_learned_is_served(terminal):
    told = terminal.type("run", str(EXAMPLES / "digits.py"), "--deadline", "10m", "--epochs", "15")
    assert "SUCCEEDED" in told
    assert "deadline met" in told
    assert terminal.ask("status", "digits")["metrics"]["accuracy"] > 0.9
    terminal.type("deploy", str(EXAMPLES / "serve_digits.py"))
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    token = (terminal.state / "token").read_text().strip()
    url = json.loads((terminal.state / "platform.json").read_text())["url"]
    answer = httpx2.post(
        f"{url}/f/digit-reader",
        json={"images": (images[:50] / 16).tolist()},
        headers={"Authorization": f"Bearer {token}"},
        timeout=60.0,
    )
    assert answer.status_code == 200, answer.text
    right = sum(int(told == label) for told, label in zip(answer.json()["outputs"], labels[:50], strict=True))
    assert right >= 45
    assert "batch=" in answer.headers["x-springtide"]


def test_the_gpt_learns_from_pythons_own_source(terminal):
    told = terminal.type("run", str(EXAMPLES / "gpt.py"), "--deadline", "15m", "--epochs", "1")
    assert "SUCCEEDED" in told
    assert terminal.ask("status", "gpt")["loss"] < 4.0, "a byte by chance costs 5.5"


def test_a_declared_task_runs(terminal):
    assert "SUCCEEDED" in terminal.type("run", str(EXAMPLES / "declared.py"))


def test_a_plain_torchrun_loop_runs_unchanged(terminal):
    assert "import springtide" not in (EXAMPLES / "torchrun_loop.py").read_text()
    told = terminal.type("run", str(EXAMPLES / "torchrun_loop.py"), "--workers", "2")
    assert "on 2 ranks" in told
    assert "SUCCEEDED" in told


def test_the_tide_comes_and_goes(tmp_path):
    terminal = Terminal(tmp_path / "state")
    told = terminal.type("up", "--slots", "4", "--pools", "inference=2", "--day", "30s", "--port", "0")
    assert "training local-0, local-1; inference local-2, local-3" in told
    assert "tide/springtide" in told
    try:
        example = str(EXAMPLES / "tide.py")
        assert "scale 1..3" in terminal.type("deploy", example)
        asking = subprocess.Popen(
            [sys.executable, example, "10s"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "SPRINGTIDE_STATE": str(terminal.state)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert "SUCCEEDED" in terminal.type("run", example, "--epochs", "8")
        answered, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0
        assert "requests answered" in answered
        report = terminal.ask("pools")
        assert [node["owner"] for node in report["nodes"]] == ["training", "training", "inference", "inference"]
        assert any(handover["kind"] == "loan" for handover in report["handovers"])
    finally:
        terminal.type("down")


def test_a_policy_of_ones_own_plays():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_policy.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_holds():
    done = subprocess.run([sys.executable, str(EXAMPLES / "demo.py")], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it held" in done.stdout
