"""Translates between the gRPC and the HTTP form of the Open Inference Protocol v2: calls, tensors, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec
from google.protobuf import json_format
from grpc import StatusCode

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.service.grpc.messages import ModelInferResponse, response_class
from springtide.serving.inference_protocol import InferRequest, RequestedOutput
from springtide.serving.tensors import DATATYPES, raw_of

# The field of `InferTensorContents` that holds a datatype. FP16 and BF16 have none: they are sent raw.
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool_contents",
        **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
        "INT64": "int64_contents",
        **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
        "UINT64": "uint64_contents",
        "FP32": "fp32_contents",
        "FP64": "fp64_contents",
        "BYTES": "bytes_contents",
    }
)
_CODES: Mapping[int, StatusCode] = MappingProxyType(
    {
        400: StatusCode.INVALID_ARGUMENT,
        401: StatusCode.UNAUTHENTICATED,
        403: StatusCode.PERMISSION_DENIED,
        404: StatusCode.NOT_FOUND,
        405: StatusCode.UNIMPLEMENTED,
        408: StatusCode.DEADLINE_EXCEEDED,
        409: StatusCode.FAILED_PRECONDITION,
        # As gRPC itself says of a message over its limit.
        413: StatusCode.RESOURCE_EXHAUSTED,
        422: StatusCode.INVALID_ARGUMENT,
        429: StatusCode.RESOURCE_EXHAUSTED,
        500: StatusCode.INTERNAL,
        502: StatusCode.UNAVAILABLE,
        503: StatusCode.UNAVAILABLE,
        504: StatusCode.DEADLINE_EXCEEDED,
    }
)
_TOLD = ("x-request-id", "x-springtide", "x-springtide-revision", "retry-after")
_MAX_SENTENCE = 2000
_NO_OUTPUTS = MappingProxyType({"binary_data_output": True})


class CallFailed(SpringtideError):
    """A call ends with this code and sentence; `metadata` goes with it to the client."""

    def __init__(self, code: StatusCode, sentence: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(sentence)
        self.code = code
        self.metadata = metadata


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request to the gateway; `head_length` is that of the JSON in front of raw tensors."""

    method: str
    target: str
    body: bytes = b""
    head_length: int | None = None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of the gateway. The names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Output(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}


class _Answer(msgspec.Struct, frozen=True):
    model_name: str
    model_version: str
    outputs: list[_Output]
    id: str = ""


_encode = msgspec.json.Encoder().encode


def model_target(name: str, version: str, rest: str = "") -> str:
    """The path of a model; with a version, that of its revision. Raises InvalidRequest without a name."""
    if not name:
        raise InvalidRequest("the call names no model")
    revision = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(name, safe='')}{revision}{rest}"


def _statistics_call(request: Any) -> HttpCall:
    target = model_target(request.name, request.version, "/stats") if request.name else "/v2/models/stats"
    return HttpCall("GET", target)


# How each call that only asks is written for the gateway.
ASKING: Mapping[str, Callable[[Any], HttpCall]] = MappingProxyType(
    {
        "ServerLive": lambda request: HttpCall("GET", "/v2/health/live"),
        "ServerReady": lambda request: HttpCall("GET", "/v2/health/ready"),
        "ModelReady": lambda request: HttpCall("GET", model_target(request.name, request.version, "/ready")),
        "ServerMetadata": lambda request: HttpCall("GET", "/v2"),
        "ModelMetadata": lambda request: HttpCall("GET", model_target(request.name, request.version)),
        "ModelConfig": lambda request: HttpCall("GET", model_target(request.name, request.version, "/config")),
        "ModelStatistics": _statistics_call,
        "RepositoryIndex": lambda request: HttpCall("POST", "/v2/repository/index", _encode({"ready": request.ready})),
    }
)
_ENVELOPES: Mapping[str, str] = MappingProxyType({"ModelConfig": "config", "RepositoryIndex": "models"})
# What these say with a status of 503 is an answer: not ready.
_READINESS = frozenset({"ServerLive", "ServerReady", "ModelReady"})


def asked_answer(call: str, answer: HttpAnswer) -> Any:
    """The message that answers one of the `ASKING` calls. Raises CallFailed."""
    if answer.status != 200 and not (call in _READINESS and answer.status == 503 and b'"error"' not in answer.body):
        raise failure_of(answer)
    document = msgspec.json.decode(answer.body)
    if envelope := _ENVELOPES.get(call):
        document = {envelope: document}
    return json_format.ParseDict(document, response_class(call)(), ignore_unknown_fields=True)


