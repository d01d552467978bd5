"""Commands as services on a real platform, deployed from the terminal; a broken one never answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_process.py"


def test_a_command_serves_from_its_folder_comes_back_and_rolls_back(platform: LivePlatform, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "server.py").write_text(EXAMPLE.read_text().replace("{len(", "{open('factor').read()} {len("))
    (folder / "factor").write_text("first")
    platform.start()

    def deploy(*arguments: str, cwd: Path = folder) -> subprocess.CompletedProcess[str]:
        main = "from springtide.cli.main import main; main()"
        command = [sys.executable, "-c", main, "deploy", *arguments, "--state", str(platform.state_dir)]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)

    def call(path: str) -> tuple[int, str]:
        answer = platform.http.post(path, content=b"a\nb", headers={"x-springtide-timeout": "60s"})
        return answer.status_code, answer.text

    typed = ("--ready", "/health", "--name", "lines")
    done = deploy("--command", "python server.py {port}", *typed, "--scale", "1..1")
    assert done.returncode == 0, done.stderr
    assert "what is below that address is its own" in done.stdout
    (folder / "factor").write_text("second")
    assert call("/f/lines/x?y=1") == (200, "/x?y=1 first 2\n"), "it has the folder as it was"
    [pid] = platform.worker_pids().values()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    wait_for(lambda: platform.worker_pids() and [*platform.worker_pids().values()] != [pid], 60, "a new replica")
    assert call("/f/lines/x")[1] == "/x first 2\n"
    broken = deploy("--command", "python nowhere.py {port}", *typed)
    assert broken.returncode == 1
    assert "ended with exit code 2 before it was ready" in broken.stdout + broken.stderr
    assert call("/f/lines/x")[1] == "/x first 2\n"
    done = deploy(str(EXAMPLE), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert call("/f/lines/x")[1] == "/x 2\n"
