"""The servers that are measured: each framework as processes of its own, and the CPU time of all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import msgspec
import psutil

from springtide.cli.session import refuse
from springtide.core.errors import BackendError

OURS, BARE = "springtide", "uvicorn"
_APPLICATIONS = Path(__file__).with_name("applications")
_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.2
_VALUES = tuple(index / 64 for index in range(64))
BODY = msgspec.json.encode({"values": _VALUES}).decode()


@dataclass(frozen=True, kw_only=True)
class ServingPeer:
    """How one framework is started: the module that tells whether it is installed, its command, and its path.

    `command(python, port, directory)` runs in the folder of the applications.
    """

    module: str
    distribution: str
    path: str
    command: Callable[[str, int, str], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _bentoml(python: str, port: int, directory: str) -> Sequence[str]:
    return (python, "-m", "bentoml", "serve", "bento:BentoHandler", "--host", "127.0.0.1", "--port", str(port))


def _bare(python: str, port: int, directory: str) -> Sequence[str]:
    settings = ("--no-access-log", "--log-level", "warning", "--lifespan", "off", "--loop", "uvloop")
    return (python, "-m", "uvicorn", "bare:answer", "--port", str(port), *settings)


# In the order of the first round. All have one replica and one process that answers HTTP, without access logs.
PEERS: Mapping[str, ServingPeer] = MappingProxyType(
    {
        BARE: ServingPeer(module="uvicorn", distribution="uvicorn", path="/", command=_bare),
        "litserve": ServingPeer(
            module="litserve",
            distribution="litserve",
            path="/predict",
            command=lambda python, port, directory: (python, "lit.py", str(port)),
        ),
        "bentoml": ServingPeer(
            module="bentoml",
            distribution="bentoml",
            path="/predict",
            command=_bentoml,
            environment={
                "BENTOML_DO_NOT_TRACK": "True",
                "BENTOML_CONFIG_OPTIONS": "api_server.logging.access.enabled=false",
            },
        ),
        "ray": ServingPeer(
            module="ray",
            distribution="ray",
            path="/",
            command=lambda python, port, directory: (python, "ray_serve.py", str(port), directory),
            environment={
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
                "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            },
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class ServingProcesses:
    """One server that answers: where, with what headers, and the process that all others descend from."""

    pid: int
    port: int
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def tree(self) -> list[psutil.Process]:
        """All its living processes."""
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each living process, user and system, counted in steps of 10 ms."""
        found = {}
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found


def cpu_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds between two counts of a tree. What ended meanwhile is left out."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """The interpreter of each peer that can be measured: those of --peer NAME=PYTHON, and what is installed here.

    Raises InvalidRequest for a name that is none of the peers, and for an interpreter that is not there.
    """
    found = {name: sys.executable for name, peer in PEERS.items() if importlib.util.find_spec(peer.module)}
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS or not python:
            refuse(f"--peer {text!r} is not like litserve=/path/to/python; the peers are {', '.join(PEERS)}")
        if not os.access(python, os.X_OK) or not Path(python).is_file():
            refuse(f"--peer {text!r}: there is no interpreter {python}")
        found[name] = str(Path(python).absolute())
    return {name: found[name] for name in PEERS if name in found}


def version_of(name: str, python: str) -> str:
    """The installed version of a peer. Raises InvalidRequest where that interpreter does not have it."""
    ask = f"import importlib.metadata as m; print(m.version({PEERS[name].distribution!r}))"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode:
        refuse(f"{python} has no {PEERS[name].distribution}; pip install {PEERS[name].distribution} there")
    return asked.stdout.strip()


@contextlib.contextmanager
def running_peer(name: str, python: str, handler: str, directory: Path) -> Iterator[ServingProcesses]:
    """A peer that has answered its first request. Raises BackendError if it does not."""
    peer, port = PEERS[name], _free_port()
    environment = {**_environment(), **peer.environment, "BENCH_HANDLER": handler}
    command = peer.command(python, port, str(directory))
    with _process(command, environment, _APPLICATIONS, directory / f"{name}.log") as process:
        server = ServingProcesses(pid=process.pid, port=port, path=peer.path)
        _await_answer(name, process, server, directory / f"{name}.log")
        yield server


@contextlib.contextmanager
def running_platform(handler: str, directory: Path) -> Iterator[ServingProcesses]:
    """A platform with two slots and the handler as a service of one replica, called with the platform's token."""
    state, port, log = directory / "state", _free_port(), directory / f"{OURS}.log"
    options = ("--foreground", "--state", str(state), "--slots", "2", "--port", str(port))
    with _process((sys.executable, "-m", "springtide", "up", *options), _environment(), directory, log) as process:
        _await(OURS, process, log, lambda: "" if _listens(port) else f"nothing listens on port {port}")
        headers = {"Authorization": f"Bearer {(state / 'token').read_text().strip()}"}
        source = {
            "filename": "handlers.py",
            "text": (_APPLICATIONS / "handlers.py").read_text(encoding="utf-8"),
            "object_name": handler.capitalize(),
            "kind": "class",
        }
        body = {"source": source, "options": {"min_replicas": 1, "max_replicas": 1}}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            answer = client.put(f"/v1/services/{handler}", json=body)
            if not answer.is_success:
                raise BackendError(f"the platform refused the service: {answer.text[:500]}")
        server = ServingProcesses(pid=process.pid, port=port, path=f"/f/{handler}", headers=headers)
        _await_answer(OURS, process, server, log)
        yield server


def answered(server: ServingProcesses) -> Any:
    """What the server answers to the body, without an envelope. Raises httpx2.HTTPError."""
    url = f"http://127.0.0.1:{server.port}{server.path}"
    answer = httpx2.post(url, content=BODY, headers={"Content-Type": "application/json", **server.headers}, timeout=60)
    answer.raise_for_status()
    found = answer.json()
    return found["outputs"] if isinstance(found, dict) else found


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPRINGTIDE_URL")}
    return {**kept, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own. At the end it is asked to stop, and what is left of its tree is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=cwd, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        tree = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        for left in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait()


def _await_answer(name: str, process: subprocess.Popen[bytes], server: ServingProcesses, log: Path) -> None:
    def missing() -> str:
        try:
            answered(server)
        except httpx2.HTTPStatusError as error:
            return f"{error.response.status_code} {error.response.text[:500]}"
        except httpx2.HTTPError as error:
            return repr(error)
        return ""

    _await(name, process, log, missing)


def _await(name: str, process: subprocess.Popen[bytes], log: Path, missing: Callable[[], str]) -> None:
    """Wait until nothing is missing. Raises BackendError with what was missing last."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    while what := missing():
        if process.poll() is not None or time.monotonic() > end_s:
            said = log.read_text(errors="replace")[-2000:]
            raise BackendError(f"{name} did not start (exit code {process.returncode}): {what}; its output:\n{said}")
        time.sleep(_POLL_S)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
