"""A Kubernetes for tests: the one that KUBECONFIG names, a lab of this session, or a sentence why there is none."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kits.kubernetes.kube_http import Kube, wait_for
from kits.kubernetes.lab.remains import REGISTRY

CHECKOUT = Path(__file__).parents[4]
START_LIMIT_S = 240.0
BINARIES = ("kube-apiserver", "kube-controller-manager", "kubelet")


def lab_folder() -> Path:
    """Where the lab's own script is, whether or not it is there."""
    return Path(os.environ.get("SPRINGTIDE_K8S_LAB") or CHECKOUT.parent / "shared" / "k8s-lab")


def missing_lab() -> str:
    """Why no lab can be started here; "" if one can."""
    script = lab_folder() / "lab.sh"
    if not script.is_file():
        return (
            f"KUBECONFIG names no cluster, and there is no lab: {script} does not exist (SPRINGTIDE_K8S_LAB names it)"
        )
    REGISTRY.mkdir(exist_ok=True)
    # Two workers of one run begin at once: the second waits, and finds what the first has fetched.
    with open(REGISTRY / "get.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all((binary_folder() / name).is_file() for name in BINARIES) and shutil.which("etcd"):
            return ""
        got = subprocess.run([script, "get"], capture_output=True, text=True, check=False, timeout=600)
    return "" if got.returncode == 0 else f"the lab's parts cannot be had ({script} get): {got.stderr.strip()[-300:]}"


def binary_folder() -> Path:
    return Path(os.environ.get("K8S_LAB_CACHE") or Path.home() / ".cache" / "k8s-lab") / "bin"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held at once, so that none is given twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def command_of(pid: int) -> list[str]:
    """How a process was started."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


class Lab:
    """An API server with its store and its controllers, in a folder of its own. Ends with the process that made it."""

    has_nodes = False

    def __init__(self) -> None:
        # Sockets below it must have paths of fewer than 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="stlab-", dir="/tmp"))
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self._keeper: subprocess.Popen[str] | None = None
        self._environment = {**os.environ}
        self._restarted: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Bring it up. Raises AssertionError with the server's own words."""
        REGISTRY.mkdir(exist_ok=True)
        options = ["--nodes"] if self.has_nodes else []
        self._keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("remains.py")), str(self.folder), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        # A lab with nodes waits here for another session's to end.
        assert self._keeper.stdout.readline().strip() == "kept"
        ports = free_ports(4)
        names = ("API_PORT", "ETCD_PORT", "PEER_PORT", "KCM_PORT")
        self._environment |= dict(zip(names, map(str, ports), strict=True))
        self._script("up")
        self._script("kcm")
        self._tune_controllers()
        wait_for(
            "the default service account", lambda: self.api.find("api/v1/namespaces/default/serviceaccounts/default")
        )

    def _tune_controllers(self) -> None:
        """Start the controllers otherwise than the lab's script does, where that is wanted."""

    def stop(self) -> None:
        """End it and take away what it left."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(90.0)
        self._keeper.stdout.close()
        self._keeper = None
        for process in self._restarted:
            process.wait(10.0)

    @functools.cached_property
    def api(self) -> Kube:
        """The administrator's way to it, once it is up."""
        return Kube(self.kubeconfig)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def kill_api_server(self) -> None:
        """Let the API server die; what it knows is in its store."""
        self._kill("apiserver")

    def start_api_server(self) -> None:
        """Start it where it was, with what it knew."""
        self._restart("apiserver")
        wait_for("the API server", lambda: self.api.get("readyz") or True, START_LIMIT_S)

    def _kill(self, name: str, *, signal_number: int = signal.SIGKILL) -> None:
        pid = self.pid(name)
        (self.folder / f"{name}.command").write_text("\0".join(command_of(pid)))
        os.kill(pid, signal_number)
        for process in self._restarted:
            if process.pid == pid:
                process.wait(30.0)
        wait_for(f"the end of {name}", lambda: not Path(f"/proc/{pid}/exe").exists() or has_ended(pid))

    def _restart(self, name: str) -> None:
        command = (self.folder / f"{name}.command").read_text().split("\0")
        self._spawn(name, command)

    def _spawn(self, name: str, command: list[str], **environment: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._restarted.append(process)
        (self.folder / f"{name}.pid").write_text(str(process.pid))

    def _script(self, verb: str) -> None:
        # The servers that it leaves running inherit its output: a file, or they would hold a pipe open.
        with open(self.folder / "script.log", "ab") as log:
            command = ["bash", str(lab_folder() / "lab.sh"), verb, str(self.folder)]
            done = subprocess.run(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            )
        assert done.returncode == 0, f"lab.sh {verb}: {(self.folder / 'script.log').read_text()[-2000:]}"


def has_ended(pid: int) -> bool:
    """Whether a process is gone, but for what its parent has still to fetch."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Cluster:
    """What a test is given: how to reach a cluster, and, where the tests may break it, the lab that it is."""

    def __init__(self, kubeconfig: Path, lab: Lab | None = None) -> None:
        self.kubeconfig = kubeconfig
        self.lab = lab
        self.api = Kube(kubeconfig)

    @contextlib.contextmanager
    def namespace(self, prefix: str) -> Iterator[str]:
        """A namespace of the test's own, with its default service account; gone afterwards."""
        name = f"{prefix}-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self.api.post("api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            account = f"api/v1/namespaces/{name}/serviceaccounts/default"
            wait_for("the service account", lambda: self.api.find(account))
            yield name
        finally:
            for pod in self.api.pods(name):
                path = f"api/v1/namespaces/{name}/pods/{pod['metadata']['name']}"
                self.api.delete(path, gracePeriodSeconds=0)
            self.api.delete(f"api/v1/namespaces/{name}")


@contextlib.contextmanager
def running(lab: Lab) -> Iterator[Lab]:
    """A lab that is up, for as long as the block lasts."""
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
