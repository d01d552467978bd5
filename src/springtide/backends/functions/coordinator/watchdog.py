"""Checks that depend on time alone: functions that are late, silent, or near the end of their lifetime.

Each check is a generator of effects. The coordinator runs them in a fixed order, mixed with those of its other parts,
and stops as soon as one ends the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from springtide.backends.functions.coordinator.invocations import OVER, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import Order
from springtide.backends.functions.coordinator.reasons import EndCause, end_sentence
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    Effect,
    FindStart,
    ReplaceFunction,
    StopNow,
    Verdict,
)

# Limits before the replica is reported as lost: invocations in a row that never began, and probes in a row
# without progress although every function answers.
MAX_LOST = 6
MAX_PROBES = 3
# How long the provider may throttle invocations before the replica is reported as lost.
MAX_THROTTLED_S = 180.0


class Watchdog:
    """The time limits for functions and their provider, with the counters that they need.

    A *probe* is a new attempt that every function has to join; those that do not join it in time count as lost.
    """

    def __init__(self) -> None:
        self._throttled_since_s: float | None = None
        self._num_unbegun = 0
        self._num_probes = 0
        self._is_probe_due = False
        self._answer_by_s = math.inf

    def observe_throttled(self, run: Run) -> None:
        """The provider throttled an invocation."""
        self._throttled_since_s = self._throttled_since_s or run.now_s

    def observe_begin(self) -> None:
        """A function reported for the first time."""
        self._num_unbegun = 0

    def observe_progress(self) -> None:
        """A step was completed."""
        self._num_probes = 0

    def pop_probe(self) -> bool:
        """Whether the attempt about to begin is a probe; returned once, then False."""
        is_due, self._is_probe_due = self._is_probe_due, False
        return is_due

    def expect_answers(self, run: Run) -> None:
        """Set the limit by which every function has to report in the present attempt."""
        self._answer_by_s = run.now_s + run.pace.answer_limit_s()

    # --- checks ----------------------------------------------------------------------------------------------------

    def retry_refused(self, run: Run) -> Iterator[Effect]:
        """Retry throttled invocations, and give up when that lasts too long."""
        assert run.record is not None
        living = [invocation for slot in run.pool for invocation in slot.living()]
        put_off = [invocation for invocation in living if invocation.num_refused and invocation.began_at_s is None]
        if not put_off:
            self._throttled_since_s = None
            return
        since_s = self._throttled_since_s if self._throttled_since_s is not None else run.now_s
        if run.now_s - since_s > MAX_THROTTLED_S:
            yield StopNow(
                After.LOST,
                f"the provider has put off functions for {MAX_THROTTLED_S:.0f} s (429): {len(living) - len(put_off)} of"
                f" {len(run.pool.slots)} run; raise the account's concurrency or choose fewer functions",
            )
            return
        for invocation in put_off:
            if invocation.retry_at_s is not None and invocation.retry_at_s <= run.now_s:
                yield run.pool.invoke(invocation, run.record, run.now_s)

    def find_unbegun(self, run: Run) -> Iterator[Verdict]:
        """Accepted invocations that never began count as lost; one that begins later finds itself superseded."""
        limit_s = run.pace.start_limit_s()
        for slot in run.pool:
            for invocation in slot.living():
                is_late = run.now_s - invocation.invoked_at_s > limit_s
                is_begun = invocation.began_at_s is not None or invocation.is_adopted
                if is_begun or invocation.retry_at_s is not None or not is_late:
                    continue
                run.pool.give_up(invocation, run.now_s)
                run.pool.num_lost += 1
                self._num_unbegun += 1
                if invocation is slot.successor:
                    # It may still start and wait for its predecessor, so no second one may: a new attempt fills the
                    # place.
                    slot.successor, slot.abandoned_successor = None, invocation.incarnation
                elif self._num_unbegun > MAX_LOST:
                    yield StopNow(After.LOST, f"{self._num_unbegun} invocations in a row were accepted and never began")
                elif run.mode is Mode.RUNNING or run.is_stepping:
                    yield _missing(run, slot, invocation, EndCause.UNBEGUN)

    def find_silent(self, run: Run) -> Iterator[Verdict]:
        """Replace functions that did not join a probe's attempt in time, and uncertain ones that reported their end."""
        for slot in run.pool:
            one = slot.invocation
            if one is None or one.is_alive or one.end is not None or one.is_given_up or run.mode is not Mode.RUNNING:
                continue
            if one.is_uncertain and one.phase in OVER - {"left", "finished"}:
                # The provider lost this invocation: no other notice of its end will come.
                yield _missing(run, slot, one, EndCause(one.phase))
        if run.now_s < self._answer_by_s:
            return
        self._answer_by_s = math.inf
        for slot in run.pool:
            one = slot.invocation
            if one is None or not one.is_alive or (one.began_at_s is None and not one.is_adopted):
                continue
            if one.report is None or one.report.attempt != run.attempt:
                run.pool.give_up(one, run.now_s)
                yield _missing(run, slot, one, EndCause.SILENT)

    def invoke_successors(self, run: Run) -> Iterator[Order]:
        """Invoke successors of functions near the end of their lifetime, early enough to be warm at the handover."""
        assert run.record is not None
        total = run.record.last_step or run.progress.total_steps
        for slot in run.pool:
            invocation = slot.invocation
            if invocation is None or not invocation.is_alive or invocation.warm_at_s is None:
                continue
            if slot.successor is not None or slot.abandoned_successor > invocation.incarnation:
                continue
            left_s = invocation.invoked_at_s + run.facts.service.lifetime_s - run.now_s
            if left_s > run.pace.calls_before_end_s():
                continue
            rest_s = math.inf if total is None else (total - slot.step) * run.pace.step_s
            if rest_s + run.pace.leaves_before_end_s() > left_s:
                yield run.pool.launch(slot, run.record, run.now_s, is_successor=True)

    def find_standstill(self, run: Run) -> Iterator[Verdict]:
        """Probe all functions by a new attempt when no step was completed for a long time."""
        invocations = [slot.invocation for slot in run.pool if slot.invocation is not None]
        if run.mode is not Mode.RUNNING or any(one.began_at_s is None and not one.is_adopted for one in invocations):
            return
        if run.is_starved:
            # All functions wait for samples.
            return
        since_s = max([run.progress_at_s, *(one.warm_at_s or 0.0 for one in invocations)])
        limit_s = run.pace.silence_limit_s()
        if run.now_s - since_s <= limit_s:
            return
        self._num_probes += 1
        if self._num_probes > MAX_PROBES:
            yield StopNow(
                After.LOST,
                f"no step was completed after step {run.progress.furthest} in {MAX_PROBES} attempts of"
                f" {limit_s:.0f} s, although every function answers",
            )
            return
        self._is_probe_due = True
        yield FindStart()


def _missing(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, cause: EndCause) -> Verdict:
    """The verdict for a function that is gone without a report of its end."""
    if run.mode is Mode.CLOSING:
        return StopNow(run.after)
    return ReplaceFunction(slot, invocation, end_sentence(invocation, cause))
