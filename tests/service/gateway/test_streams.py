"""Answers of async code and of generators: over real HTTP, from replicas that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from kits.service.gateway_replicas import run
from kits.service.real_replicas import served
from springtide.client.api import Client
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.wire.workers import Failed

GENERATOR = """
import os, time
from collections.abc import Iterator
import springtide.serving.events as events

class Served:
    def predict(self, n: int, mode: str = "", place: str = "") -> Iterator[dict]:
        if mode == "early":
            raise RuntimeError("no first item")
        if mode == "silent":
            time.sleep(1000)
        try:
            for index in range(n):
                if mode == "wait" and index == 2:
                    open(place + ".waits", "w").close()
                    while not os.path.exists(place + ".go"):
                        time.sleep(0.005)
                if mode == "late" and index == 2:
                    raise RuntimeError("no third item")
                if mode == "die" and index == 2:
                    os._exit(9)
                if mode == "large":
                    yield {"text": "x" * 100_000}
                elif mode == "own":
                    yield events.sse(f"line {index}\\nmore", event="token", event_id=str(index))
                else:
                    yield {"index": index, "pid": os.getpid()}
                if mode == "endless":
                    time.sleep(0.005)
        finally:
            if place:
                open(place, "w").close()
"""

ASYNC = """
import asyncio, os

class Served:
    async def load(self):
        self.most = self.now = 0

    async def predict(self, seconds: float = 0.0, place: str = "") -> dict:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            open(place, "w").close()
            raise
        finally:
            self.now -= 1
        return {"most": self.most, "now": self.now}
"""

ASYNC_GENERATOR = """
import asyncio
from collections.abc import AsyncIterator

class Served:
    async def predict(self, n: int, place: str = "", pause: float = 0.0) -> AsyncIterator[int]:
        try:
            for index in range(n):
                yield index
                if pause:
                    await asyncio.sleep(pause)
        finally:
            if place:
                open(place, "w").close()
