"""The port to a provider of functions: what a job's coordinator asks of it, and what it hears when one has ended.

`aws`, `alibaba` and the emulator stand behind it; which errors of theirs mean what is said here once.
"""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionService

Outcome = Literal["returned", "failed", "timed_out", "out_of_memory", "killed", "throttled", "refused", "lost"]
OnEnd = Callable[["InvocationEnd"], None]
# Clouds' names of functions have at most 64 characters, and "-10240" says how much memory one has.
MAX_PREFIX = 58
_OWN = "springtide"
_MAX_NAME = 40
_DIGEST_DIGITS = 6


class InvocationEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an invocation ended. `error` is one sentence for people, `log` the tail of what the function wrote.

    "returned": `payload` is what the handler returned. "failed": it raised, or ended by itself. "timed_out",
    "out_of_memory": the provider ended it at that limit. "killed": it was ended from outside, for no limit of its own.
    "throttled": nothing ran and nothing is charged; asking again after `retry_after_s` makes sense. "refused": nothing
    ran, and asking again the same way does not help or the provider is ill. "lost": it was accepted, or may have been,
    and its outcome is unknown: it may be running still.

    `duration_s` is what is charged for (None in doubt: a lost one may have been charged up to its lifetime).
    """

    invocation_id: str
    outcome: Outcome
    payload: bytes = b""
    error: str = ""
    log: str = ""
    duration_s: float | None = 0.0
    max_memory_mb: int = 0
    init_s: float = 0.0
    retry_after_s: float | None = None


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a function wrote: when (seconds since 1970), which instance of it, and the text."""

    at_s: float
    stream: str
    text: str


class FunctionProvider(Protocol):
    """Functions of a few memory sizes at one provider. All methods may be called from any thread."""

    @property
    def service(self) -> FunctionService:
        """What is offered: sizes, prices, lifetime, concurrency."""
        ...

    def deploy(self, memory_mb: Collection[int], environment: Mapping[str, str] | None = None) -> None:
        """Make sure that functions of these sizes exist and can be invoked. Blocks; idempotent.

        `environment` replaces what the functions are given, where it is not None. Raises InvalidRequest for what the
        user can mend, BackendError otherwise.
        """
        ...

    def invoke(self, memory_mb: int, payload: bytes, on_end: OnEnd) -> str:
        """Ask for one run of the function of that size, and return an id for it at once.

        `on_end` is called exactly once, from another thread; never after `close`. Nothing is retried here: a second
        try is a second function, which is the caller's to decide.
        """
        ...

    def tail(self, since_s: float, limit: int = 1000) -> Sequence[LogLine]:
        """What functions of all sizes wrote since then (seconds since 1970), oldest first. Raises BackendError."""
        ...

    def remove(self) -> None:
        """Delete the functions of all sizes. Those that run now run on until they end."""
        ...

    def close(self) -> None:
        """Let go of connections and threads; calls no `on_end` any more. Functions run on."""
        ...


class Invocations:
    """Runs blocking invoke calls, each in a thread of its own, and reports each end once.

    Daemon threads, not a pool: a call blocks for as long as its function runs, and must not keep the platform from
    ending. More than `limit` at a time are told to come back, as the provider itself would.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._num_running = 0
        self._is_closed = False

    @property
    def num_running(self) -> int:
        """How many calls are under way."""
        with self._lock:
            return self._num_running

    def start(self, call: Callable[[str], InvocationEnd], on_end: OnEnd) -> str:
        """Call `call(invocation_id)` in a thread; what it returns goes to `on_end`. Raises InvalidRequest if closed."""
        invocation_id = uuid.uuid4().hex
        with self._lock:
            if self._is_closed:
                raise InvalidRequest("this provider is closed; no function can be invoked through it")
            is_full = self._num_running >= self._limit
            self._num_running += 1
        if is_full:
            throttled = InvocationEnd(
                invocation_id=invocation_id,
                outcome="throttled",
                error=f"all {self._limit} functions that may run at a time are running",
                retry_after_s=1.0,
            )
            self._begin(invocation_id, lambda _: throttled, on_end)
        else:
            self._begin(invocation_id, call, on_end)
        return invocation_id

    def close(self) -> None:
        """From now on no `on_end` is called."""
        with self._lock:
            self._is_closed = True

    def _begin(self, invocation_id: str, call: Callable[[str], InvocationEnd], on_end: OnEnd) -> None:
        threading.Thread(
            target=self._run, args=(invocation_id, call, on_end), name=f"invoke-{invocation_id[:8]}", daemon=True
        ).start()

    def _run(self, invocation_id: str, call: Callable[[str], InvocationEnd], on_end: OnEnd) -> None:
        try:
            end = call(invocation_id)
        except Exception as error:
            # Whatever a provider's library does, the coordinator hears of it; it judges by the function's reports.
            end = InvocationEnd(
                invocation_id=invocation_id,
                outcome="lost",
                error=f"the invocation broke: {type(error).__name__}: {error}",
                duration_s=None,
            )
        with self._lock:
            self._num_running -= 1
            is_closed = self._is_closed
        if not is_closed:
            on_end(end)


class AccountFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at before a first job: how it stands, and what would mend it (empty: nothing to)."""

    verdict: Literal["ok", "warn", "fail"]
    text: str
    mend: str = ""


def function_prefix(name: str, store_url: str) -> str:
    """How the functions of one platform are called, but for their size: `springtide-team-3fa9c1`.

    Platforms of one account are told apart by the place where their jobs' objects lie, which no two share; the name of
    the platform (empty: none) is for people, and for access rules that name them.
    """
    parts = urlsplit(store_url)
    endpoint = dict(parse_qsl(parts.query)).get("endpoint", "")
    # Other options of the address say how it is reached, not where it is.
    place = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')} {endpoint}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:_DIGEST_DIGITS]
    own = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:_MAX_NAME].strip("-")
    return "-".join([_OWN, *([own] if own and own != _OWN else []), digest])


def check_prefix(prefix: str) -> None:
    """Raises InvalidRequest for what clouds do not take at the beginning of a function's name."""
    if re.fullmatch(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_PREFIX - 1}}}", prefix, re.ASCII) is None:
        raise InvalidRequest(
            f"a function prefix is 1 to {MAX_PREFIX} letters, digits, - and _, and begins with a letter or _, "
            f"not {prefix[:80]!r}"
        )


def one_line(error: BaseException) -> str:
    """What an error says, in one line; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
