"""Calls of a running platform with tritonclient: `python triton_calls.py CHECK GRPC_ADDRESS HTTP_ADDRESS TOKEN [KEY]`.

A process of its own, because two libraries that bring the protocol's names cannot be loaded into one.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import time

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException


def tensor(name: str, datatype: str, array: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def failure(call) -> InferenceServerException:
    try:
        call()
    except InferenceServerException as error:
        return error
    raise AssertionError("the call was answered")


def status_of(call) -> str:
    return str(failure(call).status()).removeprefix("StatusCode.")


class Checks:
    def __init__(self, address: str, http: str, token: str, key: str) -> None:
        self.address, self.http, self.token, self.key = address, http, token, key
        self.headers = {"authorization": f"Bearer {token}"}
        self.client = triton.InferenceServerClient(address)

    def infer(self, model: str, inputs, **more):
        return self.client.infer(model, inputs, **{"headers": self.headers, **more})

    def health(self) -> None:
        """Without a token, as probes ask."""
        client = self.client
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert not client.is_model_ready("absent")
        assert "no token" in str(failure(lambda: client.get_model_metadata("echo")))
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            for name in ("", "inference.GRPCInferenceService", "echo"):
                assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
            absent = stub.Check(health_pb2.HealthCheckRequest(service="absent"))
            assert absent.status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="echo"))
            assert next(watch).status == serving
            watch.cancel()

    def described(self) -> None:
        """What the server and its models say of themselves is what they say by HTTP."""
        http = triton_http.InferenceServerClient(self.http)
        server = self.client.get_server_metadata(headers=self.headers, as_json=True)
        assert server == http.get_server_metadata(headers=self.headers)
        index = self.client.get_model_repository_index(headers=self.headers).models
        told = [(entry.name, entry.version, entry.state, entry.reason) for entry in index]
        assert told == [tuple(entry.values()) for entry in http.get_model_repository_index(headers=self.headers)]
        metadata = self.client.get_model_metadata("echo", headers=self.headers)
        assert [entry.name for entry in metadata.inputs] == ["numbers"]
        assert (metadata.outputs[0].datatype, list(metadata.outputs[0].shape)) == ("FP64", [-1])
        assert self.client.get_model_metadata("echo", metadata.versions[0], headers=self.headers) == metadata
        config = self.client.get_model_config("counts", headers=self.headers).config
        assert config.model_transaction_policy.decoupled
        assert config.output[0].data_type == 12, "TYPE_FP64"
        stats = self.client.get_inference_statistics("echo", headers=self.headers).model_stats
        assert [entry.name for entry in stats] == ["echo"]
        assert {entry.name for entry in self.client.get_inference_statistics(headers=self.headers).model_stats} > {
            "echo"
        }

    def tensors(self) -> None:
        """Each datatype, lists and arrays, ids, versions and outputs."""
        for datatype, array in (
            ("FP32", np.array([[1.5, -2.0]], np.float32)),
            ("FP16", np.array([[1.5, -2.0]], np.float16)),
            ("BF16", np.array([[1.5, -2.0]], ml_dtypes.bfloat16)),
            ("FP64", np.array([[1.5, -2.0]], np.float64)),
            ("INT8", np.array([[3, -4]], np.int8)),
            ("UINT64", np.array([[3, 4]], np.uint64)),
            ("BOOL", np.array([[True, False]])),
        ):
            answer = self.infer("arrays", [tensor("x", datatype, array)], request_id=f"id-{datatype}")
            assert answer.get_response().id == f"id-{datatype}"
            assert np.array_equal(answer.as_numpy("shape"), [1, 2])
            assert np.array_equal(answer.as_numpy("doubled"), 2.0 * array.astype(np.float64).ravel())
        texts = np.array(["a", "", "\u00fc\n" * 3], object)
        answer = self.infer("texts", [tensor("texts", "BYTES", texts)])
        assert [text.decode() for text in answer.as_numpy("outputs")] == [text + "!" for text in texts]
        blobs = np.array([b"\x00\xff", b""], object)
        answer = self.infer("blobs", [tensor("blobs", "BYTES", blobs)])
        assert list(answer.as_numpy("outputs")) == [b"\x00\xff\x00\xff", b""]
        numbers = [tensor("numbers", "FP64", np.array([1.0, 2.5]))]
        for more in ({}, {"compression_algorithm": "gzip"}, {"outputs": [triton.InferRequestedOutput("outputs")]}):
            assert list(self.infer("echo", numbers, **more).as_numpy("outputs")) == [2.0, 5.0]
        assert list(self.infer("echo", numbers, model_version="1").as_numpy("outputs")) == [2.0, 5.0]
        assert status_of(lambda: self.infer("echo", numbers, model_version="77")) == "NOT_FOUND"
        self.typed()

    def typed(self) -> None:
        """Contents in their typed fields, which tritonclient itself never sends."""
        pb = triton.service_pb2
        call = pb.ModelInferRequest(model_name="echo", inputs=[{"name": "numbers", "datatype": "FP64", "shape": [2]}])
        call.inputs[0].contents.fp64_contents.extend([1.0, 2.5])
        with grpc.insecure_channel(self.address) as channel:
            stub = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = tuple(self.headers.items())
            answer, told = stub.ModelInfer.with_call(call, metadata=(*metadata, ("x-request-id", "mine")))
            assert np.frombuffer(answer.raw_output_contents[0]).tolist() == [2.0, 5.0]
            trailing = dict(told.trailing_metadata())
            assert trailing["x-request-id"] == "mine"
            assert trailing["x-springtide-revision"] == "1"
            for datatype, sentence in (("FP16", "raw_input_contents"), ("INT64", "use int64_contents")):
                call.inputs[0].datatype = datatype
                with pytest.raises(grpc.RpcError, match=sentence) as refused:
                    stub.ModelInfer(call, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def errors(self) -> None:
        numbers = [tensor("numbers", "FP64", np.array([1.0, 2.5]))]
        assert status_of(lambda: self.infer("absent", numbers)) == "NOT_FOUND"
        assert status_of(lambda: self.infer("echo", [])) == "INVALID_ARGUMENT"
        assert status_of(lambda: self.infer("echo", numbers, headers={})) == "UNAUTHENTICATED"
        assert (
            status_of(lambda: self.infer("echo", numbers, headers={"authorization": "Bearer x"})) == "UNAUTHENTICATED"
        )
        assert status_of(lambda: self.infer("raises", numbers)) == "INTERNAL"
        key = {"authorization": f"Bearer {self.key}"}
        assert list(self.infer("echo", numbers, headers=key).as_numpy("outputs")) == [2.0, 5.0]
        assert status_of(lambda: self.infer("raises", numbers, headers=key)) == "PERMISSION_DENIED"
        assert status_of(lambda: self.client.load_model("echo", headers=self.headers)) == "UNIMPLEMENTED"
        assert "springtide deploy" in str(failure(lambda: self.client.unload_model("echo", headers=self.headers)))
        large = [tensor("numbers", "FP64", np.zeros(1 << 18))]
        refused = failure(lambda: self.infer("echo", large))
        assert "max_body" in str(refused), refused
        assert "larger than max" in str(
            failure(lambda: self.infer("echo", [tensor("numbers", "FP64", np.zeros(2 << 20))]))
        )

    def ends(self) -> None:
        """Deadlines and cancelled calls end the call of `predict`."""
        wait = [tensor("seconds", "FP64", np.array([30.0])), tensor("marks", "BYTES", np.array([sys.argv[6]], object))]
        began_s = time.monotonic()
        assert status_of(lambda: self.infer("sleeps", wait, client_timeout=0.5)) == "DEADLINE_EXCEEDED"
        call = self.client.async_infer("sleeps", wait, callback=lambda result, error: None, headers=self.headers)
        time.sleep(0.5)
        call.cancel()
        assert time.monotonic() - began_s < 20.0

    def streams(self) -> None:
        with triton.InferenceServerClient(self.address) as client:
            answers: queue.Queue = queue.Queue()
            client.start_stream(lambda result, error: answers.put(error or result), headers=self.headers)
            count = [tensor("n", "INT64", np.array([3]))]
            client.async_stream_infer("counts", count, request_id="a", enable_empty_final_response=True)
            client.async_stream_infer("counts", [tensor("n", "INT64", np.array([-1]))], request_id="b")
            client.async_stream_infer("echo", [tensor("numbers", "FP64", np.array([4.0]))], request_id="c")
            client.async_stream_infer("counts", count, request_id="d")
            found = []
            for _ in range(3 + 1 + 1 + 1 + 3):
                one = answers.get(timeout=30)
                if isinstance(one, InferenceServerException):
                    found.append(str(one))
                    continue
                response = one.get_response()
                value = one.as_numpy("outputs")
                is_final = response.parameters["triton_final_response"].bool_param
                found.append((response.id, None if value is None else value.tolist(), is_final))
            client.stop_stream()
        assert found[:4] == [("a", [0.0], False), ("a", [0.5], False), ("a", [1.0], False), ("a", None, True)], found
        assert "a count is never negative" in found[4], found
        assert found[5] == ("c", [8.0], True)
        assert found[6:] == [("d", [0.0], False), ("d", [0.5], False), ("d", [1.0], False)]
        refused = failure(lambda: self.infer("counts", count))
        assert "ModelStreamInfer" in str(refused), refused

    def asynchronous(self) -> None:
        async def many() -> None:
            async with triton_aio.InferenceServerClient(self.address) as client:
                assert await client.is_server_ready()
                made = [[tensor("numbers", "FP64", np.array([float(number)]))] for number in range(40)]
                calls = [client.infer("echo", inputs, headers=self.headers) for inputs in made]
                answers = await asyncio.gather(*calls)
                assert [answer.as_numpy("outputs")[0] for answer in answers] == [2.0 * n for n in range(40)]

        asyncio.run(many())


if __name__ == "__main__":
    getattr(Checks(*sys.argv[2:6]), sys.argv[1])()
