"""The OpenAPI description of the REST API, with the structs of core/status merged in, and a page that lists it."""

from __future__ import annotations

import html
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from springtide import __version__
from springtide.core.status.api_keys import ApiKeyStatus, NewApiKey
from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.status.logins import NewLogin, SignedOut
from springtide.core.status.platform import (
    Explanation,
    HistoryEntry,
    JobStatus,
    PlatformStatus,
    ProgressSeries,
    ServiceStatus,
    Timeline,
)
from springtide.core.status.pools import PoolsReport
from springtide.core.status.quote import Quote
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import MAX_VIRTUAL_SHARDS
from springtide.service.submission.option_models import NAME_PATTERN, JobOptionsIn
from springtide.service.submission.schemas import (
    REQUEST_MODELS,
    JobIn,
    JobSourceIn,
    Problem,
    QuoteIn,
    ServiceIn,
    ServiceSourceIn,
)
from springtide.storage.datasets.manifest import DatasetChange, DatasetStatus, ShardEntry
from springtide.storage.workloads.artifacts import Artifact

_TEMPLATE = "#/components/schemas/{name}"
_PROBLEM_SCHEMA = "#/components/schemas/Problem"
_STATUS_TYPES = (
    PlatformStatus,
    JobStatus,
    ServiceStatus,
    Explanation,
    HistoryEntry,
    Timeline,
    ProgressSeries,
    PoolsReport,
    Quote,
    SharingStatus,
    NewLogin,
    SignedOut,
    ApiKeyStatus,
    NewApiKey,
    DatasetChange,
    DatasetStatus,
    Artifact,
    ArtifactStatus,
)
_METHODS = ("get", "post", "put", "patch", "delete")
# A name in a path; the routes check it themselves and say what would do.
NamePath = Annotated[str, Path(json_schema_extra={"pattern": NAME_PATTERN, "maxLength": 63})]
DigestPath = Annotated[str, Path(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]


def reference(model: type) -> dict[str, str]:
    """Return the reference to a schema of the description."""
    return {"$ref": "#/components/schemas/" + model.__name__}


def list_of(model: type) -> dict[str, Any]:
    """Return the schema of a list of such values."""
    return {"type": "array", "items": reference(model)}


def event_of(model: type, name: str) -> dict[str, Any]:
    """Return the schema of a server-sent event whose data is such a value as JSON."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": reference(model)}
    return {
        "type": "object",
        "properties": {
            "event": {"const": name},
            "id": {"type": "string"},
            "retry": {"type": "integer"},
            "data": data,
        },
        "required": ["event", "id", "data"],
    }


def answers(
    schema: dict[str, Any], description: str, *problems: int, status: int = 200, media_type: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`: the answer on success, and the statuses of its errors."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"description": description, "content": {media_type: {"schema": schema}}}
    }
    if 413 in problems:
        problems = (*problems, 408)
    for problem in sorted({401, 403, 431, *problems}):
        content = {"application/json": {"schema": reference(Problem)}}
        described[problem] = {"description": _PROBLEMS[problem], "content": content}
    return described


def takes(model: type[BaseModel], example: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a route's `openapi_extra`: the schema and an example of its body."""
    content: dict[str, Any] = {"schema": reference(model)}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


_PROBLEMS = {
    400: "The body is not JSON, or a header is not what it should be.",
    401: "No token, or a wrong one.",
    403: "From another host's name or another site's page, or an API key does not allow it.",
    404: "No workload of that id or name.",
    408: "The body stopped, or came too slowly.",
    409: "Its state does not allow it.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "A field does not fit; the sentence says what would.",
    431: "The headers or the address are too large.",
    429: "Its owner has too many unfinished jobs and services.",
    503: "The platform did not record it in time.",
}


_READINESS = {
    "type": "object",
    "properties": {"status": {"type": "string"}, "no_decisions": {"type": "string"}, "leader": {"type": "string"}},
    "required": ["status"],
}
READINESS: dict[int | str, dict[str, Any]] = {
    status: {"description": told, "content": {"application/json": {"schema": _READINESS}}}
    for status, told in {200: "They are.", 503: "They are not; `no_decisions` says why."}.items()
}
_PAGE = {"text/html": {"schema": {"type": "string"}}}
# Answered before any route is asked, and without a token.
_LOGIN = {
    "get": {
        "tags": ["pages"],
        "summary": "Sign a browser in with a code of POST /v1/logins, or with the token",
        "operationId": "login",
        "security": [],
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string", "maxLength": 128}} for name in ("code", "token")
        ],
        "responses": {
            "303": {"description": "The dashboard's address, with the cookie of a session."},
            "401": {"description": "The code is wrong, was used or is too old.", "content": _PAGE},
            **{
                str(status): {
                    "description": _PROBLEMS[status],
                    "content": {"application/json": {"schema": {"$ref": _PROBLEM_SCHEMA}}},
                }
                for status in (403, 431)
            },
        },
    }
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of every route; it is built once and cached in the app."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    described: dict[str, Any] = get_openapi(
        title="Springtide",
        version=__version__,
        description="The control API of an elastic serverless ML platform. Times are seconds of the platform's clock.",
        routes=app.routes,
        tags=[
            {"name": "platform", "description": "The platform as a whole"},
            {"name": "jobs", "description": "Training jobs"},
            {"name": "services", "description": "Inference services"},
            {"name": "workloads", "description": "Jobs and services alike"},
            {"name": "functions", "description": "Calls to the deployed services"},
            {"name": "open inference protocol", "description": "The same calls as tensors"},
            {"name": "pages", "description": "For browsers"},
        ],
    )
    components = described.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, status_schemas = msgspec.json.schema_components(_STATUS_TYPES, ref_template=_TEMPLATE)
    schemas.update(status_schemas)
    for model in REQUEST_MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for model_schema in schemas.values():
        for value in model_schema.get("properties", {}).values():
            if "patternProperties" in value:
                # What no pattern fits is refused.
                value["additionalProperties"] = False
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _state_bounds(schemas)
    _replace_validation_answers(described)
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The content of the state directory's token file"}
    }
    described["security"] = [{"token": []}]
    described["paths"]["/login"] = _LOGIN
    app.openapi_schema = described
    return described


