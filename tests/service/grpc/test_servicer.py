from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from springtide.service.grpc.gateway_client import GatewayClient
from springtide.service.grpc.messages import METHODS, SERVICE, ModelInferRequest, request_class, response_class
from springtide.service.grpc.servicer import InferenceHandlers

NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1.0]}}


class HttpDouble:
    """Named double at the wire: gives each request the same answer and keeps their heads."""

    def __init__(self, status=200, body=b"{}", headers=""):
        self.answer = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body
        self.heads = []

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.heads.append(head)
                _, _, length = head.partition("content-length: ")
                await reader.readexactly(int(length.split("\r\n")[0] or 0))
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def serving(double):
    http = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    client = GatewayClient(f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((InferenceHandlers(client),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)
        client.close()
        http.close()
        # Transports need a few iterations of the event loop to close.
        for _ in range(5):
            await asyncio.sleep(0)


def call(channel, name, request=None, **more):
    made = channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=response_class(name).FromString if name in METHODS else bytes,
    )
    return made(request if request is not None else request_class(name)(), **more)


def played(double, scenario):
    async def run():
        async with serving(double) as channel:
            return await scenario(channel)

    return asyncio.run(run())


async def failure(calling):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await calling
    return failed.value


def test_metadata_and_deadline_go_on_as_headers():
    head = json.dumps({"model_name": "m", "model_version": "4", "outputs": []}).encode()
    double = HttpDouble(body=head, headers="x-springtide-revision: 4\r\n")

    async def scenario(channel):
        metadata = (("authorization", "Bearer t"), ("x-springtide-priority", "low"), ("x-other", "no"))
        asked = call(
            channel, "ModelInfer", ModelInferRequest(model_name="m", inputs=[NUMBERS]), metadata=metadata, timeout=7
        )
        assert (await asked).model_version == "4"
        assert dict(await asked.trailing_metadata())["x-springtide-revision"] == "4"
        await call(
            channel,
            "ModelInfer",
            ModelInferRequest(model_name="m"),
            timeout=7,
            metadata=(("x-springtide-timeout", "1s"),),
        )

    played(double, scenario)
    first, second = double.heads
    assert "authorization: bearer t\r\n" in first
    assert "x-springtide-priority: low\r\n" in first
    assert "x-other" not in first
    assert 5.0 < float(first.partition("x-springtide-timeout: ")[2].split("\r\n")[0]) <= 7.1
    assert "x-springtide-timeout: 1s\r\n" in second


def test_a_refusal_has_its_code_and_says_when_to_come_again():
    double = HttpDouble(429, b'{"error":"the queue is full"}', "retry-after: 3\r\n")

    async def scenario(channel):
        error = await failure(call(channel, "ModelInfer", ModelInferRequest(model_name="m", inputs=[NUMBERS])))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "3000"

    played(double, scenario)


def test_what_is_not_sent_on_is_refused_here():
    async def scenario(channel):
        error = await failure(call(channel, "ModelInfer", ModelInferRequest()))
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the call names no model")
        unknown = await failure(call(channel, "SystemSharedMemoryStatus", request_class("ServerLive")()))
        assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "SystemSharedMemoryStatus is not answered here" in unknown.details()

    double = HttpDouble()
    played(double, scenario)
    assert double.heads == []


@pytest.mark.parametrize(("status", "found"), [(200, "SERVING"), (503, "NOT_SERVING")])
def test_health_is_readiness(status, found):
    double = HttpDouble(status, b'{"ready":false}')

    async def scenario(channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE, "m"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == found

    played(double, scenario)
    assert [head.split()[1] for head in double.heads] == [*["/v2/health/ready"] * 2, "/v2/models/m/ready"]


def test_a_watch_of_an_unknown_model_says_so():
    async def scenario(channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="m"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()

    played(HttpDouble(404, b'{"error":"there is no service"}'), scenario)
