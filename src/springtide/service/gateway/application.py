"""The inference gateway: `POST /f/{name}` and the Open Inference Protocol v2 on bare Starlette routes.

`POST /f/{name}` takes a JSON object {"parameter": value, ...}, or a bare list for the only parameter, and answers
{"outputs": what predict returned}. If a replica dies before it has answered, the request is sent to another one once:
predict is assumed to be idempotent. An error is {"error": {"code", "message"}}, on v2 paths {"error": sentence}. The
header `X-Springtide` of an answer holds the time in the queue, the cold start, the batch size and the replica's share.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import springtide
from springtide.core.errors import InvalidRequest, NotFound, SpringtideError
from springtide.core.events import Event
from springtide.core.quantities import parse_duration_s, validate_name
from springtide.core.shares import Share
from springtide.service.gateway.described import gateway_paths
from springtide.service.gateway.metrics import GatewayMetrics
from springtide.service.gateway.queue import ServiceQueue
from springtide.service.gateway.requests import ClientGone, GatewayReply, RequestRefused
from springtide.service.submission.problems import is_inference_protocol
from springtide.serving.inference_protocol import arguments_of, infer_answer, model_metadata, parse_infer
from springtide.serving.router import ReplicaRoute, ServiceRoute
from springtide.serving.schema import Call, MalformedRequest, ServiceSchema, check_call, parse_json

__all__ = ["Gateway", "ReplicaRoute", "ServiceRoute"]

_LOG = logging.getLogger("springtide.gateway")
MAX_BODY_BYTES = 1 << 20
_DEFAULT_TIMEOUT_S = 30.0
_MAX_TIMEOUT_S = 3600.0
_TICK_S = 1.0
_JSON = (b"content-type", b"application/json")
_MAX_LISTED_NAMES = 20
_Headers = tuple[tuple[bytes, bytes], ...]
_CODES = {
    400: "malformed_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "overloaded",
    500: "internal",
    502: "replica_lost",
    503: "unavailable",
    504: "too_late",
}


class _Reply(msgspec.Struct, frozen=True):
    """An HTTP answer."""

    status: int
    body: bytes
    headers: _Headers = ()


class _HttpError(SpringtideError):
    """An error answer with the given HTTP status; `details` are merged into the error object."""

    def __init__(
        self, status: int, message: str, headers: _Headers = (), details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.details = details or {}


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
    ) -> None:
        self._post = post
        self._metrics = GatewayMetrics(registry if registry is not None else CollectorRegistry())
        self._default_timeout_s = default_timeout_s
        self._lock = threading.Lock()
        self._routes: tuple[ServiceRoute, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, ServiceQueue] = {}
        self._closing: list[ServiceQueue] = []
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
        for queue in [*self._queues.values(), *self._closing]:
            queue.abort()
        self._queues.clear()
        # Transports need a few iterations of the event loop to close.
        for _ in range(3):
            await asyncio.sleep(0)

    def routes(self) -> list[Route]:
        """The Starlette routes; mount them at the root."""
        served: list[tuple[str, dict[str, _Handler]]] = [
            ("/f/{name}", {"POST": self._call, "GET": self._describe}),
            ("/v2", {"GET": self._server_metadata}),
            ("/v2/health/live", {"GET": self._live}),
            ("/v2/health/ready", {"GET": self._live}),
        ]
        for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            served.append((prefix, {"GET": self._model_metadata}))
            served.append((f"{prefix}/ready", {"GET": self._model_ready}))
            served.append((f"{prefix}/infer", {"POST": self._infer}))
        return [Route(path, _Endpoint(handlers, self._count), include_in_schema=False) for path, handlers in served]

    def num_ready(self, name: str) -> int:
        """How many replicas of the named service are connected and can take work."""
        queue = self._queues.get(name)
        return 0 if queue is None else queue.num_ready

    def first_answer_s(self, name: str) -> float | None:
        """Seconds from ready to the first answer when the named service last started from zero replicas."""
        queue = self._queues.get(name)
        return None if queue is None else queue.first_answer_s

    def openapi_paths(self) -> dict[str, Any]:
        """The OpenAPI `paths` of the protocols and the deployed services."""
        return gateway_paths({name: queue.schema for name, queue in self._queues.items()})

    def _apply(self) -> None:
        if not self._is_open:
            return
        with self._lock:
            routes = {route.service.name: route for route in self._routes}
        for name, queue in list(self._queues.items()):
            route = routes.get(name)
            if route is None or route.service.service_id != queue.service.service_id:
                del self._queues[name]
                queue.close(NotFound(f"the service {name!r} was removed"))
                self._closing.append(queue)
        for name, route in routes.items():
            if name in self._queues:
                self._queues[name].apply(route)
            else:
                self._queues[name] = ServiceQueue(route, self._metrics, self._post)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for queue in self._queues.values():
                queue.tick(loop.time())
            self._closing = [queue for queue in self._closing if queue.is_busy]
            await asyncio.sleep(_TICK_S)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        name = scope["path_params"].get("name")
        if name in self._queues and scope["method"] == "POST":
            # Only deployed services become labels, because callers can put any name into a path.
            self._metrics.answered(name, status, seconds)

    def _queue(self, scope: Scope) -> ServiceQueue:
        name = scope["path_params"]["name"]
        queue = self._queues.get(name)
        if queue is None:
            validate_name(name, "service")
            known = sorted(self._queues)
            listed = ", ".join(known[:_MAX_LISTED_NAMES]) + (", ..." if len(known) > _MAX_LISTED_NAMES else "")
            raise NotFound(f"there is no service {name!r}; " + (f"there is: {listed}" if known else "none is deployed"))
        version = scope["path_params"].get("version")
        if version is not None and version != str(queue.service.revision):
            raise NotFound(f"{name!r} is served as version {queue.service.revision}, not {version!r:.20}")
        return queue

    async def _submit(
        self, queue: ServiceQueue, scope: Scope, receive: Receive, prepare: Callable[[ServiceSchema], Call]
    ) -> tuple[GatewayReply, _Headers]:
        """Return a successful answer and its headers. Raises the error to answer with."""
        answer = await queue.submit(prepare, self._timeout_s(scope), lambda: _until_disconnected(receive))
        headers = (_springtide_header(answer, queue.service.share),)
        if answer.outcome.status != "ok":
            sentence = answer.outcome.body.decode("utf-8", "replace")
            if answer.outcome.status == "invalid":
                raise InvalidRequest(f"the call does not fit the parameters of predict: {sentence}")
            raise _HttpError(500, f"predict failed: {sentence}", headers)
        return answer, headers

    async def _call(self, scope: Scope, receive: Receive) -> _Reply:
        queue = self._queue(scope)
        body = await _read_body(scope, receive)
        value = parse_json(body)
        try:
            answer, headers = await self._submit(queue, scope, receive, lambda schema: check_call(schema, body, value))
        except InvalidRequest as error:
            if error.status != 422 or queue.schema is None:
                raise
            raise _HttpError(422, str(error), details={"expected": queue.schema.body_schema()}) from None
        return _Reply(200, b'{"outputs":' + answer.outcome.body + b"}", headers)

    async def _infer(self, scope: Scope, receive: Receive) -> _Reply:
        queue = self._queue(scope)
        request = parse_infer(await _read_body(scope, receive))

        def prepare(schema: ServiceSchema) -> Call:
            arguments = arguments_of(request, schema)
            try:
                body = msgspec.json.encode(arguments)
            except (ValueError, OverflowError, RecursionError) as error:
                raise MalformedRequest(f"the inputs cannot be written as JSON: {error}") from None
            return check_call(schema, body, arguments)

        answer, headers = await self._submit(queue, scope, receive, prepare)
        assert queue.schema is not None, "a replica sends its schema before it answers"
        service = queue.service
        reply = infer_answer(
            request, service.name, str(service.revision), queue.schema, msgspec.json.decode(answer.outcome.body)
        )
        return _Reply(200, msgspec.json.encode(reply), headers)

    def _timeout_s(self, scope: Scope) -> float:
        text = _header(scope, b"x-springtide-timeout")
        if text is None:
            return self._default_timeout_s
        try:
            timeout_s = parse_duration_s(text.decode("latin-1")[:40], "X-Springtide-Timeout")
        except InvalidRequest as error:
            raise _HttpError(400, str(error)) from None
        return min(timeout_s, _MAX_TIMEOUT_S)

    async def _describe(self, scope: Scope, receive: Receive) -> _Reply:
        queue = self._queue(scope)
        service, schema = queue.service, queue.schema
        host = (_header(scope, b"host") or b"localhost").decode("latin-1")
        url = f"{scope.get('scheme', 'http')}://{host}/f/{service.name}"
        description: dict[str, Any] = {
            "name": service.name,
            "revision": service.revision,
            "ready_replicas": queue.num_ready,
            "queued": queue.num_queued,
            "doc": schema.doc if schema else None,
            "batchable": schema.is_batchable if schema else None,
            "body": schema.body_schema() if schema else None,
            "answer": schema.answer_schema() if schema else None,
            "max_batch_size": service.max_batch_size,
            "max_body_bytes": MAX_BODY_BYTES,
            "example": _example(url, schema),
        }
        if schema is None:
            description["note"] = "the schema is known once a first replica has started; the first call starts one"
        return _Reply(200, msgspec.json.encode(description))

    async def _server_metadata(self, scope: Scope, receive: Receive) -> _Reply:
        version = getattr(springtide, "__version__", "0")
        return _Reply(200, msgspec.json.encode({"name": "springtide", "version": version, "extensions": []}))

    async def _live(self, scope: Scope, receive: Receive) -> _Reply:
        key = scope["path"].rsplit("/", 1)[-1]
        return _Reply(200 if self._is_open else 503, msgspec.json.encode({key: self._is_open}))

    async def _model_metadata(self, scope: Scope, receive: Receive) -> _Reply:
        queue = self._queue(scope)
        metadata = model_metadata(queue.service.name, str(queue.service.revision), queue.schema)
        return _Reply(200, msgspec.json.encode(metadata))

    async def _model_ready(self, scope: Scope, receive: Receive) -> _Reply:
        """Answer 200 if a replica is ready, or if the service is scaled to zero and a request would start one."""
        queue = self._queue(scope)
        if queue.num_ready:
            state = "ready"
        elif queue.is_loading or queue.service.min_replicas > 0 or queue.num_queued:
            state = "starting"
        else:
            state = "scaled_to_zero"
        is_ready = state != "starting"
        readiness = {"name": queue.service.name, "ready": is_ready, "state": state}
        headers = () if is_ready else ((b"retry-after", b"1"),)
        return _Reply(200 if is_ready else 503, msgspec.json.encode(readiness), headers)


_Handler = Callable[[Scope, Receive], Awaitable[_Reply]]


class _Endpoint:
    """A raw ASGI application for one path: calls the method's handler, turns errors into answers, counts requests."""

    def __init__(self, handlers: dict[str, _Handler], count: Callable[[Scope, int, float], None]) -> None:
        self.handlers = handlers
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        try:
            reply = await self._answer(scope, receive)
        except ClientGone:
            self._count(scope, 499, time.perf_counter() - started_s)
            return
        self._count(scope, reply.status, time.perf_counter() - started_s)
        headers = [_JSON, (b"content-length", str(len(reply.body)).encode()), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else reply.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Reply:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted([*self.handlers, *(["HEAD"] if "GET" in self.handlers else [])]))
            return _error(scope, 405, f"use {allowed} here", ((b"allow", allowed.encode()),))
        try:
            return await handler(scope, receive)
        except ClientGone:
            raise
        except RequestRefused as error:
            retry_after = None if error.retry_after_s is None else str(math.ceil(error.retry_after_s)).encode()
            headers = () if retry_after is None else ((b"retry-after", retry_after),)
            return _error(scope, error.status, str(error), headers)
        except _HttpError as error:
            return _error(scope, error.status, str(error), error.headers, error.details)
        except InvalidRequest as error:
            return _error(scope, error.status, str(error))
        except Exception:
            _LOG.exception("the gateway failed on %s %s", scope["method"], scope["path"])
            return _error(scope, 500, "the gateway failed; the platform's log has the details")


def _error(
    scope: Scope, status: int, message: str, headers: _Headers = (), details: dict[str, Any] | None = None
) -> _Reply:
    """Return an error in the format of the path: a sentence for v2, else the format of the control API."""
    # The message may quote the caller's text, which may contain lone surrogates.
    sentence = message.encode("utf-8", "replace").decode()
    if is_inference_protocol(scope["path"]):
        return _Reply(status, msgspec.json.encode({"error": sentence}), headers)
    problem = {"code": _CODES.get(status, "http_error"), "message": sentence, **(details or {})}
    return _Reply(status, msgspec.json.encode({"error": problem}), headers)


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the whole body. Raises _HttpError 413 above the limit, 415 for a compressed body."""
    encoding = _header(scope, b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise _HttpError(415, "send the body without Content-Encoding")
    too_large = _HttpError(413, f"the body is over {MAX_BODY_BYTES} bytes; send fewer items per request")
    length = _header(scope, b"content-length")
    if length is not None and length.isdigit() and (len(length) > 12 or int(length) > MAX_BODY_BYTES):
        raise too_large
    chunks: list[bytes] = []
    num_bytes = 0
    is_complete = False
    while not is_complete:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent the body")
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise too_large
        is_complete = not message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
