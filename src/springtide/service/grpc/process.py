"""Keeps the gRPC process up beside the platform. The platform itself imports nothing of gRPC."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

from springtide.core.errors import BackendError, InvalidRequest
from springtide.service.supervise import FIRST_PAUSE_S, LAST_PAUSE_S, SETTLED_S, cause_of

LOG = logging.getLogger("springtide.grpc")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_LIBRARIES = ("grpc", "grpc_health", "google.protobuf")


class GrpcProcess:
    """`python -m springtide.service.grpc` on one port, started again whenever it dies."""

    # Where it answers, as 127.0.0.1:8001; empty until it does.
    address = ""

    def __init__(self, port: int, gateway_url: str) -> None:
        self._port, self._gateway_url = port, gateway_url
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, name="grpc", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process that answers now; None without one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Raises InvalidRequest, BackendError."""
        check_libraries()
        self._port = self._begin()
        self._keeper.start()
        self.address = f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        """Let it answer what it works on for a moment, and end it."""
        self._is_ending.set()
        with self._lock:
            process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._keeper.ident is not None:
            self._keeper.join()

    def _begin(self) -> int:
        """Start the process and return its port. Raises BackendError with what it says."""
        command = [sys.executable, "-m", "springtide.service.grpc"]
        command += ["--port", str(self._port), "--gateway", self._gateway_url]
        with self._lock:
            if self._is_ending.is_set():
                raise BackendError("the platform ends")
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        line = process.stdout.readline() if readable else b""
        process.stdout.close()
        try:
            said = json.loads(line)
        except ValueError:
            said = {"error": "the process for gRPC has not started; the platform's log says why"}
        if not (bound := int(said.get("port", 0))):
            process.kill()
            _ended(process)
            raise BackendError(str(said["error"]))
        return bound

    def _keep_up(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._is_ending.is_set():
            began_s, process = time.monotonic(), self._process
            assert process is not None
            code = _ended(process)
            if self._is_ending.is_set():
                return
            if time.monotonic() - began_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            LOG.warning("the gRPC process ended by %s; starting again in %g s", cause_of(code), pause_s)
            if self._is_ending.wait(pause_s):
                return
            pause_s = min(LAST_PAUSE_S, pause_s * 2)
            try:
                self._begin()
            except (BackendError, OSError) as error:
                if not self._is_ending.is_set():
                    LOG.error("the gRPC process does not start: %s", error)


def grpc_beside(port: int | None, gateway_url: str) -> GrpcProcess:
    """The gRPC process, started; without a port one that is not. Raises InvalidRequest, BackendError."""
    process = GrpcProcess(port or 0, gateway_url)
    if port is not None:
        process.start()
    return process


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, once it has ended by itself."""
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def check_libraries() -> None:
    """Raises InvalidRequest where the libraries of gRPC are not installed."""
    for name in _LIBRARIES:
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise InvalidRequest("gRPC needs libraries that are not installed: pip install 'springtide[grpc]'")
