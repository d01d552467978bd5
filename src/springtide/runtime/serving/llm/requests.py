"""The bodies of OpenAI's API that are understood, and what of them is refused.

Fields that are not named here are ignored, as clients of other engines send many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import SpringtideError
from springtide.runtime.serving.llm.engine import Sampling

_MAX_ANSWERS = 64
_MAX_STOPS = 16
# What the completions endpoint takes where a request says nothing, as OpenAI's does.
_DEFAULT_COMPLETION_TOKENS = 16
# A text, a list of tokens, or a list of either.
Prompts = str | list[str | int | list[int]]
BodyT = TypeVar("BodyT")


class OpenAiError(SpringtideError):
    """An error in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.problem = {"message": message, "type": kind, "param": param, "code": code}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says beside its text; `continuous_usage_stats` with each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What requests for chats and for completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_answers(self) -> int:
        """How many answers each prompt gets."""
        return 1 if self.n is None else self.n

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, asked: int | None, num_prompt_tokens: int, context: int) -> Sampling:
        """How an answer to a prompt of so many tokens is chosen; `asked` are the most tokens that it may have.

        Raises OpenAiError if they do not fit into the context.
        """
        room = context - num_prompt_tokens
        if room < 1 or (asked or 0) > room:
            wanted = f" and the {asked} of the answer" if asked is not None else ""
            raise OpenAiError(
                400,
                f"This model's maximum context length is {context} tokens; the {num_prompt_tokens} of the prompt"
                f"{wanted} are too many. Shorten the prompt or the answer.",
                param="messages" if isinstance(self, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        return Sampling(
            max_tokens=room if asked is None else asked,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(AnswerRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Messages go to the chat template as they are, but for contents in parts."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens of an answer; None: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def used_tools(self) -> Sequence[dict[str, Any]]:
        """The tools that the model is told of."""
        return () if self.tool_choice == "none" else self.tools or ()


class CompletionRequest(AnswerRequest, frozen=True, kw_only=True):
    """POST /v1/completions. A prompt is a text or a list of tokens, or several of them."""

    prompt: Prompts
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def asked_tokens(self) -> int:
        """The most tokens of an answer."""
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str
    input: Prompts
    encoding_format: str | None = None
    dimensions: int | None = None


def decoded(body: bytes, kind: type[BodyT]) -> BodyT:
    """The request. Raises OpenAiError, whose message names the field where there is one."""
    try:
        return decode_json(body, kind)
    except (ValueError, RecursionError) as error:
        raise OpenAiError(400, f"The request is not valid: {error}") from None


def as_prompts(given: Prompts, param: str) -> list[str | list[int]]:
    """The prompts, or inputs, one by one. Raises OpenAiError for none, for empty ones, and for mixed kinds."""
    if isinstance(given, str):
        found: list[str | list[int]] = [given]
    elif all(isinstance(each, int) for each in given):
        found = [[each for each in given if isinstance(each, int)]]
    else:
        found = [each for each in given if not isinstance(each, int)]
        if len({type(each) for each in given}) > 1:
            raise OpenAiError(400, f"{param} holds texts or lists of tokens, not both", param=param)
    if not all(found):
        raise OpenAiError(400, f"{param} is empty, or one of several is", param=param)
    return found


def check_answer(request: AnswerRequest) -> None:
    """Raise OpenAiError for values out of range, and for what this server does not do."""
    ranges = (
        ("temperature", request.temperature, 0.0, 2.0),
        ("top_p", request.top_p, 1e-6, 1.0),
        ("n", request.n, 1, _MAX_ANSWERS),
        ("max_tokens", request.max_tokens, 1, None),
        ("seed", request.seed, -(2**63), 2**63 - 1),
    )
    for name, value, lowest, highest in ranges:
        if value is not None and not (lowest <= value and (highest is None or value <= highest)):
            bounds = f"{lowest:g} or more" if highest is None else f"from {lowest:g} to {highest:g}"
            raise OpenAiError(400, f"{name} is {value:g}; it may be {bounds}", param=name)
    if len(request.stops) > _MAX_STOPS:
        raise OpenAiError(400, f"there are {len(request.stops)} stop strings; at most {_MAX_STOPS}", param="stop")
    if request.stream_options is not None and not request.stream:
        raise OpenAiError(400, "stream_options are for streams only", param="stream_options")
    if any(request.logit_bias or {}):
        _refuse("logit_bias")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(request, name):
            _refuse(name)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        for name in ("logprobs", "echo", "suffix"):
            if getattr(request, name):
                _refuse(name)
        if request.best_of not in (None, request.num_answers):
            _refuse("best_of")


def _check_chat(request: ChatRequest) -> None:
    if request.logprobs or request.top_logprobs:
        _refuse("logprobs")
    if (request.response_format or {}).get("type", "text") != "text":
        _refuse("response_format")
    if request.tool_choice not in (None, "auto", "none"):
        _refuse("tool_choice", " but auto and none")
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        raise OpenAiError(400, "max_completion_tokens has to be 1 or more", param="max_completion_tokens")
    if not request.messages:
        raise OpenAiError(400, "messages is empty", param="messages")


def _refuse(name: str, but: str = "") -> NoReturn:
    raise OpenAiError(400, f"{name} is not supported by this server{but}", param=name, code="unsupported_parameter")


def as_messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a chat template, with contents that come in parts as one text, and arguments as objects.

    Raises OpenAiError for a part that is no text.
    """
    return [_as_message(message, index) for index, message in enumerate(given)]


def _as_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise OpenAiError(400, "a message has no role", param=f"messages[{index}].role")
    made = dict(message)
    if isinstance(content := made.get("content"), list):
        found = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(found):
            raise OpenAiError(400, "only parts of the type text are supported", param=f"messages[{index}].content")
        made["content"] = "".join(texts)
    elif content is None:
        made["content"] = ""
    elif not isinstance(content, str):
        raise OpenAiError(400, "the content of a message is a text", param=f"messages[{index}].content")
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [_with_arguments(call) for call in calls]
    return made


def _with_arguments(call: Any) -> Any:
    """The call with its arguments as an object, as templates expect them."""
    try:
        function = dict(call["function"])
        function["arguments"] = msgspec.json.decode(function["arguments"])
        return {**call, "function": function}
    except (ValueError, KeyError, TypeError):
        return call
