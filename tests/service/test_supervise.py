"""The parent that keeps the control plane up: real processes, with a control plane that does what the test says."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from springtide.service import supervise
from springtide.service.supervise import EXITS_FILE, MAX_DEATHS_AT_A_STEP, Supervisor, cause_of

# Stands for the control plane: it notes its start, comes up or not, and ends as the next line of `script` says.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
state = Path(sys.argv[sys.argv.index("--state") + 1])
port, grpc = (sys.argv[sys.argv.index(name) + 1] if name in sys.argv else "" for name in ("--port", "--grpc-port"))
with open(state / "starts", "a") as file:
    restarted = os.environ.get("SPRINGTIDE_RESTARTED", "")
    file.write(json.dumps({"port": port, "grpc": grpc, "restarted": restarted}) + "\\n")
lines = (state / "script").read_text().splitlines()
line, rest = lines[0], lines[1:] or lines[:1]
(state / "script").write_text("\\n".join(rest))
if "up" in line:
    told = {"pid": os.getpid(), "url": "http://127.0.0.1:4321", "grpc": "127.0.0.1:4322"}
    (state / "platform.json").write_text(json.dumps(told))
    time.sleep(0.6)
if "wait" in line:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60.0)
if "kill" in line:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(line.split()[-1]) if line.split()[-1].isdecimal() else 0)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[:3] == [sys.executable, "-m", "springtide.service"]
        return real([sys.executable, "-S", str(child), *command[3:]], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(supervise.subprocess, "Popen", popen)
    monkeypatch.setattr(supervise, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def supervised(state: Path, *script: str) -> tuple[int, str, list[dict[str, str]]]:
    (state / "script").write_text("\n".join(script))
    log = io.StringIO()
    code = Supervisor(["--state", str(state), "--port", "0", "--grpc-port", "0"], log).run()
    assert not (state / "supervisor.json").exists()
    return code, log.getvalue(), [json.loads(line) for line in (state / "starts").read_text().splitlines()]


@pytest.mark.slow
def test_one_that_ends_in_order_is_not_started_again(state: Path) -> None:
    code, said, starts = supervised(state, "up 0")
    assert (code, said, len(starts)) == (0, "", 1)


@pytest.mark.parametrize("code", [1, 2])
def test_one_that_never_comes_up_is_not_started_again(state: Path, code: int) -> None:
    assert supervised(state, f"down {code}")[::2] == (code, [{"port": "0", "grpc": "0", "restarted": ""}])


def test_one_that_is_refused_leaves_word_of_the_other_supervisor(state: Path) -> None:
    (state / "script").write_text("down 1")
    (state / "supervisor.json").write_text('{"pid": 1}')
    assert Supervisor(["--state", str(state), "--port", "0"], io.StringIO()).run() == 1
    assert (state / "supervisor.json").read_text() == '{"pid": 1}'


@pytest.mark.slow
def test_one_that_dies_is_started_again_at_the_same_address_and_knows_why(state: Path) -> None:
    code, said, starts = supervised(state, "up kill", "down 1", "up 0")
    assert code == 0
    assert [start["port"] for start in starts] == ["0", "4321", "4321"]
    assert [start["grpc"] for start in starts] == ["0", "4322", "4322"]
    assert starts[1]["restarted"] == "ended by signal 9 (SIGKILL) at step 0 of the journal"
    assert starts[2]["restarted"] == "ended by exit code 1 at step 0 of the journal"
    assert "starting again in 0.01 s" in said
    assert "starting again in 0.02 s" in said
    exits = [json.loads(line) for line in (state / EXITS_FILE).read_text().splitlines()]
    assert [entry["why"] for entry in exits] == ["signal 9 (SIGKILL)", "exit code 1"]
    assert (state / EXITS_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_one_that_dies_again_and_again_at_a_step_is_given_up(state: Path) -> None:
    code, said, starts = supervised(state, "up kill")
    assert code == 1
    assert len(starts) == MAX_DEATHS_AT_A_STEP
    assert f"it died {MAX_DEATHS_AT_A_STEP} times at step 0 of the journal, the last time by signal 9" in said


@pytest.mark.slow
def test_it_is_stopped_with_its_child_by_one_signal(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "script").write_text("up wait")
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    code = (
        "import subprocess, sys\n"
        "from springtide.service import supervise\n"
        "real = subprocess.Popen\n"
        f"supervise.subprocess.Popen = lambda c, **o: real([sys.executable, '-S', {str(child)!r}, *c[3:]], **o)\n"
        f"sys.exit(supervise.Supervisor(['--state', {str(state)!r}, '--port', '0']).run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        try:
            told, end_s = state / "platform.json", time.monotonic() + 30.0
            while not (told.exists() and told.read_text()) and time.monotonic() < end_s:
                time.sleep(0.02)
            pid = json.loads(told.read_text())["pid"]
            time.sleep(1.0)
            parent.send_signal(signal.SIGTERM)
            assert parent.wait(30.0) == 0
        finally:
            parent.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_log_that_grew_large_is_set_aside_and_written_to_from_its_beginning(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(supervise, "_REVIEW_S", 0.05)
    log, older = state / "platform.log", state / "platform.log.1"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        supervise.limit_log(log)
        assert not older.exists()
        writer.write(b"y" * 50)
        assert supervised(state, "up 0")[0] == 0
        assert (older.read_bytes(), log.read_bytes()) == (b"x" * 100 + b"y" * 50, b"")
        assert older.stat().st_mode & 0o777 == 0o600
        writer.write(b"z" * 101)
        older.unlink()
        older.mkdir()
        supervise.limit_log(log)
        writer.write(b"new")
    # The older part cannot be kept: the log is cut all the same.
    assert log.read_bytes() == b"new"


def test_causes_are_named() -> None:
    assert cause_of(3) == "exit code 3"
    assert cause_of(-11) == "signal 11 (SIGSEGV)"
    assert cause_of(-1000) == "signal 1000"
