"""An HTTP server on loopback that answers as a test says: what stands between the API client and a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Asked(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = {}
    # Whether the connection ends after this, with no word about how long the answer is.
    ends: bool = False


class ScriptedServer:
    """`answer` is asked for every request, on the server's thread; `asked` are all of them.

    `num_connections` is how many connections they came by.
    """

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        self.num_connections = 0
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                method, target, _ = line.decode().split(" ", 2)
                headers = {}
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, target, headers, body)
                self.asked.append(asked)
                answer = self._answer(asked)
                sent = dict(answer.headers)
                if not answer.ends:
                    sent["Content-Length"] = str(len(answer.body))
                head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
                writer.write(f"HTTP/1.1 {answer.status} X\r\n{head}\r\n".encode() + answer.body)
                await writer.drain()
                if answer.ends:
                    break
        writer.close()


@contextlib.contextmanager
def scripted(answer: Callable[[Asked], Answer]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer)
    server._thread.start()
    assert server._ready.wait(10)
    try:
        yield server
    finally:
        server._loop.call_soon_threadsafe(server._stop.set)
        server._thread.join(10)
