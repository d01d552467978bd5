"""The Open Inference Protocol on the wire: the bytes that its clients send, through the gateway, to user code."""

from __future__ import annotations

import gzip
import json
import struct
import zlib

import numpy as np
import pytest
from msgspec.structs import replace

from kits.service.gateway_replicas import FakeReplica, make_service, run
from springtide.runtime.serving.replica import ServedUserModel
from springtide.service.gateway.application import ServiceRoute
from springtide.service.gateway.protocol import WITHOUT_TOKEN, is_readiness

HEAD_LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/double/infer"


class Rows:
    def predict(self, rows: list[list[float]], scale: float = 1.0) -> list[float]:
        return [scale * sum(row) for row in rows]


class Reversed:
    def predict(self, parts: list[bytes]) -> list[bytes]:
        return [part[::-1] for part in parts]


class Texts:
    def predict(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]


class Array:
    def predict(self, x: np.ndarray) -> list[str]:
        assert isinstance(x, np.ndarray)
        return [f"{x.dtype} {x.shape} {x.ravel()[:9].tolist()}"]


class Repeated:
    def predict(self, texts: list[str]) -> list[str]:
        return [text * 1000 for text in texts]


class UserReplica(FakeReplica):
    """A replica whose answers come from the user's class, through the code of a real one."""

    def __init__(self, directory, served):
        super().__init__(directory, served=served)
        self.model = ServedUserModel(served, 8, {})

    def outcome(self, call):
        return self.model.answer([json.dumps(call).encode()])[0]


def binary(head, *raws):
    """A body as clients write it: the head, then the tensors; with its header."""
    text = json.dumps(head).encode()
    return {"content": text + b"".join(raws), "headers": {HEAD_LENGTH: str(len(text))}}


