"""The answers of one request: several at a time, each cut at its stop strings, as one sequence of changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec

from springtide.runtime.serving.llm.engine import Sampling, TextEngine
from springtide.runtime.serving.llm.metrics import LlmMetrics
from springtide.runtime.serving.llm.text import StopStrings, ToolCalls


class WantedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that a request asks for. `has_tools` takes calls of tools out of its text."""

    prompt: Sequence[int]
    sampling: Sampling
    stops: Sequence[str] = ()
    has_tools: bool = False


class AnswerChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of an answer: text, complete calls of tools as names and arguments, and why it ends, if it does.

    `num_cached` of its prompt's tokens were not computed again.
    """

    index: int
    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    num_tokens: int = 0
    num_cached: int = 0
    finish: str = ""


async def write_answer(
    engine: TextEngine, wanted: WantedAnswer, index: int, metrics: LlmMetrics
) -> AsyncGenerator[AnswerChange]:
    """The changes of one answer, the last of which says why it ends."""
    stops, tools = StopStrings(wanted.stops), ToolCalls()
    num_calls, finish, num_tokens = 0, "", 0
    with metrics.answering(len(wanted.prompt)) as observed:
        async with aclosing(engine.generate(wanted.prompt, wanted.sampling)) as pieces:
            async for piece in pieces:
                num_tokens, finish = piece.num_tokens, piece.finish
                observed.tokens(num_tokens, piece.num_cached)
                text = stops.feed(piece.text)
                if stops.is_found:
                    finish = "stop"
                elif finish:
                    text += stops.flush()
                calls: list[tuple[str, str]] = []
                if wanted.has_tools:
                    text, calls = tools.feed(text)
                    num_calls += len(calls)
                if finish:
                    text += tools.flush()
                    finish = "tool_calls" if num_calls and finish == "stop" else finish
                if text or calls or finish:
                    yield AnswerChange(
                        index=index,
                        text=text,
                        calls=calls,
                        num_tokens=num_tokens,
                        num_cached=piece.num_cached,
                        finish=finish,
                    )
                if finish:
                    observed.finished(finish)
                    return


@asynccontextmanager
async def written_answers(
    engine: TextEngine, wanted: Sequence[WantedAnswer], metrics: LlmMetrics
) -> AsyncIterator[AnswerQueue]:
    """The changes of all answers, as they come. Leaving the block ends those that are not complete."""
    queue = AnswerQueue(len(wanted))
    tasks = [
        asyncio.create_task(queue.take_from(write_answer(engine, each, index, metrics)))
        for index, each in enumerate(wanted)
    ]
    try:
        yield queue
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AnswerQueue:
    """The changes of several answers that were not taken yet."""

    def __init__(self, num_answers: int) -> None:
        self.num_open = num_answers
        self._queue: asyncio.Queue[AnswerChange | BaseException] = asyncio.Queue()

    async def take_from(self, changes: AsyncGenerator[AnswerChange]) -> None:
        """Add the changes of one answer, and what it fails with."""
        try:
            async with aclosing(changes):
                async for change in changes:
                    self._queue.put_nowait(change)
        except Exception as error:
            self._queue.put_nowait(error)

    async def next(self, patience_s: float) -> list[AnswerChange]:
        """What has come; empty if there is nothing within the time. Raises what an answer has failed with."""
        try:
            async with asyncio.timeout(patience_s):
                found = [await self._queue.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        changes: list[AnswerChange] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            self.num_open -= bool(each.finish)
            changes.append(each)
        return changes
