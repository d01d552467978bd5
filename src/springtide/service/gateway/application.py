"""The inference gateway: `POST /f/{name}` and the Open Inference Protocol v2 on bare Starlette routes.

`POST /f/{name}` takes a JSON object {"parameter": value, ...}, or a bare list for the only parameter, and answers
{"outputs": what predict returned}. If a replica dies before it has answered, the request is sent to another one once:
predict is assumed to be idempotent. An error is {"error": {"code", "message"}}, on v2 paths {"error": sentence}. The
header `X-Springtide` of an answer holds the time in the queue, the cold start, the batch size and the replica's share,
`X-Springtide-Revision` the revision that answered. With that header, or at `/f/{name}@{revision}`, a request names its
revision; all with the same `X-Springtide-Session` go to the same one while several answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope

from springtide.core.errors import InvalidRequest, NotFound
from springtide.core.events import Event
from springtide.core.quantities import parse_duration_s, validate_name
from springtide.core.shares import Share
from springtide.core.status.admission import AdmissionStatus
from springtide.service.gateway.access_log import AccessLog
from springtide.service.gateway.applications import (
    APPLICATION_METHODS,
    application_headers,
    http_head,
    refuse_application,
)
from springtide.service.gateway.described import gateway_paths
from springtide.service.gateway.endpoint import (
    ANSWERED_BY,
    CALLER,
    REQUEST_ID,
    SEND_TIMEOUT_S,
    STREAM_HEADERS,
    Endpoint,
    Handler,
    Headers,
    HttpError,
    HttpReply,
    accepts_sse,
    header_of,
    read_body,
)
from springtide.service.gateway.metrics import GatewayMetrics
from springtide.service.gateway.protocol import InferenceProtocol
from springtide.service.gateway.queue import ServiceQueue
from springtide.service.gateway.requests import GatewayReply, RequestTerms, until_disconnected
from springtide.service.gateway.revisions import RevisionGone, ServiceRevisions, gone_for_good
from springtide.serving.admission import Priority
from springtide.serving.events import EVENT_STREAM, JSON_LINES
from springtide.serving.frames import CallOrigin, HttpHead
from springtide.serving.router import ReplicaRoute, ServiceRoute
from springtide.serving.schema import Call, ServiceSchema, check_call, parse_json

__all__ = ["Gateway", "ReplicaRoute", "ServiceRoute"]

_DEFAULT_TIMEOUT_S = 30.0
_MAX_TIMEOUT_S = 3600.0
_TICK_S = 1.0
_MAX_LISTED_NAMES = 20
_MAX_DIGITS = 9
_PATHS = "/f/{name}/{path:path}"
_REVISION = b"x-springtide-revision"
_SESSION = b"x-springtide-session"
_PRIORITY = b"x-springtide-priority"
_TRACEPARENT = b"traceparent"
_MAX_TRACE_BYTES = 512
_PRIORITIES: Mapping[bytes, Priority] = MappingProxyType({b"high": "high", b"normal": "normal", b"low": "low"})


class Gateway:
    """The data plane. `update` may be called from any thread; everything else runs on the event loop.

    `post` is called with LoadObserved events on the event loop and must not block.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        *,
        registry: CollectorRegistry | None = None,
        default_timeout_s: float = _DEFAULT_TIMEOUT_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
        access_log: AccessLog | None = None,
    ) -> None:
        self._post, self._access_log = post, access_log
        self._metrics = GatewayMetrics(registry if registry is not None else CollectorRegistry())
        self._default_timeout_s = default_timeout_s
        self._send_timeout_s = send_timeout_s
        self._lock = threading.Lock()
        self._routes: tuple[ServiceRoute, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._services: dict[str, ServiceRevisions] = {}
        self._closing: list[ServiceRevisions] = []
        self._ticker: asyncio.Task[None] | None = None
        self._is_open = False

    def update(self, routes: Sequence[ServiceRoute]) -> None:
        """Replace the routes of all services. Thread-safe; routes set before `startup` are applied there."""
        with self._lock:
            if self._routes == (wanted := tuple(routes)):
                return
            self._routes = wanted
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._apply)

    async def startup(self) -> None:
        """Connect to the replicas and start reporting the load once a second."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._apply()
        self._ticker = self._loop.create_task(self._tick())

    async def shutdown(self) -> None:
        """Answer all waiting requests with 503 and close the connections."""
        with self._lock:
            self._loop = None
        self._is_open = False
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for service in [*self._services.values(), *self._closing]:
            service.abort()
        self._services.clear()
        if self._access_log is not None:
            self._access_log.write(self._access_log.take())
        # Transports need a few iterations of the event loop to close.
        for _ in range(3):
            await asyncio.sleep(0)

    def routes(self) -> list[BaseRoute]:
        """The Starlette routes; mount them at the root."""
        protocol = InferenceProtocol(
            queue_of=self._queue,
            admit=self._admitting,
            submit=self._submit,
            queues=lambda: self._queues,
            is_open=lambda: self._is_open,
            metrics=self._metrics,
        )
        served: dict[str, dict[str, Handler]] = {"/f/{name}": {"POST": self._call, "GET": self._describe}}
        passed: dict[str, Handler] = dict.fromkeys(APPLICATION_METHODS, self._pass_on)
        routes: list[BaseRoute] = [
            Route(path, Endpoint(handlers, self._count, self._send_timeout_s), include_in_schema=False)
            for path, handlers in (served | {_PATHS: passed} | protocol.handlers()).items()
        ]
        talk = Endpoint({"GET": self._pass_on}, self._count, self._send_timeout_s)
        return [*routes, WebSocketRoute(_PATHS, talk)]

    def num_ready(self, name: str) -> int:
        """How many replicas of the named service are connected and can take work."""
        service = self._services.get(name)
        return 0 if service is None else service.num_ready

    def first_answer_s(self, name: str) -> float | None:
        """Seconds from ready to the first answer when the named service last started from zero replicas."""
        service = self._services.get(name)
        return None if service is None else service.present.first_answer_s

    def admission(self, name: str) -> AdmissionStatus | None:
        """What users are told about the requests to the named service that are let in and refused."""
        service = self._services.get(name)
        return None if service is None else service.present.admission_status()

    def openapi_paths(self) -> dict[str, Any]:
        """The OpenAPI `paths` of the protocols and the deployed services."""
        return gateway_paths({name: service.answering().schema for name, service in self._services.items()})

    def _apply(self) -> None:
        if not self._is_open:
            return
        routes: dict[str, list[ServiceRoute]] = {}
        with self._lock:
            for route in self._routes:
                routes.setdefault(route.service.name, []).append(route)
        for name, service in list(self._services.items()):
            known = routes.get(name)
            if known is None or known[0].service.service_id != service.present.service.service_id:
                del self._services[name]
                service.close(NotFound(f"the service {name!r} was removed"))
                self._closing.append(service)
        for name, of_service in routes.items():
            if name in self._services:
                self._services[name].apply(of_service)
            else:
                self._services[name] = ServiceRevisions(of_service, self._metrics, self._post)

    @property
    def _queues(self) -> dict[str, ServiceQueue]:
        """The queue of each service that tells about it."""
        return {name: service.answering() for name, service in self._services.items()}

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for service in self._services.values():
                service.tick(loop.time())
            self._closing = [service for service in self._closing if service.is_busy]
            if self._access_log is not None and (lines := self._access_log.take()):
                await loop.run_in_executor(None, self._access_log.write, lines)
            await asyncio.sleep(_TICK_S)

    def log(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        """Add a line to the access log: of a request to the service `name`, or of one that was refused before."""
        if self._access_log is None:
            return
        queue: ServiceQueue | None = scope.get(ANSWERED_BY)
        self._access_log.note(
            request_id=header_of(scope, REQUEST_ID) or b"",
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=seconds,
            service=name if name in self._services else "",
            revision=0 if queue is None else queue.service.revision,
            caller=scope.get(CALLER, ""),
            traceparent=header_of(scope, _TRACEPARENT),
        )

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        name = scope["path_params"].get("name", "").partition("@")[0]
        self.log(scope, name, status, seconds)
        if name in self._services and (scope["method"] == "POST" or "path" in scope["path_params"]):
            # Only deployed services become labels, because callers can put any name into a path.
            self._metrics.answered(name, status, seconds)

    def _queue(self, scope: Scope) -> ServiceQueue:
        """The queue for a request: of the revision that it names, or else of one that is chosen. Raises NotFound."""
        name = scope["path_params"]["name"].partition("@")[0]
        service = self._services.get(name)
        if service is None:
            validate_name(name, "service")
            known = sorted(self._services)
            listed = ", ".join(known[:_MAX_LISTED_NAMES]) + (", ..." if len(known) > _MAX_LISTED_NAMES else "")
            raise NotFound(f"there is no service {name!r}; " + (f"there is: {listed}" if known else "none is deployed"))
        revision = _revision_of(scope)
        if revision is not None:
            return service.pinned(revision)
        # What only describes the service is no request to one of its revisions.
        is_request = scope["method"] == "POST" or "path" in scope["path_params"]
        return service.chosen(header_of(scope, _SESSION)) if is_request else service.answering()

    def _admitting(self, scope: Scope) -> ServiceQueue:
        """The queue for a request that it would let in now. Raises RequestRefused before the body is read."""
        queue = self._queue(scope)
        queue.check(self._terms(scope))
        return queue

    async def _submit(
        self,
        queue: ServiceQueue,
        scope: Scope,
        receive: Receive,
        prepare: Callable[[ServiceSchema], Call],
        http: HttpHead | None = None,
    ) -> tuple[GatewayReply, Headers]:
        """Return a successful answer and its headers. Raises the error to answer with."""
        service, loop = self._services[queue.service.name], asyncio.get_running_loop()
        began_s, terms = loop.time(), self._terms(scope)
        if queue.service.calls:
            request_id, trace = header_of(scope, REQUEST_ID) or b"", header_of(scope, _TRACEPARENT) or b""
            terms = replace(terms, origin=CallOrigin(terms.priority, request_id, trace[:_MAX_TRACE_BYTES]))
        try:
            while True:
                try:
                    answer = await queue.submit(
                        prepare,
                        replace(terms, timeout_s=began_s + terms.timeout_s - loop.time()),
                        lambda: until_disconnected(receive),
                        accepts_sse=accepts_sse(scope),
                        http=http,
                    )
                    break
                except RevisionGone:
                    if _revision_of(scope) is not None:
                        raise gone_for_good(queue) from None
                    queue = self._queue(scope)
            headers = (_springtide_header(answer, queue.service.share), (_REVISION, b"%d" % queue.service.revision))
            _raise_failure(answer, headers, http)
        except BaseException as error:
            service.answered(queue, loop.time() - began_s, error)
            raise
        service.answered(queue, loop.time() - began_s, None)
        scope[ANSWERED_BY] = queue
        return answer, headers

    async def _call(self, scope: Scope, receive: Receive) -> HttpReply:
        queue = self._admitting(scope)
        body = await read_body(scope, receive, queue.service.max_body_mib)
        value = parse_json(body)

        def prepare(schema: ServiceSchema) -> Call:
            refuse_application(schema, queue.service.name)
            return check_call(schema, body, value)

        try:
            answer, headers = await self._submit(queue, scope, receive, prepare)
        except InvalidRequest as error:
            if error.status != 422 or queue.schema is None:
                raise
            raise HttpError(422, str(error), details={"expected": queue.schema.body_schema()}) from None
        if answer.stream is not None:
            media_type = (EVENT_STREAM if answer.stream.is_sse else JSON_LINES).encode()
            return HttpReply(200, b"", (*headers, *STREAM_HEADERS), media_type, answer.stream)
        return HttpReply(200, b'{"outputs":' + answer.outcome.body + b"}", headers)

    async def _pass_on(self, scope: Scope, receive: Receive) -> HttpReply:
        """Let an application answer a request to one of its paths."""
        queue = self._admitting(scope)
        max_mib, is_socket = queue.service.max_body_mib, scope["type"] == "websocket"
        body = b"" if is_socket else await read_body(scope, receive, max_mib, is_as_sent=True)

        def prepare(schema: ServiceSchema) -> Call:
            if schema.kind != "asgi":
                raise NotFound(f"{queue.service.name!r} has no paths of its own; call POST /f/{queue.service.name}")
            return Call(body=body)

        answer, headers = await self._submit(queue, scope, receive, prepare, http_head(scope))
        stream = answer.stream
        if stream is None or stream.start is None:
            raise HttpError(502, "the application answered without a head", headers)
        passed = (*application_headers(stream.start), *headers)
        return HttpReply(stream.start.status, b"", passed, b"", stream, max_mib << 20)

    def _terms(self, scope: Scope) -> RequestTerms:
        """The deadline and the priority that a request's headers ask for. Raises HttpError if they make no sense."""
        timeout_s, text = self._default_timeout_s, header_of(scope, b"x-springtide-timeout")
        if text is not None:
            try:
                timeout_s = min(parse_duration_s(text.decode("latin-1")[:40], "X-Springtide-Timeout"), _MAX_TIMEOUT_S)
            except InvalidRequest as error:
                raise HttpError(400, str(error)) from None
        if (given := header_of(scope, _PRIORITY)) is None:
            return RequestTerms(timeout_s)
        priority = _PRIORITIES.get(given.strip().lower())
        if priority is None:
            raise HttpError(400, f"X-Springtide-Priority is high, normal or low, not {given.decode('latin-1')[:20]!r}")
        return RequestTerms(timeout_s, priority)

    async def _describe(self, scope: Scope, receive: Receive) -> HttpReply:
        queue = self._queue(scope)
        service, schema = queue.service, queue.schema
        host = (header_of(scope, b"host") or b"localhost").decode("latin-1")
        url = f"{scope.get('scheme', 'http')}://{host}/f/{service.name}"
        description: dict[str, Any] = {
            "name": service.name,
            "revision": service.revision,
            "ready_replicas": queue.num_ready,
            "queued": queue.num_queued,
            "doc": schema.doc if schema else None,
            "batchable": schema.is_batchable if schema else None,
            "stream": schema.is_stream if schema else None,
            "concurrency": schema.concurrency if schema else None,
            "body": schema.body_schema() if schema else None,
            "answer": schema.answer_schema() if schema else None,
            "max_batch_size": service.max_batch_size,
            "max_body_bytes": service.max_body_mib << 20,
            "example": _example(url, schema),
        }
        if schema is None:
            description["note"] = "the schema is known once a first replica has started; the first call starts one"
        return HttpReply(200, msgspec.json.encode(description))


