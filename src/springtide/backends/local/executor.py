"""LocalExecutor: the Executor port on the processes of one machine. All I/O happens on one thread of its own."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from springtide.backends.control_channel.listener import WorkerListener
from springtide.backends.control_channel.members import Source
from springtide.backends.control_channel.orders import OrderTable
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.control_channel.reports import Reports
from springtide.backends.inbox import Inbox
from springtide.backends.local.devices import Gpu, discover_gpus, discover_node
from springtide.backends.local.driver import ProcessDriver
from springtide.backends.local.launcher import WorkerLauncher
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.local.recovery import Recovery
from springtide.backends.local.shares.slots import ShareSlots
from springtide.backends.local.watch import MAX_LOG_BYTES, SilenceMonitor
from springtide.backends.local.zygote import CODE, ZygoteClient, code_stamp, has_stamp
from springtide.backends.processes import live_stat, worker_environment
from springtide.backends.sockets import listen, remove_outside, socket_directory
from springtide.core.actions import Action
from springtide.core.errors import BackendError
from springtide.core.events import Event
from springtide.core.ports import Clock, Standing
from springtide.core.resources import Node
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.workers import Report
from springtide.storage.files import lock_file, make_private

_ZYGOTE_END_S = 3.0
_POLL_S = 0.01


class LocalExecutor:
    """Runs replicas as processes. `open`, then `recover` or `start`, then `wait` and `acknowledge`; finally `close`.

    `nodes` are the nodes that this machine is divided into, in the order of its devices; by default it is one node.
    `gpus` are its GPUs in the same order; by default the driver is queried. Every method is thread-safe and none but
    `wait`, `open` and `close` blocks. `worker_command` starts workers as `[*worker_command, "--spec", FILE]` instead of
    through the zygote; `zygote=False` does so with the runtime's own command. The zygote is started as
    `[*zygote_command, "--socket", PATH]`. `crash_point` is called with each name of CRASH_POINTS around the effects,
    for tests that end the process there.
    """

    def __init__(
        self,
        state_dir: Path,
        clock: Clock,
        *,
        zygote: bool = True,
        python: str = sys.executable,
        lease_s: float = 30.0,
        crash_point: Callable[[str], None] | None = None,
        nodes: Sequence[Node] | None = None,
        gpus: Sequence[Gpu] | None = None,
        worker_command: Sequence[str] | None = None,
        zygote_command: Sequence[str] | None = None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._state_dir = state_dir.resolve()
        self._inbox: Inbox[Source] = Inbox(clock)
        self._crash_point = crash_point or (lambda name: None)
        self._nodes = nodes
        self._gpus = gpus
        self._lease_s = lease_s
        self._max_log_bytes = max_log_bytes
        self._python = python
        self._zygote_command = zygote_command or [python, "-m", "springtide.runtime", "zygote"]
        self._uses_zygote = zygote and worker_command is None
        self._worker_command = worker_command or [python, "-m", "springtide.runtime", "worker"]
        self._environment_command = [python, "-m", "springtide.runtime", "environment"]
        self._thread: threading.Thread | None = None
        self._is_accepting = False
        self._is_closing = False

    def open(self) -> None:
        """Lock the state directory, listen, warm the zygote. Raises BackendError, also if another executor holds it."""
        assert self._thread is None, "an executor is opened once"
        make_private(self._state_dir)
        directory = socket_directory(self._state_dir)
        self._sockets = directory
        self._lock = lock_file(
            directory / "lock", f"another platform is running on this state directory ({directory}); stop it first"
        )
        try:
            server = listen(directory / "control.sock")
        except BackendError:
            os.close(self._lock)
            raise
        self._reactor = Reactor()
        self._listener = WorkerListener(self._reactor, server, self._welcome)
        self._driver = ProcessDriver(self._state_dir, self._reactor, self._inbox, self._crash_point)
        self._table = self._driver.table
        address = f"unix://{directory / 'control.sock'}"
        command = None if self._uses_zygote else self._worker_command
        nodes = self._nodes or (discover_node(),)
        self._shares = self._make_shares(nodes)
        self._launcher = WorkerLauncher(
            self._driver,
            nodes,
            address,
            self._lease_s,
            command=command,
            in_environment=[*self._environment_command, "--cache", str(self._state_dir / "environments")],
            shares=self._shares,
        )
        self._orders: OrderTable[ProcessHandle] = OrderTable(self._table, self._launcher.start, self._shares.set_share)
        self._reports: Reports[ProcessHandle] = Reports(self._table, self._orders.send_missed, self._launcher.pump)
        self._orders.reports = self._reports
        self._recovery = Recovery(self._driver, self._orders)
        self._watch = SilenceMonitor(self._table, max_log_bytes=self._max_log_bytes)
        self._driver.exit_codes = self._launcher.knows_exit_codes
        self._table.on_gone = self._on_gone
        self._driver.on_process = self._shares.take
        self._reactor.on_late = self._watch.reset_silence
        if self._uses_zygote:
            zygote = self._make_zygote(directory / "zygote.sock")
            self._launcher.zygote = zygote
            self._reactor.call(zygote.ensure)
        self._reactor.call(self._watch.start)
        self._thread = threading.Thread(target=self._reactor.run, name="springtide-executor", daemon=True)
        self._thread.start()

    def close(self, stop_workers: bool = False, *, grace_s: float = 5.0) -> None:
        """End the executor and release its threads, sockets and descriptors.

        With `stop_workers`, training workers commit a checkpoint and everything ends within `grace_s`, the zygote
        included; otherwise workers and zygote live on and wait for the next executor, for `lease_s`.
        """
        if self._thread is None:
            return
        if stop_workers and self._thread.is_alive():
            have_orders_been_sent = threading.Event()
            self._reactor.call(lambda: self._orders.stop_all(grace_s))
            self._reactor.call(have_orders_been_sent.set)
            end_s = time.monotonic() + grace_s + 2.0
            # Starts that are already in the thread's queue run before this, so none is missed.
            have_orders_been_sent.wait(grace_s + 2.0)
            while (self._table.replicas or self._table.foreigners) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        self._inbox.close()
        self._reactor.call(self._disconnect)
        self._reactor.stop()
        self._thread.join()
        self._thread = None
        self._reactor.close()
        self._listener.close()
        if stop_workers:
            self._end_zygote()
            self._shares.end_daemons()
            remove_outside(self._sockets, self._state_dir)
        os.close(self._lock)

    def post(self, event: Event) -> None:
        """Hand over an event from outside (the API, the gateway); `wait` returns at once."""
        self._inbox.post(event)

    def recover(self, standing: Standing) -> None:
        """Adopt the workers that should run, report those that are gone, end the others, repeat unconfirmed actions."""

        def take_over() -> None:
            if not self._is_accepting:
                try:
                    self._recovery.recover(standing)
                finally:
                    self._accept_from_now()

        self._reactor.call(take_over)

    def start(self, action: Action) -> None:
        """Start an action; its outcome is reported as an event. Repeating an action is harmless."""

        def begin() -> None:
            if not self._is_accepting:
                # `recover` was not called, so no worker should be running: those found alive are ended.
                self._recovery.recover(Standing())
                self._accept_from_now()
            self._orders.do(action)

        self._reactor.call(begin)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return as soon as something happened, or nothing at the deadline (platform clock) or once closed."""
        return self._inbox.wait(deadline_s)

    def acknowledge(self, events: Sequence[Event]) -> None:
        """The events are in the journal: acknowledge the workers' reports that they came from."""
        sources = self._inbox.take_sources(events)
        if sources:
            self._reactor.call(lambda: self._table.settle(sources))

    def sharing(self) -> SharingStatus:
        """How this machine's devices are shared now, and by which mechanism that is enforced."""
        return SharingStatus() if self._thread is None else self._shares.sharing()

    def counts(self) -> dict[str, int]:
        """Counters by name: spawns, adopted, lost, fenced, refused_hellos, repeated_reports and so on."""
        return {**self._table.counts, "callback_errors": self._reactor.num_errors}

    # --- on the I/O thread -----------------------------------------------------------------------------------------

    def _make_zygote(self, socket_path: Path) -> ZygoteClient:
        # One that an earlier release started would fork workers that run the code of that release.
        stamp, fits = code_stamp(), self._shares.gpu.is_usable
        return ZygoteClient(
            self._reactor,
            self._zygote_command,
            worker_environment() | {"OMP_NUM_THREADS": "1", CODE: stamp, **self._shares.gpu.additions},
            socket_path,
            self._state_dir / "zygote.log",
            on_spawned=self._launcher.spawned,
            on_exited=self._launcher.exited,
            on_failed=self._launcher.failed,
            on_request_lost=self._launcher.request_lost,
            on_stray=self._launcher.stray,
            is_usable=lambda pid: has_stamp(pid, stamp) and fits(pid),
        )

    def _make_shares(self, nodes: Sequence[Node]) -> ShareSlots:
        gpus = self._gpus
        if gpus is None:
            has_gpus = any(device.kind == "gpu" for node in nodes for device in node.devices)
            gpus = discover_gpus() if has_gpus else ()
        environment = worker_environment() | {"OMP_NUM_THREADS": "1"}
        return ShareSlots(self._table, self._sockets, nodes, gpus, environment, self._python)

    def _on_gone(self, replica: Worker) -> None:
        self._reports.on_gone(replica)
        self._shares.release(replica)
        self._launcher.release(replica)

    def _accept_from_now(self) -> None:
        self._is_accepting = True
        if self._is_closing:
            return
        self._shares.begin()
        self._listener.open()

    def _welcome(self, stream: socket.socket) -> None:
        connection: FramedConnection[Report] = FramedConnection(
            self._reactor, stream, Report, self._reports.on_message, self._reports.on_close
        )
        if connection.peer_uid != os.getuid():
            self._table.counts["refused_peers"] += 1
            connection.close("another user's process")
            return
        self._reports.register(connection)

    def _disconnect(self) -> None:
        # Stop accepting first: a worker reconnects at once, and must find the next executor, not this one.
        self._is_accepting = True
        self._is_closing = True
        self._listener.shut()
        if self._launcher.zygote is not None:
            self._launcher.zygote.close()
        self._shares.close()
        self._table.disconnect_all()
        self._reports.close()

    def _end_zygote(self) -> None:
        zygote = self._launcher.zygote
        if zygote is None:
            return
        zygote.terminate()
        end_s = time.monotonic() + _ZYGOTE_END_S
        while zygote.process is not None and live_stat(zygote.process) is not None:
            if time.monotonic() > end_s:
                zygote.kill()
                end_s = time.monotonic() + _ZYGOTE_END_S
            time.sleep(_POLL_S)
        zygote.reap()