def tailored(described: dict[str, Any], *, has_pods: bool, has_functions: bool) -> dict[str, Any]:
    """Return the description for a platform: what only pods or functions have cannot be asked for without them."""
    schemas = dict(described["components"]["schemas"])
    if not has_pods:
        for model in (JobIn, QuoteIn, ServiceIn):
            schemas[model.__name__] = _with_property(schemas[model.__name__], "container", {"type": "null"})
    options = schemas[JobOptionsIn.__name__]
    if not has_functions:
        options = _with_property(options, "on", {"enum": ["cluster", "auto"], "default": "cluster"})
    schemas[JobOptionsIn.__name__] = {**options, "anyOf": _PLACES if has_functions else _PLACES[:1]}
    return {**described, "components": {**described["components"], "schemas": schemas}}


def _with_property(schema: dict[str, Any], name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "properties": {**schema["properties"], name: value}}


# The options of a job where it runs on machines, and where it runs on functions.
_PLACES = [
    {
        "properties": {
            "on": {"enum": ["cluster", "auto"]},
            "batch_schedule": {"maxItems": 0},
            "is_fastest": {"const": False},
            "search": {"type": "null"},
            "stream": {"const": ""},
            "function_workers": {"type": "null"},
        }
    },
    {
        "properties": {
            "on": {"const": "functions"},
            "layer_profile": {"type": "object"},
            "share": {"type": "null"},
            "batch": {"type": "null"},
        },
        "required": ["on", "layer_profile"],
    },
]


