"""Whether the loop makes decisions, for /readyz, status pages and people: the loop writes, any thread reads."""

from __future__ import annotations

import time
from collections.abc import Callable

from springtide.core.quantities import format_duration

# A turn takes milliseconds, and seconds with ten thousand jobs; one that takes longer than this is stuck.
STUCK_S = 30.0


class DecisionWatch:
    """Watches the turns of one loop.

    Workloads that run go on in each of these cases, but nothing is started, resized or moved.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._busy_since_s: float | None = None
        self._journal_error = ""
        self._policy_error = ""
        self._policy_error_of_turn = ""

    def note_begun(self) -> None:
        """A turn begins: there are events, or a moment has come."""
        self._policy_error_of_turn = ""
        self._busy_since_s = self._monotonic_s()

    def note_waiting(self) -> None:
        """The loop waits for the next event."""
        self._busy_since_s = None

    def note_durable(self) -> None:
        """The turn is in the journal."""
        self._journal_error, self._policy_error = "", self._policy_error_of_turn

    def note_journal_error(self, error: Exception) -> None:
        """The journal refuses the turn, which is tried again."""
        self._journal_error = str(error)

    def note_policy_error(self, error: Exception) -> None:
        """The policy's plan of this turn could not be used."""
        self._policy_error_of_turn = str(error)

    @property
    def trouble(self) -> str:
        """Why nothing is decided; empty while decisions are made."""
        if self._journal_error:
            return f"decisions wait until the journal can be written: {self._journal_error}"
        busy_since_s = self._busy_since_s
        if busy_since_s is not None and (busy_s := self._monotonic_s() - busy_since_s) > STUCK_S:
            return f"the control loop has been busy with one decision for {format_duration(busy_s)}"
        if self._policy_error:
            return f"the policy fails, so that every workload keeps its devices: {self._policy_error}"
        return ""
