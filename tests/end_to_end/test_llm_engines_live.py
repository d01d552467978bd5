"""Engines of language models that listen on a port: the openai client, a real platform, llama.cpp with a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from contextlib import closing
from pathlib import Path

import openai
import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from kits.runtime.fake_vllm import write_fake_vllm
from kits.runtime.tiny_gguf import write_tiny_gguf
from springtide.client.api import Client
from springtide.client.llm.declaration import llm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STREAMS = 8
CONTEXT, LONG = 4096, 4000
GREEDY = {"model": "chat", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
MODULE = b"springtide.runtime.serving.llm.llama_cpp_server"


def say(number: int) -> list[dict]:
    return [{"role": "user", "content": f"hello {number}, the quick brown fox"[: 8 + number]}]


def text_of(chunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


async def streamed(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
    stream = await client.chat.completions.create(
        messages=say(number), stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    text, num_tokens = "", 0
    async for chunk in stream:
        text += text_of(chunk)
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return text, num_tokens


async def whole(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
    answer = await client.chat.completions.create(messages=say(number), **GREEDY)
    return answer.choices[0].message.content, answer.usage.completion_tokens


async def begun(client: openai.AsyncOpenAI) -> openai.AsyncStream:
    """A stream that would go on for seconds, with its first text."""
    stream = await client.chat.completions.create(messages=say(3), stream=True, **GREEDY | {"max_tokens": LONG})
    async for chunk in stream:
        if text_of(chunk):
            return stream
    raise AssertionError("the stream had no text")


async def every_call(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["chat"]
    assert (await client.completions.create(model="chat", prompt="x", max_tokens=2)).usage.prompt_tokens == 1
    with pytest.raises(openai.InternalServerError, match="does not support embeddings"):
        await client.embeddings.create(model="chat", input="x")
    long = [{"role": "user", "content": "x" * (CONTEXT + 1000)}]
    for wrong in ({"messages": long}, {"max_tokens": -5}, {"messages": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**GREEDY, "messages": say(1), **wrong})
        assert caught.value.body["message"], "in OpenAI's form"


async def leave(client: openai.AsyncOpenAI) -> None:
    """More clients than the replica has slots leave, one after another: each frees its own."""
    for _ in range(6):
        await (await begun(client)).close()


async def idle_after_leaving(client: openai.AsyncOpenAI, pid: int) -> None:
    """What no client reads is not written: the process needs a small part of the time of the streams that were left."""
    began_s = cpu_s(pid)
    stream = await begun(client)
    async for _ in stream:
        pass
    whole_s = cpu_s(pid) - began_s
    streams = [await begun(client) for _ in range(4)]
    began_s = cpu_s(pid)
    for stream in streams:
        await stream.close()
    await asyncio.sleep(2 * whole_s)
    assert cpu_s(pid) - began_s < whole_s


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def concurrent(client: openai.AsyncOpenAI) -> None:
    """Streams write what is written one after the other, whatever is asked beside them."""
    alone = [await whole(client, number) for number in range(NUM_STREAMS)]
    assert {num_tokens for _, num_tokens in alone} == {24}
    assert len({text for text, _ in alone}) > NUM_STREAMS // 2, "prompts that differ have answers that differ"
    streams = (streamed(client, number) for number in range(NUM_STREAMS))
    together = await asyncio.gather(*streams, every_call(client), leave(client))
    assert together[:NUM_STREAMS] == alone


def engine_pids() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if MODULE in words:
            found.append(int(path.parent.name))
    return found


def test_llama_cpp_answers_the_openai_client_and_is_replaced_when_it_is_killed(
    platform: LivePlatform, tmp_path
) -> None:
    before = set(engine_pids())
    model = write_tiny_gguf(tmp_path / "tiny.gguf", hidden=256, layers=4, context=CONTEXT)
    platform.start()
    chat = llm("chat", model=model, context=CONTEXT, scale=(1, 1))
    token = (platform.state_dir / "token").read_text().strip()
    with closing(Client(str(platform.http.base_url), token)) as client:
        chat.deploy(client)

    def state() -> dict:
        return platform.request("GET", "/v1/services/chat")

    def is_ready() -> bool:
        return state()["num_ready"] == 1

    wait_for(is_ready, 120.0, lambda: f"the model to load; {state()}")

    async def scenario() -> None:
        url = f"{str(platform.http.base_url).rstrip('/')}/f/chat/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0, timeout=120) as client:
            await concurrent(client)
            (pid,) = set(engine_pids()) - before
            await idle_after_leaving(client, pid)
            stream = await begun(client)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match=r"replica|process"):
                async for _ in stream:
                    pass
            patient = client.with_options(default_headers={"X-Springtide-Timeout": "2m"}, timeout=180)
            assert (await whole(patient, 1))[1] == 24, "the platform has started another one"

    asyncio.run(scenario())


def test_vllm_is_started_with_the_options_or_says_that_it_is_not_there(platform: LivePlatform, tmp_path) -> None:
    platform.start()
    (tmp_path / "model").mkdir()
    path = f"{write_fake_vllm(tmp_path / 'bin')}:{os.environ['PATH']}"
    there = llm(
        "there", model=tmp_path / "model", engine="vllm", context=256, concurrency=8, scale=(1, 1), env={"PATH": path}
    )
    absent = llm("absent", model=tmp_path / "model", engine="vllm", scale=(1, 1))
    token = (platform.state_dir / "token").read_text().strip()
    with closing(Client(str(platform.http.base_url), token)) as client:
        there.deploy(client)
        absent.deploy(client)

    def state(name: str) -> dict:
        return platform.request("GET", f"/v1/services/{name}")

    wait_for(lambda: state("there")["num_ready"] == 1, 120.0, lambda: f"the double to be ready; {state('there')}")
    told = platform.http.get("/f/there/v1/models").json()
    assert [model["id"] for model in told["data"]] == ["there", str(tmp_path / "model"), "model"]
    pairs = dict(itertools.pairwise(told["words"]))
    assert (pairs["--max-model-len"], pairs["--max-num-seqs"]) == ("256", "8")
    wait_for(lambda: state("absent")["state"] == "FAILED", 120.0, lambda: f"it to be given up; {state('absent')}")
    assert "needs the program `vllm`" in state("absent")["reason"]
