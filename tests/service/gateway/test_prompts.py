"""Prompts of requests, and their way to the replica that knows their beginning: read, and with two real engines."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from kits.runtime.tiny_gguf import write_tiny_gguf
from kits.runtime.tiny_llm import write_tiny_llm
from kits.service.gateway_replicas import run
from kits.service.real_replicas import served
from springtide.core.workload import ReplicaId
from springtide.service.gateway.prompts import PromptRouting, blocks_of
from springtide.service.gateway.requests import Pending
from springtide.serving.frames import HttpHead, HttpStart
from springtide.serving.prefixes import BLOCK_BYTES
from springtide.serving.schema import Call, ServiceSchema

TRACE = Path(__file__).parents[2] / "fixtures" / "prompts" / "conversations.jsonl"
HEAD = HttpHead("POST", "http", "/f/chat/v1/chat/completions", b"", ())
SOURCE = "import springtide as st\nServed = st.llm('double', model={model!r}, context=4096, cache_mb={cache_mb})\n"


def chat(*turns: str, **more: object) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": turn} for turn in turns], **more}
    ).encode()


def test_the_turns_of_a_conversation_begin_alike_whatever_else_is_asked() -> None:
    first, second = "a" * 600, "b" * 600
    one, two = blocks_of(HEAD, chat(first)), blocks_of(HEAD, chat(first, second, temperature=0.5))
    assert len(one) == 2
    assert two[:2] == one
    other_tools = blocks_of(HEAD, chat(first, tools=[{"type": "function"}]))
    assert other_tools[0] != one[0]
    completion = HttpHead("POST", "http", "/f/chat/v1/completions", b"", ())
    assert len(blocks_of(completion, json.dumps({"prompt": "x" * 600}).encode())) == 2


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/f/chat/v1/completions", b"{}"),
        ("POST", "/f/chat/v1/embeddings", b'{"input": "' + b"x" * 600 + b'"}'),
        ("POST", "/f/chat/v1/completions", b"\x1f\x8b of gzip"),
        ("POST", "/f/chat/v1/completions", b"[" * 100_000),
        ("POST", "/f/chat/v1/completions", b"[]"),
    ],
)
def test_what_has_no_prompt_that_can_be_read_has_no_blocks(method: str, path: str, body: bytes) -> None:
    assert blocks_of(HttpHead(method, "http", path, b"", ()), body) == ()
    assert blocks_of(None, body) == ()


def pending_of(text: str) -> Pending:
    body = json.dumps({"prompt": text}).encode()
    head = HttpHead("POST", "http", "/f/chat/v1/completions", b"", ())
    future: asyncio.Future = asyncio.get_running_loop().create_future()
    call = Call(body=body)
    return Pending(1, lambda schema: call, future, 0.0, 1.0, is_cold=False, call=call, http=head)


def test_a_replica_that_says_it_had_nothing_is_believed_and_an_odd_header_changes_nothing() -> None:
    async def scenario() -> None:
        routing, one, two = PromptRouting(), ReplicaId("one"), ReplicaId("two")
        old, new = pending_of("a" * 2000), pending_of("b" * 2000)
        assert routing.cost_of(old) is None, "no replica has said that it keeps prompts"
        routing.apply(ServiceSchema(kind="asgi", cache_tokens=10_000))
        for pending in (old, new):
            routing.ended(routing.sent(one, pending))
        again = routing.sent(one, new)
        for told, expected in ((b"odd", 0.0), (b"0.95", 0.0), (b"0.000", 7.0)):
            routing.began(again, HttpStart(200, ((b"x-springtide-cached", told),)))
            routing.ended(routing.sent(two, new))
            cost = routing.cost_of(old)
            assert cost is not None
            assert round(cost(one) - 0.8) == expected, "0.8 is the answer that is being written"

    asyncio.run(scenario())


def texts_of(ids: list[int]) -> str:
    """A prompt with a block of text for each block of the trace."""
    made = []
    for number in ids:
        rng = random.Random(number)
        words = " ".join(rng.choice(["the", "quick", "brown", "fox", "over", "lazy", "dog"]) for _ in range(80))
        made.append(words[:BLOCK_BYTES])
    return "".join(made)


async def replayed(harness, num_prompts: int, num_clients: int = 4):
    """Ask the prompts of the trace in their order; tokens of prompts, those that were cached, requests by replica."""
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()][:num_prompts]
    tokens, cached, replicas, first_s = 0, 0, Counter(), []
    turns = asyncio.Semaphore(num_clients)

    async def ask(line) -> None:
        nonlocal tokens, cached
        body = {"model": "double", "prompt": texts_of(line["hash_ids"]), "max_tokens": 1, "temperature": 0}
        began_s = time.perf_counter()
        answer = await harness.client.post(
            "/f/double/v1/completions", json=body, headers={"X-Springtide-Timeout": "2m"}, timeout=120
        )
        turns.release()
        assert answer.status_code == 200, answer.text
        first_s.append(time.perf_counter() - began_s)
        usage = answer.json()["usage"]
        tokens += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        replicas[answer.headers["x-springtide"].split("replica=")[1]] += 1

    async with asyncio.TaskGroup() as group:
        for line in lines:
            await turns.acquire()
            group.create_task(ask(line))
    return cached / tokens, max(replicas.values()) / len(lines), sorted(first_s)


async def found_with(harness, directory: Path, num_replicas: int, model: Path, cache_mb: int, num_prompts: int):
    directory.mkdir()
    source = SOURCE.format(model=str(model), cache_mb=cache_mb)
    async with served(harness, directory, source, num_replicas=num_replicas, max_queue=256, concurrency=16):
        return await replayed(harness, num_prompts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_engines_compute_little_twice_and_share_the_requests(tmp_path, monkeypatch) -> None:
    model, num_prompts = write_tiny_llm(tmp_path / "model", context=4096), 120

    async def scenario(harness):
        pooled = await found_with(harness, tmp_path / "one", 1, model, 128, num_prompts)
        ours = await found_with(harness, tmp_path / "two", 2, model, 64, num_prompts)
        monkeypatch.setattr(PromptRouting, "cost_of", lambda self, pending: None)
        load = await found_with(harness, tmp_path / "load", 2, model, 64, num_prompts)
        for name, (hits, share, first_s) in (("one cache", pooled), ("prefixes", ours), ("load", load)):
            p50, p99 = first_s[len(first_s) // 2], first_s[int(0.99 * len(first_s))]
            print(f"{name}: hits {hits:.3f}, share {share:.3f}, answered p50 {p50:.3f} s, p99 {p99:.3f} s")
        assert ours[0] > load[0]
        assert ours[0] >= 0.9 * pooled[0]
        assert ours[1] <= 0.6

    run(scenario)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prompts_for_llama_cpp_go_where_their_beginning_is_known(tmp_path, monkeypatch) -> None:
    """It says when it starts how much it keeps, and nothing with its answers."""
    model, num_prompts = write_tiny_gguf(tmp_path / "tiny.gguf", context=4096), 30

    async def scenario(harness):
        ours = await found_with(harness, tmp_path / "two", 2, model, 64, num_prompts)
        monkeypatch.setattr(PromptRouting, "cost_of", lambda self, pending: None)
        load = await found_with(harness, tmp_path / "load", 2, model, 64, num_prompts)
        print(f"hits {ours[0]:.3f} by prefixes, {load[0]:.3f} by load; share {ours[1]:.3f}")
        assert ours[0] > load[0]
        assert ours[1] <= 0.7

    run(scenario)