def fp32(name, shape, values, **changes):
    raw = struct.pack(f"<{len(values)}f", *values)
    tensor = {"name": name, "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    return {**tensor, **changes}, raw


def parts_of(answer):
    """The head of a binary answer, and the raw bytes of its outputs by name."""
    length = int(answer.headers[HEAD_LENGTH])
    assert answer.headers["content-type"] == "application/octet-stream"
    head, rest = json.loads(answer.content[:length]), answer.content[length:]
    raws = {}
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        assert "data" not in output
        raws[output["name"]], rest = rest[:size], rest[size:]
    assert rest == b""
    return head, raws


def with_replica(tmp_path, served, scenario):
    async def serving(harness):
        async with UserReplica(tmp_path, served) as replica:
            await harness.serve(replica)
            await scenario(harness)

    run(serving)


def test_binary_tensors_in_and_out(tmp_path):
    async def scenario(harness):
        rows, raw = fp32("rows", [2, 3], [1, 2, 3, 4, 5, 6])
        scale, more = fp32("scale", [1], [0.5])
        head = {
            "id": "7",
            "model_name": "double",
            "what_else": 1,
            "parameters": {"binary_data_output": True, "priority": 1},
            "inputs": [rows, scale],
        }
        answer = await harness.client.post(INFER, **binary(head, raw, more))
        assert answer.status_code == 200, answer.text
        told, raws = parts_of(answer)
        assert (told["id"], told["model_name"], told["model_version"]) == ("7", "double", "1")
        assert told["outputs"] == [
            {"name": "outputs", "shape": [2], "datatype": "FP64", "parameters": {"binary_data_size": 16}}
        ]
        assert struct.unpack("<2d", raws["outputs"]) == (3.0, 7.5)
        # An output's own wish comes before that of the request.
        head["outputs"] = [{"name": "outputs", "parameters": {"binary_data": False}}]
        answer = await harness.client.post(INFER, **binary(head, raw, more))
        assert answer.json()["outputs"][0]["data"] == [3.0, 7.5]
        assert HEAD_LENGTH not in answer.headers
        # JSON in, binary out.
        asked = [{"name": "outputs", "parameters": {"binary_data": True}}]
        head = {"inputs": [{"name": "rows", "shape": [1, 2], "datatype": "INT8", "data": [1, 2]}], "outputs": asked}
        _, raws = parts_of(await harness.client.post(INFER, json=head))
        assert struct.unpack("<d", raws["outputs"]) == (3.0,)

    with_replica(tmp_path, Rows, scenario)


def test_bytes_reach_a_predict_that_takes_bytes(tmp_path):
    async def scenario(harness):
        raw = b"\3\0\0\0\xff\x00a" + b"\0\0\0\0"
        tensor = {"name": "parts", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
        head = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        told, raws = parts_of(await harness.client.post(INFER, **binary(head, raw)))
        assert told["outputs"][0]["datatype"] == "BYTES"
        assert raws["outputs"] == b"\3\0\0\0a\x00\xff" + b"\0\0\0\0"

    with_replica(tmp_path, Reversed, scenario)


def test_texts_must_be_utf_8(tmp_path):
    async def scenario(harness):
        for raw, status in ((b"\3\0\0\0\xc3\xa9a", 200), (b"\3\0\0\0\xff\xffa", 422)):
            tensor = {"name": "texts", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 7}}
            answer = await harness.client.post(INFER, **binary({"inputs": [tensor]}, raw))
            assert answer.status_code == status
            if status == 200:
                assert answer.json()["outputs"][0]["data"] == ["ÉA"]
            else:
                assert "not UTF-8; hint the parameter of predict as bytes" in answer.json()["error"]

    with_replica(tmp_path, Texts, scenario)


@pytest.mark.parametrize(
    ("datatype", "raw", "seen"),
    [
        ("FP32", struct.pack("<2f", 0.5, float("nan")), "float32 (2, 1) [0.5, nan]"),
        ("FP16", struct.pack("<2e", 0.5, 2), "float16 (2, 1) [0.5, 2.0]"),
        ("BF16", b"\x00\x3f\x00\x40", "float32 (2, 1) [0.5, 2.0]"),
        ("UINT8", b"\x01\xff", "uint8 (2, 1) [1, 255]"),
        ("BOOL", b"\x01\x00", "bool (2, 1) [True, False]"),
        ("BYTES", b"\1\0\0\0\xff\0\0\0\0", "object (2, 1) [b'\\xff', b'']"),
    ],
)
def test_a_numpy_parameter_gets_the_array_that_was_sent(tmp_path, datatype, raw, seen):
    async def scenario(harness):
        tensor = {"name": "x", "shape": [2, 1], "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
        answer = await harness.client.post(INFER, **binary({"inputs": [tensor]}, raw))
        assert answer.json()["outputs"][0]["data"] == [seen]
        wrong = {**tensor, "shape": [3, 1]}
        assert (await harness.client.post(INFER, **binary({"inputs": [wrong]}, raw))).status_code == 422
        in_json = {"name": "x", "shape": [1], "datatype": "INT16", "data": [300]}
        answer = await harness.client.post(INFER, json={"inputs": [in_json]})
        assert answer.json()["outputs"][0]["data"] == ["int16 (1,) [300]"]

    with_replica(tmp_path, Array, scenario)


ROWS, RAW = fp32("rows", [1, 2], [1, 2])


def length_of(length, head=None):
    sent = binary(head or {"inputs": [ROWS]}, RAW)
    return {**sent, "headers": {HEAD_LENGTH: length}}


WRONG = {
    "the header is longer than the body": (length_of("999"), 400),
    "the header is negative": (length_of("-1"), 400),
    "the header is zero": (length_of("0"), 400),
    "the header is no number": (length_of("ten"), 400),
    "the header is enormous": (length_of("9" * 5000), 400),
    "the header is another digit": (length_of("²"), 400),
    "the header cuts the JSON": (length_of("20"), 400),
    "no header": ({"content": binary({"inputs": [ROWS]}, RAW)["content"]}, 400),
    "more bytes than are sent": (binary({"inputs": [ROWS]}, RAW[:-1]), 400),
    "fewer bytes than are sent": (binary({"inputs": [ROWS]}, RAW + b"x"), 400),
    "size and data": (binary({"inputs": [{**ROWS, "data": [1, 2]}]}, RAW), 400),
    "neither size nor data": (binary({"inputs": [{**ROWS, "parameters": {}}]}), 400),
    "a negative size": (binary({"inputs": [{**ROWS, "parameters": {"binary_data_size": -1}}]}, RAW), 400),
    "a size that is no number": (binary({"inputs": [{**ROWS, "parameters": {"binary_data_size": "8"}}]}, RAW), 400),
    "shared memory": (binary({"inputs": [{**ROWS, "parameters": {"shared_memory_region": "r"}}]}), 400),
    "another shape": (binary({"inputs": [{**ROWS, "shape": [2, 2]}]}, RAW), 422),
    "a negative shape": (binary({"inputs": [{**ROWS, "shape": [-1, -2]}]}, RAW), 422),
    "a huge shape": (binary({"inputs": [{**ROWS, "shape": [1 << 31] * 8}]}, RAW), 422),
    "no elements": (binary({"inputs": [{**ROWS, "shape": [0, 2], "parameters": {"binary_data_size": 0}}]}), 422),
    "another datatype": (binary({"inputs": [{**ROWS, "datatype": "FP64"}]}, RAW), 422),
    "an unknown datatype": (binary({"inputs": [{**ROWS, "datatype": "FP8"}]}, RAW), 422),
    "twice": (binary({"inputs": [ROWS, ROWS]}, RAW, RAW), 422),
    "not a number": (binary({"inputs": [ROWS]}, struct.pack("<2f", float("nan"), 1)), 422),
    "bytes past the end": (binary({"inputs": [{**ROWS, "shape": [1], "datatype": "BYTES"}]}, b"\xff" * 8), 422),
    "a class": (
        binary({"inputs": [ROWS], "outputs": [{"name": "outputs", "parameters": {"classification": 2}}]}, RAW),
        422,
    ),
    "an unknown output": (binary({"inputs": [ROWS], "outputs": [{"name": "probabilities"}]}, RAW), 422),
    "a damaged gzip": ({"content": b"\x1f\x8b\x08\0\0", "headers": {"Content-Encoding": "gzip"}}, 400),
    "a bomb": ({"content": gzip.compress(b" " * (1 << 24)), "headers": {"Content-Encoding": "gzip"}}, 413),
    "an unknown encoding": ({"content": b"{}", "headers": {"Content-Encoding": "zstd"}}, 415),
}


def test_what_is_wrong_is_refused_with_a_sentence(tmp_path):
    async def scenario(harness):
        assert (await harness.client.post(INFER, **binary({"inputs": [ROWS]}, RAW))).status_code == 200
        for what, (request, status) in WRONG.items():
            headers = {name: value.encode() for name, value in request.get("headers", {}).items()}
            answer = await harness.client.post(INFER, content=request["content"], headers=headers)
            assert answer.status_code == status, (what, answer.text)
            assert isinstance(answer.json()["error"], str), what

    with_replica(tmp_path, Rows, scenario)


def test_a_body_may_be_as_large_as_the_service_says(tmp_path):
    async def scenario(harness):
        async with UserReplica(tmp_path, Array) as replica:
            for limit_mib, status in ((1, 413), (2, 200)):
                await harness.serve(replica, max_body_mib=limit_mib, revision=limit_mib)
                await harness.until(lambda mib=limit_mib: harness.gateway._queues["double"].service.max_body_mib == mib)
                raw = b"\0" * ((1 << 20) + 1)
                tensor = {"name": "x", "shape": [1, len(raw)], "datatype": "BOOL"}
                head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}
                sent = binary(head, raw)
                answer = await harness.client.post(INFER, **sent)
                assert answer.status_code == status, answer.text[:200]
                headers = {**sent["headers"], "Content-Encoding": "gzip"}
                answer = await harness.client.post(INFER, content=gzip.compress(sent["content"]), headers=headers)
                assert answer.status_code == status, "the limit is that of what was unpacked"
                assert (await harness.client.get("/f/double")).json()["max_body_bytes"] == limit_mib << 20

    run(scenario)


def test_lists_that_are_too_long_as_json_are_refused_with_what_to_do(tmp_path):
    async def scenario(harness):
        async with UserReplica(tmp_path, Rows) as replica:
            await harness.serve(replica, max_body_mib=8)
            values = np.full((1, 1 << 20), 0.1, dtype="<f4")
            tensor, _ = fp32("rows", list(values.shape), [], parameters={"binary_data_size": values.nbytes})
            answer = await harness.client.post(INFER, **binary({"inputs": [tensor]}, values.tobytes()))
            assert answer.status_code == 413
            assert "hint the parameter as numpy.ndarray" in answer.json()["error"]

    run(scenario)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_the_head_length_counts_what_was_not_compressed(tmp_path, encoding, pack):
    async def scenario(harness):
        raw = b"\1\0\0\0a" * 20
        tensor = {"name": "texts", "shape": [20], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
        sent = binary({"inputs": [tensor], "parameters": {"binary_data_output": True}}, raw)
        headers = {**sent["headers"], "Content-Encoding": encoding, "Accept-Encoding": encoding}
        answer = await harness.client.post(INFER, content=pack(sent["content"]), headers=headers)
        assert answer.headers["content-encoding"] == encoding
        assert int(answer.headers["content-length"]) < 2000
        # The client has unpacked it.
        _, raws = parts_of(answer)
        assert raws["outputs"] == (b"\xe8\3\0\0" + b"a" * 1000) * 20
        answer = await harness.client.post(INFER, **{**sent, "headers": {**sent["headers"], "Accept-Encoding": "br"}})
        assert "content-encoding" not in answer.headers

    with_replica(tmp_path, Repeated, scenario)


def test_index_configuration_and_statistics(tmp_path):
    async def scenario(harness):
        get, post = harness.client.get, harness.client.post
        asleep = replace(make_service("asleep"), revision=3)
        failed = make_service("failed")
        starting = make_service("starting", min_replicas=1)
        double = ServiceRoute(service=make_service(), replicas=harness.gateway._routes[0].replicas)
        harness.gateway.update(
            [
                double,
                ServiceRoute(service=asleep),
                ServiceRoute(service=starting),
                ServiceRoute(service=failed, failure="x"),
            ]
        )
        await harness.until(lambda: "failed" in harness.gateway._queues)
        index = (await post("/v2/repository/index")).json()
        assert {entry["name"]: (entry["version"], entry["state"]) for entry in index} == {
            "asleep": ("3", "READY"),
            "double": ("1", "READY"),
            "failed": ("1", "UNAVAILABLE"),
            "starting": ("1", "LOADING"),
        }
        assert {entry["name"]: entry["reason"] for entry in index}["failed"] == "x"
        ready = (await post("/v2/repository/index", json={"ready": True})).json()
        assert [entry["name"] for entry in ready] == ["asleep", "double"]
        for body in (b"[]", b'{"ready": 1}', b"{"):
            assert (await post("/v2/repository/index", content=body)).status_code == 400
        for verb in ("load", "unload"):
            refused = await post(f"/v2/repository/models/double/{verb}")
            assert (refused.status_code, type(refused.json()["error"])) == (409, str)
        extensions = (await get("/v2")).json()["extensions"]
        assert {"binary_tensor_data", "statistics", "model_configuration"} <= set(extensions)
        for prefix in ("/v2/models/double", "/v2/models/double/versions/1"):
            config = (await get(f"{prefix}/config")).json()
            assert config["max_batch_size"] == 0
            assert config["input"][0] == {"name": "rows", "data_type": "TYPE_FP64", "dims": [-1, -1], "optional": False}
            assert (await get(f"{prefix}/stats")).json()["model_stats"][0]["execution_count"] == 0
        assert (await post(INFER, **binary({"inputs": [ROWS]}, RAW))).status_code == 200
        assert (await post(INFER, **binary({"inputs": [ROWS]}, RAW[:3]))).status_code == 400
        stats = {entry["name"]: entry for entry in (await get("/v2/models/stats")).json()["model_stats"]}
        assert set(stats) == {"asleep", "double", "failed", "starting"}
        assert (stats["double"]["inference_count"], stats["double"]["execution_count"]) == (1, 1)
        times = stats["double"]["inference_stats"]
        assert {name: found["count"] for name, found in times.items()} == {
            "success": 1,
            "fail": 1,
            "queue": 1,
            "compute_infer": 1,
        }
        assert times["compute_infer"]["ns"] == 3_000_000, "what the replica says"
        assert times["success"]["ns"] > times["queue"]["ns"] > 0
        answer = await get("/v2/models/double/versions/2/config")
        assert (answer.status_code, answer.json()["error"]) == (
            404,
            "'double' is served as revision 1, not 2; `springtide versions double` lists all, and `springtide rollback "
            "double --to 2` brings back one that there was",
        )

    with_replica(tmp_path, Rows, scenario)


def test_without_a_token_a_model_is_ready_or_not_and_no_more_is_told(tmp_path):
    async def scenario(harness):
        # What AccessControl does for a request without a token.
        class Stranger:
            def __init__(self, app):
                self.app = app

            async def __call__(self, scope, receive, send):
                scope[WITHOUT_TOKEN] = is_readiness(scope["path"])
                await self.app(scope, receive, send)

        for route in harness.app.router.routes:
            route.app = Stranger(route.app)
        get = harness.client.get
        for path, status in (("double", 200), ("double/versions/1", 200), ("double/versions/2", 503), ("nothing", 503)):
            answer = await get(f"/v2/models/{path}/ready")
            assert (answer.status_code, answer.json()) == (status, {"ready": status == 200})
        assert (await get("/v2/models/nothing")).status_code == 404

    with_replica(tmp_path, Rows, scenario)