def infer_call(request: Any) -> HttpCall:
    """The call of /infer with a head of JSON and raw tensors. Raises InvalidRequest."""
    raws = _raw_inputs(request)
    inputs = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(raw)},
        }
        for tensor, raw in zip(request.inputs, raws, strict=True)
    ]
    head: dict[str, Any] = {
        "inputs": inputs,
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [
            {"name": output.name, "parameters": {**_parameters(output.parameters), "binary_data": True}}
            for output in request.outputs
        ]
    written = _encode(head)
    target = model_target(request.model_name, request.model_version, "/infer")
    return HttpCall("POST", target, b"".join((written, *raws)), len(written))


def _raw_inputs(request: Any) -> list[bytes]:
    """The raw form of each input, from `raw_input_contents` or from the typed contents of each."""
    raws = list(request.raw_input_contents)
    if not raws:
        return [_raw_contents(tensor) for tensor in request.inputs]
    if len(raws) != len(request.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raws)} tensors for {len(request.inputs)} inputs; send one for each"
        )
    for tensor in request.inputs:
        if tensor.HasField("contents"):
            raise InvalidRequest(f"the input {tensor.name!r:.80} has contents beside raw_input_contents; send one")
    return raws


def _raw_contents(tensor: Any) -> bytes:
    if tensor.datatype not in DATATYPES:
        raise InvalidRequest(f"the datatype {tensor.datatype!r:.40} is not known; use one of {sorted(DATATYPES)}")
    wanted = _FIELDS.get(tensor.datatype)
    if wanted is None:
        raise InvalidRequest(f"contents cannot hold {tensor.datatype}; send {tensor.name!r:.80} in raw_input_contents")
    for field, _ in tensor.contents.ListFields():
        if field.name != wanted:
            raise InvalidRequest(f"the input {tensor.name!r:.80} is {tensor.datatype}: use {wanted}, not {field.name}")
    try:
        return raw_of(tensor.datatype, list(getattr(tensor.contents, wanted)))
    except OverflowError:
        raise InvalidRequest(f"the input {tensor.name!r:.80} holds a value that {tensor.datatype} cannot") from None


def _parameters(given: Any) -> dict[str, Any]:
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in given.items()}
    return {name: getattr(given[name], choice) for name, choice in chosen.items() if choice}


def infer_response(answer: HttpAnswer) -> Any:
    """The answer to an inference. Raises CallFailed."""
    if answer.status != 200:
        raise failure_of(answer)
    length = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    return response_of(answer.body[:length], memoryview(answer.body)[length:])


def response_of(head: bytes, raws: bytes | memoryview) -> Any:
    """The message for an answer in its HTTP form: a head of JSON, then the raw outputs."""
    told = decode_json(head, _Answer)
    response = ModelInferResponse(model_name=told.model_name, model_version=told.model_version, id=told.id)
    at = 0
    for output in told.outputs:
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        end = at + int(output.parameters["binary_data_size"])
        response.raw_output_contents.append(bytes(raws[at:end]))
        at = end
    return response


def wanted_of(request: Any) -> InferRequest:
    """What an inference asks of its answer, as the HTTP form has it."""
    outputs = [RequestedOutput(name=output.name, parameters={"binary_data": True}) for output in request.outputs]
    return InferRequest([], (), outputs, _NO_OUTPUTS, request.id or None)


def failure_of(answer: HttpAnswer) -> CallFailed:
    """The error that stands for an answer which is none of success. A refusal says when to come again."""
    code = _CODES.get(answer.status, StatusCode.UNKNOWN)
    metadata = told_of(answer)
    if (after := answer.headers.get("retry-after", "")).isdecimal():
        # Clients of gRPC that try again on their own wait for so long.
        metadata = (*metadata, ("grpc-retry-pushback-ms", str(int(after) * 1000)))
    return CallFailed(code, _sentence(answer), metadata)


def told_of(answer: HttpAnswer) -> tuple[tuple[str, str], ...]:
    """The headers of an answer that go on to the client."""
    return tuple((name, answer.headers[name]) for name in _TOLD if name in answer.headers)


def _sentence(answer: HttpAnswer) -> str:
    try:
        error = msgspec.json.decode(answer.body)["error"]
        sentence = error if isinstance(error, str) else error["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        sentence = f"the gateway answered with status {answer.status}"
    return str(sentence)[:_MAX_SENTENCE]
