"""The Open Inference Protocol v2: converts tensors to the parameters of `predict` and results back.

A body is JSON, in which each tensor has its `data`. With the extension for binary tensors it is JSON (the head), whose
length a header of the request tells, followed by the raw tensors in their order; `binary_data_size` is then the number
of bytes of a tensor without `data`.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.serving.schema import MalformedRequest, Parameter, ServiceSchema
from springtide.serving.tensors import DATATYPES, FLOATS, array_document, array_of, num_elements, raw_of

_INTEGERS = DATATYPES - FLOATS - {"BOOL", "BYTES"}
# With a streamed answer, whose items are JSON: what they become as tensors.
RETURNS_HEADER = "x-springtide-returns"
_NO_PARAMETERS: Mapping[str, Any] = {}


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One input: row-major `data`, flat or nested, of `shape`; None if its bytes follow the head."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output that the caller asks for."""

    name: str
    parameters: dict[str, Any] = {}


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    inputs: list[Tensor]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[RequestedOutput] = []


@dataclass(frozen=True, slots=True)
class InferRequest:
    """The body of POST /v2/models/{m}/infer. `raws` holds the bytes of each input, None for one with `data`."""

    inputs: list[Tensor]
    raws: tuple[memoryview | None, ...]
    outputs: list[RequestedOutput]
    parameters: Mapping[str, Any]
    id: str | None


def parse_infer(body: bytes, head_length: str | None = None) -> InferRequest:
    """Decode the body, whose JSON has `head_length` bytes (None: all of it). Raises MalformedRequest."""
    length = len(body)
    if head_length is not None:
        length = int(head_length) if head_length.isdecimal() and len(head_length) < 12 else -1
        if not 0 < length <= len(body):
            raise MalformedRequest(
                f"Inference-Header-Content-Length must be the length of the JSON in the body of {len(body)} bytes, "
                f"not {head_length!r:.40}"
            )
    try:
        head = decode_json(memoryview(body)[:length], _Head)
    except RecursionError:
        raise MalformedRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise MalformedRequest(f"the body is not an inference request: {error}") from None
    raws = _raws(head.inputs, memoryview(body)[length:])
    return InferRequest(head.inputs, raws, head.outputs, head.parameters, head.id)


def _raws(inputs: list[Tensor], rest: memoryview) -> tuple[memoryview | None, ...]:
    """The bytes of each input; together they are all that follows the head. Raises MalformedRequest."""
    raws: list[memoryview | None] = []
    at = 0
    for tensor in inputs:
        if "shared_memory_region" in tensor.parameters:
            raise MalformedRequest(f"send the data of {tensor.name!r:.80}: shared memory is not supported")
        num_bytes = tensor.parameters.get("binary_data_size")
        if (num_bytes is None) == (tensor.data is None):
            raise MalformedRequest(f"the input {tensor.name!r:.80} needs either data or binary_data_size")
        if num_bytes is None:
            raws.append(None)
            continue
        if type(num_bytes) is not int or not 0 <= num_bytes <= len(rest) - at:
            raise MalformedRequest(
                f"the binary_data_size of {tensor.name!r:.80} is {num_bytes!r:.40}, but {len(rest) - at} bytes are "
                "left of the body after its JSON, whose length the header Inference-Header-Content-Length must tell"
            )
        raws.append(rest[at : at + num_bytes])
        at += num_bytes
    if at != len(rest):
        raise MalformedRequest(f"the body has {len(rest) - at} bytes more than its inputs")
    return tuple(raws)


