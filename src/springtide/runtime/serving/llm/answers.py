"""Answers in OpenAI's forms: whole ones, and the chunks of streams."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

from springtide.runtime.serving.llm.generation import AnswerChange
from springtide.runtime.serving.llm.requests import AnswerRequest, ChatRequest


class AnswerForm:
    """The form of the answers to one request, of a chat or of a completion, with what they have in common."""

    def __init__(self, request: AnswerRequest, model: str, num_prompt_tokens: int) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        self._tells_usage = request.tells_usage
        self._tells_it_always = request.tells_usage and bool(
            request.stream_options and request.stream_options.continuous_usage_stats
        )
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        self._kind = kind
        self._common = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self._num_calls: dict[int, int] = {}
        self._begun: set[int] = set()

    def usage(self) -> dict[str, Any]:
        """The tokens of all prompts and answers so far."""
        written = sum(self._num_tokens.values())
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._num_prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": min(self._num_prompt_tokens, sum(self._num_cached.values()))},
        }

    def cached_part(self, changes: Sequence[AnswerChange]) -> float:
        """The part of the prompts that was not computed again, as far as these changes tell."""
        cached = {change.index: change.num_cached for change in changes}
        return min(1.0, sum(cached.values()) / max(1, self._num_prompt_tokens))

    def whole(self, changes: Sequence[AnswerChange]) -> dict[str, Any]:
        """The answer as one object, of all its changes."""
        by_index: dict[int, list[AnswerChange]] = {}
        for change in changes:
            by_index.setdefault(change.index, []).append(change)
            self._count(change)
        choices = [self._choice(index, by_index[index]) for index in sorted(by_index)]
        return {**self._common, "object": self._kind, "choices": choices, "usage": self.usage()}

    def chunks(self, change: AnswerChange) -> list[dict[str, Any]]:
        """The chunks that tell of a change: of a chat one with the role first, and one for the end."""
        self._count(change)
        if not self._is_chat:
            return [self._chunk(change.index, {"text": change.text}, change.finish)]
        found = []
        if change.index not in self._begun:
            self._begun.add(change.index)
            found.append(self._chunk(change.index, {"delta": {"role": "assistant", "content": ""}}))
        if change.text:
            found.append(self._chunk(change.index, {"delta": {"content": change.text}}))
        if change.calls:
            start = self._num_calls.get(change.index, 0)
            self._num_calls[change.index] = start + len(change.calls)
            calls = [{"index": at, **_tool_call(*call)} for at, call in enumerate(change.calls, start)]
            found.append(self._chunk(change.index, {"delta": {"tool_calls": calls}}))
        if change.finish:
            found.append(self._chunk(change.index, {"delta": {}}, change.finish))
        return found

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk after all others, with the usage, if that is asked for."""
        if not self._tells_usage:
            return []
        return [{**self._common, "object": self._chunk_kind, "choices": [], "usage": self.usage()}]

    def _count(self, change: AnswerChange) -> None:
        self._num_tokens[change.index] = change.num_tokens
        self._num_cached[change.index] = change.num_cached

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else self._kind

    def _chunk(self, index: int, told: dict[str, Any], finish: str = "") -> dict[str, Any]:
        choice = {"index": index, **told, "logprobs": None, "finish_reason": finish or None}
        chunk = {**self._common, "object": self._chunk_kind, "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = self.usage() if self._tells_it_always else None
        return chunk

    def _choice(self, index: int, changes: Sequence[AnswerChange]) -> dict[str, Any]:
        text, finish = "".join(change.text for change in changes), changes[-1].finish
        if not self._is_chat:
            return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := [_tool_call(*call) for change in changes for call in change.calls]:
            message |= {"tool_calls": calls, "content": text.strip() or None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def embeddings(vectors: Sequence[Sequence[float]], model: str, num_tokens: int, *, as_base64: bool) -> dict[str, Any]:
    """The answer with vectors, as lists or as little-endian float32 in base64."""
    made = [_in_base64(vector) if as_base64 else list(vector) for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(made)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _in_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def model_card(name: str, created_s: float, context: int) -> dict[str, Any]:
    """What /v1/models says of a model; `max_model_len` as other servers have it."""
    return {
        "id": name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "springtide",
        "max_model_len": context,
    }
