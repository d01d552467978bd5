"""What is measured of each answer, in Prometheus' text form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_EACH_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 1.0, 2.5)


class LlmMetrics:
    """The metrics of one replica."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.first_token = Histogram(
            "springtide_llm_first_token_seconds",
            "From the arrival of a request at the replica to the first token (TTFT).",
            registry=registry,
            buckets=_FIRST_S,
        )
        self.output_token = Histogram(
            "springtide_llm_output_token_seconds",
            "Time per output token after the first, the mean of each answer (TPOT).",
            registry=registry,
            buckets=_EACH_S,
        )
        self.prompt_tokens = Counter("springtide_llm_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter(
            "springtide_llm_cached_prompt_tokens", "Tokens of prompts that were not computed again.", registry=registry
        )
        self.written_tokens = Counter("springtide_llm_output_tokens", "Tokens of answers.", registry=registry)
        self.answers = Counter("springtide_llm_answers", "Answers by how they ended.", ["finish"], registry=registry)
        self.open = Gauge("springtide_llm_open_answers", "Answers that are being written.", registry=registry)

    @contextmanager
    def answering(self, num_prompt_tokens: int) -> Iterator[AnswerTimes]:
        """Observe one answer, from now to the end of the block. One that does not finish counts as `broken`."""
        times = AnswerTimes()
        self.prompt_tokens.inc(num_prompt_tokens)
        self.open.inc()
        try:
            yield times
        finally:
            self.open.dec()
            self.answers.labels(times.finish or "broken").inc()
            self.written_tokens.inc(times.num_tokens)
            self.cached_tokens.inc(times.num_cached)
            if times.first_s is not None:
                self.first_token.observe(times.first_s - times.began_s)
                if times.num_tokens > 1:
                    self.output_token.observe((times.last_s - times.first_s) / (times.num_tokens - 1))

    def text(self) -> bytes:
        """All of them, for a scrape."""
        return generate_latest(self._registry)


class AnswerTimes:
    """When the tokens of one answer came, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.began_s = self.last_s = time.perf_counter()
        self.first_s: float | None = None
        self.num_tokens = self.num_cached = 0
        self.finish = ""

    def tokens(self, num_tokens: int, num_cached: int) -> None:
        """The answer has so many tokens now, and so many of its prompt were not computed again."""
        self.last_s = time.perf_counter()
        if self.first_s is None:
            self.first_s = self.last_s
        self.num_tokens, self.num_cached = num_tokens, num_cached

    def finished(self, finish: str) -> None:
        """The answer is complete."""
        self.finish = finish
