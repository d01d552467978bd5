"""A small network inside this machine: network namespaces as nodes, racks and a spine, with rate-limited links."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType

import msgspec

from springtide.core.errors import BackendError

_PREFIX = "springtide-"
# The burst of a link's token bucket: two milliseconds of its rate, and one of the kernel's large packets.
_BURST_S, _BURST_BYTES = 0.002, 1 << 16
_QUEUE_MS = 200


class RackNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A network of racks. `racks` are the numbers of nodes in each.

    `nic_bytes_per_s` is the rate between a node and its rack, `uplink_bytes_per_s` between a rack and the spine; both
    each way.
    """

    racks: tuple[int, ...] = (2, 2)
    nic_bytes_per_s: float = 50e6
    uplink_bytes_per_s: float = 25e6

    @property
    def num_nodes(self) -> int:
        return sum(self.racks)

    def rack_of(self, node: int) -> int:
        """The rack of a node, both counted from 0."""
        for rack, count in enumerate(self.racks):
            if node < count:
                return rack
            node -= count
        raise IndexError(node)


def why_not_here() -> str:
    """Why network namespaces cannot be used on this machine, as a sentence; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root, so links of different rates are left out"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need `{missing[0]}` (install iproute2), so links of different rates are left out"
    name = f"{_PREFIX}{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if tried.returncode:
        reason = tried.stderr.strip().partition("\n")[0] or f"exit code {tried.returncode}"
        return f"this machine does not allow network namespaces ({reason}), so links of different rates are left out"
    return ""


class NamespaceNetwork:
    """A context manager that creates the namespaces of a RackNetwork and removes them at exit, also after Ctrl-C.

    Namespaces that a killed process left behind are removed first.
    """

    INTERFACE = "eth0"

    def __init__(self, network: RackNetwork) -> None:
        self._network = network
        self._own = f"{_PREFIX}{os.getpid()}-"
        self._made: list[str] = []

    def __enter__(self) -> NamespaceNetwork:
        """Create namespaces and links. Raises BackendError with the kernel's message."""
        _remove(name for name in list_namespaces() if not _has_living_owner(name))
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the namespaces, and with them their links."""
        with _ignoring_interrupts():
            _remove(reversed(self._made))
            self._made.clear()

    def prefix(self, node: int) -> list[str]:
        """The command prefix that runs a command on the node."""
        return ["ip", "netns", "exec", f"{self._own}n{node}"]

    @staticmethod
    def address(node: int) -> str:
        return f"10.213.0.{node + 1}"

    def _build(self) -> None:
        network = self._network
        spine = self._add("spine")
        _run("ip", "-n", spine, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", spine, "link", "set", "bridge", "up")
        for rack in range(len(network.racks)):
            switch = self._add(f"r{rack}")
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            _join((switch, "trunk"), (spine, f"r{rack}"), network.uplink_bytes_per_s)
            for name, port in ((switch, "trunk"), (spine, f"r{rack}")):
                _run("ip", "-n", name, "link", "set", port, "master", "bridge")
        for node in range(network.num_nodes):
            name, switch = self._add(f"n{node}"), f"{self._own}r{network.rack_of(node)}"
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _join((switch, f"n{node}"), (name, self.INTERFACE), network.nic_bytes_per_s)
            _run("ip", "-n", switch, "link", "set", f"n{node}", "master", "bridge")
            _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", self.INTERFACE)

    def _add(self, name: str) -> str:
        full = self._own + name
        # Noted before it is created, so that it is removed even if a signal interrupts the creation.
        self._made.append(full)
        _run("ip", "netns", "add", full)
        return full


def list_namespaces() -> list[str]:
    """The names of all namespaces that this module created, in any process, and that still exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [name for name in names if name.startswith(_PREFIX)]


def _join(left: tuple[str, str], right: tuple[str, str], bytes_per_s: float) -> None:
    """Connect two (namespace, port) by a link with the same rate each way."""
    _run(
        *("ip", "link", "add", left[1], "netns", left[0], "type", "veth"),
        *("peer", "name", right[1], "netns", right[0]),
    )
    for name, port in (left, right):
        burst = int(bytes_per_s * _BURST_S) + _BURST_BYTES
        _run(
            *("tc", "-n", name, "qdisc", "add", "dev", port, "root", "tbf", "rate", f"{int(bytes_per_s * 8)}bit"),
            *("burst", str(burst), "latency", f"{_QUEUE_MS}ms"),
        )
        _run("ip", "-n", name, "link", "set", port, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise BackendError(f"`{' '.join(command)}` failed: {reason or f'exit code {done.returncode}'}")


def _remove(names: Iterable[str]) -> None:
    for name in list(names):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _has_living_owner(name: str) -> bool:
    pid = name.removeprefix(_PREFIX).partition("-")[0]
    return not pid.isdecimal() or os.path.exists(f"/proc/{pid}")


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C meanwhile, so that a second one does not interrupt the removal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the namespaces are removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
