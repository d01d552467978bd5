"""A modelled engine of a language model: steps that read a piece of a prompt and write a token of each answer."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import msgspec

from springtide.serving.prefixes import CachedBlocks
from springtide_studies.prefix_routing.trace import TOKENS_PER_BLOCK, RecordedPrompt


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: for itself, a token of a prompt, a running answer, and a token of all its contexts."""

    step_s: float = 8e-3
    prompt_token_s: float = 60e-6
    answer_s: float = 0.4e-3
    context_token_s: float = 0.2e-6
    # Tokens of prompts in one step at most.
    piece: int = 512


class ModelledEngine:
    """One replica with a cache of `capacity` blocks. Prompts are read one after the other, in the order of arrival.

    `on_began` is called with a prompt's number, the time and the part of its blocks that were there when its first
    token is written, `on_ended` with the number at the last one.
    """

    def __init__(
        self,
        capacity: int,
        times: StepTimes,
        on_began: Callable[[int, float, float], None],
        on_ended: Callable[[int], None],
    ) -> None:
        self.now_s = self.busy_s = 0.0
        self.num_hits = self.num_prompt_tokens = self.num_requests = 0
        self._times = times
        self._cache = CachedBlocks(capacity)
        self._waiting: deque[tuple[int, RecordedPrompt]] = deque()
        self._unread = 0
        self._part_found = 0.0
        self._ends: list[tuple[int, int, int]] = []
        self._num_steps = self._context = 0
        self._on_began, self._on_ended = on_began, on_ended

    def add(self, number: int, prompt: RecordedPrompt) -> None:
        """A prompt arrives now."""
        self.num_requests += 1
        self._waiting.append((number, prompt))
        if len(self._waiting) == 1:
            self._look_up(prompt)

    def advance(self, until_s: float) -> None:
        """Work until that moment; the step in which it lies is finished."""
        while self.now_s < until_s and (self._waiting or self._ends):
            self._step()
        self.now_s = max(self.now_s, until_s)

    def finish(self) -> None:
        """Work until nothing is left."""
        while self._waiting or self._ends:
            self._step()

    def _look_up(self, prompt: RecordedPrompt) -> None:
        matched = self._cache.num_matched(prompt.hash_ids)
        self.num_hits += matched
        self._part_found = matched / max(1, len(prompt.hash_ids))
        # The last token is always computed, because the first one of the answer follows from it.
        self._unread = max(1, prompt.input_length - matched * TOKENS_PER_BLOCK)
        self.num_prompt_tokens += self._unread

    def _step(self) -> None:
        times, read = self._times, min(self._unread, self._times.piece)
        took_s = times.step_s + times.prompt_token_s * read + times.answer_s * len(self._ends)
        took_s += times.context_token_s * self._context
        self.now_s += took_s
        self.busy_s += took_s
        self._num_steps += 1
        self._context += len(self._ends)
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, number, context = heapq.heappop(self._ends)
            self._context -= context
            self._on_ended(number)
        self._unread -= read
        if self._waiting and not self._unread:
            self._begin(*self._waiting.popleft())

    def _begin(self, number: int, prompt: RecordedPrompt) -> None:
        self._cache.use(prompt.hash_ids)
        self._on_began(number, self.now_s, self._part_found)
        left = max(1, prompt.output_length) - 1
        if left:
            self._context += prompt.input_length
            heapq.heappush(self._ends, (self._num_steps + left, number, prompt.input_length + left))
        else:
            self._on_ended(number)
        if self._waiting:
            self._look_up(self._waiting[0][1])
