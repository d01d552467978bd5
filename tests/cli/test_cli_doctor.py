"""The examination: what it looks at, and that every complaint carries its mend."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from springtide.cli import doctor

Run = Callable[..., Result]


def _torch(monkeypatch: pytest.MonkeyPatch, stdout: bytes, stderr: bytes = b"") -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(doctor.subprocess, "run", run)  # type: ignore[attr-defined]


GOOD = b'{"version": "2.13.0", "gloo": true, "gpus": []}\n'


def test_a_machine_that_is_well(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, GOOD)
    result = springtide("doctor", "--json")
    answer = json.loads(result.stdout)
    verdicts = {check["name"]: check["verdict"] for check in answer["checks"]}
    assert {"python", "torch", "gloo", "gpu", "cores", "state", "platform", "port"} <= set(verdicts)
    assert "fail" not in verdicts.values()
    assert (result.exit_code, answer["passed"]) == (0, True)


def test_without_torch(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, b"", b"Traceback\nModuleNotFoundError: No module named 'torch'\n")
    result = springtide("doctor")
    assert result.exit_code == 1
    assert "No module named 'torch'" in result.output
    assert "pip install 'springtide[runtime]'" in result.output


def test_a_token_that_others_can_read(springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _torch(monkeypatch, GOOD)
    token = tmp_path / "token"
    token.write_text("secret", encoding="ascii")
    token.chmod(0o644)
    assert f"chmod 600 {token}" in springtide("doctor").output


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


def test_every_complaint_has_a_mend(springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _torch(monkeypatch, b'{"version": "1", "gloo": false, "gpus": []}')
    (tmp_path / "platform.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    checks = json.loads(springtide("doctor", "--json").stdout)["checks"]
    assert all(check["mend"] for check in checks if check["verdict"] != "ok")
