"""Limiting processes to a rate without special rights, by stopping and continuing them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

# Bounds of a tenant's credit: how much it may catch up, and how long it waits after it used too much.
_MAX_CREDIT_S = 0.010
_MAX_DEBT_S = 0.050


@dataclass
class _Tenant:
    """A tenant whose process leads a group; `credit_s` is the CPU time that it may still use."""

    pid: int
    cpus: float | None = None
    credit_s: float = 0.0
    used_s: float | None = None
    at_s: float = 0.0
    stopped_at_s: float | None = None
    throttled_s: float = 0.0


class SignalEnforcer:
    """SIGSTOP once the credit of a tenant is used up, SIGCONT once it has some again, at every tick.

    Only process groups that a tenant's first process leads are stopped, so no other process is affected; processes in
    groups of their own are not limited. The owner runs a guard, so that none stays stopped when it
    dies.
    """

    mechanism = "signals"
    enforced = (
        "shares are held by stopping and continuing processes every 5 ms, on average and not for every moment; limits "
        "hold, requests are not defended against other programs, nor is a device's sum of shares kept at every moment"
    )

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    @staticmethod
    def works() -> bool:
        """Whether the system has these signals; sending them to processes of the same user is always allowed."""
        return hasattr(signal, "SIGSTOP") and hasattr(os, "killpg")

    def admit(self, tenant: str, device: str, pid: int) -> None:
        """Register the group that the process leads."""
        held = self._tenants.get(tenant)
        if held is None or held.pid != pid:
            self._tenants[tenant] = _Tenant(pid)
            # It may still be stopped by an earlier daemon.
            self._signal(self._tenants[tenant], signal.SIGCONT)

    def set_device(self, device: str, cpus: float) -> None:
        """Nothing to do: signals cannot limit a device as a whole."""

    def set_weight(self, tenant: str, weight: float) -> None:
        """Nothing to do: a lowered priority cannot be raised again without special rights."""

    def set_limit(self, tenant: str, cpus: float, *, is_calm: bool = False) -> None:
        """Let the tenant's credit grow by this much a second."""
        self._tenants[tenant].cpus = cpus

    def lift(self, tenant: str) -> None:
        held = self._tenants[tenant]
        held.cpus = None
        self._continue(held, held.at_s)

    def remove(self, tenant: str) -> None:
        held = self._tenants.pop(tenant, None)
        if held is not None:
            self._continue(held, held.at_s)

    def tick(self, used_s: Callable[[str], float], now_s: float) -> None:
        """Add every tenant's credit for the time since the last tick, and stop or continue it accordingly."""
        for name, held in self._tenants.items():
            used = used_s(name)
            if held.used_s is not None and held.cpus is not None:
                held.credit_s += held.cpus * (now_s - held.at_s) - (used - held.used_s)
                held.credit_s = min(_MAX_CREDIT_S, max(-_MAX_DEBT_S, held.credit_s))
                if held.credit_s < 0.0 and held.stopped_at_s is None:
                    self._signal(held, signal.SIGSTOP)
                    held.stopped_at_s = now_s
                elif held.credit_s >= 0.0:
                    self._continue(held, now_s)
            held.used_s, held.at_s = used, now_s

    def pids(self, tenant: str) -> list[int]:
        leader = self._tenants[tenant].pid
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(entry)) == leader:
                    found.append(int(entry))
        return sorted(found)

    def throttled_s(self, tenant: str) -> float:
        held = self._tenants[tenant]
        running_s = time.monotonic() - held.stopped_at_s if held.stopped_at_s is not None else 0.0
        return held.throttled_s + running_s

    def undo_files(self) -> list[tuple[str, str]]:
        """None: the guard continues the processes."""
        return []

    def close(self) -> None:
        for name in list(self._tenants):
            self.remove(name)

    def _continue(self, held: _Tenant, now_s: float) -> None:
        if held.stopped_at_s is not None:
            held.throttled_s += max(0.0, now_s - held.stopped_at_s)
            held.stopped_at_s = None
            self._signal(held, signal.SIGCONT)

    def _signal(self, held: _Tenant, number: int) -> None:
        """Signal the group only if the process leads it, and never the daemon's own group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(held.pid) == held.pid != os.getpgrp():
                os.killpg(held.pid, number)
