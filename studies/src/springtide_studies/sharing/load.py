"""An open-loop load for the bench of shared devices: moments drawn beforehand, sent whatever the answers, in a process
of its own (`python -m springtide_studies.sharing.load`)."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence

import msgspec

_MAX_HEAD_BYTES = 1 << 16


class Surge(msgspec.Struct, frozen=True, kw_only=True):
    """From `from_s` to `until_s` of the trial `factor` times as many requests come."""

    from_s: float
    until_s: float
    factor: float


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One service: its path, what is sent to it, and when (seconds after the start, ascending)."""

    path: str
    body: str
    moments: tuple[float, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process reads from its standard input. `starts_at_s` is on the machine's monotonic clock."""

    port: int
    token: str
    starts_at_s: float
    timeout_s: float
    targets: tuple[Target, ...]


class LoadReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request: when it was due, when it was sent, and when it was answered with which status (0: not in time).

    All moments count from the start; latency is from when it was due.
    """

    due_s: float
    sent_s: float
    answered_s: float
    status: int


def draw_moments(rate_per_s: float, duration_s: float, surges: Sequence[Surge], seed: int) -> tuple[float, ...]:
    """The arrivals of a Poisson process of this rate with these surges, by thinning one of the highest rate."""
    draw = random.Random(seed)
    highest = rate_per_s * max((surge.factor for surge in surges), default=1.0)
    moments: list[float] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(highest)) < duration_s:
        factor = max((surge.factor for surge in surges if surge.from_s <= at_s < surge.until_s), default=1.0)
        if draw.random() * highest < rate_per_s * factor:
            moments.append(at_s)
    return tuple(moments)


async def _ask(order: Order, target: Target, due_s: float, idle: list[_Connection]) -> LoadReply:
    sent_s = time.monotonic() - order.starts_at_s
    status = 0
    connection = _Connection(order.port)
    while idle:
        kept = idle.pop()
        # A server closes what was not used for some seconds: that is no failure of a request.
        if not kept.is_closed:
            connection = kept
            break
        kept.close()
    try:
        async with asyncio.timeout(max(0.0, order.timeout_s + due_s - sent_s)):
            status = await connection.post(target.path, target.body.encode(), order.token)
        idle.append(connection)
    except (OSError, ValueError, EOFError, TimeoutError, asyncio.LimitOverrunError):
        connection.close()
    answered_s = time.monotonic() - order.starts_at_s
    return LoadReply(due_s=due_s, sent_s=sent_s, answered_s=answered_s, status=status)


class _Connection:
    """One kept-alive HTTP/1.1 connection, opened when it is first used."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the server has hung up."""
        return self._streams is not None and (self._streams[0].at_eof() or self._streams[1].is_closing())

    async def post(self, path: str, body: bytes, token: str) -> int:
        """Send one request, read the whole answer and return its status."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if len(answer) > _MAX_HEAD_BYTES:
            raise ValueError("the head of the answer is too long")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        return int(answer.split(b" ", 2)[1])

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


async def send_all(order: Order) -> list[list[LoadReply]]:
    """Send every request when it is due; return the answers of each target in order."""
    idle: list[_Connection] = []

    async def serve(target: Target) -> list[LoadReply]:
        asked = []
        for due_s in target.moments:
            left_s = order.starts_at_s + due_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            asked.append(asyncio.create_task(_ask(order, target, due_s, idle)))
        return list(await asyncio.gather(*asked))

    answers = await asyncio.gather(*(serve(target) for target in order.targets))
    for connection in idle:
        connection.close()
    return list(answers)


def main() -> int:
    """Read an Order from standard input and write the answers to standard output."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(send_all(order))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
