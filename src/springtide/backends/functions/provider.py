"""The port to a provider of functions: how a job's coordinator invokes them and learns of their end.

Implemented by `aws`, `alibaba` and the emulator. The meaning of every outcome is defined here.
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
# Function names have at most 64 characters at the clouds, and end with the memory size: "-10240".
MAX_PREFIX = 58
_OWN = "springtide"
_MAX_NAME = 40
_DIGEST_DIGITS = 6


class InvocationEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an invocation ended. `error` is one sentence for users, `log` the tail of the function's output.

    "returned": `payload` is what the handler returned. "failed": it raised, or ended by itself. "timed_out",
    "out_of_memory": the provider ended it at that limit. "killed": it was ended from outside, not at a limit.
    "throttled": nothing ran and nothing is charged; retry after `retry_after_s`. "refused": nothing ran, and the same
    request will not succeed, or the provider has a failure. "lost": it was accepted, or may have been, and its outcome
    is unknown: it may still be running.

    `duration_s` is the charged time (None if unknown: a lost one may be charged up to its lifetime).
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
    """One line of a function's output: its time (seconds since 1970), the instance that wrote it, and the text."""

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

        `environment` replaces the functions' environment, unless it is None. Raises InvalidRequest for what the user
        can fix, BackendError otherwise.
        """
        ...

    def invoke(self, memory_mb: int, payload: bytes, on_end: OnEnd) -> str:
        """Start one run of the function of that size, and return an id for it at once.

        `on_end` is called exactly once, from another thread; never after `close`. Nothing is retried here: a second
        try is a second function, which only the caller can decide on.
        """
        ...

    def tail(self, since_s: float, limit: int = 1000) -> Sequence[LogLine]:
        """Output of functions of all sizes since that time (seconds since 1970), oldest first. Raises BackendError."""
        ...

    def remove(self) -> None:
        """Delete the functions of all sizes. Running invocations continue until they end."""
        ...

    def close(self) -> None:
        """Release connections and threads; no `on_end` is called afterwards. Functions run on."""
        ...


class Invocations:
    """Runs blocking invoke calls, each in a thread of its own, and reports each end once.

    The threads are daemons, not of a pool: a call blocks for as long as its function runs, and must not keep the
    platform from exiting. Calls beyond `limit` end as throttled, as they would at the provider.
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
        """Call `call(invocation_id)` in a thread and pass its result to `on_end`. Raises InvalidRequest if closed."""
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
            # Whatever a provider's library raises is reported as lost; the function's reports tell whether it runs.
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
    """One check of an account before its first job; `mend` says how to fix what was found (empty: nothing to fix)."""

    verdict: Literal["ok", "warn", "fail"]
    text: str
    mend: str = ""


def function_prefix(name: str, store_url: str) -> str:
    """The prefix of the names of one platform's functions, before the size: `springtide-team-3fa9c1`.

    It contains a digest of the store's address, which no two platforms of an account share. `name` is the platform's
    (empty: none), for readers and for access rules that list functions by name.
    """
    parts = urlsplit(store_url)
    endpoint = dict(parse_qsl(parts.query)).get("endpoint", "")
    # Other options of the address say how the store is reached, not which one it is.
    place = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')} {endpoint}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:_DIGEST_DIGITS]
    own = re.sub(r"[^A-Za-z0-9-]+", "-", name)[:_MAX_NAME].strip("-")
    return "-".join([_OWN, *([own] if own and own != _OWN else []), digest])


def check_prefix(prefix: str) -> None:
    """Raise InvalidRequest for a prefix that clouds do not accept in a function's name."""
    if re.fullmatch(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_PREFIX - 1}}}", prefix, re.ASCII) is None:
        raise InvalidRequest(
            f"a function prefix is 1 to {MAX_PREFIX} letters, digits, - and _, and begins with a letter or _, "
            f"not {prefix[:80]!r}"
        )


def one_line(error: BaseException) -> str:
    """The error's message on one line; its class where the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
