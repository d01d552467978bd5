"""The zygote's processes with libraries: started for the first program that imports them, forked for every later one.

Such a process imports in one environment. It is forked only for workers for which that import would have gone the
same way: see `LibraryProcess.verdict`. All others are forked from the zygote and import by themselves, as are those
whose process fails or dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder, Spawned, SpawnRequest, WorkerSpec, encode_frame
from springtide.runtime.zygote.forked import fork
from springtide.runtime.zygote.messages import (
    PREFIXES,
    VISIBLE,
    FromPreloaded,
    Imported,
    chosen_variables,
    own_variables,
)
from springtide.runtime.zygote.preloading import run_preloaded
from springtide.runtime.zygote.program_imports import ProgramImports

# Each has 50 to 200 MB of its own beside what it shares with the zygote.
MAX_PROCESSES: Final = 3
IDLE_S: Final = 600.0
# An import takes seconds, and a hundred on a machine with far too much to do.
IMPORT_LIMIT_S: Final = 120.0
RETRY_S: Final = 600.0
_SEND_S = 5.0
_READ_BYTES = 1 << 16
Verdict = Literal["fits", "other", "never"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker whose program imports libraries."""

    spec: WorkerSpec
    imports: ProgramImports

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """What it imports of them."""
        return frozenset(self.imports.names)


@dataclass(slots=True)
class LibraryProcess:
    """One process with libraries, which it has imported as soon as `facts` are there."""

    # 0: it has been reaped.
    pid: int
    link: socket.socket
    names: frozenset[tuple[str, str]]
    variables: Mapping[str, str]
    used_at_s: float
    facts: Imported | None = None
    waiting: list[Asked] = field(default_factory=list)
    forking: dict[str, Asked] = field(default_factory=dict)
    decoder: FrameDecoder[FromPreloaded] = field(default_factory=lambda: FrameDecoder(FromPreloaded))

    def verdict(self, asked: Asked) -> Verdict:
        """Whether this process fits a worker, another one might, or none can.

        It fits if the program imports nothing that is not here, and what the import has looked at is the same: the
        variables that were read, or that code beneath Python may have read, and the packages that were looked for, none
        of which is a file of the program's own. Secrets are never known to such a process.
        """
        spec, facts = asked.spec, self.facts
        if not asked.names <= self.names:
            return "other"
        chosen, own = chosen_variables(spec), own_variables(spec, os.environ)
        secrets = spec.workload.secrets.names if spec.workload.secrets is not None else ()
        if facts is not None:
            if (asked.imports.modules & (facts.found | facts.missing)) or (asked.imports.folders & facts.missing):
                return "never"
            if any(self._is_read(name) for name in {*secrets, *(own.keys() - chosen.keys())}):
                return "never"
        changed = {name for name in {*self.variables, *own} if self._value(name, own) != self._value(name)}
        return "other" if any(self._is_read(name) for name in changed) else "fits"

    def _is_read(self, name: str) -> bool:
        return name.startswith(PREFIXES) or (self.facts is not None and name in self.facts.variables)

    def _value(self, name: str, variables: Mapping[str, str] | None = None) -> str | int | None:
        value = (self.variables if variables is None else variables).get(name, os.environ.get(name))
        return len(value.split(",")) if name == VISIBLE and value else value


