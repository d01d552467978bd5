"""Services that call services by name on a real platform: who they are to each other, and what goes with a call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, ended_after, wait_for

pytestmark = pytest.mark.slow
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SOURCE = """
import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import springtide as st
from fastapi import FastAPI
from springtide.core.errors import SpringtideError


@st.serve(name="embed", scale=(1, 1), batch_wait=0, max_batch=1)
class Embed:
    def predict(self, text: str) -> list[int]:
        if text == "slow":
            time.sleep(2.0)
        return [len(text)]


@st.serve(name="words", scale=(1, 1))
class Words:
    async def predict(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word


@st.serve(name="shop", scale=(1, 1), calls=["embed", "words", "nowhere"])
class Shop:
    def load(self) -> None:
        self.early = self.tried(lambda: st.deployed("embed").predict(text="x"))

    def tried(self, call):
        try:
            return call()
        except SpringtideError as error:
            return f"{type(error).__name__}: {error}"

    def predict(self, what: str) -> list:
        embed = st.deployed("embed")
        if what == "early":
            return [self.early]
        if what == "forbidden":
            return [self.tried(lambda: st.deployed("front").predict(text="x"))]
        if what == "gone":
            return [self.tried(lambda: st.deployed("nowhere").predict(text="x"))]
        if what == "wrong":
            return [self.tried(lambda: embed.predict(image="x"))]
        if what == "headers":
            return [embed.url, embed.headers()]
        return [embed.predict(text=what), list(st.deployed("words").stream(text="a b c"))]


@st.serve(name="front", scale=(1, 1), calls=["shop", "words", "embed"])
class Front:
    async def predict(self, what: str) -> list:
        words = [word async for word in st.deployed("words").stream_async(text="d e")]
        return [await st.deployed("shop").predict_async(what=what), words]


@st.asgi(name="web", scale=(1, 1), calls=["embed"])
def web():
    app = FastAPI()

    @app.get("/length")
    def length(text: str):
        return st.deployed("embed").predict(text=text)

    return app
"""


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path / "state", slots=6)) as live:
        yield live


def test_services_call_each_other_as_themselves(platform: LivePlatform, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SOURCE)
    platform.start()
    main = "from springtide.cli.main import main; main()"

    def springtide(*arguments: str) -> str:
        command = [sys.executable, "-c", main, *arguments, "--state", str(platform.state_dir)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def call(name: str, body: dict, **headers: str):
        return platform.http.post(f"/f/{name}", json=body, headers=headers, timeout=60)

    for name in ("Embed", "Words", "Shop", "Front", "web"):
        springtide("deploy", f"shop.py:{name}")
    traced = {"X-Request-Id": "r-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Springtide-Priority": "low"}
    answer = call("front", {"what": "four"}, **traced)
    assert answer.json() == {"outputs": [[[4], ["a", "b", "c"]], ["d", "e"]]}, answer.text
    assert platform.http.get("/f/web/length?text=five5").json() == [5]
    assert "cannot be called while this replica loads" in call("shop", {"what": "early"}).text
    assert "was deployed to call embed, words, nowhere" in call("shop", {"what": "forbidden"}).text
    assert "NotFound: there is no service 'nowhere'" in call("shop", {"what": "gone"}).text
    assert "InvalidRequest" in call("shop", {"what": "wrong"}).text
    late = call("shop", {"what": "slow"}, **{"X-Springtide-Timeout": "500ms"})
    assert late.status_code in (500, 504)

    url, headers = call("shop", {"what": "headers"}).json()["outputs"]
    own = {"Authorization": headers["Authorization"]}
    secret = headers["Authorization"].removeprefix("Bearer ")
    assert secret.startswith("st_service.")
    assert platform.http.post(url, json={"text": "abc"}, headers=own).json() == {"outputs": [3]}
    refused = platform.http.post("/f/front", json={"what": "x"}, headers={**own, "X-Request-Id": "r-2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "r-2")
    assert "the service 'shop' may call embed, words, nowhere, and nothing else" in refused.text
    assert platform.http.get("/v1/status", headers=own).status_code == 403

    files = [path for path in platform.state_dir.rglob("*") if path.is_file()]
    token = (platform.state_dir / "token").read_text().strip()
    for path in files:
        content = path.read_bytes()
        assert secret.encode() not in content, path
        assert token.encode() not in content or path.name == "token", path
    for pid in platform.worker_pids().values():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"st_service" not in environment
        assert token.encode() not in environment

    def lines() -> list[dict]:
        return [json.loads(line) for line in (platform.state_dir / "access.jsonl").read_text().splitlines()]

    wait_for(lambda: any(line["request_id"] == "r-2" for line in lines()), 30, "the refusal in the log")
    assert [(line["status"], line["caller"]) for line in lines() if line["request_id"] == "r-2"] == [
        (403, "service:shop")
    ]

    # A restart of the control plane: the replicas stay, and are told an identity again.
    pids = set(platform.worker_pids().values())
    platform.kill()
    platform.start()
    wait_for(lambda: call("front", {"what": "four"}).status_code == 200, 60, "an answer after the restart")
    assert set(platform.worker_pids().values()) == pids

    springtide("cancel", "shop")
    wait_for(
        lambda: platform.http.post("/f/embed", json={"text": "abc"}, headers=own).status_code == 401, 30, "the end"
    )

    wait_for(lambda: any(line["status"] == 401 for line in lines()), 30, "the end in the log")
    of_first = {(line["service"], line.get("caller", "")) for line in lines() if line["request_id"] == "r-1"}
    assert of_first == {
        ("front", ""),
        ("shop", "service:front"),
        ("words", "service:front"),
        ("embed", "service:shop"),
        ("words", "service:shop"),
    }
    assert {line["trace_id"] for line in lines() if line["request_id"] == "r-1"} == {TRACE}
