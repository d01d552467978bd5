"""The revisions of one service in the gateway: a queue for each that answers, and which of them gets a request.

While one revision replaces another, requests are divided by the replicas that each has ready. A new one that is a
canary gets its fraction of them, and is judged by its answers. Each queue has the schema of its own revision.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from springtide.core.errors import NotFound, SpringtideError
from springtide.core.events import Event, LoadObserved, RevisionJudged
from springtide.service.gateway.metrics import GatewayMetrics
from springtide.service.gateway.queue import ServiceQueue
from springtide.service.gateway.requests import ClientGone, RequestRefused
from springtide.serving.canary import CanaryJudge
from springtide.serving.router import ServiceRoute


class RevisionGone(SpringtideError):
    """The request was waiting for a revision that gets none any more: another one is to answer it."""


class ServiceRevisions:
    """The queues of one service. `apply` takes the routes of its revisions, the present one first."""

    def __init__(self, routes: Sequence[ServiceRoute], metrics: GatewayMetrics, post: Callable[[Event], None]) -> None:
        self._metrics = metrics
        self._post = post
        self._loads: dict[ServiceQueue, LoadObserved] = {}
        self._beside: dict[int, ServiceQueue] = {}
        self._new: ServiceRoute | None = None
        self._judge: CanaryJudge | None = None
        self._closing: list[ServiceQueue] = []
        self.revision = routes[0].service.revision
        self.present = self._queue(routes[0])
        self.apply(routes)

    @property
    def queues(self) -> Iterator[ServiceQueue]:
        """The queues of all revisions that may get requests, the present one first."""
        yield self.present
        yield from self._beside.values()

    @property
    def num_ready(self) -> int:
        """How many replicas are connected and can take work."""
        return sum(queue.num_ready for queue in self.queues)

    def apply(self, routes: Sequence[ServiceRoute]) -> None:
        """Follow the platform's view. What waits for a revision that left is answered by another."""
        present, *beside = routes
        others = {route.service.revision: route for route in beside}
        number = present.service.revision
        if number != self.revision and number in self._beside:
            before, self.present = self.present, self._beside.pop(number)
            self._beside[self.revision] = before
        elif number != self.revision and self.revision in others:
            self._beside[self.revision] = self.present
            self.present = self._queue(present)
        self.revision = number
        self.present.apply(present)
        for revision in [revision for revision in self._beside if revision not in others]:
            self._retire(self._beside.pop(revision))
        for revision, route in others.items():
            if revision in self._beside:
                self._beside[revision].apply(route)
            else:
                self._beside[revision] = self._queue(route)
        new = next((route for route in beside if route.terms is not None), None)
        if new is None or self._new is None or new.service.revision != self._new.service.revision:
            self._judge = None
        self._new = new
        self._hand_over()

    def answering(self) -> ServiceQueue:
        """The queue that tells about the service: the present revision's, or one that is ready when that is not."""
        ready = [queue for queue in self.queues if queue.num_ready]
        return self.present if self.present.num_ready or not ready else ready[0]

    def pinned(self, revision: int) -> ServiceQueue:
        """The queue of that revision. Raises NotFound if it answers nothing now."""
        queue = self.present if revision == self.revision else self._beside.get(revision)
        if queue is None:
            name = self.present.service.name
            served = ", ".join(str(each.service.revision) for each in self.queues)
            raise NotFound(
                f"{name!r} is served as revision {served}, not {revision}; `springtide versions {name}` lists all, and "
                f"`springtide rollback {name} --to {revision}` brings back one that there was"
            )
        return queue

    def chosen(self, key: bytes | None) -> ServiceQueue:
        """The queue for one request; the same for the same `key`, as long as weights and replicas stay."""
        if not self._beside:
            return self.present
        drawn = random.random() if key is None else zlib.crc32(key) / 2**32
        new = None if self._new is None or self._new.terms is None else self._beside.get(self._new.service.revision)
        if new is not None and self._new is not None and self._new.terms is not None:
            weight = self._new.terms.canary
            if new.num_ready and drawn < weight:
                return new
            drawn = (drawn - weight) / (1 - weight) if drawn >= weight else drawn / weight
        ready = [queue for queue in self.queues if queue is not new and queue.num_ready]
        point = drawn * sum(queue.num_ready for queue in ready)
        for queue in ready:
            point -= queue.num_ready
            if point < 0:
                return queue
        return ready[-1] if ready else self.present

    def answered(self, queue: ServiceQueue, latency_s: float, error: BaseException | None) -> None:
        """Count an answer of the revision that is being judged. What a client did wrong, or a full queue, is none."""
        new = self._new
        if new is None or new.terms is None or queue is not self._beside.get(new.service.revision):
            return
        status = getattr(error, "status", 500)
        if isinstance(error, ClientGone | asyncio.CancelledError | RevisionGone) or (error and 400 <= status < 500):
            return
        now_s = asyncio.get_running_loop().time()
        if self._judge is None:
            self._begin_to_judge(now_s)
        if self._judge is not None:
            self._judge.add(latency_s, is_error=error is not None)
            self._give_verdict(now_s)

    def tick(self, now_s: float) -> None:
        """Called once a second."""
        for queue in self.queues:
            queue.tick(now_s)
        self._hand_over()
        new = self._new
        if new is not None and new.terms is not None and self._beside[new.service.revision].num_ready:
            self._begin_to_judge(now_s)
            self._give_verdict(now_s)
        self._closing = [queue for queue in self._closing if queue.is_busy]

    def close(self, error: SpringtideError) -> None:
        """Fail all waiting requests and let the sent ones finish."""
        for queue in self.queues:
            queue.close(error)

    def abort(self) -> None:
        """Close every connection at once."""
        for queue in [*self.queues, *self._closing]:
            queue.abort()

    @property
    def is_busy(self) -> bool:
        """Whether batches are still at replicas."""
        return any(queue.is_busy for queue in [*self.queues, *self._closing])

    def _queue(self, route: ServiceRoute) -> ServiceQueue:
        made: list[ServiceQueue] = []
        queue = ServiceQueue(route, self._metrics, lambda load: self._post_load(made, load))
        made.append(queue)
        return queue

    def _retire(self, queue: ServiceQueue) -> None:
        queue.close(RevisionGone("the revision gets no requests any more"))
        self._closing.append(queue)
        if self._loads.pop(queue, None) is not None:
            self._post(self._whole_load())

    def _post_load(self, source: list[ServiceQueue], load: LoadObserved) -> None:
        """Post the load of all revisions together: the platform plans for the service."""
        if not source or source[0] in self._closing:
            return
        self._loads[source[0]] = load
        self._post(self._whole_load())

    def _whole_load(self) -> LoadObserved:
        loads = [self._loads[queue] for queue in self.queues if queue in self._loads]
        if len(loads) <= 1:
            return loads[0] if loads else self.present.observe(asyncio.get_running_loop().time())
        busiest = max(loads, key=lambda load: load.arrivals_per_s)
        wanted = [load.wanted_replicas for load in loads if load.wanted_replicas is not None]
        return replace(
            busiest,
            arrivals_per_s=sum(load.arrivals_per_s for load in loads),
            in_flight=sum(load.in_flight for load in loads),
            queued=sum(load.queued for load in loads),
            idle_s=min(load.idle_s for load in loads),
            wanted_replicas=sum(wanted) if wanted else None,
        )

    def _hand_over(self) -> None:
        """Let another revision answer what waits for one of which no replica is ready."""
        if not self._beside or not self.num_ready:
            return
        for queue in self.queues:
            if queue.num_queued and not queue.num_ready:
                queue.hand_over(RevisionGone("no replica of the revision is ready"))

    def _begin_to_judge(self, now_s: float) -> None:
        if self._judge is None and self._new is not None and self._new.terms is not None:
            self._judge = CanaryJudge(self._new.terms.watch, self._new.terms.watch_for_s, now_s)

    def _give_verdict(self, now_s: float) -> None:
        verdict = None if self._judge is None else self._judge.verdict(now_s)
        if verdict is None or self._new is None:
            return
        service = self._new.service
        # No further verdict on it: it leaves with the next routes.
        self._new = None
        self._post(
            RevisionJudged(
                service_id=service.service_id,
                revision=service.revision,
                is_good=verdict.is_good,
                reason=verdict.reason,
            )
        )


def gone_for_good(queue: ServiceQueue) -> RequestRefused:
    """The answer to a request that named a revision which has left meanwhile."""
    return RequestRefused(503, f"revision {queue.service.revision} of {queue.service.name!r} gets no requests any more")
