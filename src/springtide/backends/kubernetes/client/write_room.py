"""How many writes may be under way at once: as many as keep the API server busy, and no more than that.

What is sent to a server that is busy already only waits there, in front of all other calls and of the news that
watches bring. How long calls take tells: each kind of call is compared with the quickest of its kind lately, and what
it took beyond that it has waited. A far server is slow from the first call on and has room for all; a busy one becomes
slow by what it is sent. (TCP Vegas does the same with segments.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# So many writes may wait in the server: below the first there is room for more, beyond the second there are too many.
FEW_WAITING, MANY_WAITING = 4.0, 8.0
# The quickest call of a kind counts for one to two of these: then a server that has become slower is believed.
PERIOD_S = 15.0
# Of how many calls the present waiting is the mean, about.
_SMOOTH = 16.0


class WriteRoom:
    """Room for at most `most` writes, for one event loop: `enter`, then `leave`; `note` what each call of it took."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.allowed = float(most)
        self._clock = clock
        self._num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        # By kind of call: when its period began, and the quickest of it and of the one before.
        self._quickest: dict[str, tuple[float, float, float]] = {}
        # The part of a call's time that it does not wait.
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
                # Its turn came as it was cancelled: give the place up again.
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
        """A call of that kind was answered after so long."""
        quickest_s = self._quickest_s(kind, took_s)
        part = quickest_s / took_s if took_s > 0.0 else 1.0
        self._served_part += (part - self._served_part) / _SMOOTH

    def note_refused(self) -> None:
        """The server has said that these are too many: half of them from now on."""
        self.allowed = max(1.0, self.allowed / 2.0)

    def note_taken(self) -> None:
        """A write has succeeded: a little more is tried, unless too many wait."""
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
