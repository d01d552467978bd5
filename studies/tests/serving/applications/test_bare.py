"""The handler without a framework: a raw ASGI application."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

from springtide_studies.serving import applications


def test_a_body_in_two_parts_is_answered_with_the_sum(monkeypatch):
    monkeypatch.setenv("BENCH_HANDLER", "sums")
    answer = runpy.run_path(str(Path(applications.__path__[0]) / "bare.py"))["answer"]
    parts = [{"body": b'{"values": [1', "more_body": True}, {"body": b", 2]}"}]
    sent = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(answer({"type": "http"}, receive, send))
    assert sent[0]["status"] == 200
    assert (b"content-length", b"3") in sent[0]["headers"]
    assert sent[1]["body"] == b"3.0"
