"""The commands as a script uses them, in processes of their own, on a real platform: answers and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FILE = """
import time
import torch
import springtide as st

@st.train(epochs=2, global_batch=16, workers=1)
def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches(torch.ones(64, 4)):
        time.sleep(float(ctx.params.get("pause", "0")))
        ctx.metrics(seen=batch.step)
        ctx.step(model(batch.x).square().mean())
    print("the function has returned")

@st.train(retries=0)
def broken(ctx):
    raise ValueError("no such thing")

@st.serve(scale=(0, 1))
class Echo:
    def predict(self, numbers: list[float]) -> list[float]:
        return [2 * number for number in numbers]
"""
Answer = tuple[int, Any]


class Commands:
    """Calls `springtide ... --json` with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SPRINGTIDE_")}
        self.environment = {**variables, "OMP_NUM_THREADS": "1", "SPRINGTIDE_STATE": str(state)}
        self.folder = state.parent

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "springtide", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd=self.folder,
            timeout=200,
        )

    def __call__(self, *arguments: str, code: int = 0) -> Any:
        ran = self.run(*arguments, "--json")
        assert ran.returncode == code, f"{arguments}: {ran.stdout}{ran.stderr}"
        answer = json.loads(ran.stdout)
        assert_snake_case(answer)
        return answer

    def wait_status(self, identifier: str, reached: Callable[[Any], bool]) -> Any:
        end_s = time.monotonic() + 90
        while not reached(status := self("status", identifier)):
            assert time.monotonic() < end_s, status
        return status


def assert_snake_case(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", key), key
            assert_snake_case(inner)
    elif isinstance(value, list):
        for inner in value:
            assert_snake_case(inner)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "work.py").write_text(FILE, encoding="utf-8")
    commands = Commands(folder / "state")
    started = commands("up", "--port", "0", "--slots", "2")
    try:
        assert started["started"] is True
        assert commands("up")["started"] is False
        yield commands
    finally:
        assert commands("down")["stopped"] is True
    assert commands("down")["stopped"] is False
    assert commands.run("ps").returncode == 1


def test_a_run_to_its_end(commands: Commands) -> None:
    ended = commands("run", "work.py:fit", "--name", "ended", "--deadline", "10m")
    assert (ended["state"], ended["step"], ended["metrics"]) == ("SUCCEEDED", 8, {"seen": 7.0})
    assert commands("status", "ended")["job_id"] == ended["job_id"]
    assert "to spare" in commands.run("status", "ended").stdout
    assert any("has returned" in line for line in commands("logs", "ended")["lines"])
    assert commands("why", "ended")["history"]
    assert ended["job_id"] in [job["job_id"] for job in commands("ps", "--all")["jobs"]]


def test_a_run_that_fails_and_wrong_use(commands: Commands) -> None:
    failed = commands("run", "work.py:broken", code=1)
    assert failed["state"] == "FAILED"
    assert "no such thing" in failed["reason"]
    several = commands.run("run", "work.py")
    assert several.returncode == 2
    assert "work.py:fit" in several.stderr
    assert "work.py:broken" in several.stderr
    for arguments in (["status", "nothing"], ["scale", failed["job_id"], "2"], ["run", "nothing.py"], ["bench", "x"]):
        ran = commands.run(*arguments)
        assert (ran.returncode, ran.stdout) == (2, ""), ran


def test_a_job_that_is_acted_on(commands: Commands) -> None:
    detached = commands("run", "work.py:fit", "--detach", "--epochs", "9000", "--param", "pause=0.01", "--name", "long")
    job_id = detached["job_id"]
    commands.wait_status("long", lambda job: job["step"] > 0)
    assert commands("scale", "long", "2")["max_workers"] == 2
    commands.wait_status("long", lambda job: job["num_resizes"] == 1)
    assert "(1 -> 2)" in commands.run("status", "long").stdout
    assert commands("pause", "long")["job_id"] == job_id
    paused = commands.wait_status("long", lambda job: job["state"] == "PAUSED")
    assert paused["checkpoint_step"] == paused["step"]
    assert "paused" in commands("why", "long")["reason"]
    commands("resume", "long")
    commands.wait_status("long", lambda job: job["state"] == "RUNNING")
    assert commands("cancel", "long")["state"] == "CANCELLED"


def test_a_service(commands: Commands) -> None:
    service = commands("deploy", "work.py:Echo")
    assert service["name"] == "echo"
    told = commands.run("deploy", "work.py:Echo").stdout
    assert "Authorization: Bearer $(cat " in told
    (curl,) = [line for line in told.splitlines() if line.lstrip().startswith("curl ")]
    called = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, check=True)
    assert json.loads(called.stdout)["outputs"] == [1.0]
    assert commands("scale", "echo", "1")["min_replicas"] == 1
    assert commands("status", "echo")["service_id"] == "echo"
    assert commands("why", "echo")["workload_id"] == "echo"
    commands("cancel", "echo")
