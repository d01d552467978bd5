"""Room for streams in an engine's cache: those that do not fit wait for their turn, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenRoom:
    """So many tokens, of which each stream takes some. Everything runs on one event loop."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = self._num_free = num_tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, num_tokens: int) -> AsyncIterator[None]:
        """Take so many within the block, or all that there are; waits for them."""
        taken = min(num_tokens, self._num_tokens)
        if self._waiting or taken > self._num_free:
            entry = (taken, asyncio.get_running_loop().create_future())
            self._waiting.append(entry)
            try:
                await entry[1]
            except asyncio.CancelledError:
                if entry[1].done() and not entry[1].cancelled():
                    self._give_back(taken)
                else:
                    self._waiting.remove(entry)
                    self._give_back(0)
                raise
        else:
            self._num_free -= taken
        try:
            yield
        finally:
            self._give_back(taken)

    def _give_back(self, num_tokens: int) -> None:
        """Free so many, and let those go on that have waited longest, as far as they fit."""
        self._num_free += num_tokens
        while self._waiting and self._waiting[0][0] <= self._num_free:
            taken, turn = self._waiting.popleft()
            self._num_free -= taken
            turn.set_result(None)
