"""The OpenAPI paths of the gateway: the deployed services, and the Open Inference Protocol v2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from springtide.service.submission.option_models import NAME_PATTERN
from springtide.serving.inference_protocol import tensor_values
from springtide.serving.schema import Parameter, ServiceSchema
from springtide.serving.tensors import MAX_DIMENSIONS, MAX_SIZE

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            "required": ["code", "message"],
        }
    },
    "required": ["error"],
}
_V2_ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
# What a call may be answered with beside what predict returned.
_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "The body is not JSON, or the timeout is not a duration",
        401: "No token, or a wrong one",
        403: "From another host's name or another site's page",
        404: "There is no such service",
        408: "The body stopped, or came too slowly",
        409: "Models are deployed and removed instead",
        413: "The body is too large",
        415: "The body is compressed in another way than gzip or deflate",
        422: "The call does not fit the parameters",
        429: "Too busy; see Retry-After",
        431: "The headers or the address are too large",
        500: "predict failed",
        502: "The replicas were lost before they answered",
        503: "No replica in time; see Retry-After",
        504: "No answer in time",
    }
)
_REFUSALS = (401, 403, 431)
_TAG = "functions"
_V2_TAG = "open inference protocol"
_TEXT = {"type": "string"}
_LIST: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
_NAMES_AND_TYPES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": _TEXT, "datatype": _TEXT, "shape": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "datatype", "shape"],
    },
}
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": NAME_PATTERN, "maxLength": 63},
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "description": "the revision of the service",
    "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
}


def gateway_paths(schemas: Mapping[str, ServiceSchema | None]) -> dict[str, Any]:
    """The paths of all that the gateway serves, with the schemas of the services that are deployed now.

    A service's schema is None until a replica has sent it.
    """
    paths = _protocol_paths()
    for name, schema in sorted(schemas.items()):
        paths[f"/f/{name}"] = _function(name, schema)
        infer = _infer(name, schema)
        paths[f"/v2/models/{name}/infer"] = {"post": infer}
        paths[f"/v2/models/{name}/versions/{{version}}/infer"] = {
            "parameters": [_VERSION],
            "post": infer | {"operationId": f"infer_version_{name}"},
        }
    return paths


def _function(name: str, schema: ServiceSchema | None) -> dict[str, Any]:
    body = schema.body_schema() if schema else {"type": "object"}
    answer = schema.answer_schema() if schema else {"type": "object"}
    return {
        "get": {
            "summary": f"What {name} takes and answers",
            "operationId": f"describe_{name}",
            "tags": [_TAG],
            "responses": _answers("Its parameters and an example", {"type": "object"}, 404, *_REFUSALS),
        },
        "post": {
            "summary": f"Call {name}",
            "description": schema.doc if schema else "The schema is known once a first replica has started.",
            "operationId": f"call_{name}",
            "tags": [_TAG],
            "requestBody": {"required": True, "content": _content(body)},
            "responses": _answers("What predict returned", answer, *_ERRORS),
        },
    }


def _protocol_paths() -> dict[str, Any]:
    """The paths of the protocol that are the same for all services."""
    metadata = _object(
        name=_TEXT,
        versions={"type": "array", "items": _TEXT},
        platform=_TEXT,
        inputs=_NAMES_AND_TYPES,
        outputs=_NAMES_AND_TYPES,
    )
    # Without a token there is `ready` alone.
    states = {"enum": ["ready", "starting", "scaled_to_zero", "failed"]}
    readiness = _object(ready={"type": "boolean"})
    readiness["properties"] |= {"name": _TEXT, "state": states}
    config = _object(name=_TEXT, platform=_TEXT, max_batch_size={"type": "integer"}, input=_LIST, output=_LIST)
    statistics = _object(model_stats=_LIST)
    server = _object(name=_TEXT, version=_TEXT, extensions={"type": "array", "items": _TEXT})
    paths: dict[str, Any] = {"/v2": {"get": _v2("server_metadata", "Name and version of the server", server)}}
    paths["/v2/models/stats"] = {"get": _v2("all_statistics", "The requests to all services", statistics)}
    paths["/v2/repository/index"] = {"post": _index()}
    for verb in ("load", "unload"):
        refused = _v2(f"{verb}_model", "Always refused: services are deployed and removed", {}, 409)
        del refused["responses"]["200"]
        paths[f"/v2/repository/models/{{model}}/{verb}"] = {"parameters": [_NAME | {"name": "model"}], "post": refused}
    for state in ("live", "ready"):
        told = _object(**{state: {"type": "boolean"}})
        described = _v2(f"server_{state}", f"Whether the server is {state}", told)
        described["responses"]["503"] = {"description": "It is not", "content": _content(told)}
        paths[f"/v2/health/{state}"] = {"get": described | {"security": []}}
    prefixes: tuple[tuple[str, list[dict[str, Any]], str], ...] = (
        ("/v2/models/{name}", [_NAME], "model"),
        ("/v2/models/{name}/versions/{version}", [_NAME, _VERSION], "version"),
    )
    for prefix, parameters, word in prefixes:
        described = _v2(f"{word}_metadata", "The inputs and outputs of a service", metadata, 404, 422)
        paths[prefix] = {"parameters": parameters, "get": described}
        described = _v2(f"{word}_ready", "Whether a service can answer", readiness, 404, 422)
        described["responses"]["503"] = {"description": "Its replicas are starting", "content": _content(readiness)}
        paths[f"{prefix}/ready"] = {"parameters": parameters, "get": described | {"security": []}}
        described = _v2(f"{word}_config", "The configuration of a service, as Triton writes it", config, 404, 422)
        paths[f"{prefix}/config"] = {"parameters": parameters, "get": described}
        described = _v2(f"{word}_statistics", "The requests to a service", statistics, 404, 422)
        paths[f"{prefix}/stats"] = {"parameters": parameters, "get": described}
    return paths


def _index() -> dict[str, Any]:
    entry = _object(name=_TEXT, version=_TEXT, state={"enum": ["READY", "LOADING", "UNAVAILABLE"]}, reason=_TEXT)
    described = _v2("index", "The services", {"type": "array", "items": entry}, 400, 408, 413, 415)
    asked = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    return described | {"requestBody": {"required": False, "content": _content(asked)}}


def _infer(name: str, schema: ServiceSchema | None) -> dict[str, Any]:
    answer = _object(model_name=_TEXT, model_version=_TEXT, outputs=_LIST)
    return {
        "summary": f"Call {name} with tensors",
        "description": (
            "With the header Inference-Header-Content-Length the body is so many bytes of JSON, then the bytes of the "
            "inputs that have binary_data_size instead of data. Outputs with binary_data come back in the same form."
        ),
        "operationId": f"infer_{name}",
        "tags": [_V2_TAG],
        "requestBody": {"required": True, "content": _content(_infer_body(schema))},
        "responses": _answers("What predict returned, as tensors", answer, *_ERRORS, error=_V2_ERROR_SCHEMA),
    }


def _infer_body(schema: ServiceSchema | None) -> dict[str, Any]:
    parameters = schema.parameters if schema else ()
    inputs: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
    if parameters:
        inputs["items"] = {"anyOf": [tensor for parameter in parameters for tensor in _tensors(parameter)]}
        inputs["minItems"] = sum(parameter.is_required for parameter in parameters)
        inputs["maxItems"] = len(parameters)
    output: dict[str, Any] = {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]}
    if schema is not None and schema.returns.json_schema.get("type") not in (None, "object"):
        output["properties"] = {"name": {"const": "outputs"}, "parameters": {"type": "object"}}
    return {
        "type": "object",
        "description": "Each parameter of predict is one tensor, with as many values in data as its shape has.",
        "properties": {
            "id": {"type": ["string", "null"]},
            "parameters": {"type": "object"},
            "inputs": inputs,
            "outputs": {"type": "array", "items": output},
        },
        "required": ["inputs"],
    }


def _tensors(parameter: Parameter) -> list[dict[str, Any]]:
    """The tensors that a parameter may be sent as, by the kind of their values."""
    shape = {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": MAX_SIZE},
        "minItems": len(parameter.shape) if parameter.is_list else 0,
        "maxItems": MAX_DIMENSIONS,
    }
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": parameter.name},
                "shape": shape,
                "datatype": {"enum": datatypes},
                "data": {"type": "array", "minItems": 1, "items": {"anyOf": [value, {"type": "array"}]}},
                "parameters": {"type": "object"},
            },
            "required": ["name", "shape", "datatype", "data"],
        }
        for datatypes, value in tensor_values(parameter)
    ]


def _v2(operation_id: str, summary: str, answer: dict[str, Any], *errors: int) -> dict[str, Any]:
    responses = _answers("At this instant", answer, *errors, *_REFUSALS, error=_V2_ERROR_SCHEMA)
    return {"summary": summary, "operationId": operation_id, "tags": [_V2_TAG], "responses": responses}


def _answers(
    told: str, answer: dict[str, Any], *errors: int, error: dict[str, Any] = _ERROR_SCHEMA
) -> dict[str, dict[str, Any]]:
    found = {"200": {"description": told, "content": _content(answer)}}
    return found | {str(status): {"description": _ERRORS[status], "content": _content(error)} for status in errors}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
