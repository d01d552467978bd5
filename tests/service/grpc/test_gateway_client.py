from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from grpc import StatusCode

from springtide.service.grpc.gateway_client import GatewayClient, events_of
from springtide.service.grpc.translation import CallFailed, HttpCall

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-Name: v\r\n\r\nok"
CALL = HttpCall("POST", "/v2/models/m/infer", b"{}raw", 2)


@asynccontextmanager
async def gateway(*connections):
    """A server whose n-th connection gives the n-th list of answers, one a request, and is then closed."""
    requests, waiting = [], iter(connections)

    async def serve(reader, writer):
        for answer in next(waiting):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            body = await reader.readexactly(5)
            requests.append(head + body)
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = GatewayClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client, requests
    finally:
        client.close()
        server.close()
        await settled()


async def settled():
    """Transports need a few iterations of the event loop to close."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_call_is_written_and_its_answer_read():
    async def scenario():
        async with gateway([OK, OK]) as (client, requests):
            for _ in range(2):
                answer = await client.ask(CALL, [(b"authorization", b"Bearer t")])
                assert (answer.status, answer.body, answer.headers["x-name"]) == (200, b"ok", "v")
            head = requests[0].decode().lower()
            assert head.startswith("post /v2/models/m/infer http/1.1\r\n")
            assert "inference-header-content-length: 2\r\n" in head
            assert "authorization: bearer t\r\n" in head
            assert head.endswith("content-length: 5\r\n\r\n{}raw")

    asyncio.run(scenario())


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_once():
    async def scenario():
        async with gateway([OK, b""], [OK]) as (client, requests):
            for _ in range(2):
                assert (await client.ask(CALL, [])).body == b"ok"
            assert len(requests) == 3

    asyncio.run(scenario())


def test_a_new_connection_that_ends_is_told_and_not_tried_again():
    async def scenario():
        async with gateway([b""], [OK]) as (client, requests):
            with pytest.raises(CallFailed, match="does not answer") as failed:
                await client.ask(CALL, [])
            assert failed.value.code is StatusCode.UNAVAILABLE
            assert len(requests) == 1

    asyncio.run(scenario())


def test_a_gateway_that_is_not_there_is_unavailable():
    async def scenario():
        async with gateway() as (client, _):
            pass
        with pytest.raises(CallFailed, match="does not answer"):
            await client.ask(CALL, [])

    asyncio.run(scenario())


def test_events_are_read_whatever_parts_they_come_in():
    async def scenario(size):
        body = b'data: {"a": 1}\n\n: comment\ndata: two\ndata: lines\n\nevent: error\ndata: {"error": "x"}\n\n'
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        async with gateway([answer]) as (client, _), client.opened(CALL, []) as (start, exchange):
            return [event async for event in events_of(start, exchange)]

    for size in (1, 3, 7, 1000):
        found = asyncio.run(scenario(size))
        assert found == [("", '{"a": 1}'), ("", "two\nlines"), ("error", '{"error": "x"}')]


def test_a_cancelled_call_closes_its_connection():
    async def scenario():
        closed, asked = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()
            closed.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = GatewayClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        task = asyncio.create_task(client.ask(CALL, []))
        await asked.wait()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 5.0)
        server.close()
        await settled()

    asyncio.run(scenario())
