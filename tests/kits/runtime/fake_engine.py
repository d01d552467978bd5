"""A test double at the interface of engines: its tokens are characters, and its answers follow from the prompt."""

from __future__ import annotations

import asyncio

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.engine import EngineFailed, GeneratedPiece


class FakeEngine:
    """Answers with `script`, or with the prompt in upper case, one character a piece; `sampled` is what it was asked.

    It fails after `fails_after` characters, and waits for `gate` before each one, if they are set.
    """

    context = 64

    def __init__(self, script=None):
        self.failure = ""
        self.script = script
        self.sampled = []
        self.fails_after = None
        self.gate = None
        self.num_open = 0

    async def start(self):
        pass

    async def close(self):
        pass

    async def encode(self, text):
        return [ord(character) for character in text]

    async def render(self, messages, tools):
        if any(message["role"] == "odd" for message in messages):
            raise InvalidRequest("the chat template of this model does not take these messages: odd")
        named = "".join(tool["function"]["name"] for tool in tools)
        return await self.encode(named + "".join(message["content"] for message in messages))

    async def generate(self, prompt, sampling):
        self.sampled.append(sampling)
        self.num_open += 1
        text = self.script if self.script is not None else "".join(map(chr, prompt)).upper()
        try:
            for number, character in enumerate(text[: sampling.max_tokens], 1):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if self.fails_after is not None and number > self.fails_after:
                    raise EngineFailed("the batching has ended: planted")
                is_last = number == min(len(text), sampling.max_tokens)
                finish = "" if not is_last else "stop" if number == len(text) else "length"
                yield GeneratedPiece(character, number, finish)
        finally:
            self.num_open -= 1

    async def embed(self, prompts):
        return [[1.0, len(prompt) / 1024, 0.0] for prompt in prompts]
