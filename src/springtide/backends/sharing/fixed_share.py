"""Limiting one process to a fixed share for a while; used by the profiler and by `doctor`."""

from __future__ import annotations

import os
import secrets
import threading
import time
from types import TracebackType

from springtide.backends.processes import process_clock_s
from springtide.backends.sharing.cpu.control_groups import GroupEnforcer
from springtide.backends.sharing.cpu.enforcers import Enforcer, choose_enforcer
from springtide.backends.sharing.cpu.guard import LimitGuard, start_ticks_of
from springtide.core.errors import BackendError, InvalidRequest

_TICK_S = 0.005
_TENANT = "held"
_DEVICE = "fixed"


class FixedShare:
    """A context in which the process `pid`, with all it starts, uses at most `rate` of a device of `device_cpus` cores.

    The process leads a session or a process group of its own (`subprocess.Popen(..., start_new_session=True)`).
    A `weight` above 1 gives it priority over other programs of the machine, up to its share (control groups only: up to
    256 with version 1, 100 with version 2). `mechanism` and `enforced` name the mechanism; with `none` there is no
    limit. If this process dies, a guard lifts the limit. Raises InvalidRequest, BackendError.
    """

    def __init__(self, pid: int, rate: float, device_cpus: float = 1.0, *, only: str = "", weight: float = 1.0) -> None:
        if not (0.0 < rate <= 1.0 and device_cpus > 0.0):
            raise InvalidRequest(f"a share is above 0 and at most 1 of a device of some cores, got {rate:g}")
        self._pid = pid
        self._rate = rate
        self._device_cpus = device_cpus
        self._only = only
        self._weight = weight
        self._enforcer: Enforcer | None = None
        self._guard = LimitGuard()
        self._ending = threading.Event()
        self._ticks: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def mechanism(self) -> str:
        """The mechanism that limits the process, a name of core/status/shares.py."""
        return self._enforcer.mechanism if self._enforcer is not None else "none"

    @property
    def enforced(self) -> str:
        """The mechanism as a sentence."""
        return self._enforcer.enforced if self._enforcer is not None else "nothing is held yet"

    def __enter__(self) -> FixedShare:
        name = f"springtide-fixed-{os.getpid()}-{secrets.token_hex(4)}"
        self._enforcer = enforcer = choose_enforcer(name, self._only)
        try:
            started = start_ticks_of(self._pid)
            if isinstance(enforcer, GroupEnforcer):
                enforcer.favour = self._weight
            enforcer.set_device(_DEVICE, self._device_cpus)
            enforcer.admit(_TENANT, _DEVICE, self._pid)
            self._guard.watch(enforcer.undo_files(), [(self._pid, started)])
            enforcer.set_limit(_TENANT, self._rate * self._device_cpus)
        except (BackendError, OSError) as error:
            self._release()
            raise BackendError(f"cannot hold process {self._pid} to a share: {error}") from error
        if enforcer.mechanism == "signals":
            self._ticks = threading.Thread(target=self._tick, name="springtide-fixed-share", daemon=True)
            self._ticks.start()
        return self

    def set(self, rate: float) -> None:
        assert self._enforcer is not None, "a share is set inside its context"
        self._rate = rate
        with self._lock:
            self._enforcer.set_limit(_TENANT, rate * self._device_cpus)

    def used_s(self) -> float:
        """CPU seconds that the process itself has used since it started; 0 once it is gone."""
        return process_clock_s(self._pid) or 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def _tick(self) -> None:
        while not self._ending.wait(_TICK_S):
            with self._lock:
                if self._enforcer is not None:
                    self._enforcer.tick(lambda tenant: self.used_s(), time.monotonic())

    def _release(self) -> None:
        self._ending.set()
        if self._ticks is not None:
            self._ticks.join()
            self._ticks = None
        with self._lock:
            if self._enforcer is not None:
                self._enforcer.remove(_TENANT)
                self._enforcer.close()
        self._guard.close()
