"""The schema of a served class, from the type hints of `predict`, and the check of a call against it."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from springtide.core.decoding import decoder_of_made_type
from springtide.core.errors import InvalidRequest
from springtide.serving.applications import WebService

METHOD = "predict"
_MAX_INLINE_DEPTH = 6
_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_STREAMS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)
PredictKind = typing.Literal["plain", "async", "generator", "async_generator", "asgi"]
# How many calls a replica works on at a time, if its service does not say.
ASYNC_CONCURRENCY = 64
_TENSOR_DATATYPES = {float: "FP64", int: "INT64", bool: "BOOL", str: "BYTES"}
_ARRAY_DATATYPES = frozenset(
    {"BOOL", "FP16", "FP32", "FP64", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64))}
)
_REFERENCE = "#/components/schemas/"


class MalformedRequest(InvalidRequest):
    """The bytes are not JSON, or not JSON that any service could take."""

    status = 400
    code = "malformed_request"


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of `predict`. List parameters are batched along their first axis, which counts items.

    `json_schema` describes its value; `datatype` and `shape` (-1: any length) describe it as a tensor. The value of one
    that `is_array` is a numpy array, which is not batched.
    """

    name: str
    json_schema: dict[str, Any] = {}
    is_list: bool = False
    is_required: bool = True
    datatype: str = "BYTES"
    shape: tuple[int, ...] = (-1,)
    is_array: bool = False


class ServiceSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict` takes and returns. Batchable: list in, list out, one output per item.

    `kind` is what `predict` is, or `asgi` for an application; all but plain ones get each call by itself. `concurrency`
    is how many calls, or batches of them, a replica works on at a time. Of a generator `returns` describes one item.
    `cache_tokens`: of a language model, how many tokens of prompts a replica keeps to compute none twice; 0 for others.
    """

    parameters: tuple[Parameter, ...] = ()
    returns: Parameter = Parameter(name="outputs")
    is_batchable: bool = False
    doc: str = ""
    kind: PredictKind = "plain"
    concurrency: int = 1
    cache_tokens: int = 0

    @property
    def is_stream(self) -> bool:
        """Whether an answer is a stream of items."""
        return self.kind in ("generator", "async_generator")

    def body_schema(self) -> dict[str, Any]:
        """The JSON schema of the body of `POST /f/{name}`."""
        properties = {parameter.name: parameter.json_schema for parameter in self.parameters}
        required = [parameter.name for parameter in self.parameters if parameter.is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def answer_schema(self) -> dict[str, Any]:
        """The JSON schema of the answer; of a stream that of one item."""
        if self.is_stream:
            return self.returns.json_schema
        return {"type": "object", "properties": {"outputs": self.returns.json_schema}, "required": ["outputs"]}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One checked call: the JSON object for the replica, and its items. Calls with equal `key` may share a batch."""

    body: bytes
    num_items: int = 1
    key: str = ""


def parse_json(body: bytes) -> Any:
    """Decode a user's bytes. Raises MalformedRequest for bad JSON, bad UTF-8, NaN, infinities and deep nesting."""
    if not body.strip():
        raise MalformedRequest('the body is empty; send a JSON object like {"texts": ["hello"]}')
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise MalformedRequest("the body is nested too deeply; send plain lists and objects") from None
    except ValueError as error:
        raise MalformedRequest(f"the body is not valid JSON: {error}") from None


def check_call(schema: ServiceSchema, body: bytes, value: Any) -> Call:
    """Check `value` (what `body` decodes to) against the names and lists of the schema.

    An object names the parameters; a bare list stands for the only parameter. The replica checks the types of the
    values, because it has the type hints. Raises InvalidRequest (422), which says what to send instead.
    """
    if isinstance(value, list):
        if len(schema.parameters) != 1:
            raise InvalidRequest(f"send a JSON object, because predict takes {_names(schema)}, not a bare list")
        name = schema.parameters[0].name
        body, value = b'{"' + name.encode() + b'":' + body + b"}", {name: value}
    if not isinstance(value, dict):
        raise InvalidRequest(f"send a JSON object with {_names(schema)}, not a bare {_kind(value)}")
    known = {parameter.name: parameter for parameter in schema.parameters}
    unknown = sorted(name for name in value if name not in known)
    if unknown:
        raise InvalidRequest(f"predict has no parameter {unknown[0]!r:.80}; it takes {_names(schema)}")
    missing = [
        parameter.name for parameter in schema.parameters if parameter.is_required and parameter.name not in value
    ]
    if missing:
        raise InvalidRequest(f"the parameter {missing[0]!r} is missing; predict takes {_names(schema)}")
    lengths: dict[str, int] = {}
    for name, given in value.items():
        if known[name].is_list:
            if not isinstance(given, list):
                raise InvalidRequest(f"the parameter {name!r} must be a list, not a {_kind(given)}")
            lengths[name] = len(given)
    if not schema.is_batchable:
        return Call(body=body)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidRequest(f"the lists of one call must be equally long, but {counts}")
    return Call(body=body, num_items=max(lengths.values(), default=1), key=_key(value, lengths))


def _key(value: dict[str, Any], lengths: dict[str, int]) -> str:
    """What must be equal for calls in one batch: which list parameters they have, and all other values."""
    fixed = {name: given for name, given in sorted(value.items()) if name not in lengths}
    if not fixed:
        return ",".join(sorted(lengths))
    try:
        return ",".join(sorted(lengths)) + msgspec.json.encode(fixed).decode()
    except (ValueError, OverflowError, RecursionError):
        raise MalformedRequest("the values cannot be written as JSON again; send plain numbers and texts") from None


def _names(schema: ServiceSchema) -> str:
    if not schema.parameters:
        return "no parameters"
    return ", ".join(
        parameter.name if parameter.is_required else f"{parameter.name} (optional)" for parameter in schema.parameters
    )


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, dict):
        return "object"
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else "number"


def derive_schema(served: type, concurrency: int | None = None) -> ServiceSchema:
    """Read the schema from a served class. Raises InvalidRequest if it has no usable `predict`.

    `concurrency` is that of its service; None: 1, and 64 where `predict` is async.
    """
    if issubclass(served, WebService):
        return ServiceSchema(
            kind="asgi", concurrency=concurrency or ASYNC_CONCURRENCY, doc=inspect.getdoc(served) or ""
        )
    schema = _derive(served)[0]
    usual = ASYNC_CONCURRENCY if schema.kind in ("async", "async_generator") else 1
    return msgspec.structs.replace(schema, concurrency=concurrency or usual)


def call_decoder(served: type) -> msgspec.json.Decoder[Any]:
    """Return a decoder of calls: a struct with a field for each parameter, UNSET if it was not sent."""
    schema, arguments = _derive(served)
    return decoder_of_made_type(arguments, _array_hook() if any(one.is_array for one in schema.parameters) else None)


def _array_hook() -> Callable[[type, Any], Any]:
    # Imported here, because only services with arrays need numpy.
    from springtide.serving.tensors import array_from_json

    return lambda kind, value: array_from_json(value)


def _derive(served: type) -> tuple[ServiceSchema, type[msgspec.Struct]]:
    predict = getattr(served, METHOD, None)
    if not callable(predict):
        raise InvalidRequest(f"the class {served.__name__} has no method predict(self, ...)")
    kind = _kind_of(predict)
    try:
        hints = typing.get_type_hints(predict)
    except (NameError, TypeError, AttributeError, SyntaxError, ValueError) as error:
        raise InvalidRequest(f"the type hints of {served.__name__}.predict cannot be read: {error}") from error
    given = list(inspect.signature(predict).parameters.values())
    is_static = isinstance(inspect.getattr_static(served, METHOD), staticmethod | classmethod)
    parameters: list[Parameter] = []
    fields: list[tuple[str, Any, Any] | tuple[str, Any]] = []
    for entry in given if is_static else given[1:]:
        if entry.kind not in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY):
            raise InvalidRequest(f"{served.__name__}.predict must name its parameters: no {entry}")
        is_required = entry.default is entry.empty
        parameter, hint = _describe(entry.name, hints.get(entry.name, Any))
        parameters.append(msgspec.structs.replace(parameter, is_required=is_required))
        optional: Any = hint | msgspec.UnsetType if hint is not Any else Any
        fields.append((entry.name, hint) if is_required else (entry.name, optional, msgspec.UNSET))
    returned = hints.get("return", Any)
    if kind in ("generator", "async_generator"):
        returned = (typing.get_args(returned) or (Any,))[0] if typing.get_origin(returned) in _STREAMS else Any
    returns, _ = _describe("outputs", returned)
    takes_lists = any(parameter.is_list and parameter.is_required for parameter in parameters)
    schema = ServiceSchema(
        parameters=tuple(parameters),
        returns=returns,
        is_batchable=kind == "plain" and returns.is_list and takes_lists,
        doc=inspect.getdoc(predict) or inspect.getdoc(served) or "",
        kind=kind,
    )
    arguments = msgspec.defstruct("Call", fields, kw_only=True, forbid_unknown_fields=True)
    return schema, arguments


def _kind_of(predict: Callable[..., Any]) -> PredictKind:
    if inspect.isasyncgenfunction(predict):
        return "async_generator"
    if inspect.iscoroutinefunction(predict):
        return "async"
    return "generator" if inspect.isgeneratorfunction(predict) else "plain"


def _describe(name: str, hint: Any) -> tuple[Parameter, Any]:
    """Return the parameter and the type to decode it with (Any where msgspec does not know the hint)."""
    if _is_array(hint):
        return Parameter(name=name, is_array=True, datatype=_datatype_of_array(hint)), typing.get_origin(hint) or hint
    try:
        (described,), components = msgspec.json.schema_components([hint], ref_template=_REFERENCE + "{name}")
    except (TypeError, NotImplementedError):
        return Parameter(name=name), Any
    depth, inner = 0, hint
    while typing.get_origin(inner) in _SEQUENCES or inner is list:
        depth += 1
        inner = (typing.get_args(inner) or (Any,))[0]
    parameter = Parameter(
        name=name,
        json_schema=_inline(described, components, 0),
        is_list=depth > 0,
        datatype=_TENSOR_DATATYPES.get(inner, "BYTES"),
        shape=(-1,) * max(depth, 1),
    )
    return parameter, hint


def _is_array(hint: Any) -> bool:
    """Whether the hint is numpy.ndarray or numpy.typing.NDArray[...], without an import of numpy."""
    kind = typing.get_origin(hint) or hint
    return getattr(kind, "__module__", "") == "numpy" and getattr(kind, "__name__", "") == "ndarray"


def _datatype_of_array(hint: Any) -> str:
    """The tensor datatype of NDArray[float32] and the like; FP64 where the hint names none that is one."""
    for kind in typing.get_args(typing.get_args(hint)[-1]) if typing.get_args(hint) else ():
        name = getattr(kind, "__name__", "").rstrip("_").upper()
        datatype = name.replace("FLOAT", "FP") if name.startswith("FLOAT") else name
        if datatype in _ARRAY_DATATYPES:
            return datatype
    return "FP64"


def _inline(schema: Any, components: dict[str, Any], depth: int) -> Any:
    """Replace references by the schemas themselves; a recursive type is left unspecified at some depth."""
    if isinstance(schema, list):
        return [_inline(entry, components, depth) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith(_REFERENCE):
        if depth >= _MAX_INLINE_DEPTH:
            return {}
        return _inline(components[reference.removeprefix(_REFERENCE)], components, depth + 1)
    return {key: _inline(value, components, depth) for key, value in schema.items()}
