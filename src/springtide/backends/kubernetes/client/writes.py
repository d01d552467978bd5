"""Writes to the API server: in order for each object, with limited concurrency, retried while that makes sense.

A write is an effect: an idempotent coroutine that makes something true. After a conflict it is repeated at once,
because it reads the present state; while a server is down or overloaded it is retried without limit, as long as the
write is still wanted; a refusal (403, 404, 422) is final and goes to `failed`. A process that may not write at the
moment sends nothing and tries again soon.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import AlreadyExists, KubeApiError, TooManyRequests, VersionConflict
from springtide.backends.kubernetes.client.kinds import POD, Key, Kind, Object, uid_of
from springtide.backends.kubernetes.client.write_room import WriteRoom
from springtide.core.errors import BackendError

_log = logging.getLogger(__name__)

CONCURRENCY = 32
BACKOFF_S = (0.1, 15.0)
_LOOK_AGAIN_S = 0.25
# A conflict means that another process wrote in between. After this many in a row, pause before the next try.
_PROMPT_CONFLICTS = 5

Effect = Callable[[KubeApi], Awaitable[Any]]


class _MayNotAct(BackendError):
    """This process is not certain to lead now."""


class _Write(NamedTuple):
    effect: Effect
    done: Callable[[Any], None] | None
    failed: Callable[[BackendError], None] | None
    waiting: Callable[[str], None] | None
    is_still_wanted: Callable[[], bool] | None


class Writes:
    """The queued and running writes. Call `put` only on the event loop's thread (ApiThread.write on any).

    `may_write` is checked before every single call: a process that may no longer lead sends nothing.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        concurrency: int = CONCURRENCY,
        may_write: Callable[[], bool] | None = None,
        seed: int = 0,
    ) -> None:
        self._api = api
        self._may_write = may_write or (lambda: True)
        self.room = WriteRoom(concurrency)
        self._queues: dict[Hashable, collections.deque[_Write]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rng = np.random.default_rng(seed)
        self.num_done = 0
        self.problem = ""

    @property
    def num_pending(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(
        self,
        key: Hashable,
        effect: Effect,
        *,
        done: Callable[[Any], None] | None = None,
        failed: Callable[[BackendError], None] | None = None,
        waiting: Callable[[str], None] | None = None,
        is_still_wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Have an effect run after those put before under the same key.

        `done` gets what it returned, `failed` why it never will succeed, `waiting` each time why it is tried again
        later; one that no longer `is_still_wanted` is dropped silently. All are called on the loop and must not wait.
        """
        write = _Write(effect, done, failed, waiting, is_still_wanted)
        queue = self._queues.get(key)
        if queue is not None:
            queue.append(write)
            return
        self._queues[key] = collections.deque([write])
        task = asyncio.get_running_loop().create_task(self._work(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Return when no write is queued or running."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Drop queued writes and cancel running ones."""
        for task in self._tasks:
            task.cancel()
        self._queues.clear()

    async def _work(self, key: Hashable) -> None:
        queue = self._queues[key]
        while queue:
            write = queue[0]
            try:
                await self._until_settled(write)
            except Exception:
                # An error in an effect or a callback ends that write, not those after it.
                _log.exception("a write to %s failed", key)
            queue.popleft()
            self.num_done += 1
        if self._queues.get(key) is queue:
            del self._queues[key]
        if not self._queues:
            # Writes of other keys are not delayed by this one.
            self.problem = ""

    async def _until_settled(self, write: _Write) -> None:
        backoff_s, num_conflicts = BACKOFF_S[0], 0
        while write.is_still_wanted is None or write.is_still_wanted():
            try:
                result = await self._attempt(write)
            except VersionConflict as error:
                num_conflicts += 1
                if num_conflicts <= _PROMPT_CONFLICTS:
                    continue
                reason, least_s = str(error), 0.0
            except KubeApiError as error:
                if not error.is_passing:
                    _call(write.failed, error)
                    return
                reason, least_s = str(error), error.retry_after_s
            except _MayNotAct as error:
                self._note_waiting(write, str(error))
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            except BackendError as error:
                reason, least_s = str(error), 0.0
            else:
                self.problem = ""
                _call(write.done, result)
                return
            self._note_waiting(write, reason)
            await asyncio.sleep(max(least_s, backoff_s * float(self._rng.uniform(0.5, 1.0))))
            backoff_s = min(backoff_s * 2, BACKOFF_S[1])

    def _note_waiting(self, write: _Write, reason: str) -> None:
        self.problem = reason
        _call(write.waiting, reason)

    async def _attempt(self, write: _Write) -> Any:
        """Run an effect once there is room."""
        await self.room.enter()
        try:
            if not self._may_write():
                raise _MayNotAct("this control plane may not act at the moment: its lease has to be renewed first")
            result = await write.effect(self._api)
            self.room.note_taken()
            return result
        except TooManyRequests:
            self.room.note_refused()
            raise
        finally:
            self.room.leave()


def _call(callback: Callable[[Any], None] | None, argument: Any) -> None:
    if callback is not None:
        callback(argument)


# --- effects ---------------------------------------------------------------------------------------------------------


async def ensure_created(
    api: KubeApi, kind: Kind, obj: Object, namespace: str = "", *, is_ours: Callable[[Object], bool]
) -> Object:
    """Make an object, or find it made by an earlier attempt. Raises AlreadyExists where one of that name is not ours.

    One that is on its way out is in the way of a new one: that is a conflict, to be tried again.
    """
    try:
        return await api.create(kind, obj, namespace)
    except AlreadyExists:
        name = obj["metadata"]["name"]
        found = await api.find(kind, name, namespace or obj["metadata"].get("namespace", ""))
        if found is None:
            raise VersionConflict(409, "Conflict", f"{kind.plural} {name} was there and is gone: once more") from None
        if not is_ours(found):
            raise
        return found


async def ensure_bound(api: KubeApi, pod: Key, node: str, *, uid: str = "") -> None:
    """Bind a pod to a node unless it is. Raises AlreadyExists: it is on another one; NoSuchObject: it is gone."""
    try:
        await api.bind(pod, node, uid=uid)
    except VersionConflict as error:
        found = await api.get(POD, pod.name, pod.namespace)
        if uid and uid_of(found) != uid:
            raise AlreadyExists(409, "AlreadyExists", f"pod {pod.name} is another one than was made") from error
        at = found["spec"].get("nodeName", "")
        if at and at != node:
            raise AlreadyExists(409, "AlreadyExists", f"pod {pod.name} is on node {at}, not on {node}") from error
        if not at:
            # Neither bound nor bindable: it is being deleted, or the answer was outdated. The caller tries again.
            raise
