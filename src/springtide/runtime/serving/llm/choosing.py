"""Choosing tokens for many requests at once, each by its own rules: what transformers' batching lacks.

These are logits processors of its continuous batching. Each gets one 32-bit value for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopPLogitsWarper,
)

# As `choice` of a request: chosen by chance, or the most probable token; any other value is a seed.
FREE, GREEDY = 0, -1
_WORD = 0xFFFFFFFF


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The 32-bit words, in int64, mixed so that close ones have nothing in common (Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        words = words ^ (words >> shift)
        words = (words * factor) & _WORD
    return words


class OptionalTopP(ContinuousBatchingTopPLogitsWarper):
    """Top-p for each request, which on a CPU costs nothing while none asks for it: it sorts the vocabulary."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """The scores, shape (requests, vocabulary), with -inf for what is not in a request's nucleus."""
        if scores.device.type == "cpu" and bool((tensor_arg[: scores.size(0)].view(torch.float32) >= 1.0).all()):
            return scores
        return super().__call__(scores, tensor_arg)


class SeededChoice(ContinuousBatchingLogitsProcessor):
    """Leaves one token for a request that is greedy or has a seed; has to be the last processor.

    With a seed it is drawn by the Gumbel-max trick, with noise that follows from the seed, the number of the token in
    the answer, and the entry of the vocabulary; nothing else in the batch changes it.
    """

    supported_kwargs = {"choice": int}
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill with FREE."""
        int32_tensor.fill_(FREE)

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        """The choice of each request, int32; of one with a seed what seed and place make together."""
        states = [request.state for request in requests_with_new_token]
        given = [(state.logit_processor_kwargs.get("choice", FREE), _place_of(state)) for state in states]
        return torch.tensor([self._word(*each) for each in given], dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """The scores, shape (requests, vocabulary), with -inf for all tokens but the chosen ones."""
        words = tensor_arg[: scores.size(0)]
        if scores.device.type == "cpu" and bool((words == FREE).all()):
            return scores
        tokens = torch.arange(scores.size(1), device=scores.device, dtype=torch.int64)
        noise = _mixed(_mixed(words.to(torch.int64).unsqueeze(1) & _WORD) ^ tokens)
        gumbel = -torch.log(-torch.log((noise.to(torch.float64) + 0.5) / (_WORD + 1.0)))
        drawn = scores.to(torch.float64) + torch.where((words == GREEDY).unsqueeze(1), 0.0, gumbel)
        chosen = drawn.argmax(dim=-1, keepdim=True)
        alone = torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)
        return torch.where((words == FREE).unsqueeze(1), scores, alone)

    @staticmethod
    def _word(choice: int, place: int) -> int:
        """The value for a request, as a signed 32-bit integer that no seed shares with FREE or GREEDY."""
        if choice in (FREE, GREEDY):
            return choice
        word = int(_mixed(torch.tensor((choice ^ (place * 0x9E3779B9)) & _WORD)))
        word = 1 if word in (0, _WORD) else word
        return word - (1 << 32) if word > 0x7FFFFFFF else word


def _place_of(state: Any) -> int:
    """How many tokens the answer has, also after the batching has begun it again as a longer prompt."""
    first = state._true_initial_tokens or len(state.initial_tokens)
    return int(len(state.initial_tokens) - first + len(state.generated_tokens))


def choice_of(temperature: float, seed: int | None) -> int:
    """The `choice` of a request."""
    if temperature == 0.0:
        return GREEDY
    if seed is None:
        return FREE
    return 1 + seed % (2**31 - 2)
