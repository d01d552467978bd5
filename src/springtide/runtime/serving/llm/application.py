"""OpenAI's API as an ASGI application before an engine. No HTTP framework: there are seven paths."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.answers import AnswerForm, embeddings, model_card
from springtide.runtime.serving.llm.engine import EngineFailed, TextEngine
from springtide.runtime.serving.llm.generation import WantedAnswer, written_answers
from springtide.runtime.serving.llm.metrics import LlmMetrics
from springtide.runtime.serving.llm.requests import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    OpenAiError,
    as_messages,
    as_prompts,
    check_answer,
    decoded,
)
from springtide.serving.prefixes import CACHED_HEADER

_LOG = logging.getLogger("springtide.replica")
# Between two parts of an answer; what stands between may end one that is silent for longer.
KEEP_ALIVE_S = 5.0
# After so long an answer that is no stream begins with spaces, which JSON allows; its status is 200 from then on.
PATIENCE_S = 15.0
# What waits for an engine that has failed gets its error before the replica ends.
_FAREWELL_S = 0.5
_WATCH_S = 0.5
_JSON, _EVENTS = b"application/json", b"text/event-stream"
_COMMENT = b": the answer is still being written\n\n"

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class OpenAiApplication:
    """The ASGI application of one model. `give_up` ends the replica when the engine has failed for good."""

    def __init__(
        self,
        name: str,
        engine: TextEngine,
        *,
        also_called: Sequence[str] = (),
        give_up: Callable[[int], object] = os._exit,
    ) -> None:
        self._name = name
        self._names = {name, *also_called}
        self._engine = engine
        self._give_up = give_up
        self._metrics = LlmMetrics()
        self._created_s = time.time()
        self._watch: asyncio.Task[None] | None = None

    @property
    def cache_tokens(self) -> int:
        """For how many tokens the engine keeps what it has computed."""
        return self._engine.cache_tokens

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, or keep the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        exchange = _Exchange(send)
        try:
            await self._answer(scope, await _body_of(receive), exchange)
        except OpenAiError as error:
            await exchange.fail(error.status, error.problem)
        except InvalidRequest as error:
            await exchange.fail(400, OpenAiError(400, str(error)).problem)
        except EngineFailed as error:
            _LOG.error("an answer broke off: %s", error)
            await exchange.fail(500, OpenAiError(500, str(error), kind="server_error", code="engine_failed").problem)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._engine.start()
        except (EngineFailed, InvalidRequest) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        self._watch = asyncio.create_task(self._watch_engine())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._watch.cancel()
        await self._engine.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch_engine(self) -> None:
        """End the replica when the engine has failed: the platform starts another one."""
        while not self._engine.failure:
            await asyncio.sleep(_WATCH_S)
        _LOG.error("the engine has failed, so the replica ends: %s", self._engine.failure)
        await asyncio.sleep(_FAREWELL_S)
        self._give_up(1)

    async def _answer(self, scope: dict[str, Any], body: bytes, exchange: _Exchange) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path.startswith("/v1/models/"):
            self._check_model(path.removeprefix("/v1/models/"))
            path = "/v1/models/"
        handlers: dict[str, tuple[str, Callable[[bytes, _Exchange], Awaitable[None]]]] = {
            "/v1/models": ("GET", self._list_models),
            "/v1/models/": ("GET", self._describe_model),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/embeddings": ("POST", self._embed),
            "/health": ("GET", self._tell_health),
            "/metrics": ("GET", self._tell_metrics),
        }
        if path not in handlers:
            there = ", ".join(f"{allowed} {known}" for known, (allowed, _) in handlers.items() if known[-1] != "/")
            raise OpenAiError(404, f"there is no {path or '/'}; there is {there}", code="unknown_url")
        allowed, handler = handlers[path]
        if method != allowed:
            raise OpenAiError(405, f"use {allowed} here", code="method_not_allowed")
        await handler(body, exchange)

    async def _list_models(self, body: bytes, exchange: _Exchange) -> None:
        card = model_card(self._name, self._created_s, self._engine.context)
        await exchange.answer({"object": "list", "data": [card]})

    async def _describe_model(self, body: bytes, exchange: _Exchange) -> None:
        await exchange.answer(model_card(self._name, self._created_s, self._engine.context))

    async def _tell_health(self, body: bytes, exchange: _Exchange) -> None:
        await exchange.answer({"ready": not self._engine.failure}, 503 if self._engine.failure else 200)

    async def _tell_metrics(self, body: bytes, exchange: _Exchange) -> None:
        await exchange.finish(self._metrics.text(), media_type=b"text/plain; version=0.0.4")

    async def _chat(self, body: bytes, exchange: _Exchange) -> None:
        request = decoded(body, ChatRequest)
        self._check_model(request.model)
        check_answer(request)
        prompt = await self._engine.render(as_messages(request.messages), request.used_tools)
        await self._write(request, [prompt], request.asked_tokens, exchange, has_tools=bool(request.used_tools))

    async def _complete(self, body: bytes, exchange: _Exchange) -> None:
        request = decoded(body, CompletionRequest)
        self._check_model(request.model)
        check_answer(request)
        prompts = await self._encoded(as_prompts(request.prompt, "prompt"))
        await self._write(request, prompts, request.asked_tokens, exchange)

    async def _embed(self, body: bytes, exchange: _Exchange) -> None:
        request = decoded(body, EmbeddingRequest)
        self._check_model(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise OpenAiError(400, "encoding_format is float or base64", param="encoding_format")
        if request.dimensions is not None:
            raise OpenAiError(
                400, "dimensions is not supported by this server", param="dimensions", code="unsupported_parameter"
            )
        inputs = await self._encoded(as_prompts(request.input, "input"))
        if (longest := max(map(len, inputs))) > self._engine.context:
            raise OpenAiError(
                400,
                f"an input has {longest} tokens; the maximum context length is {self._engine.context}",
                param="input",
                code="context_length_exceeded",
            )
        vectors = await self._engine.embed(inputs)
        as_base64 = request.encoding_format == "base64"
        await exchange.answer(embeddings(vectors, self._name, sum(map(len, inputs)), as_base64=as_base64))

    def _check_model(self, named: str) -> None:
        if named not in self._names:
            raise OpenAiError(
                404,
                f"The model {named!r:.80} does not exist here; this service has {self._name!r}",
                param="model",
                code="model_not_found",
            )

    async def _encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [await self._engine.encode(each) if isinstance(each, str) else each for each in prompts]

    async def _write(
        self,
        request: AnswerRequest,
        prompts: Sequence[Sequence[int]],
        asked_tokens: int | None,
        exchange: _Exchange,
        *,
        has_tools: bool = False,
    ) -> None:
        """Write the answers to all prompts, as a stream or as a whole."""
        wanted = []
        for prompt in prompts:
            sampling = request.sampling(asked_tokens, len(prompt), self._engine.context)
            for number in range(request.num_answers):
                # Answers to one prompt differ, and do so alike in each run.
                seed = None if sampling.seed is None else sampling.seed + number
                chosen = msgspec.structs.replace(sampling, seed=seed)
                wanted.append(WantedAnswer(prompt=prompt, sampling=chosen, stops=request.stops, has_tools=has_tools))
        form = AnswerForm(request, self._name, sum(map(len, prompts)))
        if request.stream:
            await self._stream(form, wanted, exchange)
            return
        changes = []
        waited_until_s = time.monotonic() + PATIENCE_S
        async with written_answers(self._engine, wanted, self._metrics) as answers:
            while answers.num_open:
                changes += await answers.next(KEEP_ALIVE_S)
                exchange.cached_part = form.cached_part(changes)
                if time.monotonic() > waited_until_s:
                    waited_until_s += KEEP_ALIVE_S
                    await exchange.send_part(b" ", _JSON)
        await exchange.answer(form.whole(changes))

    async def _stream(self, form: AnswerForm, wanted: Sequence[WantedAnswer], exchange: _Exchange) -> None:
        async with written_answers(self._engine, wanted, self._metrics) as answers:
            while answers.num_open:
                changes = await answers.next(KEEP_ALIVE_S)
                exchange.cached_part = form.cached_part(changes) if changes else None
                events = [_event(chunk) for change in changes for chunk in form.chunks(change)]
                await exchange.send_part(b"".join(events) or _COMMENT, _EVENTS)
        last = b"".join(_event(chunk) for chunk in form.last_chunks())
        await exchange.finish(last + b"data: [DONE]\n\n", media_type=_EVENTS)


class _Exchange:
    """The answer to one request on its way."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._media_type = b""
        # The part of the prompts that the engine had; the gateway corrects by it what it believes of the cache.
        self.cached_part: float | None = None

    async def answer(self, value: dict[str, Any], status: int = 200) -> None:
        await self.finish(msgspec.json.encode(value), status)

    async def finish(self, body: bytes, status: int = 200, *, media_type: bytes = _JSON) -> None:
        await self._begin(status, media_type)
        await self._send({"type": "http.response.body", "body": body})

    async def send_part(self, part: bytes, media_type: bytes) -> None:
        await self._begin(200, media_type)
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def fail(self, status: int, problem: dict[str, Any]) -> None:
        """Answer with an error; of a stream that has begun it is the last event."""
        body = msgspec.json.encode({"error": problem})
        is_stream = self._media_type == _EVENTS
        if self._media_type and not is_stream:
            # Spaces were sent with status 200: only a connection that breaks off tells of the error.
            raise EngineFailed(problem["message"])
        await self.finish(b"event: error\ndata: " + body + b"\n\n" if is_stream else body, status)

    async def _begin(self, status: int, media_type: bytes) -> None:
        if self._media_type:
            return
        self._media_type = media_type
        headers = [(b"content-type", media_type)]
        if self.cached_part is not None:
            headers.append((CACHED_HEADER, b"%.3f" % self.cached_part))
        if media_type == _EVENTS:
            # What stands between must neither keep the events back nor answer with old ones.
            headers += [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _body_of(receive: Receive) -> bytes:
    parts, is_whole = [], False
    while not is_whole:
        message = await receive()
        if message["type"] != "http.request":
            raise OpenAiError(400, "the body is not complete")
        parts.append(message.get("body", b""))
        is_whole = not message.get("more_body", False)
    return b"".join(parts)