def arguments_of(request: InferRequest, schema: ServiceSchema) -> dict[str, Any]:
    """Return the arguments of `predict`: nested lists by shape, or the value itself for a parameter that is not a list.

    A parameter that is a numpy array gets the tensor as `array_document`. Raises InvalidRequest if the data of a tensor
    does not fit its shape and datatype.
    """
    known = {parameter.name: parameter for parameter in schema.parameters}
    arguments: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raws, strict=True):
        if tensor.name in arguments:
            raise InvalidRequest(f"the input {tensor.name!r:.80} is there twice; send each once")
        parameter = known.get(tensor.name, Parameter(name=tensor.name, is_list=True))
        count = num_elements(tensor.name, tensor.datatype, tensor.shape)
        if parameter.is_array:
            arguments[tensor.name] = _document(tensor, raw, count)
            continue
        nested = _rows(_values(tensor, count), tensor.shape) if raw is None else _from_raw(tensor, raw, parameter)
        if not parameter.is_list and tensor.shape == [1]:
            nested = nested[0]
        arguments[tensor.name] = nested
    return arguments


def _document(tensor: Tensor, raw: memoryview | None, count: int) -> dict[str, Any]:
    if raw is None:
        return array_document(tensor.datatype, tensor.shape, raw_of(tensor.datatype, _values(tensor, count)))
    # The replica makes the array, but what does not fit is refused before it waits in the queue.
    array_of(tensor.name, tensor.datatype, tensor.shape, raw)
    return array_document(tensor.datatype, tensor.shape, raw)


def _from_raw(tensor: Tensor, raw: memoryview, parameter: Parameter) -> Any:
    """The nested lists of a raw tensor. Bytes are texts, or base64 for a parameter whose hint is bytes."""
    array = array_of(tensor.name, tensor.datatype, tensor.shape, raw)
    if tensor.datatype == "BYTES":
        return _rows([_text(element, tensor.name, parameter) for element in array.ravel()], tensor.shape)
    if tensor.datatype in FLOATS and not np.isfinite(array).all():
        raise InvalidRequest(
            f"the input {tensor.name!r:.80} holds a value that is infinite or not a number, which lists of predict "
            "cannot get; send finite numbers, or hint the parameter as numpy.ndarray"
        )
    return array.tolist()


def _text(element: bytes, name: str, parameter: Parameter) -> str:
    if _takes_bytes(parameter):
        return binascii.b2a_base64(element, newline=False).decode()
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"the input {name!r:.80} holds bytes that are not UTF-8; hint the parameter of predict as bytes to get them"
        ) from None


def _takes_bytes(parameter: Parameter) -> bool:
    """Whether the parameter's values, or those of its lists, are bytes: in JSON a text in base64."""
    element = parameter.json_schema
    while element.get("type") == "array" and isinstance(element.get("items"), dict):
        element = element["items"]
    return any(choice.get("contentEncoding") == "base64" for choice in (element, *element.get("anyOf", ())))


def _values(tensor: Tensor, count: int) -> list[Any]:
    """The flat values of a tensor in JSON."""
    flat = _flat(tensor.data or [])
    if len(flat) != count:
        raise InvalidRequest(
            f"the input {tensor.name!r:.80} of shape {tensor.shape} needs {count} values, its data holds {len(flat)}"
        )
    return [_value(entry, tensor) for entry in flat]


def _rows(values: list[Any], shape: list[int]) -> Any:
    if not shape:
        return values[0]
    for size in reversed(shape[1:]):
        values = [values[start : start + size] for start in range(0, len(values), size)]
    return values


def _flat(data: list[Any]) -> list[Any]:
    flat = data
    while any(isinstance(entry, list) for entry in flat):
        if not all(isinstance(entry, list) for entry in flat):
            raise InvalidRequest("the data mixes lists and values; send it flat, or nested like the shape")
        flat = [value for entry in flat for value in entry]
    return flat


def _value(value: Any, tensor: Tensor) -> Any:
    if tensor.datatype == "BYTES":
        fits = isinstance(value, str)
    elif tensor.datatype == "BOOL":
        fits = isinstance(value, bool)
    elif isinstance(value, bool):
        fits = False
    elif tensor.datatype in _INTEGERS:
        # JSON knows no difference between 3 and 3.0.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        fits = isinstance(value, int) and _fits_integer(value, tensor.datatype)
    else:
        fits = isinstance(value, int | float)
        try:
            value = float(value) if fits else value
        except OverflowError:
            fits = False
    if not fits:
        raise InvalidRequest(f"the input {tensor.name!r:.80} is {tensor.datatype}, but holds {value!r:.60}")
    return value


