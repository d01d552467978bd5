"""An application of FastAPI in a replica's process, called through the gateway over real HTTP."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from kits.service.gateway_replicas import run
from kits.service.real_replicas import served
from springtide.core.wire.workers import Failed

SOURCE = """
import asyncio, os, time
from contextlib import asynccontextmanager
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
import springtide as st

@st.asgi()
def Served():
    @asynccontextmanager
    async def lifespan(app):
        app.state.ready = "yes"
        yield
        open(os.environ["ENDED"], "w").close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    def root(request: Request):
        return {"ready": request.app.state.ready, "url": str(request.url_for("item", number=3))}

    @app.get("/items/{number}", name="item")
    async def item(number: int, q: str = ""):
        return {"number": number, "q": q}

    @app.post("/echo")
    async def echo(request: Request):
        body = await request.body()
        answer = Response(body[::-1], 201, {"x-kind": request.headers["content-type"]})
        answer.set_cookie("one", "1")
        answer.set_cookie("two", "2")
        return answer

    @app.get("/headers")
    async def headers(request: Request):
        return dict(request.headers)

    @app.get("/nothing")
    async def nothing():
        return Response(status_code=204)

    @app.get("/stream")
    async def stream(place: str = "", mode: str = "", kind: str = "text/event-stream"):
        async def parts():
            try:
                for number in range(10**9 if place else 4):
                    yield f"data: {number}\\n\\n"
                    if mode == "die":
                        os._exit(9)
                    await asyncio.sleep(0.005 if place else 0)
            finally:
                if place:
                    open(place, "w").close()
        return StreamingResponse(parts(), media_type=kind)

    @app.get("/fails")
    async def fails():
        raise RuntimeError("no such thing")

    @app.api_route("/dies", methods=["GET", "POST"])
    async def dies(place: str):
        if not os.path.exists(place):
            open(place, "w").close()
            os._exit(9)
        return {"pid": os.getpid()}

    return app
"""


def test_paths_bodies_and_heads_go_through_and_the_lifespan_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))

    async def scenario(harness):
        async with served(harness, tmp_path, SOURCE) as (replica,):
            client = harness.client
            root = await client.get("/f/double/")
            assert root.json()["ready"] == "yes"
            assert root.json()["url"].endswith("/f/double/items/3")
            assert (await client.get("/f/double/items/7?q=a%20b")).json() == {"number": 7, "q": "a b"}
            assert (await client.get("/f/double/items/seven")).status_code == 422, "the application's own refusal"
            echo = await client.post("/f/double/echo", content=b"abc", headers={"content-type": "text/odd"})
            assert (echo.status_code, echo.content, echo.headers["x-kind"]) == (201, b"cba", "text/odd")
            assert [cookie.split(";")[0] for cookie in echo.headers.get_list("set-cookie")] == ["one=1", "two=2"]
            assert "replica=r0" in echo.headers["x-springtide"]
            assert echo.headers["content-security-policy"].startswith("sandbox allow-scripts")
            sent = {"authorization": "Bearer secret", "cookie": "springtide_80=x; mine=y", "x-own": "z"}
            heads = (await client.get("/f/double/headers", headers=sent)).json()
            assert (heads["cookie"], heads["x-own"]) == ("mine=y", "z")
            assert "authorization" not in heads
            nothing = await client.get("/f/double/nothing")
            assert (nothing.status_code, nothing.content) == (204, b"")
            named = await client.get("/f/double/headers", headers={"traceparent": "00-1-2-01"})
            assert named.json()["x-request-id"] == named.headers["x-request-id"]
            assert named.json()["traceparent"] == "00-1-2-01"
            assert (await client.head("/f/double/headers")).status_code == 405, "the application's own"
            assert (await client.get("/f/double/openapi.json")).json()["servers"] == [{"url": "/f/double"}]
            stream = await client.get("/f/double/stream")
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.text == "".join(f"data: {number}\n\n" for number in range(4))
            assert (await client.get("/f/double/fails")).status_code == 500
            bare = await client.post("/f/double", json={})
            assert bare.status_code == 422
            assert "/f/double/" in bare.json()["error"]["message"]
            assert (await client.post("/f/double/echo", content=b"x" * (2 << 20))).status_code == 413
            assert (await client.get("/f/double@1/items/7")).json()["number"] == 7
            assert (await client.get("/f/double@1/items/a%2Fb")).status_code == 404, "two segments for the application"
            assert (await client.get("/f/double@2/items/7")).status_code == 404
            replica.stop(grace_s=30)
            assert await asyncio.to_thread(replica.process.wait, 30) == 0
            assert (tmp_path / "ended").exists()

    run(scenario)


def test_a_client_that_leaves_is_heard_of_in_the_application(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, SOURCE):
            place = tmp_path / "left"
            async with harness.client.stream("GET", f"/f/double/stream?place={place}") as response:
                assert await anext(response.aiter_lines()) == "data: 0"
            await harness.until(place.exists)
            await harness.until(lambda: not harness.gateway._queues["double"].is_busy)

    run(scenario)


def test_a_lost_replica_is_made_good_for_what_may_be_repeated(tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, SOURCE, num_replicas=4) as replicas:
            answer = await harness.client.get(f"/f/double/dies?place={tmp_path / 'a'}")
            assert answer.json()["pid"] in [replica.process.pid for replica in replicas]
            posted = await harness.client.post(f"/f/double/dies?place={tmp_path / 'b'}")
            assert posted.status_code == 502
            assert "POST is not repeated" in posted.json()["error"]["message"]
            events = await harness.client.get("/f/double/stream?mode=die")
            assert events.text.startswith("data: 0\n\n")
            assert events.text.split("\n\n")[-2].startswith('event: error\ndata: {"error":{"code":')
            with pytest.raises(httpx2.HTTPError):
                await harness.client.get("/f/double/stream?mode=die&kind=text/plain")

    run(scenario)


def test_a_startup_that_fails_is_the_reason_why_the_replica_does_not_load(tmp_path):
    source = """
import springtide as st

@st.asgi()
def Served():
    from contextlib import asynccontextmanager
    from fastapi import FastAPI

    @asynccontextmanager
    async def lifespan(app):
        raise RuntimeError("no weights here")
        yield

    return FastAPI(lifespan=lifespan)
"""

    async def scenario(harness):
        with pytest.raises(AssertionError) as error:
            async with served(harness, tmp_path, source):
                pass
        assert "no weights here" in str(error.value)
        assert Failed.__name__ in str(error.value)

    run(scenario)


def test_other_services_have_no_paths_of_their_own(tmp_path):
    source = """
class Served:
    def predict(self, values: list[int]) -> list[int]:
        return values
"""

    async def scenario(harness):
        async with served(harness, tmp_path, source):
            answer = await harness.client.get("/f/double/docs")
            assert answer.status_code == 404
            assert "POST /f/double" in answer.json()["error"]["message"]

    run(scenario)
