"""`fit.quote()`: the same request as `submit`, sent to where nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import springtide as st
from springtide.client.api import Client
from springtide.core.errors import InvalidRequest
from springtide.core.status.quote import Alternative, Quote, Range

FILE = """
import springtide as st

@st.train(deadline="10m", budget="$4", epochs=3, num_samples=50_000)
def fit(ctx):
    ...

wave = st.Task(model=None, dataset=None, loss=print, optimizer=print, soft=True)
"""
ANSWER = Quote(
    verdict="refused",
    reason="cannot finish within 10m00",
    finish_s=Range(p10=700.0, p90=800.0),
    alternatives=(Alternative(change="--epochs 2", options={"num_epochs": 2}),),
)


@pytest.fixture
def module(tmp_path: Path) -> Any:
    path = tmp_path / "quoted_file.py"
    path.write_text(FILE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("quoted_file", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["quoted_file"] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules["quoted_file"]


@pytest.fixture
def asked() -> list[httpx2.Request]:
    return []


@pytest.fixture
def client(asked: list[httpx2.Request]) -> Client:
    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/status":
            empty = {"version": "0", "policy": "p", "seq": 1, "now_s": 0.0, "wall_clock_offset_s": 0.0}
            return httpx2.Response(200, json={**empty, "devices": [], "jobs": [], "services": []})
        asked.append(request)
        return httpx2.Response(200, content=msgspec.json.encode(ANSWER))

    return Client("http://127.0.0.1:1/", "token", transport=httpx2.MockTransport(handle))


def test_a_training_function_asks_with_its_options(module: Any, client: Client, asked: list[httpx2.Request]) -> None:
    answer = module.fit.quote(client, deadline="20m")
    assert isinstance(answer, Quote)
    assert answer.verdict == "refused"
    assert answer.alternatives[0].options == {"num_epochs": 2}
    (request,) = asked
    assert (request.method, request.url.path) == ("POST", "/v1/quote")
    body = json.loads(request.content)
    assert body["name"] == "fit"
    assert body["options"]["deadline_s"] == 1200.0
    assert body["options"]["num_samples"] == 50_000
    assert "is_soft" not in body["options"]


def test_a_task_asks_too(module: Any, client: Client, asked: list[httpx2.Request]) -> None:
    module.wave.quote(client, wait=True)
    body = json.loads(asked[0].content)
    assert body["source"]["object_name"] == "wave"
    assert body["options"]["is_soft"]
    assert body["options"]["waits"]


@pytest.mark.parametrize("options", [{"num_samples": 0}, {"num_samples": 2.5}, {"soft": "yes"}, {"wait": 1}])
def test_what_cannot_be_is_refused_when_the_file_is_read(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        st.train(**options)


def test_an_unknown_keyword_names_the_verb(module: Any, client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"quote\(\) does not know 'dead_line'"):
        module.fit.quote(client, dead_line="1m")
