"""What a replica's code calls other services with: who it is, and the request that it works on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from springtide.serving.frames import CallOrigin, Identify


class CallScope:
    """The request that a call belongs to, or those of a batch; `timeout_s` is what is left for it now (0: any time)."""

    __slots__ = ("_deadline_s", "_timeout_s", "origin")

    def __init__(self, origin: CallOrigin | None, timeout_s: float) -> None:
        self.origin = origin
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def renew(self) -> None:
        """A part of a streamed answer was sent: the next one may take as long."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float | None:
        """How long the answer is still waited for; None if that is not known."""
        return self._deadline_s - time.monotonic() if self._timeout_s else None


class ReplicaIdentity:
    """Who this process is to other services. Thread-safe.

    `service` is the name of the service that it is a replica of (empty outside of replicas), `calls` those that its
    code may call. Its gateway tells it the address and the secret on each connection.
    """

    def __init__(self) -> None:
        self.service = ""
        self.calls: tuple[str, ...] = ()
        self.told: Identify | None = None
        self._lock = threading.Lock()
        self._kept: Any = None

    @contextmanager
    def of_replica(self, service: str, calls: tuple[str, ...]) -> Iterator[None]:
        """Within it this process is a replica of that service."""
        self.service, self.calls = service, calls
        try:
            yield
        finally:
            self.service, self.calls, self.told, self._kept = "", (), None, None

    def tell(self, told: Identify) -> None:
        """Take an identity; what was kept for another one is dropped."""
        with self._lock:
            if told != self.told:
                self.told = told
                self._kept = None

    def kept(self, make: Callable[[Identify], Any]) -> Any:
        """What `make` returned for this identity, made once; None as long as the identity is not known."""
        with self._lock:
            if self._kept is None and self.told is not None:
                self._kept = make(self.told)
            return self._kept


# A process serves one service; threads that its code starts are to be known too.
IDENTITY = ReplicaIdentity()
CALL: ContextVar[CallScope | None] = ContextVar("springtide_call", default=None)
