"""Finds the emulator of a state directory, or starts one that outlives this process; calls its admin API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.processes import (
    ProcessIdentity,
    last_line,
    live_stat,
    reap,
    signal_group,
    spawn_detached,
)
from springtide.core.decoding import convert, decode_json
from springtide.core.errors import BackendError
from springtide.core.functions import FunctionService
from springtide.storage.files import make_private

RECORD_NAME = "emulator.json"
_LOG_NAME = "emulator.log"
_START_LIMIT_S = 30.0
_SECOND_LIMIT_S = 3.0
_STOP_LIMIT_S = 10.0
_POLL_S = 0.02
_ADMIN_LIMIT_S = 10.0


class EmulatorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an emulator is, and how to get in: the token is the access key of its Lambda API, too.

    `process` is None for one that runs elsewhere.
    """

    endpoint: str
    token: str
    process: ProcessIdentity | None = None


def find_emulator(state_dir: Path) -> EmulatorAddress | None:
    try:
        address = decode_json((state_dir / RECORD_NAME).read_bytes(), EmulatorAddress)
    except (OSError, msgspec.DecodeError):
        return None
    return address if address.process is not None and live_stat(address.process) is not None else None


def ensure_emulator(state_dir: Path, config: EmulatorConfig) -> EmulatorAddress:
    """The one that runs there (with the configuration that it was started with), or a new one. Raises BackendError.

    It is in a session of its own: a platform that is killed leaves it, and finds it again, as it would a real service.
    """
    found = find_emulator(state_dir)
    if found is not None:
        return found
    make_private(state_dir)
    config_path = state_dir / "config.json"
    # The role's credentials may be in it; another process may start an emulator at the same time.
    temporary = state_dir / f"config.{secrets.token_hex(4)}.new"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(config))
    temporary.replace(config_path)
    log_path = state_dir / _LOG_NAME
    environment = {**os.environ, "SPRINGTIDE_EMULATOR_TOKEN": secrets.token_hex(20)}
    command = [sys.executable, "-m", "springtide.backends.functions.emulator", "--state-dir", str(state_dir)]
    pid = spawn_detached([*command, "--config", str(config_path)], environment, log_path)
    deadline_s = time.monotonic() + _START_LIMIT_S
    has_ended = False
    while time.monotonic() < deadline_s:
        address = find_emulator(state_dir)
        if address is not None:
            return address
        if not has_ended and reap(pid) is not None:
            has_ended = True
            # Another process may have started one already, and be about to write the record.
            deadline_s = min(deadline_s, time.monotonic() + _SECOND_LIMIT_S)
        time.sleep(_POLL_S)
    if not has_ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    raise BackendError(f"the emulator did not start: {last_line(log_path) or f'see {log_path}'}")


def stop_emulator(state_dir: Path) -> bool:
    """End the emulator and its functions; returns whether one ran. Raises BackendError if it does not end."""
    address = find_emulator(state_dir)
    if address is None or address.process is None:
        return False
    signal_group(address.process, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    while live_stat(address.process) is not None:
        reap(address.process.pid)
        if time.monotonic() > deadline_s:
            # Its functions die with it.
            signal_group(address.process, signal.SIGKILL)
            raise BackendError("the emulator did not end in time and was killed")
        time.sleep(_POLL_S)
    return True


def emulator_status(address: EmulatorAddress) -> dict[str, Any]:
    """Counts, faults and instances. Raises BackendError."""
    status = _ask(address, "GET", "/admin/status", b"")
    assert isinstance(status, dict)
    return status


def emulator_service(address: EmulatorAddress) -> FunctionService:
    """The service that it emulates. Raises BackendError."""
    try:
        return convert(_ask(address, "GET", "/admin/service", b""), FunctionService)
    except msgspec.ValidationError as error:
        raise BackendError(f"the emulator at {address.endpoint} is of another version: {error}") from None


def set_faults(address: EmulatorAddress, faults: EmulatorFaults) -> None:
    """Set the random faults. Raises BackendError."""
    _ask(address, "PUT", "/admin/faults", msgspec.json.encode(faults))


def inject(
    address: EmulatorAddress, fault: str, num_times: int = 1, seconds: float = 0.0, factor: float = 0.25
) -> None:
    """Inject a fault into the next invocations: "lost", "answer-lost", "late", "throttled", "kill", "slow".

    Raises BackendError.
    """
    body = {"fault": fault, "num_times": num_times, "seconds": seconds, "factor": factor}
    _ask(address, "POST", "/admin/inject", json.dumps(body).encode())


def kill_instance(address: EmulatorAddress, instance_id: str) -> None:
    """Kill a function now. Raises BackendError if there is no such instance."""
    _ask(address, "POST", f"/admin/kill/{instance_id}", b"")


def _ask(address: EmulatorAddress, method: str, path: str, body: bytes) -> Any:
    host = address.endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=_ADMIN_LIMIT_S)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {address.token}"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BackendError(f"the emulator at {address.endpoint} does not answer: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BackendError(f"the emulator refuses: {answer.get('message', response.status)}")
    return answer
