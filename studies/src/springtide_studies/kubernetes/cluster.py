"""The base of the Kubernetes bench: an API server of its own, and a wire to it that is slow on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.kinds import NODE
from springtide.core.errors import BackendError

LAB_VARIABLE = "SPRINGTIDE_K8S_LAB"
_LAB_S = 300.0
_END_S = 20.0


@contextlib.contextmanager
def api_server() -> Iterator[Path]:
    """The kubeconfig of an API server to fill: the one that KUBECONFIG names, else one of the lab, ended at the end.

    Raises BackendError: there is none, or it has nodes, which a bench must not stand among.
    """
    if named := os.environ.get("KUBECONFIG"):
        nodes = asyncio.run(_num_nodes(Path(named)))
        if nodes:
            raise BackendError(
                f"the cluster that KUBECONFIG names has {nodes} nodes; the bench makes a thousand of its own beside "
                "them: name an API server without any, or unset KUBECONFIG to have the lab start one"
            )
        yield Path(named)
        return
    script = _lab_script()
    folder = Path(tempfile.mkdtemp(prefix="springtide-bench-", dir="/tmp"))
    ports = dict(zip(("API_PORT", "ETCD_PORT", "PEER_PORT"), map(str, _free_ports(3)), strict=True))
    try:
        with (folder / "lab.log").open("wb") as log:
            done = subprocess.run(
                ["bash", str(script), "up", str(folder)],
                env={**os.environ, **ports},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
                timeout=_LAB_S,
            )
        if done.returncode != 0:
            raise BackendError(f"{script} up failed: {(folder / 'lab.log').read_text()[-500:]}")
        yield folder / "admin.kubeconfig"
    finally:
        # The lab's own way down takes along what other labs on this machine share: its processes are ended by id.
        for name in ("apiserver", "etcd"):
            _end(folder / f"{name}.pid")
        shutil.rmtree(folder, ignore_errors=True)


async def _num_nodes(kubeconfig: Path) -> int:
    api = KubeApi.connect(kubeconfig)
    try:
        return len((await api.list(NODE, metadata_only=True)).items)
    finally:
        await api.close()


def _lab_script() -> Path:
    named = os.environ.get(LAB_VARIABLE)
    folders = [Path(named)] if named else [parent / "shared" / "k8s-lab" for parent in Path.cwd().resolve().parents]
    for folder in folders:
        if (folder / "lab.sh").is_file():
            return folder / "lab.sh"
    raise BackendError(
        "there is no API server to measure: name one without nodes by KUBECONFIG, or the folder of the lab by "
        f"{LAB_VARIABLE} (lab.sh and its three server binaries)"
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def free_port() -> int:
    """A port of this machine at which no process listens now."""
    return _free_ports(1)[0]


def _end(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    until_s = time.monotonic() + _END_S
    while time.monotonic() < until_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class SlowWire:
    """Carries bytes to an API server and back, each of them so many seconds late. Use as a context manager."""

    def __init__(self, server: str, delay_s: float) -> None:
        host, _, port = server.removeprefix("https://").rpartition(":")
        self._address = (host, int(port))
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="slow-wire", daemon=True)
        self._ready = threading.Event()
        self.port = 0

    def __enter__(self) -> SlowWire:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            # Bytes that are still on their way arrive.
            await asyncio.sleep(2 * self._delay_s)
        except asyncio.CancelledError:
            # The wire is taken away: its users see a connection that ends.
            return
        finally:
            for end in (writer, far_writer):
                end.transport.abort()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes keep their order and do not wait for each other: each chunk is as late as the next."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self._loop.call_later(self._delay_s, _write, writer, data)
        self._loop.call_later(self._delay_s, writer.close)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