def _raise_failure(answer: GatewayReply, headers: Headers, http: HttpHead | None) -> None:
    """Raise the error that stands for an answer which says that the call failed."""
    if answer.outcome.status == "ok":
        return
    sentence = answer.outcome.body.decode("utf-8", "replace")
    if answer.outcome.status == "invalid":
        raise InvalidRequest(f"the call does not fit the parameters of predict: {sentence}")
    raise HttpError(500, f"{'predict' if http is None else 'the application'} failed: {sentence}", headers)


def _revision_of(scope: Scope) -> int | None:
    """The revision that a request names, in its path or in a header; None if it leaves it open."""
    params = scope["path_params"]
    header = header_of(scope, _REVISION)
    named = params.get("version") or params["name"].partition("@")[2] or (header or b"").decode("latin-1")
    if not named and "@" not in params["name"] and header is None:
        return None
    if not named.isdigit() or not named.isascii() or len(named) > _MAX_DIGITS:
        raise NotFound(f"a revision is a number, not {named!r:.20}")
    return int(named)


def _springtide_header(answer: GatewayReply, share: Share | None) -> tuple[bytes, bytes]:
    share_text = "" if share is None else f" share={share.request:g}..{share.limit:g}"
    return (
        b"x-springtide",
        f"queue={_ms(answer.queue_s)} cold_start={_ms(answer.cold_start_s)} batch={answer.num_batch_items} "
        f"replica={answer.replica_id}{share_text}".encode(),
    )


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f}ms" if milliseconds >= 10 or milliseconds == 0 else f"{milliseconds:.1f}ms"


def _example(url: str, schema: ServiceSchema | None) -> str:
    """Return a curl command with a valid example value for each required parameter."""
    if schema is not None and schema.kind == "asgi":
        return f"curl -s {url}/ -H 'Authorization: Bearer TOKEN'"
    arguments: dict[str, Any] = {}
    for parameter in schema.parameters if schema else ():
        if parameter.is_required:
            arguments[parameter.name] = _sample(parameter.json_schema, 0)
    body = msgspec.json.encode(arguments).decode().replace("'", "'\\''")
    return f"curl -s {url} -H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json' -d '{body}'"


def _sample(schema: Any, depth: int) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if "enum" in (schema or {}):
        return schema["enum"][0]
    if kind == "array":
        return [_sample(schema.get("items", {}), depth + 1)]
    if kind == "object" and depth < 4:
        properties = schema.get("properties", {})
        return {name: _sample(properties[name], depth + 1) for name in schema.get("required", [])}
    return {"string": "hello", "integer": 1, "number": 0.5, "boolean": True, "object": {}}.get(kind or "", 1)
