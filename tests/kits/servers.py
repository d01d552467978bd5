"""Real servers for tests, on loopback: Redis, PostgreSQL, an S3 API. Each dies with the process that asked for it."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from springtide.core.errors import BackendError
from springtide.storage.pacing import real_pace

START_LIMIT_S = 20.0
# The shell ends the server as soon as its own standard input ends: when the test's process is gone, however it went.
_KEEPER = '"$@" >/dev/null 2>&1 & echo $!; cat >/dev/null; kill -9 $!; wait $! 2>/dev/null'
_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(kw_only=True)
class RunningServer:
    """A server that listens at `host:port`; `pid` is the server's own process."""

    host: str
    port: int
    pid: int
    password: str = ""

    def kill(self) -> None:
        """Let it die, as kill -9 would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    @property
    def redis_url(self) -> str:
        """The URL of its first database."""
        return f"redis://:{self.password}@{self.host}:{self.port}/0"

    def postgres_url(self, database: str = "postgres") -> str:
        """The URL of one of its databases."""
        return f"postgresql://springtide:{self.password}@{self.host}:{self.port}/{database}"

    @property
    def s3_endpoint(self) -> str:
        """The address of its API."""
        return f"http://{self.host}:{self.port}"

    def s3_url(self, bucket: str, prefix: str = "") -> str:
        """The URL of a store in one of its buckets."""
        return f"s3://{bucket}/{prefix}?endpoint={self.s3_endpoint}&region=us-east-1"


def missing_redis() -> str:
    """Why no Redis can be started here; "" if one can."""
    return "" if shutil.which("redis-server") else "there is no redis-server on this machine"


@contextlib.contextmanager
def running_redis(
    *, port: int = 0, password: str = "", options: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A Redis with a password, without persistence, in a directory of its own. Raises BackendError if it cannot start.

    A given `port` is for a server that comes back where another has died.
    """
    password = password or secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="springtide-redis-") as folder:
        for _ in range(3):
            chosen = port or _free_port()
            settings = {
                "port": str(chosen),
                "bind": "127.0.0.1",
                "requirepass": password,
                "save": "",
                "appendonly": "no",
                "dir": folder,
                **(options or {}),
            }
            command = ["redis-server", *(part for name, value in settings.items() for part in (f"--{name}", value))]
            with _kept(["sh", "-c", _KEEPER, "keeper", *command]) as keeper:
                assert keeper.stdout is not None
                pid = int(keeper.stdout.readline())
                if _answers(chosen, pid):
                    yield RunningServer(host="127.0.0.1", port=chosen, pid=pid, password=password)
                    return
    raise BackendError("redis-server does not start; run it by hand to see why")


def missing_postgres() -> str:
    """Why no PostgreSQL can be started here; "" if one can."""
    if _postgres_programs() is None:
        return "there is no PostgreSQL server on this machine"
    if os.getuid() == 0 and (_unprivileged() is None or shutil.which("setpriv") is None):
        return "PostgreSQL does not run as root, and there is no other user that it could run as"
    return ""


@contextlib.contextmanager
def running_postgres(*, folder: Path | None = None, port: int = 0, password: str = "") -> Iterator[RunningServer]:
    """A PostgreSQL with the user `springtide`, whose password is `password`. Raises BackendError if it cannot start.

    A given `folder`, `port` and `password` are for a server that comes back, with its data, where another has died. It
    syncs what it commits, as in production. It never runs as root: where the test does, it runs as another user, to
    whom the folder then belongs.
    """
    programs = _postgres_programs()
    if programs is None or missing_postgres():
        raise BackendError(missing_postgres())
    password = password or secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        # A short path: the socket of a server lies in its folder, and the name of a socket has a limit.
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-postgres-", dir="/tmp")))
        as_user = _as_unprivileged(folder)
        data = folder / "data"
        if not data.exists():
            _make_database(as_user, programs, folder, data, password)
        (data / "postmaster.pid").unlink(missing_ok=True)
        for _ in range(3):
            chosen = port or _free_port()
            command = [*as_user, str(programs / "postgres"), "-D", str(data), "-p", str(chosen)]
            command += ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
            with _kept(["sh", "-c", _KEEPER, "keeper", *command]) as keeper:
                assert keeper.stdout is not None
                pid = int(keeper.stdout.readline())
                # While it still recovers it listens already, and refuses whoever comes.
                if _answers(chosen, pid) and _is_ready(programs, chosen, pid):
                    yield RunningServer(host="127.0.0.1", port=chosen, pid=pid, password=password)
                    return
    raise BackendError(f"PostgreSQL does not start; run {programs / 'postgres'} by hand to see why")


def _postgres_programs() -> Path | None:
    """Where `postgres` and `initdb` are: Debian keeps them beside each other by version, outside of the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.parent.name)],
        reverse=True,
    )
    found += [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    needed = ("initdb", "postgres", "pg_isready")
    return next((path for path in found if all((path / name).exists() for name in needed)), None)


def _unprivileged() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _as_unprivileged(folder: Path) -> list[str]:
    """The command's beginning that makes it run as somebody else where this process is root."""
    user = _unprivileged()
    if os.getuid() != 0 or user is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _make_database(as_user: list[str], programs: Path, folder: Path, data: Path, password: str) -> None:
    secret = folder / "password"
    secret.write_text(password, encoding="ascii")
    command = [*as_user, str(programs / "initdb"), "-D", str(data), "--no-sync", "--username=springtide"]
    command += ["--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8", "--locale=C"]
    made = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    secret.unlink()
    if made.returncode != 0:
        raise BackendError(f"initdb failed: {' '.join(made.stderr.split())[-300:]}")


def _is_ready(programs: Path, port: int, pid: int) -> bool:
    pace = real_pace()
    until_s = pace.now_s() + START_LIMIT_S
    question = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "springtide"]
    while pace.now_s() < until_s:
        if subprocess.run([*question, "-d", "postgres"], check=False).returncode == 0:
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        pace.sleep(0.05)
    return False


@contextlib.contextmanager
def running_s3(*, buckets: tuple[str, ...] = (), host: str = "127.0.0.1") -> Iterator[RunningServer]:
    """moto's S3 API with these buckets, in a process of its own. Raises BackendError if it cannot start.

    `host` is the address of this machine that it listens at.
    """
    environment = {**os.environ, "MOTO_ALLOW_NONEXISTENT_REGION": "true"}
    with _kept([sys.executable, "-c", _S3_SERVER, host], environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.isdigit():
            raise BackendError("moto's server does not start; is moto[s3,server] installed?")
        server = RunningServer(host=host, port=int(line), pid=process.pid)
        for bucket in buckets:
            ask_s3(server, "PUT", f"/{bucket}")
        yield server


def ask_s3(server: RunningServer, verb: str, path: str) -> int:
    """Ask the server something that stores never do (make a bucket, take it away); the status it answers."""
    import http.client

    connection = http.client.HTTPConnection(server.host, server.port, timeout=START_LIMIT_S)
    try:
        connection.request(
            verb, path, headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        )
        return connection.getresponse().status
    finally:
        connection.close()


@contextlib.contextmanager
def _kept(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, pid: int) -> bool:
    """Whether somebody listens there before the limit, or before the process is gone."""
    pace = real_pace()
    until_s = pace.now_s() + START_LIMIT_S
    while pace.now_s() < until_s:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return True
        except OSError:
            pace.sleep(0.01)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return False
