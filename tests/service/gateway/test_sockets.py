"""WebSockets to applications and to commands, by a client of another library, through the gateway to real processes."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from kits.service.gateway_replicas import run
from kits.service.real_replicas import served

APP = """
import asyncio, os
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

app = FastAPI()

@app.websocket("/echo")
async def echo(socket: WebSocket, place: str = ""):
    await socket.accept("chat" if "chat" in socket.scope["subprotocols"] else None, headers=[(b"x-own", b"1")])
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message["code"])
            if message.get("text") == "close":
                await socket.close(4001, "as you wish")
                return
            if message.get("text") == "fail":
                raise RuntimeError("no such thing")
            if message.get("text") == "die":
                os._exit(9)
            if message.get("text") is not None:
                await socket.send_text(message["text"].upper())
            else:
                await socket.send_bytes(message["bytes"][::-1])
    except WebSocketDisconnect as end:
        if place:
            open(place, "w").write(str(end.code))

@app.websocket("/flood")
async def flood(socket: WebSocket):
    await socket.accept()
    while True:
        await socket.send_bytes(bytes(1 << 16))

@app.websocket("/deaf")
async def deaf(socket: WebSocket, seconds: float):
    await socket.accept()
    await asyncio.sleep(seconds)

@app.get("/plain")
async def plain():
    return {"root": "here"}
"""
ASGI = f"""
import springtide as st

@st.asgi(ready="/plain")
def Served():
    here = {{}}
    exec({APP!r}, here)
    return here["app"]
"""
PROCESS = """
import springtide as st

place = '{place}'

@st.process(ready="/plain")
def Served(port):
    return f"python -m uvicorn --app-dir {place} --port {port} --log-level warning app:app"
"""


@pytest.fixture(params=["asgi", "process"])
def source(request, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    return ASGI if request.param == "asgi" else PROCESS.replace("'{place}'", repr(str(tmp_path)))


def test_messages_go_both_ways_and_either_side_closes(source, tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, source) as (replica,):
            url, place = f"ws://127.0.0.1:{harness.port}/f/double", tmp_path / "left"
            async with connect(f"{url}/echo?place={place}", subprotocols=["talk", "chat"]) as socket:
                assert socket.subprotocol == "chat"
                assert socket.response.headers["x-own"] == "1"
                assert "replica=r0" in socket.response.headers["x-springtide"]
                await socket.send("hällo")
                assert await socket.recv() == "HÄLLO"
                await socket.send(bytes(range(256)) * 3000)
                assert await socket.recv() == (bytes(range(256)) * 3000)[::-1]
                assert harness.gateway._queues["double"].is_busy, "it counts as a call in flight"
                await socket.close(4004)
            await harness.until(place.exists)
            await harness.until(lambda: place.read_text() == "4004")
            await harness.until(lambda: not harness.gateway._queues["double"].is_busy)
            async with connect(f"{url}@1/echo") as socket:
                await socket.send("close")
                with pytest.raises(ConnectionClosed) as closed:
                    await socket.recv()
                assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "as you wish")
            async with connect(f"{url}/echo", max_size=None) as socket:
                await socket.send(bytes((1 << 20) + 1))
                with pytest.raises(ConnectionClosed) as closed:
                    await socket.recv()
                assert closed.value.rcvd.code == 1009, "over max_body"
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/nowhere")
            assert refused.value.response.status_code == 403, "what uvicorn and the application answer"
            await harness.until(lambda: not harness.gateway._queues["double"].is_busy)
            async with connect(f"{url}/echo") as socket:
                replica.stop(grace_s=60)
                await socket.send("on")
                assert await socket.recv() == "ON", "a drain waits for it"
            assert await asyncio.to_thread(replica.process.wait, 60) == 0

    run(scenario)


def test_what_fails_or_dies_or_does_not_read_ends_the_connection(source, tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, source, num_replicas=1):
            url = f"ws://127.0.0.1:{harness.port}/f/double"
            queue = harness.gateway._queues["double"]
            async with connect(f"{url}/flood", ping_interval=None, close_timeout=1):
                # It reads nothing: what is sent to it stops, and after a while it is cut off.
                assert queue.is_busy
                await harness.until(lambda: not queue.is_busy)
            async with connect(f"{url}/deaf?seconds=3", close_timeout=1) as socket:
                sent = []
                with pytest.raises(ConnectionClosed):
                    await _send_much(socket, sent)
                assert len(sent) < 30, "MiB: what is not read is not sent on without end"
            await harness.until(lambda: not queue.is_busy)
            for told in ("fail", "die"):
                async with connect(f"{url}/echo") as socket:
                    await socket.send(told)
                    with pytest.raises(ConnectionClosed) as closed:
                        await socket.recv()
                    assert closed.value.rcvd is None or closed.value.rcvd.code in (1011, 1006), told

    run(scenario, send_timeout_s=2, server_settings={"ws_ping_interval": None})


async def _send_much(socket, sent):
    while True:
        await socket.send(bytes(1 << 20))
        sent.append(1)


@pytest.mark.slow
def test_a_client_that_is_gone_is_noticed_while_its_messages_are_not_taken(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, ASGI):
            queue = harness.gateway._queues["double"]
            async with connect(f"ws://127.0.0.1:{harness.port}/f/double/deaf?seconds=3600", close_timeout=1) as socket:
                sending = asyncio.create_task(_send_much(socket, []))
                await asyncio.wait([sending], timeout=1)
                sending.cancel()
            # Pings are not answered any more, and the application is given some seconds and then cancelled.
            await harness.until(lambda: not queue.is_busy)

    run(scenario, server_settings={"ws_ping_interval": 1, "ws_ping_timeout": 2})


def test_what_is_no_application_has_no_sockets(tmp_path):
    source = """
class Served:
    def predict(self, values: list[int]) -> list[int]:
        return values
"""

    async def scenario(harness):
        async with served(harness, tmp_path, source):
            for name, status in (("double", 404), ("other", 404)):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(f"ws://127.0.0.1:{harness.port}/f/{name}/echo")
                assert refused.value.response.status_code == status
                assert b"error" in refused.value.response.body

    run(scenario)
