"""HTTP to one API server: persistent connections, whole and streamed answers, proxies and certificates.

A control plane makes several calls for each pod that it starts, so its own CPU time per call is the bottleneck.
Answers are not compressed: the server and its control plane are close to each other, and compression would cost both
CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import ssl
import urllib.request
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from springtide.backends.kubernetes.client.errors import Unreachable

CONNECT_TIMEOUT_S = 5.0
# API servers and their proxies close idle connections; this side closes them earlier.
IDLE_S = 30.0
# At close: how often, and with what pause in seconds, remaining connections are aborted.
END_TURNS, END_TURN_S = 50, 0.01
# A connection whose other end vanished without closing it is detected within half a minute.
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
        ]
        if hasattr(socket, "TCP_USER_TIMEOUT")
        else []
    ),
]

# Larger bodies are written in pieces.
_WHOLE_BODY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
_TROUBLES = (aiohttp.ClientError, OSError, ValueError)


class Reply(NamedTuple):
    """A complete answer. Header names are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream:
    """A streamed answer. Header names are case-insensitive."""

    def __init__(self, response: aiohttp.ClientResponse, server: str) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._server = server

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of its body, as it arrives. Raises Unreachable."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except _TROUBLES as error:
            raise unreachable(self._server, error) from error


class Wire:
    """HTTP connections to one API server, for one event loop.

    `context` is for servers at https, `server_name` what the server's certificate is for where that is not its address,
    `proxy` the URL of one in between. `headers` go with every call.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        *,
        proxy: str | None = None,
        server_name: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._server = server
        self._context = context
        self._proxy = proxy
        self._options: dict[str, Any] = {"server_hostname": server_name} if server_name else {}
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._retired: aiohttp.ClientSession | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    async def send(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, silence_s: float
    ) -> Reply:
        """Ask, and read the answer whole. `target` is a path with its query, percent-encoded.

        Raises Unreachable: no answer, or nothing was heard for `silence_s`.
        """
        try:
            async with self._request(method, target, headers, body, silence_s) as response:
                return Reply(response.status, response.headers, await response.read())
        except _TROUBLES as error:
            raise unreachable(self._server, error) from error

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, silence_s: float | None
    ) -> AsyncGenerator[Stream]:
        """Ask as `send` does, and read the answer as it comes; `silence_s` None is for ever."""
        try:
            response = await self._request(method, target, headers, body, silence_s)
        except _TROUBLES as error:
            raise unreachable(self._server, error) from error
        try:
            yield Stream(response, self._server)
        finally:
            # A stream that was not read to its end closes its connection.
            response.close()

    async def renew(self) -> None:
        """Use new connections, which authenticate anew, for further calls. Open streams are read to their end."""
        if self._retired is not None:
            await self._retired.close()
        self._retired, self._session = self._session, None

    async def close(self) -> None:
        for session in (self._session, self._retired):
            if session is not None:
                await session.close()
        self._session = self._retired = None
        await self._let_all_end()

    async def _let_all_end(self) -> None:
        """Wait until every connection is gone: a loop that ends before them complains.

        One that was given up within its handshake would wait for the other end to say goodbye, which may be no more.
        """
        left = END_TURNS
        while left and (there := [each for each in self._sockets if each.fileno() >= 0]):
            left -= 1
            for each in there:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(END_TURN_S)

    def _request(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, silence_s: float | None
    ) -> Any:
        if self._session is None:
            self._session = self._make_session()
        data = io.BytesIO(body) if body is not None and len(body) > _WHOLE_BODY_BYTES else body
        return self._session.request(
            method,
            URL(self._server + target, encoded=True),
            headers=headers,
            data=data,
            proxy=self._proxy,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s),
            **self._options,
        )

    def _make_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=IDLE_S,
                ssl=self._context if self._context is not None else True,
                socket_factory=self._make_socket,
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),
            read_bufsize=_CHUNK_BYTES,
            trust_env=False,
        )

    def _make_socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family=family, type=kind, proto=protocol)
        made.setblocking(False)
        for option in SOCKET_OPTIONS:
            made.setsockopt(*option)
        self._sockets.add(made)
        return made


def unreachable(server: str, error: BaseException) -> Unreachable:
    return Unreachable(f"the API server {server} does not answer: {str(error) or type(error).__name__}")


def proxy_for(server: str) -> str | None:
    """The proxy for an address in the environment (HTTPS_PROXY, NO_PROXY), if any."""
    url = urlsplit(server)
    if urllib.request.proxy_bypass(url.hostname or ""):
        return None
    return urllib.request.getproxies().get(url.scheme)
