"""The interface between OpenAI's API and what writes tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from springtide.core.errors import SpringtideError

Finish = Literal["", "stop", "length"]


class EngineFailed(SpringtideError):
    """The engine could not write an answer, or not all of it."""

    status = 500


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, and how many at most. `temperature` 0 takes the most probable one.

    With a `seed` the same prompt has the same answer, whatever else the engine works on. `ignore_eos` goes on where the
    model would end.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False


class GeneratedPiece(msgspec.Struct, frozen=True):
    """The next text of an answer, which may be empty; how many tokens it has by now; and why it ends, if it does.

    `num_cached`: so many tokens of the prompt were there from earlier ones and not computed again.
    """

    text: str
    num_tokens: int
    finish: Finish = ""
    num_cached: int = 0


class TextEngine(Protocol):
    """A loaded model. All calls are made on one event loop, `start` before the others.

    `context` is how many tokens a prompt and its answer may have together, `cache_tokens` how many tokens of prompts
    are kept, so that others that begin alike share them (0: none are shared); both are known after `start`. `failure`
    says why nothing is written any more, empty while all is well.
    """

    context: int
    cache_tokens: int
    failure: str

    async def start(self) -> None:
        """Begin to work. Raises EngineFailed."""
        ...

    async def close(self) -> None:
        """End; what is being written fails."""
        ...

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model expects at its beginning."""
        ...

    async def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation by the model's chat template. Raises InvalidRequest if that cannot be."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[GeneratedPiece]:
        """Write an answer. Closing the generator early frees its place. Raises EngineFailed."""
        ...

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector of length one for each prompt. Raises EngineFailed, and InvalidRequest where there are none."""
        ...