def _state_bounds(schemas: dict[str, Any]) -> None:
    """Add what models do not say: which values of one field go with which of another, and the powers of two."""
    schemas[JobIn.__name__]["properties"]["options"]["anyOf"] = [
        {"properties": {"layer_profile": {"type": "null"}}},
        {"properties": {"on": {"enum": ["functions", "auto"]}}, "required": ["on"]},
    ]
    # A script's batch is its own.
    for model in (JobIn, QuoteIn):
        schemas[model.__name__]["anyOf"] = [
            {"properties": {"source": {"properties": {"kind": {"const": "function"}}}}},
            {"properties": {"options": {"properties": {"batch": {"type": "null"}}}}},
        ]
        # The sums of a library's program cannot be exact.
        is_without = {"properties": {"source": {"properties": {"library": {"enum": ["", "springtide"]}}}}}
        is_inexact = {"properties": {"options": {"properties": {"num_virtual_shards": {"type": "null"}}}}}
        schemas[model.__name__]["allOf"] = [{"anyOf": [is_without, is_inexact]}]
    is_named: dict[str, Any] = {"properties": {"object_name": {"minLength": 1}}, "required": ["object_name"]}
    is_script = {"properties": {"kind": {"const": "script"}, "object_name": {"const": ""}}, "required": ["kind"]}
    schemas[ServiceSourceIn.__name__]["allOf"] = [is_named]
    schemas[JobSourceIn.__name__]["anyOf"] = [
        is_script,
        {**is_named, "properties": {**is_named["properties"], "kind": {"const": "function"}, "library": {"const": ""}}},
    ]
    shards = schemas[JobOptionsIn.__name__]["properties"]["num_virtual_shards"]["anyOf"][0]
    shards["enum"] = [1 << power for power in range(MAX_VIRTUAL_SHARDS.bit_length())]
    schemas[ShardEntry.__name__]["prefixItems"][1]["minimum"] = 1
    schemas[DatasetChange.__name__]["anyOf"] = [
        {"properties": {"verb": {"const": "close"}}},
        {"properties": {"arrays": {"minItems": 1}, "shards": {"minItems": 1}}, "required": ["arrays", "shards"]},
    ]


def _replace_validation_answers(described: dict[str, Any]) -> None:
    """Replace FastAPI's schema of a 422: every error of this API is a Problem."""
    for operations in described["paths"].values():
        for operation in operations.values():
            problem = operation.get("responses", {}).get("422")
            if problem is not None:
                problem["content"] = {"application/json": {"schema": reference(Problem)}}


def render_page(described: dict[str, Any]) -> str:
    """Return an HTML page that lists every operation. It loads no other files, so it works without a network."""
    sections: list[str] = []
    for tag in (*(tag["name"] for tag in described["tags"]), None):
        rows = [
            f"<dt><code>{method.upper()} {html.escape(path)}</code></dt><dd>{_describe_operation(operation)}</dd>"
            for path, operations in described["paths"].items()
            for method, operation in operations.items()
            if method in _METHODS and (operation.get("tags") or [None])[0] == tag
        ]
        if rows:
            sections.append(f"<h2>{html.escape(tag or 'other')}</h2><dl>{''.join(rows)}</dl>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Springtide API</title></head>'
        f"<body><h1>Springtide API {html.escape(described['info']['version'])}</h1>"
        "<p>Every <code>/v1</code> path needs <code>Authorization: Bearer TOKEN</code>. The full description is "
        '<a href="/openapi.json">openapi.json</a>.</p>' + "".join(sections) + "</body></html>"
    )


def _describe_operation(operation: dict[str, Any]) -> str:
    text = html.escape(operation.get("summary", ""))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in body:
        text += f"; takes <code>{html.escape(body['$ref'].rpartition('/')[2])}</code>"
    statuses = ", ".join(html.escape(status) for status in operation.get("responses", {}))
    return f"{text}; answers {statuses}"
