"""Measures the gateway on this machine: against the same replica called directly, and against bare HTTP.

Three real processes: this one (the client: raw asyncio sockets, no HTTP library), a uvicorn server with the gateway
and a route that answers a constant, and a replica started by the runtime's entry point.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from springtide.core.errors import BackendError
from springtide.core.wire.workers import Acknowledge, FrameDecoder, Hello, Ready, Report, Stop, WorkerSpec
from springtide.core.wire.workers import encode_frame as encode_order
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId
from springtide.service.gateway.application import Gateway, ReplicaRoute, ServiceRoute
from springtide.serving.frames import MAX_FRAME_BYTES, Answered, Predict, Reply, Welcome, encode_frame

_NAME = "bench"
_SOURCE = '''
class Sums:
    """Adds up rows of numbers."""

    def predict(self, rows: list[list[float]]) -> list[float]:
        return [sum(row) for row in rows]
'''
_ROW = [index / 32 for index in range(32)]
_CALL = msgspec.json.encode({"rows": [_ROW]})
_EXPECTED = msgspec.json.encode([sum(_ROW)])
_CONSTANT = b'{"outputs":' + _EXPECTED + b"}"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
# A guard against regressions: queueing, checks, batching and metrics take time too.
_MOST_OVER_PARTS = 3.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_gateway_bench(
    *, num_rounds: int = 8, num_requests: int = 400, client_counts: Sequence[int] = (1, 16)
) -> dict[str, Any]:
    """Measure and return {"bench", "machine", "rows", "criterion", "passed"}.

    Each of `num_rounds` rounds sends `num_requests` requests directly, through the gateway and to the constant route,
    in turn, once with each of `client_counts` at a time; 1 and 16 must be among them. `ours` is the gateway, `baseline`
    the direct call, `bound` the constant. Raises BackendError if a process does not start or an answer is wrong.
    """
    load_before = os.getloadavg()[0]
    rows = asyncio.run(_measure_all(num_rounds, num_requests, client_counts))
    is_within = {row["case"]: row["ours"] <= _MOST_OVER_PARTS * (row["baseline"] + row["bound"]) for row in rows}
    return {
        "bench": "gateway",
        "machine": {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "load_1m_before": round(load_before, 2),
            "client": "raw asyncio sockets in a process of its own",
            "requests_per_case": num_rounds * num_requests,
        },
        "rows": rows,
        "criterion": (
            f"alone a request takes at most {_MOST_OVER_PARTS:.0f} times as long as its parts, the direct call and the "
            f"bare HTTP exchange; 16 at a time it costs at most {_MOST_OVER_PARTS:.0f} times their CPU"
        ),
        "passed": is_within["c=1 latency p50"] and is_within["c=16 CPU per request"],
    }


async def _measure_all(num_rounds: int, num_requests: int, client_counts: Sequence[int]) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-bench-")))
        replica_pid, address = await stack.enter_async_context(_replica(directory))
        server_pid, port = await stack.enter_async_context(_server(address))
        direct = await stack.enter_async_context(_direct(address))
        rows: list[dict[str, Any]] = []
        for concurrency in client_counts:
            clients = [await stack.enter_async_context(_http(port)) for _ in range(concurrency)]
            rows += await _measure(concurrency, num_rounds, num_requests, direct, clients, (server_pid, replica_pid))
        return sorted(rows, key=lambda row: (row["unit"] != "us", "CPU" in row["case"], row["case"]))


_Send = Callable[[], Awaitable[None]]


class _Phase:
    """The samples of one way to send requests."""

    def __init__(self, senders: list[_Send], pids: tuple[int, ...]) -> None:
        self._senders = senders
        self._pids = pids
        self.latencies_s: list[float] = []
        self.cpu_s = 0.0
        self.wall_s = 0.0

    async def run(self, num_requests: int) -> None:
        """Send that many requests, as many at a time as there are senders."""
        each = math.ceil(num_requests / len(self._senders))
        cpu_s, started_s = _cpu_s(self._pids), time.perf_counter()
        await asyncio.gather(*(self._repeat(send, each) for send in self._senders))
        self.wall_s += time.perf_counter() - started_s
        self.cpu_s += _cpu_s(self._pids) - cpu_s

    async def _repeat(self, send: _Send, times: int) -> None:
        for _ in range(times):
            started_s = time.perf_counter()
            await send()
            self.latencies_s.append(time.perf_counter() - started_s)

    @property
    def p50_us(self) -> float:
        return statistics.median(self.latencies_s) * 1e6

    @property
    def cpu_us(self) -> float:
        """CPU time per request of the serving processes, without the client's."""
        return self.cpu_s / len(self.latencies_s) * 1e6

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return len(self.latencies_s) / self.wall_s


