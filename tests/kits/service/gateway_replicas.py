"""Replicas on sockets that answer the gateway, and the gateway before them."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette

from springtide.core.wire.workers import FrameDecoder
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId
from springtide.service.api.connections import SOCKET_SETTINGS, connection_class
from springtide.service.gateway.application import Gateway, ReplicaRoute, ServiceRoute
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    BatchOutcome,
    Draining,
    Ping,
    Pong,
    Predict,
    Question,
    Welcome,
    encode_frame,
)
from springtide.serving.schema import derive_schema


class Doubler:
    """Doubles numbers."""

    def predict(self, values: list[int], times: int = 2) -> list[int]:
        raise NotImplementedError


class FakeReplica:
    """Named double: answers batches on its own socket; `hold` keeps answers back, `die_on` breaks the connection."""

    def __init__(self, directory, name="r1", served=Doubler):
        self.path = str(directory / f"{name}.sock")
        self.replica_id = ReplicaId(name)
        self.schema = derive_schema(served)
        self.batches = []
        self.hold = None
        self.is_draining = False
        self.deaths = 0
        self.arrived = asyncio.Event()
        self.writers = set()

    def route(self, is_ready=True):
        return ReplicaRoute(
            replica_id=self.replica_id, address=f"unix://{self.path}" if is_ready else "", is_ready=is_ready
        )

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self.serve, self.path)
        return self

    async def __aexit__(self, *args):
        if self.hold is not None:
            self.hold.set()
        self.server.close()
        for writer in list(self.writers):
            writer.close()
        for _ in range(5):
            await asyncio.sleep(0)

    async def serve(self, reader, writer):
        self.writers.add(writer)
        frames: FrameDecoder[Question] = FrameDecoder(Question, MAX_FRAME_BYTES)
        writer.write(encode_frame(Welcome(replica_id=self.replica_id, schema=self.schema)))
        try:
            while data := await reader.read(65536):
                for question in frames.feed(data):
                    await self.take(question, writer)
        except ConnectionError:
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def take(self, question, writer):
        if isinstance(question, Ping):
            writer.write(encode_frame(Pong(nonce=question.nonce, is_draining=self.is_draining)))
            return
        assert isinstance(question, Predict)
        if self.is_draining:
            writer.write(encode_frame(Draining(batch_id=question.batch_id)))
            return
        calls = [json.loads(call) for call in question.calls]
        self.batches.append(calls)
        self.arrived.set()
        if self.deaths > 0:
            self.deaths -= 1
            writer.transport.abort()
            return
        if self.hold is not None:
            await self.hold.wait()
        outcomes = tuple(self.outcome(call) for call in calls)
        writer.write(encode_frame(Answered(batch_id=question.batch_id, outcomes=outcomes, predict_s=0.003)))

    def outcome(self, call):
        if "values" not in call:
            return BatchOutcome("ok", json.dumps(call["features"]).encode())
        if not all(type(value) is int for value in call["values"]):
            return BatchOutcome("invalid", b"Expected `int`")
        if 666 in call["values"]:
            return BatchOutcome("error", b"RuntimeError: boom")
        return BatchOutcome("ok", json.dumps([value * call.get("times", 2) for value in call["values"]]).encode())


def make_service(name="double", **changes):
    settings = {
        "batch_wait_s": 0.002,
        "max_batch_size": 8,
        "max_queue": 64,
        "entrypoint": Entrypoint(source_path="x.py"),
        **changes,
    }
    return InferenceService(service_id=WorkloadId(f"{name}-1"), name=name, **settings)


class Harness:
    def __init__(self, gateway, app, client, events, registry, port):
        self.gateway, self.app, self.client = gateway, app, client
        self.events, self.registry, self.port = events, registry, port

    async def call(self, values, name="double", timeout=None, headers=None, **more):
        headers = {**(headers or {}), **({"X-Springtide-Timeout": timeout} if timeout else {})}
        return await self.client.post(f"/f/{name}", json={"values": values, **more}, headers=headers)

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def serve(self, *replicas, **changes):
        service = changes.pop("service", None) or make_service(**changes)
        self.gateway.update([ServiceRoute(service=service, replicas=tuple(replica.route() for replica in replicas))])
        await self.until(lambda: service.name in self.gateway._queues)
        await self.until(lambda: self.gateway._queues[service.name].num_ready == len(replicas))
        return service

    def metrics(self):
        return generate_latest(self.registry).decode()


@asynccontextmanager
async def running(server_settings=None, **settings):
    events, registry = [], CollectorRegistry()
    gateway = Gateway(events.append, registry=registry, **settings)
    app = Starlette(routes=gateway.routes())
    config = uvicorn.Config(
        app,
        http=connection_class(1024),
        log_level="warning",
        lifespan="off",
        access_log=False,
        **SOCKET_SETTINGS,
        **(server_settings or {}),
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await gateway.startup()
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield Harness(gateway, app, client, events, registry, port)
        finally:
            await gateway.shutdown()
            server.should_exit = True
            await task


def run(scenario, **settings):
    async def main():
        async with running(**settings) as harness:
            await scenario(harness)

    asyncio.run(main())
