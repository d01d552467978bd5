"""Parameter stores as processes of this machine: a redis-server each, on loopback, with a password, without a disk."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from springtide.backends.functions.parameter_store.host import PING_LIMIT_S, ParameterStoreHost
from springtide.backends.functions.parameter_store.redis_ping import answers, user_words
from springtide.backends.processes import (
    ProcessIdentity,
    identify,
    live_stat,
    reap,
    signal_group,
    spawn_detached,
)
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidSetting, SettingName
from springtide.storage.files import write_durable

START_LIMIT_S = 30.0
END_LIMIT_S = 5.0
MEMORY_MB = 1024
MEND_OF_MISSING_BINARY = (
    "install Redis (apt install redis-server), name the program with ",
    SettingName("functions.parameter_store"),
    " 'redis?binary=/path/redis-server', or a Redis that runs with redis://HOST:6379/0",
)
_POLL_S = 0.02
_TRIES = 3


class _Process(ProcessIdentity, frozen=True):
    """What names a server: its process, and the folder with its configuration and its log."""

    folder: str


class RedisProcesses:
    """Starts and ends them. `binary` is the program's name or path; each holds `memory_mb` at most, then refuses.

    Raises InvalidRequest where there is no such program.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: str = "redis-server",
        memory_mb: int = MEMORY_MB,
        now_s: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._program = find_binary(binary)
        self._folder = folder
        self._memory_mb = memory_mb
        self._now_s = now_s
        self._sleep = sleep
        self._children: set[int] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(self, job_id: str, before: ParameterStoreHost | None) -> ParameterStoreHost:
        """A fresh server, at the port and with the password of the one before if there was one and the port is free.

        Raises BackendError with what the server said.
        """
        ports: list[int] = []
        password = secrets.token_hex(24)
        if before is not None:
            parts = urlsplit(before.url)
            ports, password = [parts.port or 0], parts.password or password
        folder = self._folder / quote(job_id, safe="")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = folder / "redis.log"
        for attempt in range(_TRIES):
            port = ports[attempt] if attempt < len(ports) else _free_port()
            config = folder / "redis.conf"
            write_durable(config, self._config(port, password, folder).encode())
            log.unlink(missing_ok=True)
            pid = spawn_detached([self._program, str(config)], dict(os.environ), log)
            self._children.add(pid)
            identity = identify(pid)
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            if identity is not None and self._await(url, identity):
                named = _Process(identity.pid, identity.start_ticks, identity.boot_id, str(folder))
                kept = msgspec.json.encode(named).decode()
                return ParameterStoreHost(url=url, identity=kept, began_at_s=self._now_s())
            if identity is not None:
                self._end(identity)
        raise BackendError(f"{self._program} does not start: {_last_line(log)}; run it by hand to see why")

    def is_alive(self, server: ParameterStoreHost) -> bool:
        """Whether that very process runs and answers."""
        return self._is_there(_process_of(server)) and answers(server.url, PING_LIMIT_S)

    def end(self, server: ParameterStoreHost) -> None:
        """Ask it to end, and kill it if it does not; its folder goes with it."""
        ended = _process_of(server)
        self._end(ended)
        shutil.rmtree(ended.folder, ignore_errors=True)

    def _end(self, identity: ProcessIdentity) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._is_there(identity):
                signal_group(identity, number)
            until_s = time.monotonic() + END_LIMIT_S
            while self._is_there(identity) and time.monotonic() < until_s:
                self._sleep(_POLL_S)
        if self._is_there(identity):
            raise BackendError(f"the redis-server with process number {identity.pid} does not end; kill it by hand")

    def _config(self, port: int, password: str, folder: Path) -> str:
        lines = (
            "bind 127.0.0.1",
            f"port {port}",
            "protected-mode yes",
            " ".join(user_words(password)),
            # What it holds is worth one step: nothing is written to a disk, and nothing is thrown away in silence.
            'save ""',
            "appendonly no",
            f"maxmemory {self._memory_mb}mb",
            "maxmemory-policy noeviction",
            "daemonize no",
            "loglevel warning",
            f'dir "{folder}"',
        )
        return "\n".join(lines) + "\n"

    def _await(self, url: str, identity: ProcessIdentity) -> bool:
        until_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until_s and self._is_there(identity):
            # Another program on that port would not know the password.
            if answers(url, 1.0):
                return self._is_there(identity)
            self._sleep(_POLL_S)
        return False

    def _is_there(self, identity: ProcessIdentity) -> bool:
        # A dead child is a zombie until it is reaped; children of an earlier platform are not this process's.
        if identity.pid in self._children and reap(identity.pid) is not None:
            self._children.discard(identity.pid)
        return live_stat(identity) is not None


def find_binary(binary: str) -> str:
    """The path of the server's program. Raises InvalidRequest, which says what to install or to set."""
    found = shutil.which(binary)
    if found is None:
        raise InvalidSetting(f"there is no {binary} on this machine: ", *MEND_OF_MISSING_BINARY)
    return found


def _process_of(server: ParameterStoreHost) -> _Process:
    return decode_json(server.identity, _Process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1].strip()[:200] if lines else "it says nothing"
