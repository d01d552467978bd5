"""The share agent of a node: it keeps the node's GPU share daemon running and sends it the pods that hold shares.

`python -m springtide.backends.kubernetes.share_agent.agent --settings FILE` in a pod that sees the node's processes
and has a directory of the node. Shares are enforced every few milliseconds by the daemon, a separate process. The
agent reads the pods of its node from the API server; while it is stopped or has no connection to the server, the
daemon continues with the last table that it received.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.kinds import POD
from springtide.backends.kubernetes.install.settings_file import read_settings
from springtide.backends.kubernetes.pods.shares import PRIVATE_NAME, PUBLIC_NAME
from springtide.backends.kubernetes.pods.spec import label_value
from springtide.backends.kubernetes.pods.tenants import tenants_of
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.kubernetes.share_agent.pages import serve_pages
from springtide.backends.sharing.gpu.discovery import Gpu, discover_gpus
from springtide.backends.sharing.gpu.library import LIBRARY_NAME, find_library
from springtide.backends.sharing.gpu.pods import pods_seen
from springtide.backends.sharing.gpu.table import (
    SOCKET_NAME,
    STATUS_NAME,
    TABLE_NAME,
    GpuDaemonStatus,
    GpuTable,
    GpuTenantEntry,
)
from springtide.backends.sharing.table import read_whole
from springtide.core.errors import BackendError, SpringtideError
from springtide.core.wire.workers import encode_frame

_log = logging.getLogger(__name__)

AGENT_PORT = 8792
DAEMON = "springtide.backends.sharing.gpu.daemon"
NODE_VARIABLE = "NODE_NAME"
_BACKOFF_S = (0.1, 5.0)
# How often the daemon's table is compared without a notification; it is sent again if it differs.
_LOOK_S = 1.0
_STALE_S = 3.0
# How often to check that processes of sharers are visible; a container may briefly have none.
_VISIBILITY_S = 5.0


class ShareAgent:
    """The agent of one node. `run` runs until cancelled; errors are shown in `problem` and retried."""

    def __init__(
        self,
        settings: KubernetesSettings,
        node_name: str,
        library: Path,
        discover: Callable[[], tuple[Gpu, ...]] = discover_gpus,
    ) -> None:
        self._node_name = node_name
        self._discover = discover
        self._gpus: tuple[Gpu, ...] = ()
        self._private = Path(settings.share_directory) / PRIVATE_NAME
        self._public = Path(settings.share_directory) / PUBLIC_NAME
        self._library = library
        self._cache = Cache(
            POD,
            namespaces=settings.namespaces or ("",),
            labels=f"{names.PLATFORM_LABEL}={label_value(settings.name)}",
            fields=f"spec.nodeName={node_name}",
        )
        self._changed = asyncio.Event()
        self._daemon: asyncio.subprocess.Process | None = None
        self._has_sent = False
        self._problems: tuple[str, ...] = ()
        self._invisible: frozenset[str] = frozenset()
        # Tenants of the previous agent keep their shares, even if their pods' annotations can no longer be read.
        table = read_whole(self._private / TABLE_NAME, GpuTable)
        self._entries: tuple[GpuTenantEntry, ...] = table.tenants if table is not None else ()

    async def run(self, api: KubeApi) -> None:
        """Serve the node until cancelled. Raises BackendError or OSError if the directory cannot be used."""
        self._prepare()
        self._cache.listen(lambda change: self._changed.set())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._find_gpus())
                tasks.create_task(self._cache.run(api))
                tasks.create_task(self._keep_daemon())
                tasks.create_task(self._send_tables())
                tasks.create_task(self._check_visibility())
        finally:
            daemon = self._daemon
            if daemon is not None and daemon.returncode is None:
                # SIGKILL, not SIGTERM: limits stay in force, and the next daemon adopts them.
                with contextlib.suppress(ProcessLookupError):
                    daemon.kill()
                await daemon.wait()

    # --- status ------------------------------------------------------------------------------------------------------

    def status(self) -> GpuDaemonStatus | None:
        """The daemon's status; None if that is outdated."""
        found = read_whole(self._private / STATUS_NAME, GpuDaemonStatus)
        return found if found is not None and time.monotonic() - found.written_at_s < _STALE_S else None

    @property
    def problem(self) -> str:
        """Why shares of this node are not enforced; empty if they are."""
        if os.geteuid() != 0:
            return "the share agent has to be root on its node: pods have users of their own, and must reach its socket"
        if not self._gpus:
            return "the driver of this node tells of no GPU (nvidia-smi)"
        if self.status() is None:
            return "the share daemon does not run, or says nothing"
        if not self._cache.is_synced:
            return self._cache.problem or "the pods of this node are not known yet"
        if not self._has_sent:
            return "the share daemon has not been sent the table of tenants yet"
        if self._invisible:
            return (
                f"no process of {len(self._invisible)} pods that run and share a GPU can be seen from here, so no "
                "process can be matched to its pod: the agent's pod needs hostPID: true"
            )
        return self._cache.problem or "; ".join(self._problems)

    # --- the directory -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Create both directories, and copy the library to the one that sharers see."""
        for directory, mode in ((self._private, 0o700), (self._public, 0o755)):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(mode)
        target = self._public / LIBRARY_NAME
        if target.is_file() and target.read_bytes() == self._library.read_bytes():
            return
        # Replaced by a rename, not overwritten: running programs have the old file mapped.
        temporary = target.with_name(f".{LIBRARY_NAME}.{os.getpid()}")
        shutil.copyfile(self._library, temporary)
        temporary.chmod(0o755)
        os.replace(temporary, target)

    async def _find_gpus(self) -> None:
        """Wait until the driver, which may come up after this pod, lists a GPU."""
        while not (found := await asyncio.to_thread(self._discover)):
            await asyncio.sleep(_LOOK_S)
        self._gpus = found
        self._changed.set()

    # --- the daemon --------------------------------------------------------------------------------------------------

    async def _keep_daemon(self) -> None:
        command = [sys.executable, "-m", DAEMON, str(self._private), "--tenants", str(self._public)]
        command += ["--segments", str(self._private / "segments")]
        backoff_s = _BACKOFF_S[0]
        while True:
            began_s = time.monotonic()
            try:
                self._daemon = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
                code = await self._daemon.wait()
                _log.warning("the share daemon ended with %d; the next one goes on where it stopped", code)
            except OSError as error:
                _log.error("the share daemon cannot be started: %s", error)
            if time.monotonic() - began_s > _BACKOFF_S[1]:
                backoff_s = _BACKOFF_S[0]
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])

    # --- the table ---------------------------------------------------------------------------------------------------

    async def _send_tables(self) -> None:
        """Keep a connection to the daemon and send it the table whenever that has changed."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(str(self._private / SOCKET_NAME))
                try:
                    await self._send_until_closed(reader, writer)
                finally:
                    self._has_sent = False
                    writer.close()
            await asyncio.sleep(_BACKOFF_S[0])

    def _update_tenants(self) -> None:
        """Read the tenants from the pods, and log each new problem once."""
        found = tenants_of(self._cache.objects(), self._node_name, self._gpus, self._entries)
        for problem in found.problems:
            if problem not in self._problems:
                _log.warning("%s", problem)
        self._entries, self._problems = found

    async def _check_visibility(self) -> None:
        """Check that processes of sharing pods are visible: the daemon knows its tenants by their processes."""
        before: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(_VISIBILITY_S)
            running = {
                str(pod["metadata"]["uid"]).lower()
                for pod in self._cache.objects()
                if (pod.get("status") or {}).get("phase") == "Running"
            }
            held = running & {entry.pod_uid.lower() for entry in self._entries}
            now = frozenset(held - await asyncio.to_thread(pods_seen)) if held else frozenset()
            # Only pods without a visible process twice in a row count: one may have just ended, or be starting.
            self._invisible, before = now & before, now

    async def _send_until_closed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent: tuple[GpuTenantEntry, ...] | None = None
        gone = asyncio.create_task(reader.read())
        try:
            # The daemon never sends anything: the read ends when the daemon does.
            while not gone.done():
                self._changed.clear()
                # Until all pods and GPUs have been read, the daemon continues with the previous agent's table.
                if self._cache.is_synced and self._gpus:
                    self._update_tenants()
                    if self._entries != sent:
                        writer.write(encode_frame(GpuTable(tenants=self._entries, sent_at_s=time.monotonic())))
                        await writer.drain()
                        sent, self._has_sent = self._entries, True
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({gone, changed}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            gone.cancel()


async def serve(settings: KubernetesSettings, node_name: str, library: Path, *, host: str, port: int) -> None:
    """Run the agent and its pages until SIGTERM. Raises BackendError or OSError."""
    agent = ShareAgent(settings, node_name, library)
    api = KubeApi.connect()
    pages = await serve_pages(agent, host, port)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    running, ending = asyncio.create_task(agent.run(api)), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        for task in (running, ending):
            task.cancel()
        await asyncio.gather(running, ending, return_exceptions=True)
        pages.close()
        await api.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent of the node that $NODE_NAME names."""
    parser = argparse.ArgumentParser(prog="springtide.backends.kubernetes.share_agent.agent", description=__doc__)
    parser.add_argument("--settings", required=True, type=Path, help="the platform's settings")
    parser.add_argument("--library", type=Path, help="the interposition library (default: this installation's)")
    parser.add_argument("--host", default="0.0.0.0", help="where its pages are")
    parser.add_argument("--port", default=AGENT_PORT, type=int)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s share agent: %(message)s")
    try:
        settings = read_settings(options.settings)
        node_name = os.environ.get(NODE_VARIABLE, "")
        if not node_name or not settings.share_directory:
            raise BackendError(f"{NODE_VARIABLE} has to name the node, and the settings a share_directory")
        library = options.library or find_library()
        asyncio.run(serve(settings, node_name, library, host=options.host, port=options.port))
    except (SpringtideError, OSError) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
