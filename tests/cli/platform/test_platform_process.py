"""Finding, starting and waiting for the platform's process."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.cli.platform import platform_process
from springtide.cli.platform.platform_process import (
    PlatformFile,
    is_alive,
    is_healthy,
    read_platform,
    read_token,
    running_platform,
    start_platform,
    wait_gone,
)
from springtide.core.errors import BackendError, InvalidRequest


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()
        self.wfile.write(b'{"status":"ok","version":"0"}')

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"pid": "x", "url": 3}', b"\xff\xfe", b'{"pid": 1}'])
def test_a_state_directory_without_a_readable_platform(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "platform.json").write_bytes(content)
    assert read_platform(tmp_path) is None
    assert running_platform(tmp_path) is None


@pytest.mark.slow
def test_a_platform_runs_only_if_it_answers(tmp_path: Path, url: str) -> None:
    written = f'{{"pid": {os.getpid()}, "url": "{url}", "version": "0"}}'
    (tmp_path / "platform.json").write_text(written, encoding="ascii")
    assert running_platform(tmp_path) == PlatformFile(pid=os.getpid(), url=url)
    assert is_healthy(url + "/")
    (tmp_path / "platform.json").write_text(written.replace(url, "http://127.0.0.1:1"), encoding="ascii")
    assert running_platform(tmp_path) is None


def test_the_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a platform running there"):
        read_token(tmp_path)
    (tmp_path / "token").write_text("secret\n", encoding="ascii")
    assert read_token(tmp_path) == "secret"


def test_living_ended_and_zombie_processes(ended_pid: int) -> None:
    assert is_alive(os.getpid())
    assert not is_alive(ended_pid)
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    assert wait_gone(zombie.pid, 30.0)
    zombie.wait()
    assert not wait_gone(os.getpid(), 0.0)


def _fake_service(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(
        platform_process, "service_command", lambda *arguments, **options: [sys.executable, "-c", program]
    )


def test_a_platform_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "platform.log").write_text("what an earlier one wrote\n", encoding="ascii")
    _fake_service(monkeypatch, "import sys; sys.exit('springtide: the port is taken; choose another')")
    with pytest.raises(BackendError, match="did not start: the port is taken; choose another") as caught:
        start_platform(state, 2, "elastic", 0)
    assert str(state / "platform.log") in str(caught.value)
    _fake_service(monkeypatch, "raise SystemExit(3)")
    with pytest.raises(BackendError, match=r"it wrote nothing \(code 3"):
        start_platform(tmp_path / "other", None, "elastic", 0)


@pytest.mark.slow
def test_a_platform_that_answers_is_returned(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os, pathlib, time\n"
        f"written = json.dumps(dict(pid=os.getpid(), url={url!r}))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'platform.json').write_text(written)\n"
        "time.sleep(30)\n"
    )
    _fake_service(monkeypatch, program)
    found = start_platform(tmp_path, None, "elastic", 0)
    assert found.url == url
    assert is_alive(found.pid)
    os.kill(found.pid, 9)
    os.waitpid(found.pid, 0)


def test_the_command_line_of_the_platform(tmp_path: Path) -> None:
    command = platform_process.service_command(tmp_path, 2, "fifo", 0)
    assert command[1:] == [
        "-m", "springtide.service", "--state", str(tmp_path), "--slots", "2", "--policy", "fifo", "--port", "0",
    ]  # fmt: skip
    command = platform_process.service_command(tmp_path, 2, "fifo", 0, grpc_port=8001)
    assert command[command.index("--grpc-port") + 1] == "8001"
    assert "--slots" not in platform_process.service_command(tmp_path, None, "fifo", 0)
    command = platform_process.service_command(tmp_path, 4, "fifo", 0, pools="inference=2", day_s=120.0)
    assert command[-8:-4] == ["--pools", "inference=2", "--day", "120.0"]
