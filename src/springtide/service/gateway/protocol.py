"""The paths of the Open Inference Protocol v2, as its HTTP clients use them: health, models, index and inference.

Errors are {"error": sentence}. Whether server and models are ready is told without a token, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope

import springtide
from springtide.core.errors import InvalidRequest
from springtide.service.gateway.applications import refuse_application
from springtide.service.gateway.endpoint import (
    ANSWERED_BY,
    STREAM_HEADERS,
    Handler,
    Headers,
    HttpError,
    HttpReply,
    accepts_sse,
    compressed_if_asked,
    header_of,
    read_body,
)
from springtide.service.gateway.metrics import GatewayMetrics, totals_of
from springtide.service.gateway.queue import ServiceQueue
from springtide.service.gateway.requests import GatewayReply
from springtide.service.submission.problems import TooLarge
from springtide.serving.events import EVENT_STREAM
from springtide.serving.frames import MAX_FRAME_BYTES
from springtide.serving.inference_protocol import (
    RETURNS_HEADER,
    arguments_of,
    described_returns,
    infer_answer,
    infer_body,
    model_config,
    model_metadata,
    parse_infer,
)
from springtide.serving.schema import Call, MalformedRequest, ServiceSchema, check_call, parse_json

# The key in a request's scope that says that it came without the token.
WITHOUT_TOKEN = "springtide:without_token"
_MODEL_READY = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_STATES = {"ready": "READY", "starting": "LOADING", "scaled_to_zero": "READY", "failed": "UNAVAILABLE"}
_ASLEEP = "it has no replica now; a request starts one"
_HEAD_LENGTH = b"inference-header-content-length"
_TENSORS_TYPE = b"application/octet-stream"
# The frame to the replica has a little more than the call.
_MAX_CALL_BYTES = MAX_FRAME_BYTES - 1024
_Prepare = Callable[[ServiceSchema], Call]


def is_readiness(path: str) -> bool:
    """Whether the path tells of health alone, which clients and probes ask for without a token."""
    return path in ("/v2/health/live", "/v2/health/ready") or _MODEL_READY.fullmatch(path) is not None


class InferenceProtocol:
    """The handlers of /v2.

    `queue_of` returns the queue of the service in a path, `admit` the same if a request would be let in now, `submit`
    calls a service, `queues` returns all by name.
    """

    def __init__(
        self,
        *,
        queue_of: Callable[[Scope], ServiceQueue],
        admit: Callable[[Scope], ServiceQueue],
        submit: Callable[[ServiceQueue, Scope, Receive, _Prepare], Awaitable[tuple[GatewayReply, Headers]]],
        queues: Callable[[], Mapping[str, ServiceQueue]],
        is_open: Callable[[], bool],
        metrics: GatewayMetrics,
    ) -> None:
        self._queue_of = queue_of
        self._admit = admit
        self._submit = submit
        self._queues = queues
        self._is_open = is_open
        self._metrics = metrics

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """The handlers by path and method; fixed paths come before those with a name."""
        served: dict[str, dict[str, Handler]] = {
            "/v2": {"GET": self._server_metadata},
            "/v2/health/live": {"GET": self._live},
            "/v2/health/ready": {"GET": self._live},
            "/v2/models/stats": {"GET": self._all_statistics},
            "/v2/repository/index": {"POST": self._index},
            "/v2/repository/models/{model}/load": {"POST": self._load},
            "/v2/repository/models/{model}/unload": {"POST": self._load},
        }
        for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            served[prefix] = {"GET": self._model_metadata}
            served[f"{prefix}/ready"] = {"GET": self._model_ready}
            served[f"{prefix}/config"] = {"GET": self._model_config}
            served[f"{prefix}/stats"] = {"GET": self._model_statistics}
            served[f"{prefix}/infer"] = {"POST": self._infer}
        return served

    async def _server_metadata(self, scope: Scope, receive: Receive) -> HttpReply:
        version = getattr(springtide, "__version__", "0")
        return _json({"name": "springtide", "version": version, "extensions": EXTENSIONS})

    async def _live(self, scope: Scope, receive: Receive) -> HttpReply:
        key = scope["path"].rsplit("/", 1)[-1]
        return _json({key: self._is_open()}, 200 if self._is_open() else 503)

    async def _index(self, scope: Scope, receive: Receive) -> HttpReply:
        body = await read_body(scope, receive, 1)
        # Clients send no body, or an object with `ready`.
        asked = parse_json(body) if body.strip() else {}
        if not isinstance(asked, dict) or not isinstance(asked.get("ready", False), bool):
            raise MalformedRequest('send no body, or {"ready": true} for the services that are ready')
        index = [_indexed(queue) for _, queue in sorted(self._queues().items())]
        return _json([entry for entry in index if entry["state"] == "READY" or not asked.get("ready")])

    async def _load(self, scope: Scope, receive: Receive) -> HttpReply:
        raise HttpError(
            409, "models are not loaded or unloaded here; use `springtide deploy` and `springtide cancel` instead"
        )

    async def _model_metadata(self, scope: Scope, receive: Receive) -> HttpReply:
        queue = self._queue_of(scope)
        return _json(model_metadata(queue.service.name, str(queue.service.revision), queue.schema))

    async def _model_config(self, scope: Scope, receive: Receive) -> HttpReply:
        queue = self._queue_of(scope)
        service = queue.service
        return _json(model_config(service.name, service.revision, service.max_batch_size, queue.schema))

    async def _model_ready(self, scope: Scope, receive: Receive) -> HttpReply:
        """Answer 200 if a replica is ready, or if the service is scaled to zero and a request would start one."""
        try:
            queue = self._queue_of(scope)
        except InvalidRequest:
            if not scope.get(WITHOUT_TOKEN):
                raise
            # Which services there are is not told.
            return _json({"ready": False}, 503)
        state = queue.readiness
        is_ready = state in ("ready", "scaled_to_zero")
        told = {} if scope.get(WITHOUT_TOKEN) else {"name": queue.service.name, "state": state}
        headers = ((b"retry-after", b"1"),) if state == "starting" else ()
        return _json({"ready": is_ready, **told}, 200 if is_ready else 503, headers)

    async def _model_statistics(self, scope: Scope, receive: Receive) -> HttpReply:
        return _json({"model_stats": [self._statistics(self._queue_of(scope))]})

    async def _all_statistics(self, scope: Scope, receive: Receive) -> HttpReply:
        return _json({"model_stats": [self._statistics(queue) for _, queue in sorted(self._queues().items())]})

    def _statistics(self, queue: ServiceQueue) -> dict[str, Any]:
        """The requests to a service of this name since the platform started; times in nanoseconds."""
        name = queue.service.name
        succeeded, failed = self._metrics.answers(name)
        batches = totals_of(self._metrics.batch.labels(name))
        times = {
            "success": succeeded,
            "fail": failed,
            "queue": totals_of(self._metrics.queue.labels(name)),
            "compute_infer": totals_of(self._metrics.predict.labels(name)),
        }
        return {
            "name": name,
            "version": str(queue.service.revision),
            "inference_count": int(batches.total),
            "execution_count": batches.num,
            "inference_stats": {
                key: {"count": found.num, "ns": round(found.total * 1e9)} for key, found in times.items()
            },
            "batch_stats": [],
        }

    async def _infer(self, scope: Scope, receive: Receive) -> HttpReply:
        queue = self._admit(scope)
        body = await read_body(scope, receive, queue.service.max_body_mib)
        head_length = header_of(scope, _HEAD_LENGTH)
        request = parse_infer(body, None if head_length is None else head_length.decode("latin-1"))

        def prepare(schema: ServiceSchema) -> Call:
            refuse_application(schema, queue.service.name)
            if schema.is_stream and not accepts_sse(scope):
                raise InvalidRequest(
                    f"{queue.service.name!r} answers with a stream: send Accept: text/event-stream, call it by gRPC's "
                    f"ModelStreamInfer, or call /f/{queue.service.name}"
                )
            arguments = arguments_of(request, schema)
            try:
                encoded = msgspec.json.encode(arguments)
            except (ValueError, OverflowError, RecursionError) as error:
                raise MalformedRequest(f"the inputs cannot be written as JSON: {error}") from None
            if len(encoded) > _MAX_CALL_BYTES:
                raise TooLarge(
                    f"the inputs have {len(encoded)} bytes as JSON, as which lists reach predict, and "
                    f"{_MAX_CALL_BYTES} are allowed; send fewer, or hint the parameter as numpy.ndarray"
                )
            return check_call(schema, encoded, arguments)

        answer, headers = await self._submit(queue, scope, receive, prepare)
        queue = scope[ANSWERED_BY]
        assert queue.schema is not None, "a replica sends its schema before it answers"
        service, schema = queue.service, queue.schema
        if answer.stream is not None:
            told_returns = (RETURNS_HEADER.encode(), described_returns(schema))
            return HttpReply(200, b"", (*headers, told_returns, *STREAM_HEADERS), EVENT_STREAM.encode(), answer.stream)
        outputs = msgspec.json.decode(answer.outcome.body)
        told = infer_answer(request, service.name, str(service.revision), schema, outputs)
        head, tensors = infer_body(request, told, schema)
        reply = HttpReply(200, head, headers)
        if tensors is not None:
            headers = (*headers, (_HEAD_LENGTH, str(len(head)).encode()))
            reply = HttpReply(200, head + tensors, headers, _TENSORS_TYPE)
        return compressed_if_asked(scope, reply)


def _indexed(queue: ServiceQueue) -> dict[str, str]:
    state = queue.readiness
    reason = _ASLEEP if state == "scaled_to_zero" else "" if state == "ready" else queue.trouble
    return {
        "name": queue.service.name,
        "version": str(queue.service.revision),
        "state": _STATES[state],
        "reason": reason,
    }


def _json(value: object, status: int = 200, headers: Headers = ()) -> HttpReply:
    return HttpReply(status, msgspec.json.encode(value), headers)
