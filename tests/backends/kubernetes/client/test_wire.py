"""The way to an API server: connections that are kept, long bodies, answers as they come, proofs that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kits.kubernetes.scripted_server import Answer, Asked, scripted
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.auth import Fixed, TokenFile
from springtide.backends.kubernetes.client.errors import NotAuthenticated, Unreachable
from springtide.backends.kubernetes.client.kinds import CONFIG_MAP, POD, Key
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.client.wire import Wire


def with_wire(url: str, task: Callable[[Wire], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        wire = Wire(url, None, **options)
        try:
            return await task(wire)
        finally:
            await wire.close()

    return asyncio.run(run())


async def get(wire: Wire, target: str = "/version") -> int:
    return (await wire.send("GET", target, {}, None, 5.0)).status


def test_calls_share_a_connection_until_it_has_to_be_another_one() -> None:
    async def calls(wire: Wire) -> list[int]:
        for _ in range(3):
            await get(wire)
        before = server.num_connections
        await wire.renew()
        await get(wire)
        return [before, server.num_connections]

    with scripted(lambda asked: Answer()) as server:
        assert with_wire(server.url, calls) == [1, 2]


def test_as_many_connections_as_calls_at_once() -> None:
    async def calls(wire: Wire) -> None:
        await asyncio.gather(*(get(wire) for _ in range(40)))

    with scripted(lambda asked: Answer()) as server:
        with_wire(server.url, calls)
        assert len(server.asked) == 40
        assert server.num_connections > 1


def test_nobody_asks_for_a_compressed_answer_and_every_call_bears_the_headers() -> None:
    with scripted(lambda asked: Answer(headers={"Retry-After": "7"})) as server:

        async def ask(wire: Wire) -> str:
            reply = await wire.send("GET", "/a%20b?x=%2C", {"Accept": "text/x"}, None, 5.0)
            return reply.headers["retry-after"]

        assert with_wire(server.url, ask, headers={"User-Agent": "me"}) == "7"
    (asked,) = server.asked
    assert asked.target == "/a%20b?x=%2C"
    assert (asked.headers["user-agent"], asked.headers["accept"]) == ("me", "text/x")
    assert "accept-encoding" not in asked.headers


@pytest.mark.parametrize("size", [0, 10, (1 << 20) + 1])
def test_a_body_arrives_whole(size: int) -> None:
    body = b"x" * size
    with scripted(lambda asked: Answer(body=str(len(asked.body)).encode())) as server:

        async def send(wire: Wire) -> bytes:
            return (await wire.send("POST", "/", {"Content-Type": "application/json"}, body, 5.0)).body

        assert with_wire(server.url, send) == str(size).encode()
        assert server.asked[0].body == body


def test_a_redirection_is_an_answer_like_any_other() -> None:
    with scripted(lambda asked: Answer(302, headers={"Location": "http://127.0.0.1:1/"})) as server:
        assert with_wire(server.url, get) == 302


@pytest.mark.parametrize("answer", [b"half", b""])
def test_an_answer_that_breaks_off(answer: bytes) -> None:
    with scripted(lambda asked: Answer(body=answer, headers={"Content-Length": "100"}, ends=True)) as server:
        with pytest.raises(Unreachable, match=server.url):
            with_wire(server.url, get)

        async def stream(wire: Wire) -> None:
            async with wire.open("GET", "/", {}, None, 5.0) as opened:
                async for _ in opened.chunks():
                    pass

        with pytest.raises(Unreachable, match=server.url):
            with_wire(server.url, stream)


def test_who_does_not_speak_http_is_told_of() -> None:
    async def live() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        wire = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        try:
            with pytest.raises(Unreachable):
                await get(wire)
        finally:
            await wire.close()
            server.close()

    asyncio.run(live())


def test_a_stream_that_is_left_early_takes_its_connection_along() -> None:
    lines = b"".join(b"line %d\n" % number for number in range(1000))
    with scripted(lambda asked: Answer(body=lines)) as server:

        async def read(wire: Wire) -> None:
            async with wire.open("GET", "/", {}, None, None) as stream:
                async for _ in stream.chunks():
                    break
            # What came after it must not be taken for the answer to this.
            assert (await wire.send("GET", "/", {}, None, 5.0)).body == lines

        with_wire(server.url, read)


def with_api(url: str, auth: Any, task: Callable[[KubeApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        api = KubeApi(url, auth=auth)
        try:
            return await task(api)
        finally:
            await api.close()

    return asyncio.run(run())


def known_as(bearer: str, answer: Answer) -> Callable[[Asked], Answer]:
    refusal = Answer(401, json.dumps({"code": 401, "message": "who are you"}).encode())
    return lambda asked: answer if asked.headers.get("authorization") == bearer else refusal


async def watch(api: KubeApi) -> list[str]:
    return [event.type async for event in api.watch(POD, "ml", resource_version="4")]


def test_a_watch_that_is_refused_proves_itself_anew_once(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    auth = TokenFile(token)
    asyncio.run(auth.said())
    token.write_text("new")
    line = b'{"type": "ADDED", "object": {"metadata": {"name": "p", "resourceVersion": "5"}}}\n'
    with scripted(known_as("Bearer new", Answer(body=line))) as server:
        assert with_api(server.url, auth, watch) == ["ADDED"]
        assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer old", "Bearer new"]
    with scripted(known_as("Bearer newer", Answer(body=line))) as server:
        with pytest.raises(NotAuthenticated, match="who are you"):
            with_api(server.url, auth, watch)
        assert len(server.asked) == 1


def test_what_stays_as_it_is_is_said_once() -> None:
    with scripted(known_as("Basic eDp5", Answer())) as server:
        with_api(server.url, Fixed("Basic eDp5"), lambda api: api.get(POD, "p", "ml"))
        with pytest.raises(NotAuthenticated):
            with_api(server.url, Fixed("Basic other"), lambda api: api.get(POD, "p", "ml"))
        assert len(server.asked) == 2


def test_writes_that_were_taken_are_told_of_by_kind() -> None:
    noted: list[str] = []

    async def calls(api: KubeApi) -> None:
        api.on_write = lambda kind, took_s: noted.append(kind) if took_s > 0.0 else None
        await api.get(POD, "p", "ml")
        await api.create(POD, {"metadata": {"name": "p"}}, "ml")
        await api.bind(Key("ml", "p"), "n1")
        await api.patch(POD, "p", {}, "ml", subresource="status")
        await api.patch(POD, "p", {}, "ml")
        assert not await api.delete(CONFIG_MAP, "gone", "ml")

    gone = Answer(404, b'{"code": 404}')
    with scripted(lambda asked: gone if asked.method == "DELETE" else Answer()) as server:
        with_api(server.url, None, calls)
    assert noted == ["POST pods", "POST binding", "PATCH status", "PATCH"]


def make_certificate(folder: Path) -> Path:
    """A certificate of its own making for 127.0.0.1, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    texts = (
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
        made.public_bytes(serialization.Encoding.PEM),
    )
    path = folder / "server.pem"
    path.write_bytes(b"".join(texts))
    return path


