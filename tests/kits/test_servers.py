"""The servers of tests are real, private, and gone with the process that asked for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from kits import servers
from kits.servers import (
    ask_s3,
    missing_postgres,
    missing_redis,
    running_postgres,
    running_redis,
    running_s3,
)
from springtide.core.errors import BackendError


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_test_that_is_killed_takes_its_servers_with_it():
    if missing_redis():
        pytest.skip(missing_redis())
    code = (
        "import sys; from kits.servers import running_redis, running_s3\n"
        "with running_redis() as redis, running_s3() as s3: print(redis.pid, s3.pid, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(servers.__file__).parents[1])},
    )
    assert child.stdout is not None
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    pause = threading.Event()
    while any(is_alive(pid) for pid in pids):
        pause.wait(0.05)


@pytest.mark.slow
def test_an_s3_server_has_its_buckets_and_ends():
    with running_s3(buckets=("one", "two")) as server:
        assert ask_s3(server, "HEAD", "/one") == ask_s3(server, "HEAD", "/two") == 200
        assert ask_s3(server, "HEAD", "/three") == 404
        assert server.s3_url("one", "x").startswith(f"s3://one/x?endpoint=http://127.0.0.1:{server.port}&")
    assert not is_alive(server.pid)


def test_a_redis_asks_for_its_password_and_ends():
    if missing_redis():
        pytest.skip(missing_redis())
    with running_redis() as server, socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(b"GET a\r\n")
        assert connection.recv(100).startswith(b"-NOAUTH")
        assert server.password in server.redis_url
        with socket.socket() as elsewhere, pytest.raises(OSError):
            elsewhere.bind((server.host, server.port))
    assert not is_alive(server.pid)


def test_why_there_is_no_redis_is_said(monkeypatch):
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    assert missing_redis() == "there is no redis-server on this machine"


@pytest.mark.slow
def test_a_postgres_asks_for_its_password_is_nobodys_root_and_ends():
    if missing_postgres():
        pytest.skip(missing_postgres())
    with running_postgres() as server:
        with psycopg.connect(server.postgres_url()) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("springtide",)
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.postgres_url().replace(server.password, "wrong"))
        with open(f"/proc/{server.pid}/status") as file:
            uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
        assert "0" not in uids
    assert not is_alive(server.pid)


def test_why_there_is_no_postgres_is_said(monkeypatch):
    monkeypatch.setattr(servers, "_postgres_programs", lambda: None)
    assert missing_postgres() == "there is no PostgreSQL server on this machine"
    with pytest.raises(BackendError, match="no PostgreSQL"), running_postgres():
        raise AssertionError("it started")
    monkeypatch.undo()
    if servers._postgres_programs() is not None:
        monkeypatch.setattr(servers.os, "getuid", lambda: 0)
        monkeypatch.setattr(servers, "_unprivileged", lambda: None)
        assert "does not run as root" in missing_postgres()
