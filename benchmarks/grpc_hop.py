"""What a call by gRPC costs beside the same call by HTTP: CPU of the gRPC process and of the platform, and HTTP's p99.

springtide up --state DIR --grpc-port 0; python benchmarks/grpc_hop.py --state DIR [--rounds 5] [--requests 400]

The service doubles 32 numbers of FP32. Each round makes as many calls by HTTP (binary tensors, kept connections) and by
gRPC, in turn, with 1 and with 16 at a time. Then HTTP is called by one client alone and beside 8 callers by gRPC, in
turn. CPU is from the kernel's accounts in nanoseconds (schedstat, all threads), less what the processes use when idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import msgspec
import numpy as np

from springtide.service.grpc.gateway_client import GatewayClient
from springtide.service.grpc.messages import SERVICE, ModelInferRequest, ModelInferResponse
from springtide.service.grpc.translation import infer_call, infer_response

_NAME = "grpc-hop"
_IDLE_S = 5.0
_BESIDE = 8
_SOURCE = """
class Doubles:
    def predict(self, x: list[float]) -> list[float]:
        return [2 * value for value in x]
"""
_NUMBERS = np.arange(32, dtype=np.float32)
_INPUT = {"name": "x", "datatype": "FP32", "shape": [32]}
_REQUEST = ModelInferRequest(model_name=_NAME, inputs=[_INPUT], raw_input_contents=[_NUMBERS.tobytes()])
_Call = Callable[[], Awaitable[Any]]


def main() -> None:
    """Measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="In each round, of each kind.")
    asked = parser.parse_args()
    platform = msgspec.json.decode((asked.state / "platform.json").read_bytes())
    token = (asked.state / "token").read_text().strip()
    source = {"filename": "doubles.py", "text": _SOURCE, "object_name": "Doubles", "kind": "class"}
    with httpx2.Client(base_url=platform["url"], headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        body = {"source": source, "options": {"min_replicas": 1, "max_replicas": 1, "max_batch_size": 1}}
        client.put(f"/v1/services/{_NAME}", json=body).raise_for_status()
        try:
            client.post(f"/f/{_NAME}", json={"x": [1.0]}, headers={"X-Springtide-Timeout": "60s"}).raise_for_status()
            found = asyncio.run(_measured(platform, token, asked.rounds, asked.requests))
        finally:
            client.delete(f"/v1/services/{_NAME}")
    print(msgspec.json.encode(found).decode())


async def _measured(platform: dict[str, Any], token: str, num_rounds: int, num_requests: int) -> dict[str, Any]:
    pids = {"platform": platform["pid"], "grpc": _grpc_pid(platform["pid"])}
    idle = {name: -_cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(_IDLE_S)
    idle = {name: (idle[name] + _cpu_s(pid)) / _IDLE_S for name, pid in pids.items()}
    http = GatewayClient(platform["url"])
    call, headers = infer_call(_REQUEST), [(b"authorization", b"Bearer " + token.encode())]
    async with grpc.aio.insecure_channel(platform["grpc"]) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=ModelInferResponse.FromString,
        )

        async def by_http() -> None:
            _check(infer_response(await http.ask(call, headers)))

        async def by_grpc() -> None:
            _check(await infer(_REQUEST, metadata=(("authorization", f"Bearer {token}"),)))

        ways: dict[str, _Call] = {"http": by_http, "grpc": by_grpc}
        rows = [await _costs(ways, number, num_rounds, num_requests, pids, idle) for number in (1, 16)]
        beside = await _beside(ways, num_rounds, num_requests)
    http.close()
    return {"load_1m": os.getloadavg()[0], "idle_percent": {n: round(100 * s, 2) for n, s in idle.items()}} | {
        "rows": rows,
        "http_ms_alone_and_beside_grpc": beside,
    }


async def _costs(
    ways: dict[str, _Call],
    num_clients: int,
    num_rounds: int,
    num_requests: int,
    pids: dict[str, int],
    idle: dict[str, float],
) -> dict[str, Any]:
    cpu_us: dict[str, dict[str, list[float]]] = {way: {name: [] for name in pids} for way in ways}
    latencies: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(num_rounds + 1):
        for way, call in ways.items():
            before, began_s = {name: _cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
            each = num_requests // num_clients
            found = await asyncio.gather(*(_repeated(call, each) for _ in range(num_clients)))
            took_s = time.perf_counter() - began_s
            if number:
                # The first round warms up.
                latencies[way] += [one for many in found for one in many]
                for name, pid in pids.items():
                    used_s = _cpu_s(pid) - before[name] - idle[name] * took_s
                    cpu_us[way][name].append(used_s / (each * num_clients) * 1e6)
    return {
        "clients": num_clients,
        "requests_of_each": len(latencies["http"]),
        "cpu_us": {way: {name: _spread(values) for name, values in of.items()} for way, of in cpu_us.items()},
        "ms": {way: _quantiles(found) for way, found in latencies.items()},
    }


async def _beside(ways: dict[str, _Call], num_rounds: int, num_requests: int) -> dict[str, Any]:
    """The latency of HTTP alone, beside callers by gRPC, and beside as many callers by HTTP, in turn."""
    latencies: dict[str, list[float]] = {"alone": [], "http": [], "grpc": []}
    for _ in range(num_rounds):
        for kind, found in latencies.items():
            others = [asyncio.create_task(_endless(ways[kind])) for _ in range(_BESIDE if kind in ways else 0)]
            found += await _repeated(ways["http"], num_requests)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    return {kind: _quantiles(found) for kind, found in latencies.items()}


async def _repeated(call: _Call, times: int) -> list[float]:
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        await call()
        found.append(time.perf_counter() - began_s)
    return found


async def _endless(call: _Call) -> None:
    while True:
        await call()


def _check(response: Any) -> None:
    if np.frombuffer(response.raw_output_contents[0]).tolist() != (2 * _NUMBERS).tolist():
        raise SystemExit(f"a wrong answer: {response}")


def _spread(values: list[float]) -> dict[str, int]:
    return {"mean": round(statistics.mean(values)), "min": round(min(values)), "max": round(max(values))}


def _quantiles(found: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(found, n=100)
    return {"p50": round(cuts[49] * 1e3, 2), "p99": round(cuts[98] * 1e3, 2)}


def _grpc_pid(platform_pid: int) -> int:
    for path in Path(f"/proc/{platform_pid}/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                if b"springtide.service.grpc" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    raise SystemExit("the platform has no gRPC process: start it with --grpc-port 0")


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()