class PreloadedProcesses:
    """Places workers whose programs import libraries.

    `on_spawned(spec, pid)`: one was forked, a child of this process. `fork_plainly(spec, names)` forks one that has to
    import these by itself. `hold(spec)`: it will take a while. `leave` is called in each new process first.
    """

    def __init__(
        self,
        on_spawned: Callable[[WorkerSpec, int], None],
        fork_plainly: Callable[[WorkerSpec, tuple[tuple[str, str], ...]], None],
        hold: Callable[[WorkerSpec], None],
        leave: Callable[[], None],
    ) -> None:
        self._on_spawned, self._fork_plainly, self._hold, self._leave = on_spawned, fork_plainly, hold, leave
        self._processes: list[LibraryProcess] = []
        self._failed_at_s: dict[frozenset[tuple[str, str]], float] = {}

    @property
    def links(self) -> list[socket.socket]:
        """The sockets to read when they are ready."""
        return [process.link for process in self._processes]

    def place(self, asked: Asked) -> None:
        """Have a worker forked: at once, or when its libraries are imported."""
        verdicts = [(process.verdict(asked), process) for process in self._processes]
        for verdict, process in verdicts:
            if verdict == "fits" and process.facts is not None:
                return self._request(process, asked)
        if asked.names in self._failed_at_s or any(verdict == "never" for verdict, _ in verdicts):
            return self._fork_alone(asked)
        found = next((process for verdict, process in verdicts if verdict == "fits"), None) or self._start(asked)
        if found is None:
            return self._fork_alone(asked)
        found.waiting.append(asked)
        self._hold(asked.spec)

    def read(self, ready: list[socket.socket]) -> None:
        """Take what these have said."""
        for process in [one for one in self._processes if one.link in ready]:
            try:
                data = process.link.recv(_READ_BYTES)
                messages = process.decoder.feed(data)
            except BlockingIOError:
                continue
            except (OSError, BackendError):
                data, messages = b"", []
            for message in messages:
                self._take(process, message)
            if not data and process in self._processes:
                self._end(process, "it was ended")

    def reaped(self, pid: int) -> None:
        """A child has ended, so that its id may be another process's now."""
        for process in self._processes:
            if process.pid == pid:
                process.pid = 0

    def tick(self) -> None:
        """End what nothing has used for long, and what does not come up."""
        now_s = time.monotonic()
        self._failed_at_s = {names: at_s for names, at_s in self._failed_at_s.items() if now_s - at_s < RETRY_S}
        for process in list(self._processes):
            if process.facts is None and now_s - process.used_at_s > IMPORT_LIMIT_S:
                self._end(process, f"it took longer than {IMPORT_LIMIT_S:.0f} s")
            elif process.facts is not None and now_s - process.used_at_s > IDLE_S and not process.forking:
                self._end(process)

    def _take(self, process: LibraryProcess, message: FromPreloaded) -> None:
        if isinstance(message, Spawned):
            asked = process.forking.pop(message.replica_id, None)
            if asked is not None:
                self._on_spawned(asked.spec, message.pid)
        elif isinstance(message, Imported):
            process.facts, process.used_at_s = message, time.monotonic()
            _say(f"imported ahead: {_told(process)} ({message.cpu_s:.1f} s, {message.private_mib} MiB of its own)")
            waiting, process.waiting = process.waiting, []
            for asked in waiting:
                self.place(asked)
        else:
            self._end(process, message.reason)

    def _start(self, asked: Asked) -> LibraryProcess | None:
        """Start a process for what the worker imports, with all that is in those whose place it takes."""
        names, variables = asked.names, chosen_variables(asked.spec)
        packages = {module.partition(".")[0] for module, _ in names}
        for process in [one for one in self._processes if one.facts is not None and not one.forking]:
            has_package = any(module.partition(".")[0] in packages for module, _ in process.names)
            if has_package and process.verdict(Asked(asked.spec, ProgramImports())) == "fits":
                names |= process.names
                self._end(process)
        if len(self._processes) >= MAX_PROCESSES:
            idle = [one for one in self._processes if one.facts is not None and not one.forking]
            if not idle:
                return None
            self._end(min(idle, key=lambda one: one.used_at_s))
        ours, theirs = socket.socketpair()
        zygote = os.getpid()

        def run() -> NoReturn:
            self._leave()
            ours.close()
            run_preloaded(theirs, zygote, sorted(names), variables)

        pid = fork(run)
        theirs.close()
        ours.setblocking(False)
        started = LibraryProcess(pid, ours, names, variables, time.monotonic())
        self._processes.append(started)
        return started

    def _request(self, process: LibraryProcess, asked: Asked) -> None:
        process.used_at_s = time.monotonic()
        process.forking[asked.spec.replica_id] = asked
        try:
            process.link.settimeout(_SEND_S)
            process.link.sendall(encode_frame(SpawnRequest(spec=asked.spec)))
            process.link.setblocking(False)
        except OSError:
            self._end(process, "it does not answer")

    def _fork_alone(self, asked: Asked) -> None:
        self._fork_plainly(asked.spec, asked.imports.names)

    def _end(self, process: LibraryProcess, failure: str = "") -> None:
        """End a process; its workers that have not begun are forked without it."""
        if process.pid:
            os.kill(process.pid, signal.SIGKILL)
        _read_births(process, self._take)
        process.link.close()
        self._processes.remove(process)
        if failure:
            _say(f"not imported ahead any more: {_told(process)}: {failure}")
        if failure and process.facts is None:
            self._failed_at_s[process.names] = time.monotonic()
        for asked in [*process.waiting, *process.forking.values()]:
            if failure and process.facts is None:
                self._failed_at_s[asked.names] = time.monotonic()
            self._fork_alone(asked)


def _read_births(process: LibraryProcess, take: Callable[[LibraryProcess, FromPreloaded], None]) -> None:
    """Take what is said already. After the shutdown nothing can be said, so no other worker begins."""
    with contextlib.suppress(OSError, BackendError):
        process.link.shutdown(socket.SHUT_RD)
        while data := process.link.recv(_READ_BYTES):
            for message in process.decoder.feed(data):
                if isinstance(message, Spawned):
                    take(process, message)


def _told(process: LibraryProcess) -> str:
    return ", ".join(sorted({module.partition(".")[0] for module, _ in process.names}))


def _say(line: str) -> None:
    sys.stderr.write(f"springtide: {line}\n")
    sys.stderr.flush()
