"""The one thread that talks to the API server: caches, writes, and other calls.

No other thread waits for the server. The decision loop and the workers' reactor pass on what is to be done and
continue; outcomes are passed to callbacks on this thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeVar

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import COMPARE_EVERY_S, Cache, Trim, trim_metadata
from springtide.backends.kubernetes.client.kinds import Kind, Object
from springtide.backends.kubernetes.client.writes import CONCURRENCY, Effect, Writes
from springtide.core.errors import BackendError

try:
    import uvloop
except ImportError:
    # uvloop does not exist for Windows, where `springtide run --on k8s` may be used: asyncio's own loop does the same.
    _new_loop = None
else:
    _new_loop = uvloop.new_event_loop

_log = logging.getLogger(__name__)
T = TypeVar("T")
# How often it is looked whether a cache that is not needed has failed.
_LOOK_S = 0.02
_CLOSE_S = 5.0


class ApiThread:
    """Runs all calls to one cluster. `open` first, `close` last; its methods may be called from any thread.

    `connect` creates the KubeApi (on the thread). `may_write` is checked before every write (Leadership.may_act).
    """

    def __init__(
        self,
        connect: Callable[[], KubeApi],
        *,
        concurrency: int = CONCURRENCY,
        may_write: Callable[[], bool] | None = None,
        seed: int | None = None,
    ) -> None:
        self._connect = connect
        self._concurrency = concurrency
        self._may_write = may_write
        # Processes that lost a server at the same time must not reconnect at the same time: unseeded, pauses differ.
        self._seed = zlib.crc32(f"{socket.gethostname()}/{os.getpid()}".encode()) if seed is None else seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._caches: list[Cache] = []
        self._dispensable: list[Cache] = []
        self._is_closing = False
        self._lock = threading.Lock()
        self._num_handed = 0
        self._api: KubeApi | None = None
        self._writes: Writes | None = None

    # --- start and end -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread, without a call to the server. Raises BackendError if no cluster is configured."""
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="kubernetes-api", daemon=True)
        self._thread.start()
        opened.result()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Cancel running calls, drop queued ones, and end the thread."""
        if self._loop is None or self._thread is None or self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)

    def __enter__(self) -> ApiThread:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def cache(
        self,
        kind: Kind,
        *,
        namespaces: Sequence[str] = ("",),
        labels: str = "",
        fields: str = "",
        trim: Trim = trim_metadata,
        listener: Any = None,
        compare_every_s: float = COMPARE_EVERY_S,
        is_needed: bool = True,
    ) -> Cache:
        """Keep the objects of a kind up to date from now on; not synced yet when this returns.

        Without `is_needed`, `sync` goes on where they cannot be listed.
        """
        cache = Cache(
            kind,
            namespaces=namespaces,
            labels=labels,
            fields=fields,
            trim=trim,
            compare_every_s=compare_every_s,
            seed=self._seed + len(self._caches),
        )
        if listener is not None:
            cache.listen(listener)
        self._caches.append(cache)
        if not is_needed:
            self._dispensable.append(cache)
        self.run(cache.run)
        return cache

    def sync(self, timeout_s: float) -> None:
        """Wait until every cache is synced. Raises BackendError with the reason if one is not."""
        until_s = time.monotonic() + timeout_s
        for cache in self._dispensable:
            while not (cache.wait_synced(_LOOK_S) or cache.problem or time.monotonic() >= until_s):
                pass
        for cache in self._caches:
            if cache not in self._dispensable and not cache.wait_synced(max(0.0, until_s - time.monotonic())):
                why = cache.problem or "no answer yet"
                raise BackendError(f"the {cache.kind.plural} of {self.api.server} could not be listed: {why}")

    def write(
        self,
        key: Hashable,
        effect: Effect,
        *,
        done: Callable[[Any], None] | None = None,
        failed: Callable[[BackendError], None] | None = None,
        waiting: Callable[[str], None] | None = None,
        is_still_wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Queue an effect, in order with those of the same key; see Writes.put. Returns at once."""

        def put() -> None:
            self.writes.put(key, effect, done=done, failed=failed, waiting=waiting, is_still_wanted=is_still_wanted)
            self._hand(-1)

        self._hand(1)
        self.soon(put)

    def run(self, task: Callable[[KubeApi], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the thread. Failures not taken from the future are logged. Dropped once closed."""
        loop, watched = self._running(), self._watched(task)
        try:
            return asyncio.run_coroutine_threadsafe(watched, loop)
        except RuntimeError:
            watched.close()
            if not self._is_closing:
                raise
            dropped: concurrent.futures.Future[T] = concurrent.futures.Future()
            dropped.cancel()
            return dropped

    def call(self, task: Callable[[KubeApi], Coroutine[Any, Any, T]], timeout_s: float = 30.0) -> T:
        """Run a coroutine and wait for it; never where decisions are made. Raises what it raises, and BackendError."""
        assert threading.current_thread() is not self._thread, "the API thread would wait for itself"
        future = asyncio.run_coroutine_threadsafe(task(self.api), self._running())
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise BackendError(f"the API server {self.api.server} has not answered within {timeout_s:g} s") from error

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the thread, after those queued earlier. Dropped once closed."""
        try:
            self._running().call_soon_threadsafe(_guarded, function)
        except RuntimeError:
            if not self._is_closing:
                raise

    def later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function on the thread after a delay; only to be used on this thread."""
        self._running().call_later(delay_s, _guarded, function)

    def every(self, period_s: float, function: Callable[[], Awaitable[None] | None]) -> None:
        """Call a function on the thread again and again, each time `period_s` after it has returned."""

        async def repeat(_: KubeApi) -> None:
            while True:
                await asyncio.sleep(period_s)
                try:
                    waiting = function()
                    if inspect.isawaitable(waiting):
                        await waiting
                except Exception:
                    _log.exception("what is done every %g s failed", period_s)

        self.run(repeat)

    def confirm(self, cache: Cache, name: str, namespace: str, told: Callable[[Object | None], None]) -> None:
        """Read an object of a cache from the server, retried until it answers; `told` is called on the thread."""
        self.write(
            (cache.kind, namespace, name, "confirm"),
            lambda api: cache.confirm(api, name, namespace),
            done=told,
        )

    # --- status ------------------------------------------------------------------------------------------------------

    @property
    def api(self) -> KubeApi:
        """The API server; its coroutines must be run on this thread."""
        assert self._api is not None, "not open"
        return self._api

    @property
    def writes(self) -> Writes:
        """The writes; only to be used on this thread, except for the numbers."""
        assert self._writes is not None, "not open"
        return self._writes

    @property
    def heard_age_s(self) -> float:
        """How long ago the API server last sent anything; infinite if it never has."""
        return time.monotonic() - self.api.heard_at_s

    @property
    def num_pending(self) -> int:
        return self._num_handed + self.writes.num_pending

    @property
    def problem(self) -> str:
        """Why the platform has no connection to its cluster, as a sentence; empty if it has."""
        problems = (*(cache.problem for cache in self._caches), self.writes.problem)
        return next((problem for problem in problems if problem), "")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self, opened: concurrent.futures.Future[None]) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._serve(opened))

    async def _serve(self, opened: concurrent.futures.Future[None]) -> None:
        self._stop = asyncio.Event()
        try:
            self._api = self._connect()
        except BaseException as error:
            opened.set_exception(error)
            return
        self._writes = Writes(self._api, concurrency=self._concurrency, may_write=self._may_write, seed=self._seed)
        self._api.on_write = self._writes.room.note
        self._loop = asyncio.get_running_loop()
        opened.set_result(None)
        await self._stop.wait()
        self._writes.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()
        # Turn calls queued at the last moment into tasks, so that the runner cancels them.
        await asyncio.sleep(0)

    async def _watched(self, task: Callable[[KubeApi], Coroutine[Any, Any, T]]) -> T:
        current = asyncio.current_task()
        assert current is not None
        self._tasks.add(current)
        try:
            return await task(self.api)
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("what ran on the API thread failed")
            raise
        finally:
            self._tasks.discard(current)

    def _hand(self, change: int) -> None:
        with self._lock:
            self._num_handed += change

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise BackendError("the API thread is not open")
        return self._loop


def _guarded(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        _log.exception("what was asked of the API thread failed")
