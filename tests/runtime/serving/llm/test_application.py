"""OpenAI's API by the openai client itself, and its own types for answers, before a test double of an engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kits.runtime.fake_engine import FakeEngine
from springtide.runtime.serving.llm import application as module
from springtide.runtime.serving.llm.application import OpenAiApplication

HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def clients(engine=None, **settings):
    """The application, a plain client and the openai client before it; no socket is opened."""
    app = OpenAiApplication("chat", engine or FakeEngine(), **settings)

    async def below_root(scope, receive, send):
        await app({**scope, "root_path": "/f/chat"}, receive, send)

    transport = httpx2.ASGITransport(app=below_root)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x/f/chat") as http:
        yield http, openai.AsyncOpenAI(base_url="http://x/f/chat/v1", api_key="t", http_client=http, max_retries=0)


def run(scenario, engine=None, **settings):
    async def main():
        async with asyncio.timeout(60), clients(engine, **settings) as (http, client):
            await scenario(http, client)

    asyncio.run(main())


def events_of(text):
    """The data of each event of a stream, the last of which is [DONE]."""
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if not block.startswith(":")]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line) for line in lines[:-2]]


def test_models_and_a_whole_chat():
    async def scenario(http, client):
        assert [model.id for model in (await client.models.list()).data] == ["chat"]
        assert (await client.models.retrieve("chat")).object == "model"
        answer = await client.chat.completions.create(model="chat", messages=HELLO, max_tokens=4)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("HELL", "length")
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        raw = await http.post("/v1/chat/completions", json={"model": "chat", "messages": HELLO})
        ChatCompletion.model_validate(raw.json(), strict=True)
        assert raw.json()["choices"][0]["finish_reason"] == "stop"
        assert (await http.get("/health")).json() == {"ready": True}

    run(scenario)


def test_a_stream_has_the_chunks_of_openai():
    async def scenario(http, client):
        body = {"model": "chat", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        raw = await http.post("/v1/chat/completions", json=body)
        assert raw.headers["content-type"].startswith("text/event-stream")
        chunks = events_of(raw.text)
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]] == [*"HELLO"]
        assert (chunks[-2]["choices"][0]["delta"], chunks[-2]["choices"][0]["finish_reason"]) == ({}, "stop")
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 10)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        stream = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == "HELLO"
        async with client.chat.completions.stream(model="chat", messages=HELLO) as helper:
            assert (await helper.get_final_completion()).choices[0].message.content == "HELLO"
        body["stream_options"]["continuous_usage_stats"] = True
        raw = await http.post("/v1/chat/completions", json=body)
        assert [chunk["usage"]["completion_tokens"] for chunk in events_of(raw.text)][:3] == [1, 1, 2]

    run(scenario)


def test_completions_of_several_prompts_each_with_several_answers():
    async def scenario(http, client):
        answer = await client.completions.create(model="chat", prompt=["ab", "cd"], n=2, seed=7)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(["AB", "AB", "CD", "CD"]))
        assert answer.usage.prompt_tokens == 4
        assert [sampling.seed for sampling in engine.sampled] == [7, 8, 7, 8]
        tokens = await client.completions.create(model="chat", prompt=[104, 105])
        assert tokens.choices[0].text == "HI"
        long = await client.completions.create(model="chat", prompt="x" * 30)
        assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (16, "length")
        raw = await http.post("/v1/completions", json={"model": "chat", "prompt": "ab", "stream": True})
        chunks = events_of(raw.text)
        for chunk in chunks:
            Completion.model_validate({**chunk, "choices": []}, strict=True)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["A", "B"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]

    engine = FakeEngine()
    run(scenario, engine)


def test_stop_strings_end_an_answer_and_its_generation():
    async def scenario(http, client):
        for stream in (False, True):
            answer = await client.chat.completions.create(
                model="chat", messages=HELLO, stop=["LLO", "never"], stream=stream
            )
            if stream:
                chunks = [chunk.choices[0] async for chunk in answer]
                found = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
            else:
                found = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert found == ("HE", "stop")
        assert engine.num_open == 0

    engine = FakeEngine()
    run(scenario, engine)


def test_tools_are_told_to_the_model_and_its_calls_are_parsed():
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]

    async def scenario(http, client):
        answer = await client.chat.completions.create(model="chat", messages=HELLO, tools=tools, max_tokens=40)
        assert answer.choices[0].finish_reason == "length", "a cut call is text"
        engine.context = 4096
        answer = await client.chat.completions.create(model="chat", messages=HELLO, tools=tools)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
        assert message.tool_calls[0].function.model_dump() == {"name": "weather", "arguments": '{"city":"Bern"}'}
        assert answer.usage.prompt_tokens == len("weatherhello")
        body = {"model": "chat", "messages": HELLO, "tools": tools, "stream": True}
        chunks = events_of((await http.post("/v1/chat/completions", json=body)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta] == [0]
        assert not any(delta.get("content") for delta in deltas)
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        plain = await client.chat.completions.create(model="chat", messages=HELLO, tools=tools, tool_choice="none")
        assert plain.choices[0].message.content == call
        history = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
        assert (await client.chat.completions.create(model="chat", messages=history, tools=tools)).choices

    engine = FakeEngine(call)
    run(scenario, engine)


def test_contents_in_parts_and_fields_of_other_servers_are_taken():
    async def scenario(http, client):
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        answer = await client.chat.completions.create(
            model="chat",
            messages=parts,
            max_completion_tokens=9,
            temperature=0,
            presence_penalty=0,
            user="me",
            extra_body={"ignore_eos": True, "min_p": 0.1, "top_k": None},
        )
        assert answer.choices[0].message.content == "AB"
        (sampling,) = engine.sampled
        assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (9, 0.0, True)

    engine = FakeEngine()
    run(scenario, engine)


def test_embeddings_as_numbers_and_as_the_client_asks():
    async def scenario(http, client):
        answer = await client.embeddings.create(model="chat", input=["ab", "a"])
        assert [each.embedding for each in answer.data] == [[1.0, 2 / 1024, 0.0], [1.0, 1 / 1024, 0.0]]
        assert answer.usage.total_tokens == 3
        raw = await http.post("/v1/embeddings", json={"model": "chat", "input": "ab", "encoding_format": "float"})
        CreateEmbeddingResponse.model_validate(raw.json(), strict=True)
        with pytest.raises(openai.BadRequestError, match="maximum context"):
            await client.embeddings.create(model="chat", input="x" * 65)

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"temperature": "hot"}, None),
        ({"messages": [{"role": "odd", "content": ""}]}, None),
        ({"messages": "hello"}, None),
    ],
)
def test_what_is_wrong_is_said_in_the_form_of_openai(changes, named):
    async def scenario(http, client):
        raw = await http.post("/v1/chat/completions", json={"model": "chat", "messages": HELLO, **changes})
        error = raw.json()["error"]
        assert raw.status_code == (404 if named == "model" else 400)
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", named)
        assert error["message"]

    run(scenario)


def test_other_bodies_paths_and_methods_are_refused_too():
    async def scenario(http, client):
        assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (await http.post("/v1/chat/completions", content=b"[" * 5000)).status_code == 400
        missing = await http.get("/v1/files")
        assert missing.status_code == 404
        assert "POST /v1/chat/completions" in missing.json()["error"]["message"]
        assert (await http.get("/v1/completions")).status_code == 405
        for prompt in ("", [], ["a", ""], ["a", [1]], [[]]):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="chat", prompt=prompt)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    run(scenario)


def test_an_engine_that_fails_ends_streams_with_an_event_and_the_replica():
    ended = []

    async def scenario(http, client):
        app = OpenAiApplication("chat", engine, give_up=ended.append)
        sent, told = [], asyncio.Queue()
        told.put_nowait({"type": "lifespan.startup"})
        life = asyncio.create_task(app({"type": "lifespan"}, told.get, lambda message: put(sent, message)))
        stream = await client.chat.completions.create(model="chat", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the batching has ended"):
            assert [chunk async for chunk in stream] == [], "not reached"
        with pytest.raises(openai.InternalServerError, match="the batching has ended"):
            await client.chat.completions.create(model="chat", messages=HELLO)
        assert "springtide_llm_answers_total" in (await http.get("/metrics")).text
        assert not ended
        engine.failure = "planted"
        assert (await http.get("/health")).status_code == 503
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.01)
        assert ended == [1]
        life.cancel()

    async def put(sent, message):
        sent.append(message)

    engine = FakeEngine()
    engine.fails_after = 2
    run(scenario, engine)


def test_a_client_that_leaves_frees_the_place_of_its_answer():
    async def scenario(http, client):
        request = asyncio.create_task(client.chat.completions.create(model="chat", messages=HELLO, n=3))
        while engine.num_open < 3:
            await asyncio.sleep(0.001)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert engine.num_open == 0

    engine = FakeEngine()
    engine.gate = asyncio.Event()
    run(scenario, engine)


def test_answers_that_take_long_are_kept_alive(monkeypatch):
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)

    async def scenario(http, client):
        for stream in (False, True):
            engine.gate = asyncio.Event()
            body = {"model": "chat", "messages": HELLO, "stream": stream}
            request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await asyncio.sleep(0.2)
            engine.gate.set()
            text = (await request).text
            if stream:
                assert text.startswith(": ")
                assert len(events_of(text)) == 7
            else:
                assert text.startswith(" ")
                assert json.loads(text)["choices"][0]["message"]["content"] == "HELLO"

    engine = FakeEngine()
    run(scenario, engine)


def test_times_of_tokens_are_measured():
    async def scenario(http, client):
        await client.chat.completions.create(model="chat", messages=HELLO)
        text = (await http.get("/metrics")).text
        assert "springtide_llm_first_token_seconds_count 1.0" in text
        assert "springtide_llm_output_token_seconds_count 1.0" in text
        assert "springtide_llm_output_tokens_total 5.0" in text
        assert 'springtide_llm_answers_total{finish="stop"} 1.0' in text
        assert "springtide_llm_open_answers 0.0" in text

    run(scenario)
