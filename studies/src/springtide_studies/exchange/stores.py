"""The stores that all-reduces are measured on: files in memory, a Redis, an S3 API; started for one measurement.

The servers end with the process that started them, even if it is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from springtide.core.errors import BackendError

START_LIMIT_S = 30.0
BUCKET = "sync"
# What clients sign with (the server takes anything), and that no proxy stands between this machine and itself.
S3_ENVIRONMENT = (
    ("AWS_ACCESS_KEY_ID", "probe"),
    ("AWS_SECRET_ACCESS_KEY", "probe"),
    ("NO_PROXY", "127.0.0.1"),
    ("no_proxy", "127.0.0.1"),
)
# Both servers end when their standard input does.
_KEEPER = '"$@" >/dev/null 2>&1 & trap "kill -9 $!" EXIT; cat >/dev/null'
_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
server.start()
sys.stdin.read()
"""


def missing(kind: str) -> str:
    """Why a store of that kind cannot be measured here; "" if it can."""
    if kind == "redis" and shutil.which("redis-server") is None:
        return "there is no redis-server on this machine"
    if kind == "redis" and importlib.util.find_spec("redis") is None:
        return "the redis package is not installed: pip install 'springtide[functions]'"
    if kind == "s3" and (importlib.util.find_spec("moto") is None or importlib.util.find_spec("obstore") is None):
        return "the S3 server or its client is not installed: pip install 'moto[s3,server]' 'springtide[functions]'"
    return ""


@contextlib.contextmanager
def running_store(kind: str) -> Iterator[str]:
    """The URL of a fresh store: `file` (in memory where the machine has such a folder), `redis` or `s3`.

    Raises BackendError where its server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="springtide-sync-", dir=_memory_folder()) as folder:
        if kind == "file":
            yield f"file://{folder}/objects"
            return
        port = _free_port()
        if kind == "redis":
            options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder)
            command = ["sh", "-c", _KEEPER, "keeper", "redis-server", "--port", str(port), *options]
        else:
            command = [sys.executable, "-c", _S3_SERVER, str(port)]
        with _kept(command) as process:
            _await_port(process, port, kind)
            if kind == "redis":
                yield f"redis://127.0.0.1:{port}/0"
                return
            _make_bucket(port)
            yield f"s3://{BUCKET}/probe?endpoint=http://127.0.0.1:{port}&region=us-east-1"


def _memory_folder() -> Path | None:
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _kept(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int, kind: str) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.02)
    raise BackendError(f"the server of the {kind} store does not start; run it by hand to see why")


def _make_bucket(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_LIMIT_S)
    try:
        credential = "AWS4-HMAC-SHA256 Credential=probe/20260101/us-east-1/s3/aws4_request"
        connection.request("PUT", f"/{BUCKET}", headers={"Authorization": credential})
        answer = connection.getresponse()
        if answer.status != 200:
            raise BackendError(f"the S3 server makes no bucket: it answers {answer.status}")
    finally:
        connection.close()
