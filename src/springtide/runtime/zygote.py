"""The zygote: a warm, single-threaded process that forks workers, so that a worker starts in milliseconds.

It has imported torch and taken one optimizer step, has no thread but the main one, no socket but its control
connection, and never runs user code. Had it used torch with several threads before a fork, the child's first such
operation would hang.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import setproctitle
import torch

from springtide.core.errors import BackendError
from springtide.core.wire.workers import ChildExited, FrameDecoder, Spawned, SpawnRequest, WorkerSpec, encode_frame
from springtide.runtime.process.deferred_compiler import defer_compiler
from springtide.runtime.process.exits import EXIT_CRASHED
from springtide.storage.files import make_private

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_IDLE_EXIT_S = 60.0
_POLL_S = 1.0
_MAX_TASKS = 2


def warm_up() -> None:
    """Take one step of SGD and of AdamW on one thread, so that children need no imports at their first step."""
    torch.set_num_threads(1)
    defer_compiler()
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        optimizer = make(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 2)), torch.zeros(2, dtype=torch.int64))
        torch.autograd.backward(loss)
        optimizer.step()
    import springtide.runtime.worker  # noqa: F401 - children find everything imported.

    # The copies of users' sources that children import are for one run: compiled modules beside them would be litter.
    sys.dont_write_bytecode = True
    num_tasks = len(os.listdir("/proc/self/task"))
    assert num_tasks <= _MAX_TASKS, f"the zygote has {num_tasks} threads; forking it would hang its children"
    gc.collect()
    gc.freeze()


class Zygote:
    """Listens at `path` and serves one control plane at a time; reports it could not send go to the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        self._listener.bind(str(temporary))
        os.chmod(temporary, 0o600)
        self._listener.listen()
        # Renamed when it already listens, so that connecting never fails; this also replaces an older zygote's socket.
        os.rename(temporary, path)
        self._inode = path.stat().st_ino
        self._connection: socket.socket | None = None
        self._decoder: FrameDecoder[SpawnRequest] = FrameDecoder(SpawnRequest)
        self._children: dict[int, WorkerSpec] = {}
        self._unsent: list[bytes] = []
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def run(self) -> None:
        """Serve until the socket file is removed or replaced, or for a minute without control plane and children."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        idle_since_s = time.monotonic()
        while self._is_current():
            sockets = [self._listener, self._wake_receiver] + ([self._connection] if self._connection else [])
            ready, _, _ = select.select(sockets, [], [], _POLL_S)
            if self._wake_receiver in ready:
                self._wake_receiver.recv(4096)
            self._reap()
            if self._listener in ready:
                self._accept()
            elif self._connection is not None and self._connection in ready:
                self._read()
            if self._connection is not None or self._children:
                idle_since_s = time.monotonic()
            elif time.monotonic() - idle_since_s > _IDLE_EXIT_S:
                self._path.unlink(missing_ok=True)
                return

    def _is_current(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _accept(self) -> None:
        """Accept a new control plane in place of the old one and send it all unsent reports."""
        connection, _ = self._listener.accept()
        self._disconnect()
        connection.settimeout(_POLL_S * 5)
        self._connection = connection
        self._decoder = FrameDecoder(SpawnRequest)
        self._flush()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 16)
            requests = self._decoder.feed(data) if data else []
        except (OSError, BackendError):
            data, requests = b"", []
        if not data:
            self._disconnect()
        for request in requests:
            self._spawn(request.spec)

    def _spawn(self, spec: WorkerSpec) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_worker(spec)
        self._children[pid] = spec
        self._report(encode_frame(Spawned(replica_id=spec.replica_id, pid=pid)))

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            spec = self._children.pop(pid, None)
            if spec is not None:
                code = os.waitstatus_to_exitcode(status)
                self._report(encode_frame(ChildExited(replica_id=spec.replica_id, pid=pid, exit_code=code)))

    def _report(self, frame: bytes) -> None:
        self._unsent.append(frame)
        self._flush()

    def _flush(self) -> None:
        while self._connection is not None and self._unsent:
            try:
                self._connection.sendall(self._unsent[0])
            except OSError:
                self._disconnect()
                return
            self._unsent.pop(0)

    def _become_worker(self, spec: WorkerSpec) -> None:
        """In the child: close the zygote's sockets, reset signals, run the worker, and never return."""
        code = EXIT_CRASHED
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(name, signal.SIG_DFL)
            self._disconnect()
            for own in (self._listener, self._wake_receiver, self._wake_sender):
                own.close()
            _redirect_output(spec.log_path)
            _raise_oom_score()
            # What `ps` and `pgrep -f` show. First: it is written where the environment lies until that is changed.
            setproctitle.setproctitle(f"springtide worker {spec.replica_id}")
            os.environ.update(spec.environment)
            from springtide.runtime.worker import main

            code = main(spec)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Not sys.exit: the zygote's stack frames must not unwind in the child.
            os._exit(code)


def _redirect_output(log_path: str) -> None:
    if not log_path:
        return
    make_private(Path(log_path).parent)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _log_stream(1), _log_stream(2)


class _LogFile(io.FileIO):
    """A log file that drops output while the disk is full, so that a full disk does not end the training."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


def _log_stream(descriptor: int) -> TextIO:
    raw = _LogFile(descriptor, "w", closefd=False)
    # Characters that UTF-8 cannot encode must not end the training either.
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _raise_oom_score() -> None:
    """Make the kernel's OOM killer prefer workers: a job survives losing one, but all jobs need the control plane."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def run_zygote(path: Path) -> int:
    """Warm up, then serve until the zygote is not needed any more; returns the exit code."""
    warm_up()
    Zygote(path).run()
    return 0