"""

SSE = {"Accept": "text/event-stream"}


def events_of(text):
    return [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n") if block]


async def call(harness, body, **headers):
    return await harness.client.post("/f/double", json=body, headers=headers)


async def free(harness):
    """Wait until the gateway counts nothing at replicas."""
    await harness.until(lambda: not harness.gateway._queues["double"].is_busy)


def test_a_generator_is_sent_as_events_or_as_lines_and_its_errors_are_told(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, GENERATOR):
            answer = await call(harness, {"n": 3}, **SSE)
            assert answer.headers["content-type"] == "text/event-stream"
            assert [event["index"] for event in events_of(answer.text)] == [0, 1, 2]
            answer = await call(harness, {"n": 3})
            assert answer.headers["content-type"] == "application/x-ndjson"
            assert answer.headers["transfer-encoding"] == "chunked"
            assert [json.loads(line)["index"] for line in answer.text.splitlines()] == [0, 1, 2]
            assert "batch=1" in answer.headers["x-springtide"]
            empty = await call(harness, {"n": 0}, **SSE)
            assert (empty.status_code, empty.content) == (200, b"")
            own = await call(harness, {"n": 2, "mode": "own"})
            assert own.headers["content-type"] == "text/event-stream"
            assert own.text.startswith("event: token\nid: 0\ndata: line 0\ndata: more\n\nevent: token\nid: 1\n")
            large = await call(harness, {"n": 20, "mode": "large"})
            assert [len(json.loads(line)["text"]) for line in large.text.splitlines()] == [100_000] * 20
            early = await call(harness, {"n": 3, "mode": "early"}, **SSE)
            assert early.status_code == 500
            assert "no first item" in early.json()["error"]["message"]
            late = await call(harness, {"n": 3, "mode": "late"}, **SSE)
            *items, error = [block for block in late.text.split("\n\n") if block]
            assert (late.status_code, len(items)) == (200, 2)
            assert error.startswith('event: error\ndata: {"error":{"code":"predict_failed"')
            assert "no third item" in error
            late = await call(harness, {"n": 3, "mode": "late"})
            assert "no third item" in json.loads(late.text.splitlines()[2])["error"]["message"]
            wrong = await call(harness, {"n": "three"}, **SSE)
            assert wrong.status_code == 422
            infer = {"inputs": [{"name": "n", "shape": [1], "datatype": "INT64", "data": [1]}]}
            refused = await harness.client.post("/v2/models/double/infer", json=infer)
            assert refused.status_code == 422
            assert "/f/double" in refused.json()["error"]
            events = await harness.client.post("/v2/models/double/infer", json=infer, headers=SSE)
            assert events.headers["content-type"] == "text/event-stream"
            assert json.loads(events.headers["x-springtide-returns"])["name"] == "outputs"
            assert [event["index"] for event in events_of(events.text)] == [0]
            config = (await harness.client.get("/v2/models/double/config")).json()
            assert config["model_transaction_policy"] == {"decoupled": True}
            client = Client(f"http://127.0.0.1:{harness.port}", "token")
            items = await asyncio.to_thread(lambda: list(client.infer_stream("double", n=2)))
            assert [item["index"] for item in items] == [0, 1]
            texts = await asyncio.to_thread(lambda: list(client.infer_stream("double", n=1, mode="own")))
            assert texts == ["line 0\nmore"]
            with pytest.raises(BackendError, match="no third item"):
                await asyncio.to_thread(lambda: list(client.infer_stream("double", n=3, mode="late")))
            with pytest.raises(InvalidRequest, match="infer_stream"):
                await asyncio.to_thread(client.infer, "double", n=1)
            client.close()
            told = (await harness.client.get("/f/double")).json()
            assert (told["stream"], told["concurrency"], told["batchable"]) == (True, 1, False)
            await free(harness)

    run(scenario)


@pytest.mark.parametrize("how", ["close", "reset", "stop"])
def test_a_client_that_leaves_or_stops_reading_closes_the_generator_and_frees_the_slot(tmp_path, how):
    async def scenario(harness):
        async with served(harness, tmp_path, GENERATOR):
            place = tmp_path / "closed"
            mode = "large" if how == "stop" else "endless"
            body = json.dumps({"n": 1_000_000, "mode": mode, "place": str(place)})
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            head = f"POST /f/double HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body.encode())
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.read(100)
            if how == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if how != "stop":
                writer.transport.abort() if how == "reset" else writer.close()
            await harness.until(place.exists)
            await free(harness)
            # The slot is the only one, and the next request gets it.
            answer = await call(harness, {"n": 1})
            assert answer.status_code == 200
            writer.close()
            code = 408 if how == "stop" else 499
            assert f'springtide_request_seconds_count{{code="{code}",service="double"}} 1.0' in harness.metrics()

    run(scenario, send_timeout_s=0.3)


def test_a_slow_reader_stops_no_other_stream(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, GENERATOR, concurrency=2):
            body = json.dumps({"n": 1_000_000, "mode": "large"})
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
            head = f"POST /f/double HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body.encode())
            await reader.readuntil(b"\r\n\r\n")
            other = await call(harness, {"n": 100, "mode": "large"})
            assert len(other.text.splitlines()) == 100
            writer.close()
            await free(harness)

    run(scenario)


def test_a_replica_in_a_pod_streams_over_tcp_and_hears_of_a_client_that_leaves(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, ASYNC_GENERATOR, is_pod=True):
            answer = await call(harness, {"n": 3}, **SSE)
            assert events_of(answer.text) == [0, 1, 2]
            place = tmp_path / "closed"
            body = {"n": 2, "place": str(place), "pause": 1000.0}
            async with harness.client.stream("POST", "/f/double", json=body) as response:
                assert await anext(response.aiter_lines()) == "0"
            await harness.until(place.exists)
            await free(harness)

    run(scenario)


def test_async_calls_work_side_by_side_and_are_cancelled(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, ASYNC):
            answers = await asyncio.gather(*(call(harness, {"seconds": 0.5}) for _ in range(20)))
            assert max(answer.json()["outputs"]["most"] for answer in answers) == 20
            left = tmp_path / "left"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await call(harness, {"seconds": 1000, "place": str(left)})
            await harness.until(left.exists)
            late = tmp_path / "late"
            headers = {"X-Springtide-Timeout": "200ms"}
            answer = await call(harness, {"seconds": 1000, "place": str(late)}, **headers)
            assert answer.status_code == 504
            await harness.until(late.exists)
            await free(harness)
            assert (await call(harness, {})).json()["outputs"]["now"] == 0

    run(scenario)


def test_an_async_generator_is_cancelled_where_it_awaits_and_where_it_does_not(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, ASYNC_GENERATOR):
            answer = await call(harness, {"n": 5}, **SSE)
            assert events_of(answer.text) == [0, 1, 2, 3, 4]
            for number, pause in enumerate((0.0, 1000.0)):
                place = tmp_path / f"closed{number}"
                body = {"n": 10**9, "place": str(place), "pause": pause}
                async with harness.client.stream("POST", "/f/double", json=body) as response:
                    async for line in response.aiter_lines():
                        assert line == "0"
                        break
                await harness.until(place.exists)
            await free(harness)
            silent = await call(harness, {"n": 2, "pause": 1000.0}, **{"X-Springtide-Timeout": "200ms"})
            assert json.loads(silent.text.splitlines()[1])["error"]["code"] == "too_late"
            await free(harness)

    run(scenario)


def test_a_replica_that_is_lost_after_the_first_item_ends_the_answer_with_an_error(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, GENERATOR, num_replicas=2) as replicas:
            answer = await call(harness, {"n": 5, "mode": "die"}, **SSE)
            *items, error = [block for block in answer.text.split("\n\n") if block]
            assert len(items) == 2
            assert '"code":"replica_lost"' in error
            await harness.until(lambda: any(replica.process.poll() is not None for replica in replicas))
            other = next(replica for replica in replicas if replica.process.poll() is None)
            pid = other.process.pid
            assert json.loads((await call(harness, {"n": 1})).text)["pid"] == pid

    run(scenario)


def test_a_call_without_an_item_is_sent_to_another_replica(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, ASYNC, num_replicas=2) as (first, second):
            task = asyncio.create_task(call(harness, {"seconds": 1.0}))
            await harness.until(lambda: harness.gateway._queues["double"].is_busy)
            first.kill()
            answer = await task
            assert answer.status_code == 200
            assert f"replica={second.replica_id}" in answer.headers["x-springtide"]

    run(scenario)


def test_a_replica_that_is_to_stop_ends_its_streams_first(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, GENERATOR) as (replica,):
            place = tmp_path / "place"
            body = {"n": 4, "mode": "wait", "place": str(place)}
            task = asyncio.create_task(call(harness, body))
            await harness.until((tmp_path / "place.waits").exists)
            replica.stop(grace_s=60)
            await harness.until(lambda: harness.gateway._queues["double"].num_ready == 0)
            assert replica.process.poll() is None
            (tmp_path / "place.go").touch()
            answer = await task
            assert len(answer.text.splitlines()) == 4
            assert await asyncio.to_thread(replica.process.wait, 30) == 0

    run(scenario)


def test_plain_code_that_runs_on_after_its_time_has_its_replica_replaced(tmp_path):
    source = """
import time

class Served:
    def predict(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds
"""

    async def scenario(harness):
        async with served(harness, tmp_path, source, grace_s=0.2) as (replica,):
            headers = {"X-Springtide-Timeout": "200ms"}
            assert (await call(harness, {"seconds": 1000}, **headers)).status_code == 504
            told = await asyncio.to_thread(replica.plane.next, Failed)
            assert "beyond what its requests allow" in told.error
            assert await asyncio.to_thread(replica.process.wait, 30) == 1

    run(scenario)


def test_plain_code_works_in_as_many_threads_as_asked(tmp_path):
    source = """
import threading

class Served:
    def load(self):
        self.all_here = threading.Barrier(3)

    def predict(self, values: list[int]) -> list[int]:
        self.all_here.wait(60)
        return values
"""

    async def scenario(harness):
        async with served(harness, tmp_path, source, concurrency=3, max_batch_size=1):
            answers = await asyncio.gather(*(harness.call([n]) for n in range(3)))
            assert [answer.json() for answer in answers] == [{"outputs": [n]} for n in range(3)]

    run(scenario)
