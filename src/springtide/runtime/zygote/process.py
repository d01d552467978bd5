"""The zygote: a warm, single-threaded process that forks workers, so that a worker starts in milliseconds.

It has imported torch and taken one optimizer step, has no thread but the main one, no socket but its control
connection, and never runs user code. Had it used torch with several threads before a fork, the child's first such
operation would hang. Processes with libraries beside torch are forked from it under the same rules: see `preloaded`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from springtide.core.decoding import decode_msgpack
from springtide.core.errors import BackendError
from springtide.core.wire.workers import (
    ChildExited,
    FrameDecoder,
    Held,
    Spawned,
    SpawnRequest,
    WorkerSpec,
    encode_frame,
)
from springtide.runtime.process.deferred_compiler import defer_compiler
from springtide.runtime.zygote.forked import adopt_orphans, become_worker, fork, reset_signals, show_title
from springtide.runtime.zygote.output import use_log_streams
from springtide.runtime.zygote.preloaded import Asked, PreloadedProcesses
from springtide.runtime.zygote.program_imports import ProgramImports, imports_of

_IDLE_EXIT_S = 60.0
_POLL_S = 1.0
_MAX_TASKS = 2
# What a worker says of its program in one message; what is more is not looked at.
_MAX_ANSWER_BYTES = 60_000


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
        # Workers of which it is not known yet what their programs import, by the socket that they tell it by.
        self._asked: dict[socket.socket, tuple[int, WorkerSpec]] = {}
        self._preloaded = (
            PreloadedProcesses(self._born, self._fork, self._hold, self._leave) if adopt_orphans() else None
        )
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
            links = self._preloaded.links if self._preloaded is not None else []
            ready, _, _ = select.select([*sockets, *self._asked, *links], [], [], _POLL_S)
            if self._wake_receiver in ready:
                self._wake_receiver.recv(4096)
            for link in [one for one in self._asked if one in ready]:
                self._take_answer(link)
            if self._preloaded is not None:
                self._preloaded.read(ready)
                self._preloaded.tick()
            self._reap()
            if self._listener in ready:
                self._accept()
            elif self._connection is not None and self._connection in ready:
                self._read()
            if self._connection is not None or self._children or self._asked:
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
        """Fork a worker. It looks at its program first, and may have another process forked in its place."""
        if self._preloaded is None:
            self._fork(spec)
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        began_in = os.getcwd()

        def run() -> NoReturn:
            self._leave()
            ours.close()
            show_title(f"worker {spec.replica_id}")
            answer = msgspec.msgpack.encode(imports_of(spec.workload.entrypoint, began_in))
            is_told = b"" if len(answer) > _MAX_ANSWER_BYTES else answer
            theirs.send(is_told or msgspec.msgpack.encode(ProgramImports()))
            if is_told and decode_msgpack(answer, ProgramImports).names:
                os._exit(0)
            theirs.close()
            become_worker(spec, ())

        pid = fork(run)
        theirs.close()
        self._asked[ours] = (pid, spec)

    def _take_answer(self, link: socket.socket) -> None:
        pid, spec = self._asked.pop(link)
        data = link.recv(_MAX_ANSWER_BYTES)
        link.close()
        imports = decode_msgpack(data, ProgramImports) if data else ProgramImports()
        if imports.names and self._preloaded is not None:
            self._preloaded.place(Asked(spec, imports))
        else:
            self._born(spec, pid)

    def _fork(self, spec: WorkerSpec, libraries: tuple[tuple[str, str], ...] = ()) -> None:
        def run() -> NoReturn:
            self._leave()
            become_worker(spec, libraries)

        self._born(spec, fork(run))

    def _born(self, spec: WorkerSpec, pid: int) -> None:
        self._children[pid] = spec
        self._report(encode_frame(Spawned(replica_id=spec.replica_id, pid=pid)))

    def _hold(self, spec: WorkerSpec) -> None:
        self._report(encode_frame(Held(replica_id=spec.replica_id)))

    def _leave(self) -> None:
        """In a forked process: give up what is the zygote's."""
        reset_signals()
        self._disconnect()
        links = self._preloaded.links if self._preloaded is not None else []
        for own in (self._listener, self._wake_receiver, self._wake_sender, *self._asked, *links):
            own.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._children:
                # Whatever it has said before its end is there by now: that it was a worker, for example.
                for link in [link for link, (asked, _) in self._asked.items() if asked == pid]:
                    self._take_answer(link)
                if self._preloaded is not None:
                    self._preloaded.reaped(pid)
                    self._preloaded.read(self._preloaded.links)
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


def run_zygote(path: Path) -> int:
    """Warm up, then serve until the zygote is not needed any more; returns the exit code."""
    use_log_streams()
    warm_up()
    Zygote(path).run()
    return 0
