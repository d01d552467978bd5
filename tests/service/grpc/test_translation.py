from __future__ import annotations

import json

import numpy as np
import pytest
from grpc import StatusCode

from springtide.core.errors import InvalidRequest
from springtide.service.grpc.messages import ModelInferRequest, request_class
from springtide.service.grpc.translation import (
    ASKING,
    CallFailed,
    HttpAnswer,
    asked_answer,
    failure_of,
    infer_call,
    infer_response,
    model_target,
    told_of,
)
from springtide.serving.inference_protocol import parse_infer


def request_of(datatype="FP32", shape=(2,), contents=None, raws=(), **more):
    inputs = [{"name": "x", "datatype": datatype, "shape": shape, **({"contents": contents} if contents else {})}]
    return ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raws, **more)


def sent(request):
    """The call as the gateway reads it."""
    call = infer_call(request)
    return call, parse_infer(call.body, str(call.head_length))


def test_raw_inputs_are_sent_as_they_are():
    raw = np.array([1.5, -2.0], np.float32).tobytes()
    call, read = sent(request_of(raws=[raw], id="a", outputs=[{"name": "y"}]))
    assert (call.method, call.target, read.id) == ("POST", "/v2/models/m/infer", "a")
    assert read.raws == (raw,)
    assert (read.inputs[0].name, read.inputs[0].shape, read.inputs[0].datatype) == ("x", [2], "FP32")
    assert [(output.name, output.parameters) for output in read.outputs] == [("y", {"binary_data": True})]
    assert read.parameters == {"binary_data_output": True}


@pytest.mark.parametrize(
    ("datatype", "field", "values", "dtype"),
    [
        ("BOOL", "bool_contents", [True, False], np.bool_),
        ("INT8", "int_contents", [-128, 127], np.int8),
        ("INT32", "int_contents", [-(2**31), 7], np.int32),
        ("INT64", "int64_contents", [-(2**63), 7], np.int64),
        ("UINT16", "uint_contents", [0, 65535], np.uint16),
        ("UINT64", "uint64_contents", [0, 2**64 - 1], np.uint64),
        ("FP32", "fp32_contents", [1.5, float("inf")], np.float32),
        ("FP64", "fp64_contents", [1.5, -0.0], np.float64),
    ],
)
def test_typed_contents_are_sent_raw(datatype, field, values, dtype):
    _, read = sent(request_of(datatype, contents={field: values}))
    assert bytes(read.raws[0]) == np.array(values, dtype).tobytes()


def test_bytes_have_their_lengths():
    _, read = sent(request_of("BYTES", contents={"bytes_contents": [b"ab", b""]}))
    assert bytes(read.raws[0]) == b"\x02\x00\x00\x00ab\x00\x00\x00\x00"


def test_parameters_of_each_kind_are_passed_on():
    request = request_of(raws=[bytes(8)])
    request.parameters["a"].int64_param = -3
    request.parameters["b"].string_param = "text"
    request.parameters["c"].uint64_param = 2**64 - 1
    request.parameters["d"].double_param = 0.5
    request.inputs[0].parameters["e"].bool_param = True
    _, read = sent(request)
    assert {name: read.parameters[name] for name in "abcd"} == {"a": -3, "b": "text", "c": 2**64 - 1, "d": 0.5}
    assert read.inputs[0].parameters["e"] is True


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (request_of("FP16", contents={"fp32_contents": [1.0]}), "raw_input_contents"),
        (request_of("FP32", contents={"fp64_contents": [1.0]}), "use fp32_contents, not fp64_contents"),
        (request_of("FP8", contents={"fp32_contents": [1.0]}), "not known"),
        (request_of("INT8", contents={"int_contents": [300]}), "a value that INT8 cannot"),
        (request_of(raws=[b"", b""]), "2 tensors for 1 inputs"),
        (request_of(contents={"fp32_contents": [1.0]}, raws=[bytes(4)]), "beside raw_input_contents"),
        (ModelInferRequest(), "names no model"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(request_, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        infer_call(request_)


def test_an_answer_becomes_raw_outputs():
    outputs = [
        {"name": "y", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": 16}},
        {"name": "z", "datatype": "BOOL", "shape": [1], "parameters": {"binary_data_size": 1}},
    ]
    head = json.dumps({"model_name": "m", "model_version": "3", "id": "a", "outputs": outputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    response = infer_response(HttpAnswer(200, headers, head + bytes(16) + b"\x01"))
    assert (response.model_name, response.model_version, response.id) == ("m", "3", "a")
    assert [(one.name, one.datatype, list(one.shape)) for one in response.outputs] == [
        ("y", "FP64", [2]),
        ("z", "BOOL", [1]),
    ]
    assert list(response.raw_output_contents) == [bytes(16), b"\x01"]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (413, "RESOURCE_EXHAUSTED"),
        (422, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (502, "UNAVAILABLE"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (418, "UNKNOWN"),
    ],
)
def test_a_status_becomes_a_code_with_the_gateways_sentence(status, code):
    with pytest.raises(CallFailed, match="a sentence") as failed:
        infer_response(HttpAnswer(status, {}, b'{"error":"a sentence"}'))
    assert failed.value.code is StatusCode[code]


def test_a_refusal_says_when_to_come_again():
    failed = failure_of(HttpAnswer(429, {"retry-after": "2", "x-request-id": "r"}, b'{"error":"busy"}'))
    assert dict(failed.metadata) == {"retry-after": "2", "x-request-id": "r", "grpc-retry-pushback-ms": "2000"}
    assert told_of(HttpAnswer(200, {"content-type": "x", "x-springtide": "queue=0ms"}, b"")) == (
        ("x-springtide", "queue=0ms"),
    )


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error":{}}'])
def test_an_answer_without_a_sentence_gets_one(body):
    assert str(failure_of(HttpAnswer(500, {}, body))) == "the gateway answered with status 500"


def test_names_cannot_leave_their_part_of_the_path():
    assert model_target("a/../b?c", "1/2", "/ready") == "/v2/models/a%2F..%2Fb%3Fc/versions/1%2F2/ready"


def test_each_call_that_asks_has_its_path_and_answer():
    named = {name: ASKING[name](request_class(name)(name="m", version="2")) for name in ("ModelReady", "ModelConfig")}
    assert [call.target for call in named.values()] == [
        "/v2/models/m/versions/2/ready",
        "/v2/models/m/versions/2/config",
    ]
    assert ASKING["ModelStatistics"](request_class("ModelStatistics")()).target == "/v2/models/stats"
    assert json.loads(ASKING["RepositoryIndex"](request_class("RepositoryIndex")(ready=True)).body) == {"ready": True}
    index = asked_answer("RepositoryIndex", HttpAnswer(200, {}, b'[{"name":"m","version":"1","state":"READY"}]'))
    assert (index.models[0].name, index.models[0].state) == ("m", "READY")
    config = b'{"name":"m","input":[{"name":"x","data_type":"TYPE_FP32","dims":[-1],"optional":true}]}'
    assert asked_answer("ModelConfig", HttpAnswer(200, {}, config)).config.input[0].data_type == 11


def test_not_ready_is_an_answer_and_a_refusal_an_error():
    assert not asked_answer("ModelReady", HttpAnswer(503, {}, b'{"ready":false,"name":"m","state":"failed"}')).ready
    with pytest.raises(CallFailed, match="stopping"):
        asked_answer("ModelReady", HttpAnswer(503, {}, b'{"error":"stopping"}'))
    with pytest.raises(CallFailed, match="gone"):
        asked_answer("ModelMetadata", HttpAnswer(503, {}, b'{"error":"gone"}'))
