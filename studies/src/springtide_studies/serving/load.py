"""The load generator: one process that plays closed loops of requests, as many at a time as it has clients.

It reads one ServingPhase as a line of JSON on its standard input and answers with one ServingLoad on its standard
output, until its input ends. Each client keeps one connection and sends its next request when it has the answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec
import uvloop

# A client that has waited so long after the end of a phase counts as one error.
_ANSWER_TIMEOUT_S = 30.0


class ServingPhase(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to http://127.0.0.1:`port`, by `num_clients` at a time, for `seconds`."""

    port: int
    path: str
    body: str
    headers: dict[str, str]
    num_clients: int
    seconds: float


class ServingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a phase. Errors are statuses other than 200, lost connections, and answers unlike the first one."""

    num_requests: int
    num_errors: int
    first_error: str
    seconds: float
    p50_ms: float
    p99_ms: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        """Good answers a second."""
        return (self.num_requests - self.num_errors) / self.seconds


@dataclass(slots=True)
class _Counted:
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    expected: bytes | None = None


class _Client(asyncio.Protocol):
    """One connection. It ends with the first answer after `end_s`."""

    def __init__(self, request: bytes, end_s: float, counted: _Counted) -> None:
        self._request, self._end_s, self._counted = request, end_s, counted
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._sent_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._body, self._sent_s = b"", time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        now_s, counted = time.perf_counter(), self._counted
        counted.latencies_s.append(now_s - self._sent_s)
        status = self._parser.get_status_code()
        if counted.expected is None and status == 200:
            counted.expected = self._body
        if status != 200 or self._body != counted.expected:
            counted.errors.append(f"status {status}: {self._body[:200].decode(errors='replace')}")
        if now_s < self._end_s and self._parser.should_keep_alive():
            self._send()
        else:
            self._transport.close()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._counted.errors.append(f"connection lost: {exc}")
            self._counted.latencies_s.append(time.perf_counter() - self._sent_s)
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def play(phase: ServingPhase) -> ServingLoad:
    """Play one phase. Raises OSError where there is no server."""
    body = phase.body.encode()
    lines = {"Host": f"127.0.0.1:{phase.port}", "Content-Type": "application/json", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **phase.headers}.items())
    request = f"POST {phase.path} HTTP/1.1\r\n{head}\r\n".encode() + body
    counted, began_s, cpu_s = _Counted(), time.perf_counter(), time.process_time()
    await asyncio.gather(*(_repeat(phase, request, began_s + phase.seconds, counted) for _ in range(phase.num_clients)))
    seconds, sorted_s = time.perf_counter() - began_s, sorted(counted.latencies_s)
    return ServingLoad(
        num_requests=len(sorted_s),
        num_errors=len(counted.errors),
        first_error=counted.errors[0] if counted.errors else "",
        seconds=seconds,
        p50_ms=1e3 * sorted_s[len(sorted_s) // 2],
        p99_ms=1e3 * sorted_s[min(len(sorted_s) - 1, len(sorted_s) * 99 // 100)],
        client_cpu_s=time.process_time() - cpu_s,
    )


async def _repeat(phase: ServingPhase, request: bytes, end_s: float, counted: _Counted) -> None:
    """One client, which connects again where a server closes the connection after an answer."""
    loop = asyncio.get_running_loop()
    while True:
        transport, client = await loop.create_connection(
            lambda: _Client(request, end_s, counted), "127.0.0.1", phase.port
        )
        try:
            async with asyncio.timeout(phase.seconds + _ANSWER_TIMEOUT_S):
                await client.ended
        except TimeoutError:
            counted.errors.append(f"no answer within {_ANSWER_TIMEOUT_S:g} s")
            counted.latencies_s.append(_ANSWER_TIMEOUT_S)
        finally:
            transport.abort()
        if time.perf_counter() >= end_s:
            return


def main() -> None:
    """Play what comes on standard input."""
    for line in sys.stdin.buffer:
        found = uvloop.run(play(msgspec.json.decode(line, type=ServingPhase)))
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
