"""The GPU share daemon: a process that grants tokens to the tenants of GPUs every few milliseconds.

`python -m springtide.backends.sharing.gpu.daemon DIRECTORY` serves one platform at a time on a socket there, and
outlives it. If it is killed, it leaves everything as it is and the next one continues; on SIGTERM it lifts all limits.
Where tenants are not this user's own programs, `--tenants` is another directory for the one socket that they may see,
and `--segments` one for their shared memory that outlives the daemon's container.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import select
import sys
import time
from pathlib import Path

from springtide.backends.sharing.daemon import (
    CONTROL_VARIABLE,
    TICK_S,
    LoopFigures,
    ShareDaemon,
    be_on_time,
    p99,
    reopen_slots,
)
from springtide.backends.sharing.gpu.clients import Clients
from springtide.backends.sharing.gpu.segments import allow_many_files, private_directory, segment_directory
from springtide.backends.sharing.gpu.table import (
    EXIT_TAKEN,
    LOCK_NAME,
    SOCKET_NAME,
    STATUS_NAME,
    TABLE_NAME,
    TENANT_SOCKET_NAME,
    GpuDaemonStatus,
    GpuTable,
)
from springtide.backends.sharing.gpu.tenants import GpuTenants, is_held
from springtide.backends.sharing.gpu.ticks import GpuTicks
from springtide.backends.sharing.table import read_whole, write_whole
from springtide.core.errors import BackendError
from springtide.core.status.shares import SharingStatus

_log = logging.getLogger(__name__)

_TAKEN_S = 2.0
_ENFORCED = (
    "a preloaded library holds CUDA launches to the device time that is granted every 5 ms, and allocations to the "
    "memory limit; programs that get around it (statically linked, without the preload) are not held"
)


class GpuSharing:
    """GPUs: tenants are limited by tokens in shared memory, and ask for their share on a socket that `epoll` watches.

    `lock` is the descriptor that locks `directory` for one daemon. Tenants of an earlier daemon there are adopted.
    """

    table_type: type[GpuTable] = GpuTable
    socket_name = SOCKET_NAME
    file_names: tuple[str, ...] = (STATUS_NAME, TABLE_NAME)

    def __init__(
        self,
        directory: Path,
        lock: int,
        epoll: select.epoll,
        *,
        is_controlled: bool = True,
        tenants: Path | None = None,
        segments: Path | None = None,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._epoll = epoll
        self._tenants = GpuTenants(private_directory(segments) if segments else segment_directory(directory))
        self._ticks = GpuTicks(self._tenants, time.monotonic_ns, is_controlled=is_controlled)
        self._adopt()
        self._clients = Clients((tenants or directory) / TENANT_SOCKET_NAME, epoll, self._tenants.answer)

    @property
    def is_sharing(self) -> bool:
        return bool(self._tenants.by_key)

    @property
    def is_contended(self) -> bool:
        """Whether a tenant has to be limited on any device."""
        return not self._ticks.is_free

    def take(self, table: GpuTable) -> None:
        """Enforce the shares of exactly the tenants of the table that live, and save the table for the next daemon."""
        self._put_in_force(table)
        self._ticks.arrange(table.sent_at_s)
        self._watch_processes()
        with contextlib.suppress(BackendError):
            write_whole(self._directory / TABLE_NAME, table)

    def tick(self, due_s: float) -> None:
        self._ticks.tick(due_s)

    def handle(self, descriptor: int) -> None:
        """A process asks for its share, or one with a slot has died."""
        if not self._clients.handle(descriptor):
            self._tenants.died(descriptor)
        self._watch_processes()

    def check(self, now_s: float) -> bool:
        """Remove dead tenants and repair what is broken; False if another daemon's socket is in place."""
        is_current = self._clients.is_current()
        self._clients.expire(now_s)
        if self._tenants.check():
            self._ticks.arrange(now_s)
        self._watch_processes()
        return is_current

    def status(self, now_s: float, loop: LoopFigures) -> GpuDaemonStatus:
        """The status, with the number of processes that ask but belong to no tenant."""
        unknown = self._clients.num_unknown(now_s)
        others = f"; {unknown} processes that hold no share asked for one: they are not held" if unknown else ""
        enforced = _ENFORCED if self.is_sharing else f"no device is shared; {_ENFORCED}"
        return GpuDaemonStatus(
            pid=os.getpid(),
            written_at_s=now_s,
            sharing=SharingStatus(
                mechanism="cuda-preload",
                enforced=f"{enforced}{others}",
                tick_s=loop.tick_s,
                late_p99_s=loop.late_p99_s,
                reaction_p99_s=p99(self._ticks.reactions_s),
                tenants=self._ticks.statuses(),
            ),
            cpu_fraction=loop.cpu_fraction,
            num_ticks=loop.num_ticks,
            num_processes=self._tenants.num_processes,
            num_unknown=unknown,
            num_answers=self._clients.num_answers,
            num_refused=self._clients.num_refused,
            num_deaths=self._tenants.num_deaths,
            num_files=len(os.listdir("/proc/self/fd")) - 1,
            num_made=self._tenants.num_made,
            num_adopted=self._tenants.num_adopted,
        )

    def close(self) -> None:
        """Lift the limits of all tenants, unless another daemon may have adopted them."""
        self._tenants.close(is_giving_up=self._is_owner())
        self._ticks.close()
        self._clients.close()

    def _is_owner(self) -> bool:
        """Whether this daemon still has the lock: its file may have been removed and created again by another."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._directory / LOCK_NAME).stat())
        except OSError:
            return True

    def _adopt(self) -> None:
        """Adopt the tenants of an earlier daemon, before a platform has connected."""
        table = read_whole(self._directory / TABLE_NAME, GpuTable)
        if table is not None:
            before = read_whole(self._directory / STATUS_NAME, GpuDaemonStatus)
            self._put_in_force(table)
            if before is not None:
                self._tenants.keep_counts(
                    {(tenant.replica_id, tenant.device_id): tenant.num_launches for tenant in before.sharing.tenants}
                )
            self._ticks.arrange(time.monotonic())
        self._tenants.sweep()
        self._watch_processes()

    def _put_in_force(self, table: GpuTable) -> None:
        self._ticks.reader = reopen_slots(self._ticks.reader, table.slots_path, "shares follow what is launched alone")
        self._tenants.take(entry for entry in table.tenants if is_held(entry))

    def _watch_processes(self) -> None:
        for pidfd in self._tenants.new_pidfds:
            with contextlib.suppress(OSError):
                self._epoll.register(pidfd, select.EPOLLIN)
        self._tenants.new_pidfds.clear()


def take_directory(directory: Path, patience_s: float = _TAKEN_S) -> int | None:
    """Return a descriptor that locks the directory for this daemon; None if another keeps it for `patience_s`."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end_s:
                os.close(descriptor)
                return None
            time.sleep(TICK_S)


def main() -> int:
    """Serve the platform of the directory named on the command line."""
    parser = argparse.ArgumentParser(prog="springtide.backends.sharing.gpu.daemon")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tenants", type=Path, help="where tenants find their socket (default: DIRECTORY)")
    parser.add_argument("--segments", type=Path, help="where shared memory lies (default: the machine's)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s GPU share daemon: %(message)s")
    directory = options.directory
    held = take_directory(directory)
    if held is None:
        _log.error("another one serves %s", directory)
        return EXIT_TAKEN
    allow_many_files()
    be_on_time()
    epoll = select.epoll()
    try:
        gpus = GpuSharing(
            directory,
            held,
            epoll,
            is_controlled=os.environ.get(CONTROL_VARIABLE, "") != "off",
            tenants=options.tenants,
            segments=options.segments,
        )
        ShareDaemon(directory, gpus, epoll).run()
    except BackendError as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