def _fits_integer(value: int, datatype: str) -> bool:
    low, high = _integer_bounds(datatype)
    return low <= value <= high


def _integer_bounds(datatype: str) -> tuple[int, int]:
    bits = int(datatype.lstrip("UINT"))
    return (0, (1 << bits) - 1) if datatype.startswith("U") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def tensor_values(parameter: Parameter) -> list[tuple[list[str], dict[str, Any]]]:
    """The datatypes that a parameter of `predict` can be sent as, each with the JSON schema of one value."""
    element = parameter.json_schema
    while element.get("type") == "array" and isinstance(element.get("items"), dict):
        element = element["items"]
    floats: list[tuple[list[str], dict[str, Any]]] = [(sorted(FLOATS), {"type": "number"})]
    integers: list[tuple[list[str], dict[str, Any]]] = []
    for datatype in sorted(_INTEGERS):
        low, high = _integer_bounds(datatype)
        integers.append(([datatype], {"type": "integer", "minimum": low, "maximum": high}))
    texts: list[tuple[list[str], dict[str, Any]]] = [(["BYTES"], {"type": "string"})]
    truths: list[tuple[list[str], dict[str, Any]]] = [(["BOOL"], {"type": "boolean"})]
    fitting = {"number": integers + floats, "integer": integers, "boolean": truths, "string": texts}
    return fitting.get(element.get("type", ""), integers + floats + truths + texts)


def infer_answer(
    request: InferRequest, model: str, version: str, schema: ServiceSchema, outputs: Any
) -> dict[str, Any]:
    """Return the response for the result of predict: a mapping of lists as one tensor each, else one named `outputs`.

    A result that is not a regular array of numbers, booleans or texts is sent as BYTES, with each element as JSON.
    """
    if isinstance(outputs, dict) and outputs and all(isinstance(value, list) for value in outputs.values()):
        tensors = [_tensor(name, value, None) for name, value in outputs.items()]
    else:
        tensors = [_tensor("outputs", outputs, schema.returns)]
    wanted = {output.name for output in request.outputs}
    if any("classification" in output.parameters for output in request.outputs):
        raise InvalidRequest("classification is not supported; ask for the output itself")
    if wanted:
        known = {tensor["name"] for tensor in tensors}
        if not wanted <= known:
            raise InvalidRequest(f"there is no output {min(wanted - known)!r:.80}; there is {sorted(known)}")
        tensors = [tensor for tensor in tensors if tensor["name"] in wanted]
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": tensors}
    if request.id is not None:
        answer["id"] = request.id
    return answer


def infer_body(request: InferRequest, answer: dict[str, Any], schema: ServiceSchema) -> tuple[bytes, bytes | None]:
    """Return the answer as JSON, and the raw tensors that follow it; None if none is asked for as binary data.

    An output is binary if its own `binary_data` says so, else if the request's `binary_data_output` does.
    """
    by_default = request.parameters.get("binary_data_output") is True
    asked = {output.name: output.parameters for output in request.outputs}
    raws: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for tensor in answer["outputs"]:
        if asked.get(tensor["name"], _NO_PARAMETERS).get("binary_data", by_default) is True:
            described = {key: value for key, value in tensor.items() if key != "data"}
            is_base64 = tensor["datatype"] == "BYTES" and _takes_bytes(schema.returns)
            values = [_decoded(text) for text in tensor["data"]] if is_base64 else tensor["data"]
            raws.append(raw_of(tensor["datatype"], values))
            tensor = {**described, "parameters": {"binary_data_size": len(raws[-1])}}
        outputs.append(tensor)
    head = msgspec.json.encode({**answer, "outputs": outputs})
    return head, b"".join(raws) if raws else None


