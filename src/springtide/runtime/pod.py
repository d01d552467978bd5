"""`python -m springtide.runtime pod`: the first process of a worker's container, which supervises the worker.

It forks the worker before heavy imports, copies the worker's output, forwards requests to stop, and reaps orphans. When
the worker has ended, also by a signal, it saves the output and exits with the worker's exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NoReturn, TextIO

from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import InferenceService
from springtide.runtime.elastic.step_spool import SPOOL_NAME, missing_lines
from springtide.runtime.process.exits import EXIT_CRASHED, EXIT_UNFIT
from springtide.runtime.process.pod_place import (
    fetch_source,
    open_prestop,
    read_spec,
    root_of_source,
    upload_log,
    write_termination_message,
)
from springtide.runtime.process.redaction import HOLD_S, Redactor
from springtide.runtime.process.user_environment import container_secrets

_READ_BYTES = 1 << 16
# Only the newest output is kept, in two files of at most this length.
_LOG_BYTES = 4 << 20
_LAST_OUTPUT_S = 0.5
_UPLOAD_S = 5.0
_HOOK_S = 0.2
# How long an environment may take. The kubelet gives a service ten minutes until its health probe is answered.
_SERVICE_ENVIRONMENT_S = 540.0
_JOB_ENVIRONMENT_S = 1_800.0
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def run_pod() -> int:
    """Run this container's worker to its end and return the exit code: the worker's, or 128 and a signal's number.

    5 where the container lacks what a worker needs; the sentence is on stderr and in the termination message.
    """
    try:
        spec = read_spec(os.environ)
        listener = open_prestop(spec)
    except (InvalidRequest, OSError) as error:
        sys.stderr.write(f"springtide: {error}\n")
        write_termination_message(os.environ, str(error))
        return EXIT_UNFIT
    # Signals stay blocked until both the worker and the handler that forwards them to it exist.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    reading, writing = os.pipe()
    supervisor_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        listener.close()
        _become_worker(spec, writing, supervisor_pid)
    os.close(writing)
    supervisor = _Supervisor(spec, pid, reading, listener)
    code = supervisor.run()
    write_termination_message(os.environ, supervisor.log.last_line() if code else "")
    print_missing_steps(spec)
    upload_output(spec, supervisor.log.read())
    supervisor.close()
    return code


def print_missing_steps(spec: WorkerSpec) -> None:
    """Print the step lines that the store lacks; the platform reads them from the container's output.

    They would be lost otherwise: the container's disk is removed with it.
    """
    if not spec.store_url:
        return
    for line in missing_lines(Path(spec.work_dir) / SPOOL_NAME):
        with contextlib.suppress(OSError):
            sys.stdout.write(f"{line}\n")
    with contextlib.suppress(OSError):
        sys.stdout.flush()


def upload_output(spec: WorkerSpec, output: bytes, upload: Callable[[WorkerSpec, bytes], None] = upload_log) -> None:
    """Upload the output, within a few seconds at most: the container is about to be removed."""

    def run() -> None:
        try:
            upload(spec, output)
        except SpringtideError as error:
            sys.stderr.write(f"springtide: the output could not be kept: {error}\n")

    thread = threading.Thread(target=run, name="springtide-log", daemon=True)
    thread.start()
    thread.join(_UPLOAD_S)


def _become_worker(spec: WorkerSpec, output: int, supervisor_pid: int) -> NoReturn:
    """In the child: redirect stdout and stderr to the pipe, fetch the source, run the worker, and never return."""
    code = EXIT_CRASHED
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor_pid:
            os._exit(code)
        for name in _SIGNALS:
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # The inherited streams were configured for the container's own output.
        sys.stdout, sys.stderr = _stream(1), _stream(2)
        _set_user_and_home(os.environ, spec.work_dir)
        os.environ.update(spec.environment)
        code = run_pod_worker(spec) if spec.workload.packages is None else _in_environment(spec)
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Not sys.exit: the supervisor's stack frames must not unwind in the child.
        os._exit(code)


def _set_user_and_home(environment: MutableMapping[str, str], home: str) -> None:
    """Set a user name and a home directory: a container's user often has neither, and libraries need both."""
    for name in ("USER", "LOGNAME"):
        environment.setdefault(name, "springtide")
    if environment.get("HOME", "/") == "/":
        environment["HOME"] = home


