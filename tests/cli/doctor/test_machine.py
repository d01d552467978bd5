"""The examination: what it looks at, and that every complaint carries its mend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.doctor import machine as doctor
from springtide.cli.platform.platform_process import PlatformFile
from springtide.core.status.pools import PoolStatus

Run = Callable[..., Result]


def _torch(monkeypatch: pytest.MonkeyPatch, stdout: bytes, stderr: bytes = b"") -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(doctor.subprocess, "run", run)  # type: ignore[attr-defined]


GOOD = b'{"version": "2.13.0", "gloo": true, "gpus": []}\n'


@pytest.mark.slow
def test_a_machine_that_is_well(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, GOOD)
    result = springtide("doctor", "--json")
    answer = json.loads(result.stdout)
    verdicts = {check["name"]: check["verdict"] for check in answer["checks"]}
    assert {"python", "torch", "gloo", "gpu", "cores", "state", "platform", "port"} <= set(verdicts)
    assert "fail" not in verdicts.values()
    assert (result.exit_code, answer["passed"]) == (0, True)


@pytest.mark.slow
def test_without_torch(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, b"", b"Traceback\nModuleNotFoundError: No module named 'torch'\n")
    result = springtide("doctor")
    assert result.exit_code == 1
    assert "No module named 'torch'" in result.output
    assert "pip install 'springtide[runtime]'" in result.output


@pytest.mark.slow
def test_a_token_that_others_can_read(springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _torch(monkeypatch, GOOD)
    token = tmp_path / "token"
    token.write_text("secret", encoding="ascii")
    token.chmod(0o644)
    assert f"chmod 600 {token}" in springtide("doctor").output


@pytest.mark.slow
def test_a_platform_that_died(springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _torch(monkeypatch, GOOD)
    process = subprocess.Popen(["true"])
    process.wait()
    (tmp_path / "platform.json").write_text(json.dumps({"pid": process.pid, "url": "http://127.0.0.1:1"}))
    assert "is gone" in springtide("doctor").output
    (tmp_path / "platform.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    result = springtide("doctor")
    assert "lives and does not answer" in result.output
    assert result.exit_code == 1


@pytest.mark.slow
def test_every_complaint_has_a_mend(springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _torch(monkeypatch, b'{"version": "1", "gloo": false, "gpus": []}')
    (tmp_path / "platform.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    checks = json.loads(springtide("doctor", "--json").stdout)["checks"]
    assert all(check["mend"] for check in checks if check["verdict"] != "ok")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing set but what the test sets, and no GPU."""
    for name in ("POOLS", "SLOTS"):
        monkeypatch.delenv(f"SPRINGTIDE_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("springtide.backends.local.devices.discover_gpus", lambda: ())
    _torch(monkeypatch, GOOD)
    return monkeypatch


def _said_of_pools(springtide: Run) -> dict[str, Any]:
    checks = json.loads(springtide("doctor", "--json").stdout)["checks"]
    (found,) = [check for check in checks if check["name"] == "pools"]
    return dict(found)


@pytest.mark.slow
def test_the_pools_that_the_next_platform_would_have(springtide: Run, settings: pytest.MonkeyPatch) -> None:
    assert "share the slots" in _said_of_pools(springtide)["text"]
    settings.setenv("SPRINGTIDE_POOLS", "inference=2")
    settings.setenv("SPRINGTIDE_SLOTS", "4")
    assert "inference=2 at the next `springtide up` (SPRINGTIDE_POOLS)" in _said_of_pools(springtide)["text"]
    settings.setenv("SPRINGTIDE_SLOTS", "1")
    said = _said_of_pools(springtide)
    assert said["verdict"] == "fail"
    assert "the pools take 2 slots and there is 1" in said["text"]
    assert "SPRINGTIDE_POOLS" in said["mend"]


@pytest.mark.slow
def test_the_pools_of_the_platform_that_runs(springtide: Run, client: Any, settings: pytest.MonkeyPatch) -> None:
    running = PlatformFile(pid=1, url="http://127.0.0.1:1")
    settings.setattr(doctor, "running_platform", lambda state_dir: running)
    assert _said_of_pools(springtide)["text"] == "jobs and services share 2 slots"
    plain = client.status()
    counts = {"num_nodes": 2, "num_training": 0, "num_serving": 1}
    pools = (
        PoolStatus(pool="training", num_devices=3, num_borrowed=1, num_lent=0, num_draining=0, **counts),
        PoolStatus(pool="inference", num_devices=1, num_borrowed=0, num_lent=1, num_draining=1, **counts),
    )
    settings.setattr(client, "status", lambda: replace(plain, pools=pools, policy="tide/springtide"))
    assert _said_of_pools(springtide)["text"] == (
        "training 3 (1 borrowed); inference 1 (1 lent, 1 draining) (policy tide/springtide)"
    )


@pytest.mark.slow
def test_no_colour_is_written_as_an_escape(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, b"", b"ModuleNotFoundError: No module named 'torch'\n")
    output = springtide("doctor").output
    assert "fail  torch" in output
    assert "\\x1b" not in output


def test_what_workers_need_not_import_is_told(
    tmp_path: Path,
) -> None:
    # Doubles with the command lines of a zygote and of its process with libraries.
    title = "import setproctitle, time; setproctitle.setproctitle('springtide libraries lightning'); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {title!r}])"
    words = f"springtide.runtime zygote --socket {tmp_path.resolve() / 'run'}"
    with subprocess.Popen([sys.executable, "-c", script, *words.split()]) as zygote:
        children = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children")
        limit_s = time.monotonic() + 30.0
        while not children.read_text() and time.monotonic() < limit_s:
            time.sleep(0.01)
        child = int(children.read_text())
        while not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"springtide") and time.monotonic() < limit_s:
            time.sleep(0.01)
        try:
            (check,) = doctor._check_zygote(tmp_path, platform_pid=os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)
            zygote.kill()
    assert "without importing torch, lightning" in check.text
