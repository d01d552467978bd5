"""Answers the calls of the Open Inference Protocol, and of gRPC's health checks, with what the gateway says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.service.grpc.gateway_client import GatewayClient, answer_of, events_of
from springtide.service.grpc.messages import METHODS, SERVICE, ModelStreamInferResponse, request_class
from springtide.service.grpc.translation import (
    ASKING,
    CallFailed,
    HttpAnswer,
    HttpCall,
    asked_answer,
    failure_of,
    infer_call,
    infer_response,
    model_target,
    response_of,
    told_of,
    wanted_of,
)
from springtide.serving.events import EVENT_STREAM
from springtide.serving.inference_protocol import RETURNS_HEADER, InferRequest, infer_answer, infer_body
from springtide.serving.schema import Parameter, ServiceSchema

HEALTH = "grpc.health.v1.Health"
_WATCH_S = 1.0
# What of a call's metadata is a header of the gateway's.
_PASSED_ON = frozenset(
    {
        "authorization",
        "traceparent",
        "x-request-id",
        "x-springtide-priority",
        "x-springtide-revision",
        "x-springtide-session",
        "x-springtide-timeout",
    }
)
_ACCEPT = (b"accept", EVENT_STREAM.encode())
_FINAL = "triton_final_response"
_WANTS_EMPTY = "triton_enable_empty_final_response"
_NOT_SERVED = (
    "is not answered here: services are deployed and cancelled with `springtide deploy` and `springtide cancel`, "
    "tensors travel in messages, and there are no settings for traces or logs"
)
Context = Any


class InferenceHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handlers of the inference service and of health; other calls of the former are UNIMPLEMENTED, and told so."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._handlers: dict[str, Any] = {
            f"/{SERVICE}/{name}": self._unary(name, self._asking(name)) for name in ASKING
        }
        self._handlers[f"/{SERVICE}/ModelInfer"] = self._unary("ModelInfer", self._infer)
        self._handlers[f"/{SERVICE}/ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream_infer, request_class("ModelStreamInfer").FromString, _serialized
        )
        check = health_pb2.HealthCheckRequest.FromString
        self._handlers[f"/{HEALTH}/Check"] = grpc.unary_unary_rpc_method_handler(
            _told_to_client(self._check), check, _serialized
        )
        self._handlers[f"/{HEALTH}/Watch"] = grpc.unary_stream_rpc_method_handler(self._watch, check, _serialized)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call by its path; None for one of another service."""
        path = handler_call_details.method
        handler = self._handlers.get(path)
        if handler is None and path.startswith(f"/{SERVICE}/"):
            return grpc.unary_unary_rpc_method_handler(_not_served(path.rpartition("/")[2]))
        return handler

    def _unary(self, name: str, answer: Callable[[Any, Context], Any]) -> Any:
        request = METHODS[name] and request_class(name)
        return grpc.unary_unary_rpc_method_handler(_told_to_client(answer), request.FromString, _serialized)

    def _asking(self, name: str) -> Callable[[Any, Context], Any]:
        async def answered(request: Any, context: Context) -> Any:
            return asked_answer(name, await self._gateway.ask(ASKING[name](request), _headers(context)))

        return answered

    async def _infer(self, request: Any, context: Context) -> Any:
        answer = await self._gateway.ask(infer_call(request), _headers(context))
        response = infer_response(answer)
        context.set_trailing_metadata(told_of(answer))
        return response

    async def _stream_infer(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """Answer one request after the other. An error ends its request, and the stream goes on with the next."""
        async for request in requests:
            try:
                async for response in self._answers(request, context):
                    yield ModelStreamInferResponse(infer_response=response)
            except (CallFailed, InvalidRequest) as error:
                failed = ModelStreamInferResponse(error_message=str(error))
                failed.infer_response.id = request.id
                yield failed

    async def _answers(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """The answers to one request of a stream: one for each item of a service that yields, else one."""
        async with self._gateway.opened(infer_call(request), [*_headers(context), _ACCEPT]) as (start, exchange):
            head = answer_of(start, b"")
            if start.status != 200 or RETURNS_HEADER not in head.headers:
                parts = []
                while part := await exchange.next():
                    parts.append(part)
                response = infer_response(HttpAnswer(head.status, head.headers, b"".join(parts)))
                response.parameters[_FINAL].bool_param = True
                yield response
                return
            returns = decode_json(head.headers[RETURNS_HEADER], Parameter)
            schema = ServiceSchema(parameters=(), returns=returns, is_batchable=False)
            wanted, version = wanted_of(request), head.headers.get("x-springtide-revision", "")
            async for kind, data in events_of(start, exchange):
                if kind == "error":
                    raise failure_of(HttpAnswer(500, {}, data.encode()))
                response = _item_response(wanted, request.model_name, version, schema, data)
                response.parameters[_FINAL].bool_param = False
                yield response
        if request.parameters[_WANTS_EMPTY].bool_param if _WANTS_EMPTY in request.parameters else False:
            last = response_of(_empty_head(request, version), b"")
            last.parameters[_FINAL].bool_param = True
            yield last

    async def _check(self, request: Any, context: Context) -> Any:
        return health_pb2.HealthCheckResponse(status=await self._health(request.service, context))

    async def _watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        told = None
        while True:
            try:
                status = await self._health(request.service, context)
            except CallFailed as error:
                is_unknown = error.code is grpc.StatusCode.NOT_FOUND
                status = _STATUS.SERVICE_UNKNOWN if is_unknown else _STATUS.NOT_SERVING
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_S)

    async def _health(self, name: str, context: Context) -> Any:
        """Whether the platform serves, or the model of this name does. Raises CallFailed for an unknown one."""
        is_all = name in ("", SERVICE, HEALTH)
        target = "/v2/health/ready" if is_all else model_target(name, "", "/ready")
        answer = await self._gateway.ask(HttpCall("GET", target), _headers(context))
        if answer.status == 200:
            return _STATUS.SERVING
        if answer.status == 503:
            return _STATUS.NOT_SERVING
        raise failure_of(answer)


_STATUS: Any = health_pb2.HealthCheckResponse


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _item_response(wanted: InferRequest, model: str, version: str, schema: ServiceSchema, data: str) -> Any:
    try:
        item = msgspec.json.decode(data)
    except msgspec.DecodeError:
        # An event whose data is a text of its own.
        item = data
    head, raws = infer_body(wanted, infer_answer(wanted, model, version, schema, item), schema)
    return response_of(head, raws or b"")


def _empty_head(request: Any, version: str) -> bytes:
    told = {"model_name": request.model_name, "model_version": version, "outputs": [], "id": request.id}
    return msgspec.json.encode(told)


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    """The gateway's headers for a call: what its metadata says, and its deadline if that is the shorter time."""
    headers = [
        (name.encode(), value.encode("latin-1", "replace"))
        for name, value in context.invocation_metadata() or ()
        if name in _PASSED_ON and isinstance(value, str)
    ]
    left_s = context.time_remaining()
    if left_s is not None and all(name != b"x-springtide-timeout" for name, _ in headers):
        headers.append((b"x-springtide-timeout", b"%.3f" % max(left_s, 0.001)))
    return headers


def _told_to_client(answer: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """The same handler, whose errors end the call with a code and a sentence."""

    async def answered(request: Any, context: Context) -> Any:
        try:
            return await answer(request, context)
        except CallFailed as error:
            await context.abort(error.code, str(error), error.metadata)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answered


def _not_served(name: str) -> Callable[[Any, Context], Any]:
    async def refused(request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name:.80} {_NOT_SERVED}")

    return refused