async def _measure(
    concurrency: int,
    num_rounds: int,
    num_requests: int,
    direct: _Direct,
    clients: list[_Http],
    pids: tuple[int, int],
) -> list[dict[str, Any]]:
    server_pid, replica_pid = pids
    baseline = _Phase([direct.call] * concurrency, (replica_pid,))
    ours = _Phase([client.call for client in clients], pids)
    constant = _Phase([client.constant for client in clients], (server_pid,))
    phases = (baseline, ours, constant)
    warm = [_Phase(phase._senders, phase._pids) for phase in phases]
    for phase in warm:
        await phase.run(num_requests // 4)
    for _ in range(num_rounds):
        for phase in phases:
            await phase.run(num_requests)
    case = f"c={concurrency}"
    return [
        _row(f"{case} latency p50", "us", ours.p50_us, baseline.p50_us, constant.p50_us),
        _row(f"{case} CPU per request", "us", ours.cpu_us, baseline.cpu_us, constant.cpu_us),
        _row(f"{case} throughput", "1/s", ours.per_s, baseline.per_s, constant.per_s),
    ]


def _row(case: str, unit: str, ours: float, baseline: float, bound: float) -> dict[str, Any]:
    return {
        "case": case,
        "ours": round(ours, 1),
        "baseline": round(baseline, 1),
        "baseline_name": "the same replica, called directly over its socket",
        # CPU time is counted in steps of 10 ms: a very short run may measure none and has no ratio.
        "ratio": round(ours / baseline, 3) if baseline else None,
        "bound": round(bound, 1),
        "bound_name": "the same HTTP server answering a constant",
        "unit": unit,
    }


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return the CPU time that the processes have used, all threads, user and system; in steps of 10 ms."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


@asynccontextmanager
async def _replica(directory: Path) -> Any:
    """Start a replica by the runtime's entry point, act as its control plane, and yield its pid and address."""
    source = directory / "sums.py"
    source.write_text(_SOURCE)
    control = directory / "control.sock"
    service = _service(str(source))
    spec = WorkerSpec(
        workload=service,
        replica_id=ReplicaId("bench-r1"),
        generation=1,
        control_address=f"unix://{control}",
        token="bench",
        work_dir=str(directory / "work"),
        log_path="",
    )
    (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    writers: list[asyncio.StreamWriter] = []

    async def control_plane(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        decoder: FrameDecoder[Report] = FrameDecoder(Report)
        while data := await reader.read(65536):
            for report in decoder.feed(data):
                if report.seq and not isinstance(report, Hello):
                    writer.write(encode_order(Acknowledge(seq=report.seq)))
                if isinstance(report, Ready) and not ready.done():
                    ready.set_result(report.address)
        writer.close()

    server = await asyncio.start_unix_server(control_plane, str(control))
    command = [sys.executable, "-m", "springtide.runtime", "worker", "--spec", str(directory / "spec.json")]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process.pid, await _first(ready, process, "the replica")
        for writer in writers:
            writer.write(encode_order(Stop(grace_s=_STOP_TIMEOUT_S)))
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    finally:
        await _end(process)
        server.close()
        for writer in writers:
            writer.close()


@asynccontextmanager
async def _server(address: str) -> Any:
    """Start the HTTP server process and yield its pid and port."""
    command = [sys.executable, "-m", "springtide.service.gateway.bench", "--address", address]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = asyncio.get_running_loop().create_task(process.stdout.readline())
        yield process.pid, int(await _first(line, process, "the gateway"))
    finally:
        await _end(process)


async def _first(ready: asyncio.Future[Any], process: asyncio.subprocess.Process, what: str) -> Any:
    """Return the first output of the process. Raises BackendError if it ends before or stays silent."""
    ended = asyncio.get_running_loop().create_task(process.wait())
    done, _ = await asyncio.wait({ready, ended}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if ready not in done or not ready.result():
        ready.cancel()
        raise BackendError(f"{what} did not start (exit code {process.returncode}); its output says why")
    return ready.result()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _direct(address: str) -> Any:
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix://"))
    direct = _Direct(reader, writer)
    try:
        yield direct
    finally:
        await direct.close()


class _Direct:
    """The baseline: calls the replica over its own socket, many at a time on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Answered]] = {}
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def call(self) -> None:
        """Send one call and check its answer."""
        self._next_id += 1
        batch_id = self._next_id
        answer = self._waiting[batch_id] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_frame(Predict(batch_id=batch_id, calls=(_CALL,))))
        outcome = (await answer).outcomes[0]
        if outcome.body != _EXPECTED:
            raise BackendError(f"the replica answered {outcome.body[:200]!r}")

    async def _read(self) -> None:
        frames: FrameDecoder[Reply] = FrameDecoder(Reply, MAX_FRAME_BYTES)
        while data := await self._reader.read(1 << 16):
            for reply in frames.feed(data):
                if isinstance(reply, Answered):
                    self._waiting.pop(reply.batch_id).set_result(reply)
                else:
                    assert isinstance(reply, Welcome)

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def _http(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield _Http(reader, writer)
    finally:
        writer.close()


class _Http:
    """One kept-alive HTTP/1.1 connection that sends prepared bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def call(self) -> None:
        await self._exchange(f"/f/{_NAME}")

    async def constant(self) -> None:
        await self._exchange("/constant")

    async def _exchange(self, path: str) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: b\r\nContent-Length: {len(_CALL)}\r\n\r\n"
        self._writer.write(head.encode() + _CALL)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await self._reader.readexactly(length)
        if body != _CONSTANT:
            raise BackendError(f"{path} answered {body[:200]!r}")


def _service(source_path: str) -> InferenceService:
    return InferenceService(
        service_id=WorkloadId("bench-1"),
        name=_NAME,
        entrypoint=Entrypoint(source_path=source_path, object_name="Sums", kind="class"),
        max_batch_size=16,
        min_replicas=1,
    )


class _Constant:
    """The bound: reads the body and answers what the gateway would, as a raw ASGI application like the gateway's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_CONSTANT)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _CONSTANT})


async def _serve(address: str) -> None:
    """The server process: gateway and constant route in one application. Writes its port once it can answer."""
    gateway = Gateway(lambda event: None)
    app = Starlette(routes=[*gateway.routes(), Route("/constant", _Constant())])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    await gateway.startup()
    replica = ReplicaRoute(replica_id=ReplicaId("bench-r1"), address=address, is_ready=True)
    gateway.update([ServiceRoute(service=_service(""), replicas=(replica,))])
    serving = asyncio.get_running_loop().create_task(server.serve())
    while not (server.started and gateway.num_ready(_NAME)) and not serving.done():
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{server.servers[0].sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await serving
    await gateway.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="the replica's socket")
    asyncio.run(_serve(parser.parse_args().address))
