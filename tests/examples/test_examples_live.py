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

from kits.examples.terminal import EXAMPLES, Terminal
from kits.simulation.sweeps import only_in_full

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]


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


@pytest.mark.parametrize("example", [pytest.param("functions_gpt", marks=only_in_full), "functions_digits"])
def test_what_can_run_on_functions_runs_on_machines(terminal, example):
    told = terminal.type("run", str(EXAMPLES / f"{example}.py"), "--epochs", "1")
    assert "SUCCEEDED" in told
    refused = terminal.type("run", str(EXAMPLES / f"{example}.py"), "--on", "functions", expect=2)
    assert refused == "", "this platform was started without functions, which is an error"


@pytest.mark.parametrize(
    ("example", "least"), [pytest.param("functions_gpt", 4.5, marks=only_in_full), ("functions_digits", 2.2)]
)
def test_it_runs_on_functions(tmp_path, example, least):
    terminal = Terminal(tmp_path / "state")
    assert "functions  emulator" in terminal.type("up", "--slots", "1", "--port", "0", "--functions", "emulator")
    try:
        path = str(EXAMPLES / f"{example}.py")
        quote = terminal.ask("quote", path, "--on", "functions", "--epochs", "1")
        assert quote["verdict"] == "accepted"
        assert quote["bill"]["function_usd"] > 0
        assert "SUCCEEDED" in terminal.type("run", path, "--on", "functions", "--epochs", "1")
        job = terminal.ask("status", example.replace("_", "-"))
        assert job["on"] == "emulator"
        assert job["loss"] < least
        assert job["step"] == job["total_steps"]
        assert Path(job["artifact_path"]).is_file()
        assert 0 < job["cost_usd"] < 0.5
    finally:
        terminal.type("down")


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


def test_a_goal_a_batch_that_grows_other_frameworks_and_a_study(tmp_path):
    terminal = Terminal(tmp_path / "state")
    assert "functions  emulator" in terminal.type("up", "--slots", "1", "--port", "0", "--functions", "emulator")
    try:
        for example, least in (("dynamic_batching", 0.2), ("numpy_softmax", 0.3), ("jax_mlp", 0.5)):
            told = terminal.type("run", str(EXAMPLES / f"{example}.py"), "--on", "functions", "--deadline", "20m")
            assert "SUCCEEDED" in told
            job = terminal.ask("status", example.replace("_", "-"))
            assert job["loss"] < least, example
            assert job["step"] == job["total_steps"]
            assert job["search"]["tried"], "what was measured is told"
            assert Path(job["artifact_path"]).is_file()
        study = terminal.ask("tune", str(EXAMPLES / "nas_optuna.py"), "--trials", "2", "--budget", "0.2")
        assert [trial["state"] for trial in study["trials"]] == ["succeeded", "succeeded"]
        assert 0 < study["spent_usd"] <= 0.2
    finally:
        terminal.type("down")
