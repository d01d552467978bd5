"""A request inside the gateway: its state, its answer or error, and the watch on its deadline and its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from starlette.types import Receive

from springtide.core.errors import SpringtideError
from springtide.core.workload import ReplicaId
from springtide.serving.admission import Priority
from springtide.serving.frames import BatchOutcome, CallOrigin, HttpHead
from springtide.serving.schema import Call, ServiceSchema

if TYPE_CHECKING:
    from springtide.service.gateway.streams import AnswerStream

_WATCH_AFTER_S = 0.02
_DISCONNECTED = ("http.disconnect", "websocket.disconnect")


class RequestRefused(SpringtideError):
    """The request was not answered by the model: too busy (429), no replica (502, 503), too late (504)."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ClientGone(SpringtideError):
    """The client closed its connection before it was answered."""


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a request asks of its answer: the first part of it within `timeout_s`, before others by `priority`."""

    timeout_s: float
    priority: Priority = "normal"
    # What the services are told that its call calls; None where it may call none.
    origin: CallOrigin | None = None


@dataclass(frozen=True, slots=True)
class GatewayReply:
    """The answer of a replica to one request, with the times on the way to it."""

    outcome: BatchOutcome
    replica_id: ReplicaId
    queue_s: float
    cold_start_s: float
    num_batch_items: int
    # The body of a streamed answer; `outcome` is empty then.
    stream: AnswerStream | None = None


@dataclass(slots=True, eq=False)
class Pending:
    """A request inside the gateway. `call` is None until a replica has sent the schema to check the request against."""

    request_id: int
    prepare: Callable[[ServiceSchema], Call]
    future: asyncio.Future[GatewayReply]
    arrived_at_s: float
    deadline_s: float
    is_cold: bool
    # Whether a replica was free for it when it came.
    is_alone: bool = False
    call: Call | None = None
    is_sent: bool = False
    cold_start_s: float = 0.0
    queue_s: float = 0.0
    tried: set[ReplicaId] = field(default_factory=set)
    accepts_sse: bool = False
    # The head of a request to an application.
    http: HttpHead | None = None
    origin: CallOrigin | None = None
    # The hashes of its prompt's blocks, once they are known.
    blocks: tuple[int, ...] | None = None
    # Tells the replica that the answer is not wanted any more, while it works on the request alone.
    cancel: Callable[[], None] | None = None


def origin_of(pendings: Sequence[Pending]) -> CallOrigin | None:
    """What is told of the requests behind a batch: of several only the highest of their priorities."""
    origins = [pending.origin for pending in pendings if pending.origin is not None]
    if len(origins) <= 1:
        return origins[0] if origins else None
    found = {origin.priority for origin in origins}
    return CallOrigin(next(priority for priority in get_args(Priority) if priority in found))


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] not in _DISCONNECTED:
        pass


class DisconnectWatch:
    """Ends a request at its deadline or when its client disconnects.

    Watching the client costs a task, so it starts after 20 ms, when most requests have been answered.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pending: Pending,
        expire: Callable[[Pending], None],
        until_disconnected: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._loop = loop
        self._pending = pending
        self._expire = expire
        self._until_disconnected = until_disconnected
        self._task: asyncio.Task[None] | None = None
        if pending.deadline_s - pending.arrived_at_s > _WATCH_AFTER_S:
            self._timer = loop.call_at(pending.arrived_at_s + _WATCH_AFTER_S, self._begin)
        else:
            self._timer = loop.call_at(pending.deadline_s, expire, pending)

    def _begin(self) -> None:
        self._timer = self._loop.call_at(self._pending.deadline_s, self._expire, self._pending)
        self._task = self._loop.create_task(self._until_disconnected())
        self._task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._pending.future.done():
            self._pending.future.set_exception(ClientGone("the client closed the connection"))

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
