"""Commands that listen on a port as replicas: real programs, called through the gateway over real HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import pytest

from kits.service.gateway_replicas import run
from kits.service.real_replicas import served
from springtide.core.wire.workers import Failed

APP = """
import asyncio, os, subprocess, sys
from contextlib import asynccontextmanager
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

@asynccontextmanager
async def lifespan(app):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield
    open("ended", "w").close()

app = FastAPI(lifespan=lifespan)

@app.api_route("/show/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def show(request: Request, rest: str):
    body = await request.body()
    raw = request.scope["raw_path"].decode()
    return {"method": request.method, "raw": raw, "query": request.url.query, "body": len(body), "pid": os.getpid(),
            "headers": dict(request.headers), "group": os.getpgid(0), "own": os.environ["OWN"]}

@app.get("/away")
async def away():
    return RedirectResponse("/show/there")

@app.get("/kept")
async def kept():
    return Response(status_code=304, headers={"etag": "x"})

@app.get("/large")
async def large():
    return Response(bytes(5 << 20))

@app.get("/stream")
async def stream(place: str = "", mode: str = ""):
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
    return StreamingResponse(parts(), media_type="text/event-stream")

@app.api_route("/dies", methods=["GET", "POST"])
async def dies(place: str):
    if not os.path.exists(place):
        open(place, "w").close()
        os._exit(9)
    return {"pid": os.getpid()}

@app.get("/hangs")
async def hangs(request: Request, place: str):
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
    open(place, "w").close()

@app.get("/health")
async def health():
    return Response(status_code=200 if os.path.exists("healthy") or os.environ["OWN"] == "1" else 503)
"""
SOURCE = """
import os
import springtide as st

os.chdir({place!r})
os.environ["OWN"] = "1"

@st.process(ready="/health")
def Served(port):
    return f"python -m uvicorn --port {{port}} --log-level warning app:app"
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    return SOURCE.format(place=str(tmp_path))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _group(group: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = []
    for pid in pids:
        try:
            if os.getpgid(pid) == group and _is_alive(pid):
                found.append(pid)
        except ProcessLookupError:
            pass
    return found


def test_requests_reach_the_command_as_they_are_and_a_drain_ends_it(source, tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, source) as (replica,):
            client, url = harness.client, "/f/double"
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                assert (await client.request(method, f"{url}/show/")).json()["method"] == method
            sent = {
                "authorization": "Bearer secret",
                "cookie": "springtide_80=x; mine=y",
                "connection": "x-one",
                "x-one": "1",
            }
            shown = (await client.post(f"{url}@1/show/a%2Fb%20c?q=%20d", content=bytes(1 << 20), headers=sent)).json()
            assert (shown["raw"], shown["query"], shown["body"]) == ("/show/a%2Fb%20c", "q=%20d", 1 << 20)
            assert shown["headers"]["cookie"] == "mine=y"
            assert shown["headers"]["x-forwarded-prefix"] == "/f/double"
            assert shown["headers"]["host"] == shown["headers"]["x-forwarded-host"] == f"127.0.0.1:{harness.port}"
            assert not shown["headers"].keys() & {"authorization", "x-one"}
            assert shown["group"] == shown["pid"] != os.getpgid(replica.process.pid)
            assert (shown["own"], shown["headers"]["content-length"]) == ("1", str(1 << 20))
            assert len(_group(shown["group"])) == 2
            away = await client.get(f"{url}/away")
            assert (away.status_code, away.headers["location"]) == (307, "/f/double/show/there")
            kept = await client.get(f"{url}/kept")
            assert (kept.status_code, kept.content, kept.headers["etag"]) == (304, b"", "x")
            large = await client.get(f"{url}/large")
            assert large.content == bytes(5 << 20)
            assert "replica=r0" in large.headers["x-springtide"]
            head = await client.head(f"{url}/health")
            assert head.status_code == 405, "the application's own"
            stream = await client.get(f"{url}/stream")
            assert stream.text == "".join(f"data: {number}\n\n" for number in range(4))
            assert (await client.get(f"{url}/nowhere")).json() == {"detail": "Not Found"}
            assert (await client.post(url, json={})).status_code == 422
            assert (await client.get(f"{url}@2/show/")).status_code == 404
            assert (
                (await client.get(url))
                .json()["example"]
                .startswith(f"curl -s http://127.0.0.1:{harness.port}/f/double/ -H")
            )
            async with client.stream("GET", f"{url}/stream?place={tmp_path / 'left'}") as response:
                assert await anext(response.aiter_lines()) == "data: 0"
                replica.stop(grace_s=60)
                await harness.until(lambda: harness.gateway._queues["double"].num_ready == 0)
                assert not (tmp_path / "ended").exists()
            await harness.until((tmp_path / "left").exists)
            assert await asyncio.to_thread(replica.process.wait, 60) == 0
            assert (tmp_path / "ended").exists(), "it got SIGTERM after the last request"
            assert not _group(shown["group"])

    run(scenario)


def test_a_hanging_request_is_ended_by_its_time_and_its_client(source, tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, source):
            late = await harness.client.get(
                f"/f/double/hangs?place={tmp_path / 'late'}", headers={"x-springtide-timeout": "1s"}
            )
            assert late.status_code == 504
            await harness.until((tmp_path / "late").exists)
            with pytest.raises(httpx2.TimeoutException):
                await harness.client.get(f"/f/double/hangs?place={tmp_path / 'gone'}", timeout=1)
            await harness.until((tmp_path / "gone").exists)
            await harness.until(lambda: not harness.gateway._queues["double"].is_busy)

    run(scenario)


def test_the_end_of_the_command_is_the_end_of_its_replica(source, tmp_path):
    async def scenario(harness):
        async with served(harness, tmp_path, source, num_replicas=3) as replicas:
            told = [asyncio.create_task(asyncio.to_thread(replica.plane.next, Failed)) for replica in replicas]
            answer = await harness.client.get(f"/f/double/dies?place={tmp_path / 'a'}")
            assert answer.status_code == 200, "another one answers"
            await harness.until(lambda: any(replica.process.poll() is not None for replica in replicas))
            assert [replica.process.poll() for replica in replicas].count(1) == 1
            done, _ = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
            assert "python ended with exit code 9" in done.pop().result().error
            posted = await harness.client.post(f"/f/double/dies?place={tmp_path / 'b'}")
            assert posted.status_code == 502
            assert "POST is not repeated" in posted.json()["error"]["message"]
            broken = await harness.client.get("/f/double/stream?mode=die")
            assert "event: error" in broken.text
            await asyncio.wait(told)

    run(scenario)


@pytest.mark.parametrize("is_pod", [False, True])
def test_nothing_of_the_command_outlives_a_killed_replica(source, tmp_path, is_pod):
    async def scenario(harness):
        async with served(harness, tmp_path, source, is_pod=is_pod) as (replica,):
            group = (await harness.client.get("/f/double/show/")).json()["group"]
            assert len(_group(group)) == 2
            replica.process.send_signal(signal.SIGKILL)
            await harness.until(lambda: not _group(group))

    run(scenario)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("'no-such-program --port 1'", "there is no program 'no-such-program'"),
        ('["sh", "-c", "exit 3"]', "the command sh ended with exit code 3 before it was ready"),
        ('"sh -c \'"', "cannot be split into words"),
        ("7", "must return a command"),
    ],
)
def test_a_command_that_does_not_start_is_a_replica_that_does_not_load(tmp_path, command, why):
    source = f"import springtide as st\n\n@st.process()\ndef Served():\n    return {command}\n"

    async def scenario(harness):
        with pytest.raises(AssertionError) as error:
            async with served(harness, tmp_path, source):
                pass
        assert why in str(error.value).replace("\\'", "'")

    run(scenario)


def test_an_old_program_without_readiness_is_ready_when_its_port_is(tmp_path):
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "sub" / "one.txt").write_text("one")
    source = f"""
import springtide as st

@st.process()
def Served():
    return ["python", "-m", "http.server", "--bind", "127.0.0.1", "-d", {str(tmp_path / "files")!r}, "{{port}}"]
"""

    async def scenario(harness):
        async with served(harness, tmp_path, source):
            assert (await harness.client.get("/f/double/sub/one.txt")).text == "one"
            assert (await harness.client.head("/f/double/sub/one.txt")).headers["content-length"] == "3"
            assert "one.txt" in (await harness.client.get("/f/double/sub", follow_redirects=True)).text
            assert (await harness.client.post("/f/double/sub", content=b"x")).status_code == 501

    run(scenario)