def _decoded(text: str) -> bytes:
    """The bytes of a text in base64; the text's own where predict has not returned the bytes that its hint says."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return text.encode("utf-8", "replace")


def _tensor(name: str, value: Any, declared: Parameter | None) -> dict[str, Any]:
    values = value if isinstance(value, list) else [value]
    shape, flat = [len(values)], values
    while flat and all(isinstance(entry, list) for entry in flat) and len({len(entry) for entry in flat}) == 1:
        shape.append(len(flat[0]))
        flat = [inner for entry in flat for inner in entry]
    datatype = _datatype(flat, declared)
    if datatype is None:
        flat = [entry if isinstance(entry, str) else msgspec.json.encode(entry).decode() for entry in flat]
    return {"name": name, "shape": shape, "datatype": datatype or "BYTES", "data": flat}


def _datatype(flat: list[Any], declared: Parameter | None) -> str | None:
    """Return the tensor datatype of plain values; None if they are not all of one kind."""
    kinds = {type(entry) for entry in flat}
    if not kinds:
        return declared.datatype if declared is not None else "FP64"
    if kinds == {bool}:
        return "BOOL"
    if kinds == {str}:
        return "BYTES"
    if kinds <= {int, float}:
        is_integer = kinds == {int} and (declared is None or declared.is_array or declared.datatype != "FP64")
        if is_integer:
            return "INT64" if all(_fits_integer(entry, "INT64") for entry in flat) else None
        return "FP64"
    return None


def described_returns(schema: ServiceSchema) -> bytes:
    """A `Parameter` as JSON that says how items of a streamed answer become tensors; ASCII, and short."""
    returns = schema.returns
    inner = {"contentEncoding": "base64"} if _takes_bytes(returns) else {}
    return msgspec.json.encode(msgspec.structs.replace(returns, json_schema=inner))


def model_metadata(model: str, version: str, schema: ServiceSchema | None) -> dict[str, Any]:
    """Return the answer of GET /v2/models/{m}; inputs and outputs are empty until a replica has sent its schema."""

    def described(parameter: Parameter) -> dict[str, Any]:
        return {"name": parameter.name, "datatype": parameter.datatype, "shape": list(parameter.shape)}

    return {
        "name": model,
        "versions": [version],
        "platform": "springtide_python",
        "inputs": [described(parameter) for parameter in schema.parameters] if schema else [],
        "outputs": [described(schema.returns)] if schema else [],
    }


def model_config(model: str, revision: int, max_batch_size: int, schema: ServiceSchema | None) -> dict[str, Any]:
    """Return the answer of GET /v2/models/{m}/config, in the terms of Triton's model configuration.

    Its `max_batch_size` is 0 unless each tensor has a first axis that counts items and another one, because `dims`
    leave the first out then.
    """
    parameters = schema.parameters if schema else ()
    tensors = (*parameters, *((schema.returns,) if schema else ()))
    is_batched = schema is not None and schema.is_batchable and all(len(tensor.shape) > 1 for tensor in tensors)

    def described(parameter: Parameter) -> dict[str, Any]:
        datatype = "STRING" if parameter.datatype == "BYTES" else parameter.datatype
        return {
            "name": parameter.name,
            "data_type": f"TYPE_{datatype}",
            "dims": list(parameter.shape[1:] if is_batched else parameter.shape),
            "optional": not parameter.is_required,
        }

    outputs = [described(schema.returns)] if schema else []
    for output in outputs:
        del output["optional"]
    transactions = {"model_transaction_policy": {"decoupled": True}} if schema is not None and schema.is_stream else {}
    return {
        "name": model,
        **transactions,
        "platform": "springtide_python",
        "backend": "springtide_python",
        "version_policy": {"specific": {"versions": [revision]}},
        "max_batch_size": max_batch_size if is_batched else 0,
        "input": [described(parameter) for parameter in parameters],
        "output": outputs,
    }