def run_pod_worker(spec: WorkerSpec) -> int:
    """Run a container's worker, which fetches its source, and return its exit code."""
    return _serve(spec) if isinstance(spec.workload, InferenceService) else _train(spec)


def _in_environment(spec: WorkerSpec) -> int:
    """Become that worker in an environment with packages of its own, which is made on the container's own disk."""
    try:
        # Requirements may name wheels of the folder.
        root = root_of_source(fetch_source(spec))
    except (SpringtideError, OSError) as error:
        sys.stderr.write(f"springtide: {error}\n")
        return EXIT_UNFIT
    from springtide.runtime.environment import run_in_environment

    limit_s = _SERVICE_ENVIRONMENT_S if isinstance(spec.workload, InferenceService) else _JOB_ENVIRONMENT_S
    limit_s = min(limit_s, spec.workload.start_timeout_s or limit_s)
    cache = Path(spec.work_dir) / "environments"
    return run_in_environment(spec, cache, command="pod-worker", limit_s=limit_s, directory=root)


def _train(spec: WorkerSpec) -> int:
    try:
        spec = fetch_source(spec)
    except (SpringtideError, OSError) as error:
        sys.stderr.write(f"springtide: {error}\n")
        return EXIT_UNFIT
    from springtide.runtime.worker import main

    return main(spec)


def _serve(spec: WorkerSpec) -> int:
    # This imports torch only if the user's code does.
    from springtide.runtime.serving.pod import main

    return main(spec)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class PodLog:
    """A worker's newest output, in one file and an older one; at most twice `limit_bytes` in all."""

    def __init__(self, path: Path, limit_bytes: int = _LOG_BYTES) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append output. On a full disk it is dropped here, but still reaches the container's log."""
        try:
            if self._num_bytes + len(data) > self._limit_bytes:
                self._file.close()
                os.replace(self._path, self._older)
                self._file, self._num_bytes = self._path.open("wb", buffering=0), 0
            self._num_bytes += self._file.write(data) or 0
        except (OSError, ValueError):
            return

    def read(self) -> bytes:
        return b"".join(path.read_bytes() for path in (self._older, self._path) if path.exists())

    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = self.read()[-_READ_BYTES:].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        self._file.close()


class _Supervisor:
    """Supervises the worker until it has ended, with one thread and an event loop."""

    def __init__(self, spec: WorkerSpec, pid: int, output: int, listener: socket.socket) -> None:
        self.log = PodLog(Path(spec.log_path))
        self._redactor = Redactor(container_secrets(os.environ))
        self._pid = pid
        self._output: int | None = output
        self._listener = listener
        self._hooks: list[socket.socket] = []
        self._code: int | None = None
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source in (output, listener, self._wake):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> int:
        """Copy output, forward signals and reap children until the worker is gone; returns its exit code."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self._terminate_worker())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        while self._code is None:
            self._turn(HOLD_S if self._redactor.is_holding else None)
        # Its last output may still be in the pipe, and processes that it started may hold the pipe open.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        end_s = time.monotonic() + _LAST_OUTPUT_S
        while self._output is not None and time.monotonic() < end_s:
            self._turn(max(0.0, end_s - time.monotonic()))
        self._pass_on(self._redactor.flush())
        return self._code

    def close(self) -> None:
        """Disconnect waiting preStop hooks, which then exit; the pause lets them do so before the container ends."""
        for hook in self._hooks:
            hook.close()
        if self._hooks:
            time.sleep(_HOOK_S)
        self.log.close()
        self._listener.close()

    def _turn(self, timeout_s: float | None) -> None:
        ready = self._selector.select(timeout_s)
        if not ready:
            self._pass_on(self._redactor.flush())
        for key, _ in ready:
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):
                    self._hooks.append(self._listener.accept()[0])
                    self._terminate_worker()
            elif key.fileobj is self._wake:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(_READ_BYTES)
            else:
                self._copy_output()
        self._reap()

    def _terminate_worker(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _copy_output(self) -> None:
        assert self._output is not None
        data = os.read(self._output, _READ_BYTES)
        if not data:
            self._pass_on(self._redactor.flush())
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = None
            return
        self._pass_on(self._redactor.feed(data))

    def _pass_on(self, data: bytes) -> None:
        self.log.write(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(1, view) :]
        except OSError:
            # The container's log is not read any more; the log file has the output.
            return

    def _reap(self) -> None:
        """Reap ended children: note the worker's exit code, and drop orphans that this process inherited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