@contextlib.contextmanager
def petrified(certificate: Path) -> Iterator[str]:
    """The URL of a server that begins to answer and then does nothing more, as one that is stopped: no goodbye either.

    Whoever comes first gets the beginning of a watch; with everybody after that it does not even shake hands.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    kept: list[socket.socket] = []
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    line = b'{"type": "ADDED", "object": {"metadata": {"name": "p", "resourceVersion": "5"}}}\n'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def begin() -> None:
            with contextlib.suppress(OSError):
                kept.append(context.wrap_socket(server.accept()[0], server_side=True))
                kept[0].recv(1 << 16)
                kept[0].sendall(head + b"%x\r\n%s\r\n" % (len(line), line))

        thread = threading.Thread(target=begin)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join(10.0)
            for each in kept:
                each.close()


@pytest.mark.slow
def test_what_ends_beside_a_server_that_is_stopped_leaves_nothing_open(tmp_path: Path) -> None:
    """Whatever is still open when its loop ends complains from the collector of garbage, which pytest takes amiss."""
    certificate = make_certificate(tmp_path)
    apis: list[KubeApi] = []
    begun = threading.Event()

    async def follow(api: KubeApi) -> None:
        async for _ in api.watch(POD, resource_version="4"):
            begun.set()

    with petrified(certificate) as url:
        context = ssl.create_default_context(cafile=certificate)

        def connect() -> KubeApi:
            apis.append(KubeApi(url, context=context))
            return apis[0]

        with ApiThread(connect) as thread:
            thread.run(follow)
            assert begun.wait(10.0)
            thread.run(lambda api: api.version())
            until_s = time.monotonic() + 10.0
            while len(apis[0].wire._sockets) < 2 and time.monotonic() < until_s:
                time.sleep(0.01)
            sockets = list(apis[0].wire._sockets)
            assert len(sockets) == 2
        assert [each.fileno() for each in sockets] == [-1, -1]
        gc.collect()
