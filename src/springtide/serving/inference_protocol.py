"""The Open Inference Protocol v2: converts JSON tensors to the parameters of `predict` and results back."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.serving.schema import MalformedRequest, Parameter, ServiceSchema

_INTEGERS = frozenset(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64))
_FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
_DATATYPES = _INTEGERS | _FLOATS | {"BOOL", "BYTES"}
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 31


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One input: row-major `data`, flat or nested, of `shape`."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] = {}


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output that the caller asks for."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v2/models/{m}/infer."""

    inputs: list[Tensor]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[RequestedOutput] = []


def parse_infer(body: bytes) -> InferRequest:
    """Decode the body. Raises MalformedRequest."""
    try:
        return decode_json(body, InferRequest)
    except RecursionError:
        raise MalformedRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise MalformedRequest(f"the body is not an inference request: {error}") from None


def arguments_of(request: InferRequest, schema: ServiceSchema) -> dict[str, Any]:
    """Return the arguments of `predict`: nested lists by shape, or the value itself for a parameter that is not a list.

    Raises InvalidRequest if the data of a tensor does not fit its shape and datatype.
    """
    known = {parameter.name: parameter for parameter in schema.parameters}
    arguments: dict[str, Any] = {}
    for tensor in request.inputs:
        if tensor.name in arguments:
            raise InvalidRequest(f"the input {tensor.name!r:.80} is there twice; send each once")
        nested = _nested(tensor)
        parameter = known.get(tensor.name)
        if parameter is not None and not parameter.is_list and tensor.shape in ([], [1]):
            nested = nested[0] if isinstance(nested, list) else nested
        arguments[tensor.name] = nested
    return arguments


def _nested(tensor: Tensor) -> Any:
    if tensor.datatype not in _DATATYPES:
        raise InvalidRequest(f"the datatype {tensor.datatype!r:.40} is not known; use one of {sorted(_DATATYPES)}")
    if len(tensor.shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_SIZE for size in tensor.shape):
        raise InvalidRequest(
            f"the shape of {tensor.name!r:.80} must have at most {MAX_DIMENSIONS} sizes, none negative or huge"
        )
    flat = _flat(tensor.data)
    if len(flat) != math.prod(tensor.shape):
        raise InvalidRequest(
            f"the input {tensor.name!r:.80} of shape {tensor.shape} needs {math.prod(tensor.shape)} values, "
            f"its data holds {len(flat)}"
        )
    values = [_value(entry, tensor) for entry in flat]
    if not tensor.shape:
        return values[0]
    for size in reversed(tensor.shape[1:]):
        num_rows = len(values) // size if size else 0
        values = [values[row * size : (row + 1) * size] for row in range(num_rows)]
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
    floats: list[tuple[list[str], dict[str, Any]]] = [(sorted(_FLOATS), {"type": "number"})]
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
    if wanted:
        known = {tensor["name"] for tensor in tensors}
        if not wanted <= known:
            raise InvalidRequest(f"there is no output {min(wanted - known)!r:.80}; there is {sorted(known)}")
        tensors = [tensor for tensor in tensors if tensor["name"] in wanted]
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": tensors}
    if request.id is not None:
        answer["id"] = request.id
    return answer


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
        is_integer = kinds == {int} and (declared is None or declared.datatype != "FP64")
        if is_integer:
            return "INT64" if all(_fits_integer(entry, "INT64") for entry in flat) else None
        return "FP64"
    return None


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
