"""The queue of one service in the gateway: holds requests, forms batches, sends them to replicas, returns answers.

Everything runs on the event loop. `springtide.serving` decides which requests are admitted, batched and sent where.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.events import LoadObserved
from springtide.core.status.admission import AdmissionStatus
from springtide.core.workload import InferenceService, ReplicaId
from springtide.service.gateway.admission import RequestAdmission
from springtide.service.gateway.metrics import GatewayMetrics
from springtide.service.gateway.prompts import PromptRouting
from springtide.service.gateway.replica_client import ReplicaClient
from springtide.service.gateway.requests import (
    DisconnectWatch,
    GatewayReply,
    Pending,
    RequestRefused,
    RequestTerms,
    origin_of,
)
from springtide.service.gateway.scaling import ReplicaAdvice
from springtide.service.gateway.streams import SWITCHING, AnswerStream, SocketStream
from springtide.serving.admission import QueueState, bounded_retry_s, calls_ahead, smooth
from springtide.serving.batcher import (
    BatchLimits,
    Waiting,
    WaitUntil,
    expected_requests_after,
    form_batch,
    worthwhile_wait_s,
)
from springtide.serving.frames import (
    Answered,
    BatchOutcome,
    Chunk,
    Draining,
    End,
    HttpHead,
    HttpStart,
    Open,
    Predict,
    Taken,
)
from springtide.serving.load import LoadWindow, is_worth_reporting
from springtide.serving.prefixes import RoutedPrompt
from springtide.serving.router import ReplicaLoad, ServiceRoute, pick_replica
from springtide.serving.schema import Call, ServiceSchema

_RETRY_AFTER_S = 2.0
_MIN_REPORT_INTERVAL_S = 1.0
# The methods of requests to applications that may be sent again when a replica is lost.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


@dataclass(slots=True)
class _SentBatch:
    """A batch, or a call alone, that a replica has not answered yet, with the part of an answer that has come."""

    pendings: list[Pending]
    sent_at_s: float
    num_items: int
    client: ReplicaClient
    is_alone: bool
    stream: AnswerStream | None = None
    # Of a request to a language model.
    prompt: RoutedPrompt | None = None
    # When the first part of a streamed answer came.
    answered_at_s: float | None = None


class ServiceQueue:
    """The queue of one deployed service. `post` is called with its load; `apply` updates the set of its replicas."""

    def __init__(self, route: ServiceRoute, metrics: GatewayMetrics, post: Callable[[LoadObserved], None]) -> None:
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self.service: InferenceService = route.service
        self.schema: ServiceSchema | None = None
        self.window = LoadWindow(route.service.service_id, now_s)
        self.advice = ReplicaAdvice(route.service, now_s, len(route.replicas))
        self._admission = RequestAdmission(route.service, metrics)
        self._prompts = PromptRouting()
        self._metrics = metrics
        self._queue_seconds = metrics.queue.labels(route.service.name)
        self._batch_items = metrics.batch.labels(route.service.name)
        self._predict_seconds = metrics.predict.labels(route.service.name)
        self._in_flight_gauge = metrics.in_flight.labels(route.service.name)
        self._post = post
        self._reported: LoadObserved | None = None
        self._reported_at_s = -1e9
        self._clients: dict[ReplicaId, ReplicaClient] = {}
        self._retired: set[ReplicaClient] = set()
        self._loading: frozenset[ReplicaId] = frozenset()
        self._seen_ready: set[ReplicaId] = set()
        self._held: dict[int, Pending] = {}
        self._waiting: dict[int, Waiting] = {}
        self._pendings: dict[int, Pending] = {}
        self._sent: dict[int, _SentBatch] = {}
        self._num_in_flight = 0
        self._next_id = 0
        self._expected = 1.0
        self._call_s: float | None = None
        self._answered_at_s: dict[ReplicaId, float] = {}
        self._woken_at_s: float | None = None
        self._ready_at_s: float | None = None
        self._is_first_answer_due = False
        # Seconds from the first ready replica to the first answer, at the last start from zero replicas.
        self.first_answer_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed: SpringtideError | None = None
        self.apply(route)

    @property
    def num_ready(self) -> int:
        return sum(1 for client in self._clients.values() if client.is_connected and not client.is_draining)

    @property
    def num_queued(self) -> int:
        """The number of waiting requests, including those held until the schema is known."""
        return len(self._waiting) + len(self._held)

    @property
    def readiness(self) -> Literal["ready", "starting", "scaled_to_zero", "failed"]:
        """Whether a request is answered, now or after a start. Scaled to zero: a request would start a replica."""
        if self._failure:
            return "failed"
        if self.num_ready:
            return "ready"
        is_starting = self.is_loading or self.service.min_replicas > 0 or self.num_queued > 0
        return "starting" if is_starting else "scaled_to_zero"

    @property
    def trouble(self) -> str:
        """Why the service has failed, or has no replica yet, if that is known."""
        return self._failure or self._waits

    @property
    def is_loading(self) -> bool:
        """Whether a replica was started that has not been ready yet."""
        return bool(self._loading - self._seen_ready)

    @property
    def is_busy(self) -> bool:
        """Whether batches are still at replicas."""
        return bool(self._sent)

    def apply(self, route: ServiceRoute) -> None:
        """Follow the platform's view: connect to new ready replicas, send nothing more to those that left it."""
        is_other = not _have_same_replicas(route.service, self.service)
        self.service = route.service
        self.advice.apply(route.service, len(route.replicas))
        self._admission.apply(route.service)
        self._failure, self._waits = route.failure, route.waits
        self._startable_at_s = None if route.waits_s is None else self._loop.time() + route.waits_s
        usable = {replica.replica_id: replica for replica in route.replicas if replica.is_ready and replica.address}
        if is_other and not usable.keys() & self._clients.keys():
            # Else the revision before answers until a replica of the new one has sent its schema.
            self.schema = None
        self._loading = frozenset(replica.replica_id for replica in route.replicas if not replica.is_ready)
        self._seen_ready &= {replica.replica_id for replica in route.replicas}
        for replica_id, client in list(self._clients.items()):
            replica = usable.get(replica_id)
            if replica is None or (replica.address, replica.token) != (client.address, client.token):
                self._retire(client)
        for replica_id, replica in usable.items():
            if replica_id not in self._clients:
                self._clients[replica_id] = ReplicaClient(
                    replica_id,
                    replica.address,
                    token=replica.token,
                    identity=route.identity,
                    on_ready=self._on_ready,
                    on_answer=self._on_answer,
                    on_chunk=self._on_chunk,
                    on_lost=self._on_lost,
                    on_draining=lambda client: None,
                )
        self._prompts.keep(self._clients)
        if self._failure:
            for pending in list(self._pendings.values()):
                if not pending.is_sent:
                    self._fail(pending, self._service_failed())
        self._dispatch()

    async def submit(
        self,
        prepare: Callable[[ServiceSchema], Call],
        terms: RequestTerms,
        until_disconnected: Callable[[], Coroutine[Any, Any, None]],
        *,
        accepts_sse: bool = False,
        http: HttpHead | None = None,
    ) -> GatewayReply:
        """Queue one request and wait for its answer, or for the first item of a streamed one.

        `prepare` checks the request against the schema as soon as that is known, and raises InvalidRequest.
        `until_disconnected` returns when the client has disconnected. Raises RequestRefused, InvalidRequest or
        ClientGone.
        """
        if self._closed is not None:
            raise self._closed
        if self._failure:
            raise self._service_failed()
        self.check(terms)
        now_s = self._loop.time()
        self.window.arrived(now_s)
        self.advice.arrived()
        num_ready, num_queued = self.num_ready, self.num_queued
        self._next_id += 1
        pending = Pending(
            request_id=self._next_id,
            prepare=prepare,
            future=self._loop.create_future(),
            arrived_at_s=now_s,
            deadline_s=now_s + terms.timeout_s,
            is_cold=num_ready == 0,
            is_alone=self._num_calls_with_next() <= num_ready * self._concurrency,
            accepts_sse=accepts_sse,
            http=http,
            origin=terms.origin,
        )
        if self.schema is not None:
            pending.call = prepare(self.schema)
        self._expected = expected_requests_after(self._expected, num_queued + self._num_in_flight + 1)
        watch = DisconnectWatch(self._loop, pending, self._expire, until_disconnected)
        latency_s: float | None = None
        try:
            self._enqueue(pending)
            self._report_waiting(num_ready)
            answer = await pending.future
            latency_s = self._loop.time() - now_s
            return answer
        finally:
            self.window.ended(self._loop.time(), latency_s)
            watch.cancel()
            self._forget(pending)
            if latency_s is None and pending.cancel is not None:
                pending.cancel()

    def check(self, terms: RequestTerms) -> None:
        """Raise RequestRefused if a request that came now would not be let in. The refusal is counted."""
        if self._closed is not None or self._failure:
            return
        now_s, state = self._loop.time(), self._state(self.num_ready, self.num_queued)
        refused = self._admission.refusal(state, terms, self._num_calls_with_next(), self._at_work_s, now_s)
        if refused is None:
            return
        self.window.arrived(now_s)
        self.advice.arrived()
        # For the number of replicas it counts as the part of one that its work would have taken.
        num_each = self._concurrency * self._requests_a_call
        self.window.refused(now_s, self._admission.call_s * self.service.target_in_flight / num_each)
        raise RequestRefused(429, refused.reason, refused.retry_after_s)

    def admission_status(self) -> AdmissionStatus:
        """What users are told about the requests that are let in and refused."""
        return self._admission.status(self._loop.time())

    @property
    def _concurrency(self) -> int:
        """How many calls a replica works on at a time."""
        return 1 if self.schema is None else self.schema.concurrency

    @property
    def _requests_a_call(self) -> int:
        """How many requests may share a call."""
        return self.service.max_batch_size if self.schema is None or self.schema.is_batchable else 1

    def _num_calls_with_next(self) -> int:
        """How many calls are at work and waiting, with that of a request that comes now."""
        return len(self._sent) + -(-(self.num_queued + 1) // self._requests_a_call)

    def _at_work_s(self) -> list[float]:
        now_s = self._loop.time()
        return [now_s - sent.sent_at_s for sent in self._sent.values()]

    def _state(self, num_ready: int, num_queued: int) -> QueueState:
        """What admission has to know. How long an item of a stream takes is not known from whole streams."""
        schema, concurrency = self.schema, self._concurrency
        is_batchable = schema is None or schema.is_batchable
        num_ahead = calls_ahead(num_queued, len(self._sent), self.service.max_batch_size, is_batchable=is_batchable)
        if concurrency > 1:
            num_ahead = max(0, num_ahead + 1 - num_ready * concurrency)
        return QueueState(
            num_queued=num_queued,
            max_queue=self.service.max_queue,
            num_calls_ahead=num_ahead,
            num_ready=num_ready * concurrency,
            call_s=None if schema is not None and schema.is_stream else self._call_s,
        )

    def observe(self, now_s: float) -> LoadObserved:
        return self.window.observe(
            now_s,
            in_flight=self._num_in_flight,
            queued=self.num_queued,
            loading=self.is_loading,
            wanted=self.advice.wanted,
        )

    def tick(self, now_s: float) -> None:
        """Called once a second: update the advised number of replicas, and post the load if it has changed enough."""
        self.advice.tick(now_s, num_queued=self.num_queued, idle_s=self.observe(now_s).idle_s)
        self.report_load(now_s)
        self._admission.tick()

    def report_load(self, now_s: float, *, always: bool = False) -> None:
        """Post the load if it differs enough from the last report, or `always`."""
        load = self.observe(now_s)
        if always or is_worth_reporting(self._reported, self._reported_at_s, load, now_s, self.service.idle_s):
            self._reported, self._reported_at_s = load, now_s
            self._post(load)

    def close(self, error: SpringtideError) -> None:
        """Fail all waiting requests with `error` and let the sent ones finish: the service or the gateway ends.

        A request that a draining replica returns unanswered from now on fails with `error` too.
        """
        self._closed = error
        self.hand_over(error)
        for client in list(self._clients.values()):
            self._retire(client)
        if self._timer is not None:
            self._timer.cancel()

    def hand_over(self, error: SpringtideError) -> None:
        """Fail with `error` all requests that no replica has."""
        for pending in list(self._pendings.values()):
            if not pending.is_sent:
                self._fail(pending, error)

    def abort(self) -> None:
        """Close every connection at once."""
        self.close(RequestRefused(503, "the gateway shuts down; send the request again", _RETRY_AFTER_S))
        for client in list(self._retired):
            client.close()

    def _report_waiting(self, num_ready: int) -> None:
        """Report at once that requests wait without a ready replica (once per burst), or that a queue has formed."""
        now_s = self._loop.time()
        if num_ready == 0:
            if self._woken_at_s is None and self.num_queued:
                self._woken_at_s = now_s
                self.advice.wake()
                self.report_load(now_s, always=True)
        elif (
            self._waiting
            and (self._reported is None or self._reported.queued == 0)
            and now_s - self._reported_at_s >= _MIN_REPORT_INTERVAL_S
        ):
            self.report_load(now_s)

    def _enqueue(self, pending: Pending) -> None:
        self._pendings[pending.request_id] = pending
        if pending.call is None:
            self._held[pending.request_id] = pending
            return
        self._waiting[pending.request_id] = _waiting(pending, pending.call, self.schema)
        self._dispatch()

    def _requeue(self, pendings: list[Pending]) -> None:
        """Put requests back at the front of the queue in their order, because they have waited longest."""
        front: dict[int, Waiting] = {}
        for pending in pendings:
            if self._closed is not None:
                self._fail(pending, self._closed)
            elif not pending.future.done():
                assert pending.call is not None
                pending.is_sent = False
                pending.cancel = None
                front[pending.request_id] = _waiting(pending, pending.call, self.schema)
        self._waiting = {**front, **self._waiting}

    def _forget(self, pending: Pending) -> None:
        self._pendings.pop(pending.request_id, None)
        self._held.pop(pending.request_id, None)
        self._waiting.pop(pending.request_id, None)
        if not self.num_queued and not self.num_ready:
            # The burst is over: the next one wakes the control plane again.
            self._woken_at_s = None

    def _fail(self, pending: Pending, error: SpringtideError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)
        self._forget(pending)

    def _service_failed(self) -> RequestRefused:
        """The service has failed and only its owner can deploy it again, so the answer has no Retry-After."""
        return RequestRefused(503, f"service {self.service.name!r} has failed: {self._failure}; deploy it again")

    def _expire(self, pending: Pending) -> None:
        waited_s = self._loop.time() - pending.arrived_at_s
        if pending.is_sent:
            error = RequestRefused(504, f"the model did not answer within the {waited_s:.1f} s that the request allows")
        elif self.num_ready == 0:
            why = self._waits or next((client.problem for client in self._clients.values() if client.problem), "")
            waits = f" ({why})" if why else ""
            error = RequestRefused(
                503,
                f"no replica of {self.service.name!r} became ready within the {waited_s:.1f} s that the request "
                f"allows{waits}; send it again later or with a longer X-Springtide-Timeout",
                self._retry_without_replica_s(),
            )
        else:
            error = RequestRefused(
                503, f"the request waited {waited_s:.1f} s in the queue, all that it allows", _RETRY_AFTER_S
            )
        self._fail(pending, error)

    def _retry_without_replica_s(self) -> float:
        at_s = self._startable_at_s
        return _RETRY_AFTER_S if at_s is None else max(_RETRY_AFTER_S, bounded_retry_s(at_s - self._loop.time()))

    def _dispatch(self) -> None:
        """Send batches while requests wait and a replica can take one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        service = self.service
        limits = BatchLimits(
            max_batch_size=service.max_batch_size,
            batch_wait_s=worthwhile_wait_s(service.batch_wait_s, self._call_s, service.slo_s),
        )
        while self._waiting:
            client = self._pick()
            if client is None:
                return
            queue = list(self._waiting.values())
            decision = form_batch(
                queue,
                self._loop.time(),
                limits,
                expected_requests=self._expected,
                call_s=self._expected_s(client),
            )
            for request_id in decision.expired:
                self._expire(self._pendings[request_id])
            if isinstance(decision, WaitUntil):
                self._timer = self._loop.call_at(decision.at_s, self._dispatch)
                return
            if decision.is_short:
                self._expected = float(max(1, len(self._waiting) + self._num_in_flight))
            if decision.request_ids:
                self._send(
                    client, [self._pendings[request_id] for request_id in decision.request_ids], decision.num_items
                )

    def _expected_s(self, client: ReplicaClient) -> float:
        """How long a call sent to this replica now is expected to take; 0 if that is not known."""
        schema = self.schema
        if self._call_s is None or (schema is not None and schema.is_stream):
            return 0.0
        concurrency = 1 if schema is None else schema.concurrency
        return self._call_s * (1 + len(client.outstanding) // concurrency)

    def _pick(self) -> ReplicaClient | None:
        """Choose a replica. A busy one gets a second batch only if that is full: until then it can still grow."""
        oldest = self._pendings[next(iter(self._waiting))]
        loads = [
            ReplicaLoad(
                replica_id=client.replica_id,
                num_outstanding=len(client.outstanding),
                is_ready=client.is_connected,
                is_draining=client.is_draining,
            )
            for client in self._clients.values()
        ]
        avoid = frozenset(oldest.tried)
        concurrency = 1 if self.schema is None else self.schema.concurrency
        cost = self._prompts.cost_of(oldest)
        chosen = pick_replica(loads, max_outstanding=concurrency, avoid=avoid, cost=cost)
        is_plain = self.schema is None or self.schema.kind == "plain"
        if chosen is None and is_plain and len(self._waiting) >= self.service.max_batch_size:
            chosen = pick_replica(loads, max_outstanding=concurrency + 1, avoid=avoid)
        return None if chosen is None else self._clients[chosen]

    def _send(self, client: ReplicaClient, pendings: list[Pending], num_items: int) -> None:
        now_s = self._loop.time()
        self._next_id += 1
        batch_id = self._next_id
        for pending in pendings:
            del self._waiting[pending.request_id]
            pending.is_sent = True
            if pending.is_cold and self._ready_at_s is not None:
                pending.cold_start_s = max(0.0, min(self._ready_at_s, now_s) - pending.arrived_at_s)
            pending.queue_s = now_s - pending.arrived_at_s - pending.cold_start_s
            self._queue_seconds.observe(pending.queue_s)
        calls = tuple(pending.call.body for pending in pendings if pending.call is not None)
        timeout_s = max(pending.deadline_s for pending in pendings) - now_s
        try:
            if self.schema is None or self.schema.kind == "plain":
                origin = origin_of(pendings)
                client.ask(Predict(batch_id=batch_id, calls=calls, timeout_s=timeout_s, origin=origin))
            else:
                alone = pendings[0]
                client.ask(
                    Open(
                        batch_id=batch_id,
                        call=calls[0],
                        is_sse=alone.accepts_sse,
                        http=alone.http,
                        timeout_s=timeout_s,
                        origin=alone.origin,
                    )
                )
                alone.cancel = functools.partial(client.cancel, batch_id)
        except BackendError as error:
            for pending in pendings:
                self._fail(pending, RequestRefused(413, str(error)))
            return
        sent = self._sent[batch_id] = _SentBatch(pendings, now_s, num_items, client, pendings[0].is_alone)
        sent.prompt = self._prompts.sent(client.replica_id, pendings[0])
        self._batch_items.observe(num_items)
        self._count_in_flight(len(pendings))

    def _count_in_flight(self, change: int) -> None:
        self._num_in_flight += change
        self._in_flight_gauge.inc(change)

    def _on_ready(self, client: ReplicaClient, schema: ServiceSchema) -> None:
        now_s = self._loop.time()
        self.schema = schema
        self._prompts.apply(schema)
        self._seen_ready.add(client.replica_id)
        self.window.busy(now_s)
        if self.num_ready == 1:
            self._ready_at_s = now_s
            if self._woken_at_s is not None:
                self._metrics.cold_start.labels(self.service.name).observe(now_s - self._woken_at_s)
                self._woken_at_s = None
                self._is_first_answer_due = True
        held, self._held = self._held, {}
        for pending in held.values():
            try:
                pending.call = pending.prepare(schema)
            except InvalidRequest as error:
                self._fail(pending, error)
                continue
            self._waiting[pending.request_id] = _waiting(pending, pending.call, schema)
        self._dispatch()

    def _on_chunk(self, chunk: Chunk | Taken) -> None:
        """Pass on a part of a streamed answer; with the first one the request is answered."""
        sent = self._sent[chunk.batch_id]
        if isinstance(chunk, Taken):
            if isinstance(sent.stream, SocketStream):
                sent.stream.taken(chunk.num_bytes)
            return
        if sent.stream is None:
            sent.stream = self._begin_stream(chunk.batch_id, sent, is_sse=chunk.is_sse, start=chunk.start)
        sent.stream.feed(chunk.body)

    def _begin_stream(
        self, batch_id: int, sent: _SentBatch, *, is_sse: bool, start: HttpStart | None = None
    ) -> AnswerStream:
        pending, client = sent.pendings[0], sent.client
        sent.answered_at_s = self._loop.time()
        self._prompts.began(sent.prompt, start)
        give_credit = functools.partial(client.credit, batch_id)
        on_cancel = functools.partial(client.cancel, batch_id)
        stream: AnswerStream
        if start is not None and start.status == SWITCHING and pending.http is not None and pending.http.is_socket:
            feed = functools.partial(client.feed, batch_id)
            stream = SocketStream(start=start, give_credit=give_credit, on_cancel=on_cancel, feed=feed)
        else:
            stream = AnswerStream(
                is_sse=is_sse,
                start=start,
                silence_s=pending.deadline_s - pending.arrived_at_s,
                give_credit=give_credit,
                on_cancel=on_cancel,
            )
        self._resolve(client, sent, (BatchOutcome("ok", b""),), stream)
        return stream

    def _resolve(
        self,
        client: ReplicaClient,
        sent: _SentBatch,
        outcomes: tuple[BatchOutcome, ...],
        stream: AnswerStream | None = None,
    ) -> None:
        if self._is_first_answer_due and self._ready_at_s is not None:
            self._is_first_answer_due, self.first_answer_s = False, self._loop.time() - self._ready_at_s
        for pending, outcome in zip(sent.pendings, outcomes, strict=True):
            if not pending.future.done():
                reply = GatewayReply(
                    outcome, client.replica_id, pending.queue_s, pending.cold_start_s, sent.num_items, stream
                )
                pending.future.set_result(reply)

    def _end(self, client: ReplicaClient, sent: _SentBatch, end: End) -> None:
        """End the answer to a call alone."""
        now_s = self._loop.time()
        hold_s = now_s - sent.sent_at_s
        self._call_s = smooth(self._call_s, hold_s)
        if not isinstance(sent.stream, SocketStream):
            answer_s = hold_s if sent.answered_at_s is None else sent.answered_at_s - sent.sent_at_s
            self._admission.ended(hold_s, answer_s, is_alone=sent.is_alone)
        self._predict_seconds.observe(end.predict_s)
        is_stream = self.schema is not None and self.schema.is_stream
        if sent.stream is None and is_stream and end.outcome.status == "ok":
            # It had no items.
            sent.stream = self._begin_stream(end.batch_id, sent, is_sse=sent.pendings[0].accepts_sse)
        if sent.stream is None:
            self._resolve(client, sent, (end.outcome,))
        elif end.outcome.status == "ok":
            sent.stream.end()
        else:
            sent.stream.end(RequestRefused(500, f"predict failed: {end.outcome.body.decode('utf-8', 'replace')}"))

    def _on_answer(self, client: ReplicaClient, reply: Answered | End | Draining) -> None:
        now_s = self._loop.time()
        sent = self._sent.pop(reply.batch_id)
        self._prompts.ended(sent.prompt)
        self._count_in_flight(-len(sent.pendings))
        if isinstance(reply, Draining):
            self._requeue(sent.pendings)
        elif isinstance(reply, End):
            self._end(client, sent, reply)
        elif len(reply.outcomes) != len(sent.pendings):
            for pending in sent.pendings:
                self._fail(pending, RequestRefused(502, "the replica answered another number of requests than it got"))
        else:
            # A batch sent to a busy replica waits there first; only the time that the replica worked on it counts.
            began_s = max(sent.sent_at_s, self._answered_at_s.get(client.replica_id, 0.0))
            self._call_s = smooth(self._call_s, now_s - began_s)
            self._admission.ended(now_s - began_s, now_s - began_s, is_alone=sent.is_alone)
            self._predict_seconds.observe(reply.predict_s)
            self._resolve(client, sent, reply.outcomes)
        self._answered_at_s[client.replica_id] = now_s
        # The service was busy until now, even if the callers of this batch have left.
        self.window.busy(now_s)
        self._close_if_done(client)
        self._dispatch()

    def _on_lost(self, client: ReplicaClient, batch_ids: tuple[int, ...]) -> None:
        """Send the unanswered requests of a lost connection to another replica, once: predict is assumed idempotent."""
        again: list[Pending] = []
        for batch_id in batch_ids:
            sent = self._sent.pop(batch_id)
            self._prompts.ended(sent.prompt)
            self._count_in_flight(-len(sent.pendings))
            if sent.stream is not None:
                # What the client has of it cannot be taken back.
                lost = RequestRefused(502, f"the replica {client.replica_id} was lost in the midst of its answer")
                sent.stream.end(lost, status=502, code="replica_lost")
                continue
            for pending in sent.pendings:
                if pending.http is not None and pending.http.method not in _REPEATABLE:
                    why = f"the replica was lost at this request, and a {pending.http.method} is not repeated"
                    self._fail(pending, RequestRefused(502, why))
                elif pending.tried:
                    self._fail(pending, RequestRefused(502, "two replicas died while they worked on this request"))
                else:
                    pending.tried.add(client.replica_id)
                    again.append(pending)
        self._requeue(again)
        if client.is_draining:
            self._retire(client)
        self._close_if_done(client)
        if self.num_queued:
            self._report_waiting(self.num_ready)
        self._dispatch()

    def _retire(self, client: ReplicaClient) -> None:
        """Send nothing more to this replica and close the connection once it has answered everything."""
        client.is_retired = True
        if self._clients.get(client.replica_id) is client:
            del self._clients[client.replica_id]
        self._answered_at_s.pop(client.replica_id, None)
        self._retired.add(client)
        self._close_if_done(client)

    def _close_if_done(self, client: ReplicaClient) -> None:
        if client.is_retired and not client.outstanding:
            self._retired.discard(client)
            client.close()


def _have_same_replicas(one: InferenceService, other: InferenceService) -> bool:
    """Whether the same replicas serve both: if only shares differ, they keep running and send no new schema."""
    if one.revision == other.revision:
        return True
    has_shares = one.share is not None and other.share is not None
    other_with_share = replace(other, share=one.share, capacity_per_s=one.capacity_per_s, revision=one.revision)
    return has_shares and one == other_with_share


def _waiting(pending: Pending, call: Call, schema: ServiceSchema | None) -> Waiting:
    return Waiting(
        request_id=pending.request_id,
        arrived_at_s=pending.arrived_at_s,
        deadline_s=pending.deadline_s,
        num_items=call.num_items,
        num_bytes=len(call.body),
        key=call.key,
        is_batchable=schema is not None and schema.is_batchable,
    )
