"""The platform's process as commands see it: its file in the state directory, and how to start and stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidRequest
from springtide.storage.files import open_private

_POLL_S = 0.1
START_TIMEOUT_S = 60.0


class PlatformFile(msgspec.Struct, frozen=True):
    """The content of `platform.json` in the state directory, which describes the running platform."""

    pid: int
    url: str
    grpc: str = ""


def read_platform(state_dir: Path) -> PlatformFile | None:
    """The content of platform.json; None if it does not exist or cannot be read."""
    try:
        return decode_json((state_dir / "platform.json").read_bytes(), PlatformFile)
    except (OSError, ValueError, RecursionError):
        return None


def read_token(state_dir: Path) -> str:
    """The API's token. Raises InvalidRequest if it cannot be read."""
    try:
        return (state_dir / "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the token in {state_dir}: {error}; is a platform running there?") from None


def is_healthy(url: str, timeout_s: float = 1.0) -> bool:
    import httpx2

    try:
        # Ignore proxies in the environment: the platform is on this machine.
        with httpx2.Client(trust_env=False, timeout=timeout_s) as http:
            answer = http.get(f"{url.rstrip('/')}/healthz")
    except httpx2.HTTPError:
        return False
    return answer.status_code == 200 and b'"ok"' in answer.content


def running_platform(state_dir: Path) -> PlatformFile | None:
    platform = read_platform(state_dir)
    return platform if platform is not None and is_healthy(platform.url) else None


def is_alive(pid: int) -> bool:
    """Whether a process with this id is running (a zombie is not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    else:
        return state not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists()


def parent_of(pid: int) -> int | None:
    """The process that has started this one; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def supervisor_pid(state_dir: Path) -> int | None:
    """The living process that keeps this directory's platform up; None without one."""
    try:
        pid = int(msgspec.json.decode((state_dir / "supervisor.json").read_bytes())["pid"])
    except (OSError, ValueError, TypeError, KeyError, msgspec.DecodeError):
        return None
    try:
        # Another process may have the number by now.
        is_supervisor = b"springtide.service.supervise" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return pid if is_supervisor and is_alive(pid) else None


def service_command(
    state_dir: Path,
    slots: int | None,
    policy: str,
    port: int,
    price: float | None = None,
    *,
    grpc_port: int | None = None,
    pools: str = "",
    day_s: float | None = None,
    max_unfinished: int | None = None,
    journal_retention: str = "",
    keep_ended: str = "",
    functions: Path | None = None,
    is_supervised: bool = False,
) -> list[str]:
    """The command line of the platform; `functions` is the file with the settings of its function service.

    With `is_supervised` it is started again whenever it dies.
    """
    module = "springtide.service.supervise" if is_supervised else "springtide.service"
    command = [sys.executable, "-m", module, "--state", str(state_dir)]
    if slots is not None:
        command += ["--slots", str(slots)]
    if price is not None:
        command += ["--price", repr(price)]
    if pools:
        command += ["--pools", pools]
    if day_s is not None:
        command += ["--day", repr(day_s)]
    if max_unfinished is not None:
        command += ["--max-unfinished", str(max_unfinished)]
    if journal_retention:
        command += ["--journal-retention", journal_retention]
    if keep_ended:
        command += ["--keep-ended", keep_ended]
    if grpc_port is not None:
        command += ["--grpc-port", str(grpc_port)]
    if functions is not None:
        command += ["--functions", str(functions)]
    return [*command, "--policy", policy, "--port", str(port)]


def start_platform(
    state_dir: Path,
    slots: int | None,
    policy: str,
    port: int,
    price: float | None = None,
    *,
    grpc_port: int | None = None,
    pools: str = "",
    day_s: float | None = None,
    max_unfinished: int | None = None,
    journal_retention: str = "",
    keep_ended: str = "",
    functions: Path | None = None,
) -> PlatformFile:
    """Start the platform detached and wait until it answers. Raises BackendError with its output if it exits."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = state_dir / "platform.log"
    start = log_path.stat().st_size if log_path.exists() else 0
    with open_private(log_path, "ab") as log:
        process = subprocess.Popen(
            service_command(
                state_dir,
                slots,
                policy,
                port,
                price,
                grpc_port=grpc_port,
                pools=pools,
                day_s=day_s,
                max_unfinished=max_unfinished,
                journal_retention=journal_retention,
                keep_ended=keep_ended,
                functions=functions,
                is_supervised=True,
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise BackendError(_why_ended(log_path, start, process.returncode))
        platform = read_platform(state_dir)
        is_ours = platform is not None and process.pid in (platform.pid, parent_of(platform.pid))
        if platform is not None and is_ours and is_healthy(platform.url):
            # The platform outlives this command; without this Python warns about a running child process.
            process.returncode = 0
            return platform
        time.sleep(_POLL_S)
    os.kill(process.pid, signal.SIGTERM)
    process.wait()
    raise BackendError(
        f"the platform did not answer within {START_TIMEOUT_S:.0f} s and was stopped; {log_path} says what it did"
    )


def _why_ended(log_path: Path, start: int, returncode: int) -> str:
    with log_path.open("rb") as log:
        log.seek(start)
        lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    said = lines[-1].strip().removeprefix("springtide: ") if lines else "it wrote nothing"
    return f"the platform did not start: {said} (code {returncode}; all of it: {log_path})"


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Wait until the process is gone; returns whether it is."""
    end_s = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True
