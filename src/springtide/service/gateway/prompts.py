"""Prompts for language models in the gateway: read from requests, and routed to replicas that know their beginning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.workload import ReplicaId
from springtide.service.gateway.requests import Pending
from springtide.serving.frames import HttpHead, HttpStart
from springtide.serving.prefixes import (
    BLOCK_BYTES,
    BYTES_PER_TOKEN,
    CACHED_HEADER,
    PrefixRouter,
    RoutedPrompt,
    prefix_blocks,
)
from springtide.serving.schema import ServiceSchema

# Of OpenAI's API; embeddings are kept by no engine.
_PATHS = ("/v1/chat/completions", "/v1/completions")


class _Asked(msgspec.Struct):
    """What of a request becomes the prompt, as it was sent: chat templates have the tools before the messages."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


def blocks_of(http: HttpHead | None, body: bytes) -> tuple[int, ...]:
    """The blocks of a request's prompt; none for a request that has no prompt, or whose body is compressed.

    Two turns of a conversation have equal bytes up to the end of the earlier one if the client writes them alike.
    """
    if http is None or http.method != "POST" or not http.path.endswith(_PATHS):
        return ()
    try:
        asked = decode_json(body, _Asked)
    except (ValueError, RecursionError):
        return ()
    return prefix_blocks(bytes(asked.messages) or bytes(asked.prompt), bytes(asked.tools))


class PromptRouting:
    """The routing of one service's prompts. It does nothing for services whose replicas keep no prompts."""

    def __init__(self) -> None:
        self._router: PrefixRouter | None = None
        self._capacity = 0

    def apply(self, schema: ServiceSchema) -> None:
        """Follow what a replica has said of itself."""
        capacity = schema.cache_tokens * BYTES_PER_TOKEN // BLOCK_BYTES
        if capacity != self._capacity:
            self._capacity = capacity
            self._router = PrefixRouter(capacity) if capacity else None

    def keep(self, replica_ids: Iterable[ReplicaId]) -> None:
        """Forget all replicas but these."""
        if self._router is not None:
            self._router.keep(replica_ids)

    def cost_of(self, pending: Pending) -> Callable[[ReplicaId], float] | None:
        """What the request costs at each replica; None if it is routed by load alone."""
        router, blocks = self._router, self._blocks(pending)
        if router is None or not blocks:
            return None
        return lambda replica_id: router.cost(replica_id, blocks)

    def sent(self, replica_id: ReplicaId, pending: Pending) -> RoutedPrompt | None:
        """The request was sent there. Answers that begin with no whole block count as work too."""
        if self._router is None or pending.http is None or not pending.http.path.endswith(_PATHS):
            return None
        return self._router.sent(replica_id, self._blocks(pending))

    def began(self, prompt: RoutedPrompt | None, start: HttpStart | None) -> None:
        """The first part of the answer has come, with this head."""
        if self._router is None or prompt is None:
            return
        self._router.began(prompt)
        told = next((value for name, value in start.headers if name == CACHED_HEADER), None) if start else None
        if told is not None:
            with contextlib.suppress(ValueError):
                self._router.found(prompt, float(told))

    def ended(self, prompt: RoutedPrompt | None) -> None:
        """The answer has ended, however that was."""
        if self._router is not None and prompt is not None:
            self._router.ended(prompt)

    def _blocks(self, pending: Pending) -> tuple[int, ...]:
        if self._router is None or pending.call is None:
            return ()
        if pending.blocks is None:
            pending.blocks = blocks_of(pending.http, pending.call.body)
        return pending.blocks
