"""A proxy on the wire between the platform and a real API server, which does what networks and API servers do.

It delays, cuts connections, answers from the past (a listing taken earlier), keeps notifications back or loses them,
refuses with a status, and lets a write through without its answer. Clients reach it by plain HTTP on loopback; it
speaks to the server with the rights of the kubeconfig, or with the client's own token where it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import Unreachable
from springtide.backends.kubernetes.client.wire import Stream

# What each connection says for itself.
_HOP = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive", "user-agent"}


@dataclass
class Request:
    """One request of a client, as rules see it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch and self.path.rsplit("/", 1)[-1].endswith("s")

    def is_of(self, plural: str) -> bool:
        """Whether it is about objects of a kind, by its name in paths."""
        return plural in self.path.split("/")


Rule = Callable[[Request], bool]


@dataclass
class Rules:
    """What the proxy does to which requests. Replaced as a whole value by value; tests set them from their thread."""

    # Seconds before a request goes on, by the first rule that fits.
    delays: list[tuple[Rule, float]] = field(default_factory=list)
    # A request that fits is answered with a status, its body and headers, so many times.
    answers: list[list[Any]] = field(default_factory=list)
    # A request that fits goes through, and its answer does not: the connection is cut instead, so many times.
    lost_answers: list[list[Any]] = field(default_factory=list)
    # A notification that fits (request, type, object) never reaches the client.
    lost_events: list[Callable[[Request, str, dict[str, Any]], bool]] = field(default_factory=list)
    # Listings of paths as they were when they were frozen.
    frozen: dict[str, bytes] = field(default_factory=dict)
    # Whether notifications wait, for which requests.
    held: list[Rule] = field(default_factory=list)
    is_away: bool = False


class ApiProxy:
    """Use as a context manager; `url` is where clients reach it. Thread-safe."""

    def __init__(self, kubeconfig: Path) -> None:
        self.rules = Rules()
        self.requests: list[Request] = []
        self.num_lost_events = 0
        self._upstream = KubeApi.connect(kubeconfig)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="api-proxy", daemon=True)
        self._ready = threading.Event()
        self.port = 0

    def __enter__(self) -> ApiProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> KubeApi:
        """An API client that goes through here."""
        return KubeApi(self.url)

    # --- what tests order --------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End every connection, in the middle of whatever it carries."""
        done = threading.Event()

        def cut() -> None:
            for task in list(self._connections):
                task.cancel()
            self._loop.call_later(0.05, done.set)

        self._loop.call_soon_threadsafe(cut)
        assert done.wait(10)

    def go_away(self) -> None:
        """As a server that is stopped: connections break, new ones are ended at once."""
        self.rules.is_away = True
        self.cut()

    def come_back(self) -> None:
        self.rules.is_away = False

    def freeze(self, path: str, labels: str = "") -> None:
        """From now on listings of this path are what they are now (with their versions of now)."""
        query = f"?labelSelector={quote(labels)}" if labels else ""
        future = asyncio.run_coroutine_threadsafe(self._fetch(path + query), self._loop)
        self.rules.frozen[path] = future.result(10)

    def answer(
        self, rule: Rule, status: int, times: int = 1, reason: str = "", message: str = "", **headers: str
    ) -> None:
        """Answer requests that fit with a status instead of asking the server."""
        body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message or reason, "code": status}
        self.rules.answers.append([rule, times, status, json.dumps(body).encode(), headers])

    def lose_answer(self, rule: Rule, times: int = 1) -> None:
        """Let requests that fit through, and cut the connection instead of answering."""
        self.rules.lost_answers.append([rule, times])

    def count(self, rule: Rule) -> int:
        return sum(rule(request) for request in list(self.requests))

    def wait_for(self, rule: Rule, within_s: float = 10.0) -> None:
        """Wait until a request that fits has come."""
        until_s = time.monotonic() + within_s
        while not self.count(rule):
            assert time.monotonic() < until_s, "no such request came"
            time.sleep(0.01)

    # --- the wire ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._upstream.close()
        # Transports that were cut are closed by the loop's next turns.
        await asyncio.sleep(0.05)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.rules.is_away:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            while request := await self._read(reader):
                self.requests.append(request)
                await self._handle(request, writer)
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError, Unreachable):
            # Whatever ended it, the client sees a connection that broke.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        line = await reader.readline()
        if not line:
            return None
        method, target, _ = line.decode().split(" ", 2)
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, target, headers, body)

    async def _handle(self, request: Request, writer: asyncio.StreamWriter) -> None:
        for rule, delay_s in self.rules.delays:
            if rule(request):
                await asyncio.sleep(delay_s)
                break
        for answer in self.rules.answers:
            if answer[1] > 0 and answer[0](request):
                answer[1] -= 1
                await _send(writer, answer[2], answer[3], answer[4])
                return
        frozen = self.rules.frozen.get(request.path)
        if frozen is not None and request.is_list:
            await _send(writer, 200, frozen, {})
            return
        kept = {name: value for name, value in request.headers.items() if name not in _HOP}
        silence_s = None if request.is_watch or "follow" in request.query else 30.0
        wire = self._upstream.wire
        async with wire.open(request.method, request.target, kept, request.body or None, silence_s) as answer:
            if request.is_watch and answer.status == 200:
                await self._forward_watch(request, answer, writer)
                return
            body = b"".join([chunk async for chunk in answer.chunks()])
        for lost in self.rules.lost_answers:
            if lost[1] > 0 and lost[0](request):
                lost[1] -= 1
                raise ConnectionResetError
        after = answer.headers.get("retry-after")
        await _send(writer, answer.status, body, {"Retry-After": after} if after else {})

    async def _forward_watch(self, request: Request, answer: Stream, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        async for line in _lines(answer):
            while any(rule(request) for rule in self.rules.held):
                await asyncio.sleep(0.02)
            event = json.loads(line)
            if any(rule(request, event["type"], event["object"]) for rule in self.rules.lost_events):
                self.num_lost_events += 1
                continue
            data = line + b"\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _fetch(self, path: str) -> bytes:
        reply = await self._upstream.wire.send("GET", path, {}, None, 30.0)
        assert reply.status == 200, reply.body
        return reply.body


async def _lines(answer: Stream) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in answer.chunks():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str]) -> None:
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
