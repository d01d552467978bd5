"""The limit on concurrent writes: as many as keep the API server busy, and no more.

Requests to a busy server only queue there, in front of all other calls and of notifications of watches. The queue is
estimated from durations: each kind of call is compared with the quickest of its kind lately; the excess is waiting. A
distant server is slow from the first call on and has room for all; a busy one becomes slow by the load. (TCP Vegas
does the same with segments.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Writes queued in the server: below the first number the limit rises, above the second it falls.
FEW_WAITING, MANY_WAITING = 4.0, 8.0
# The quickest call of a kind counts for one to two periods; then a server that became slower is accepted as such.
PERIOD_S = 15.0
# The number of calls, roughly, over which the waiting time is averaged.
_SMOOTH = 16.0


class WriteRoom:
    """Room for at most `most` writes, for one event loop: `enter`, then `leave`; `note` the duration of each call."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.allowed = float(most)
        self._clock = clock
        self._num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        # By kind of call: when its period began, and the quickest call of it and of the previous one.
        self._quickest: dict[str, tuple[float, float, float]] = {}
        # The fraction of a call's duration that is not waiting.
        self._served_part = 1.0

    async def enter(self) -> None:
        """Wait for room, first come, first served."""
        if self._num_inside < int(self.allowed) and not self._waiting:
            self._num_inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was cancelled just when its turn came: leave again.
                self.leave()
            raise

    def leave(self) -> None:
        self._num_inside -= 1
        while self._waiting and self._num_inside < int(self.allowed):
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_inside += 1
                turn.set_result(None)

    def note(self, kind: str, took_s: float) -> None:
        """Record the duration of a call of that kind."""
        quickest_s = self._quickest_s(kind, took_s)
        part = quickest_s / took_s if took_s > 0.0 else 1.0
        self._served_part += (part - self._served_part) / _SMOOTH

    def note_refused(self) -> None:
        """The server answered that there are too many: halve the limit."""
        self.allowed = max(1.0, self.allowed / 2.0)

    def note_taken(self) -> None:
        """A write has succeeded: raise the limit a little, unless too many writes are queued."""
        num_waiting = self.allowed * (1.0 - self._served_part)
        if num_waiting > MANY_WAITING:
            self.allowed = max(MANY_WAITING, self.allowed - (num_waiting - MANY_WAITING) / self.allowed)
        elif num_waiting < FEW_WAITING:
            self.allowed = min(float(self.most), self.allowed + 1.0 / self.allowed)

    def _quickest_s(self, kind: str, took_s: float) -> float:
        now_s = self._clock()
        began_s, quickest_s, before_s = self._quickest.get(kind, (now_s, took_s, took_s))
        if now_s - began_s > PERIOD_S:
            began_s, quickest_s, before_s = now_s, took_s, quickest_s
        quickest_s = min(quickest_s, took_s)
        self._quickest[kind] = (began_s, quickest_s, before_s)
        return min(quickest_s, before_s)
