"""A language model as a service: the openai client, a real platform, transformers' batching, a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing

import openai
import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from kits.runtime.tiny_llm import write_tiny_llm
from springtide.client.api import Client
from springtide.client.llm.declaration import llm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STREAMS = 16
GREEDY = {"model": "chat", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def say(number: int) -> list[dict]:
    return [{"role": "user", "content": f"hello {number}, the quick brown fox"[: 8 + number]}]


async def streamed(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
    """The text of a stream, and the tokens that it says it has."""
    stream = await client.chat.completions.create(
        messages=say(number), stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    text, num_tokens = "", 0
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return text, num_tokens


async def whole(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
    answer = await client.chat.completions.create(messages=say(number), **GREEDY)
    return answer.choices[0].message.content, answer.usage.completion_tokens


async def disturb(client: openai.AsyncOpenAI) -> None:
    """Requests that are refused, and clients that leave, beside the others."""
    for wrong in ({"max_tokens": 10**6}, {"temperature": -1}, {"messages": "x"}, {"messages": []}):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**{**GREEDY, "messages": say(1), **wrong})
    for _ in range(3):
        stream = await client.chat.completions.create(messages=say(3), stream=True, **GREEDY | {"max_tokens": 400})
        await anext(aiter(stream))
        await stream.close()


async def every_call(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["chat"]
    assert (await client.completions.create(model="chat", prompt="x")).usage.prompt_tokens == 1
    sampled = {**GREEDY, "temperature": 1.0, "top_p": 0.9, "seed": 3, "messages": say(2)}
    seeded = [await client.chat.completions.create(**sampled) for _ in range(2)]
    assert seeded[0].choices[0].message.content == seeded[1].choices[0].message.content
    vectors = await client.embeddings.create(model="chat", input=["hello", "the fox"])
    assert [round(sum(value * value for value in each.embedding), 3) for each in vectors.data] == [1.0, 1.0]
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        await client.models.retrieve("other")


async def concurrent(client: openai.AsyncOpenAI) -> None:
    """16 streams at a time write what one after the other does, whatever is asked beside them."""
    alone = [await whole(client, number) for number in range(NUM_STREAMS)]
    assert {num_tokens for _, num_tokens in alone} == {24}
    assert len({text for text, _ in alone}) > NUM_STREAMS // 2, "prompts that differ have answers that differ"
    together = await asyncio.gather(*(streamed(client, number) for number in range(NUM_STREAMS)), disturb(client))
    assert together[:-1] == alone


async def broken(client: openai.AsyncOpenAI, pid: int) -> None:
    """The replica is killed in the midst of a stream."""
    stream = await client.chat.completions.create(messages=say(1), stream=True, **GREEDY | {"max_tokens": 490})
    await anext(aiter(stream))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="replica"):
        async for _ in stream:
            pass


def test_the_openai_client_is_served_and_no_request_harms_another(platform: LivePlatform, tmp_path) -> None:
    platform.start()
    model = write_tiny_llm(tmp_path / "model")
    chat = llm("chat", model=model, cache_mb=8, scale=(1, 1))
    token = (platform.state_dir / "token").read_text().strip()
    with closing(Client(str(platform.http.base_url), token)) as client:
        chat.deploy(client)

    def state() -> dict:
        return platform.request("GET", "/v1/services/chat")

    wait_for(lambda: state()["num_ready"] == 1, 240.0, lambda: f"the model to load; {state()}")

    def num_open() -> float:
        lines = platform.http.get("/f/chat/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("springtide_llm_open_answers "))

    async def scenario() -> None:
        url = f"{str(platform.http.base_url).rstrip('/')}/f/chat/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0, timeout=120) as client:
            await every_call(client)
            await concurrent(client)
            wait_for(lambda: num_open() == 0.0, 30.0, "the places of clients that have left to be free")
            (pid,) = platform.worker_pids().values()
            await broken(client, pid)
            wait_for(lambda: pid not in platform.worker_pids().values(), 60.0, "the replica to be gone")
            patient = client.with_options(default_headers={"X-Springtide-Timeout": "4m"}, timeout=300)
            assert (await whole(patient, 1))[1] == 24, "the platform has started another replica"

    asyncio.run(scenario())
