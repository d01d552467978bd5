"""Replicas on sockets that answer the gateway, and the gateway before them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette

from springtide.core.workload import Entrypoint, InferenceService, WorkloadId
from springtide.service.gateway.application import Gateway, ServiceRoute


class Doubler:
    """Doubles numbers."""

    def predict(self, values: list[int], times: int = 2) -> list[int]:
        raise NotImplementedError


def make_service(name="double", **changes):
    settings = {"batch_wait_s": 0.002, "max_batch_size": 8, "max_queue": 64, **changes}
    return InferenceService(
        service_id=WorkloadId(f"{name}-1"), name=name, entrypoint=Entrypoint(source_path="x.py"), **settings
    )


class Harness:
    def __init__(self, gateway, client, events, registry, port):
        self.gateway, self.client, self.events, self.registry, self.port = gateway, client, events, registry, port

    async def call(self, values, name="double", timeout=None, **more):
        headers = {"X-Springtide-Timeout": timeout} if timeout else {}
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
async def running():
    events, registry = [], CollectorRegistry()
    gateway = Gateway(events.append, registry=registry)
    app = Starlette(routes=gateway.routes())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server.install_signal_handlers = lambda: None
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await gateway.startup()
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield Harness(gateway, client, events, registry, port)
        finally:
            await gateway.shutdown()
            server.should_exit = True
            await task


def run(scenario):
    async def main():
        async with running() as harness:
            await scenario(harness)

    asyncio.run(main())
