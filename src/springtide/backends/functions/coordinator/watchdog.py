"""What a coordinator does when nothing happens but time: who is late, silent, about to leave, or too dear."""

from __future__ import annotations

import math

from springtide.backends.functions.coordinator.attempts import CLOSE_S, LAG_S
from springtide.backends.functions.coordinator.invocations import OVER, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.parameter_store import Parameters
from springtide.backends.functions.coordinator.reasons import death_sentence

# How often one place may die without any progress of the job before that is no accident any more.
MAX_DEATHS = 5
# How often in a row invocations may vanish, and all functions may stand still although everybody answers.
MAX_LOST = 6
MAX_PROBES = 3
# So long the provider may put invocations off before the job gives its place back.
MAX_THROTTLED_S = 180.0
USAGE_INTERVAL_S = 5.0


class Watchdog(Parameters):
    """The part of the coordinator that looks at the clock."""

    _is_unsettled = False

    def _works(self) -> bool:
        """Whether steps are being made now, towards a boundary at which all stop or not."""
        if self.record is None or self.record.verb == "stop":
            return False
        return self.mode == "running" or (self.mode == "closing" and self.record.last_step is not None)

    def _look_around(self) -> None:
        """Everything that is due at this instant."""
        self._wake_if_due()
        if self._is_unsettled and self.mode == "running":
            # The coordinator before was about to end or change something: a new attempt knows of none of it.
            self._is_unsettled = False
            self._look()
        if self.mode == "running":
            self._look_after_store()
        if self.mode == "closing" and self._now_s > self._close_by_s:
            if self._works():
                self._stop_now(self.after)
            else:
                self.pool.give_up_all(self._now_s)
                self._check_closed()
        for check in (
            self._try_again,
            self._find_unbegun,
            self._find_silent,
            self._look_after_change,
            self._rest_if_starved,
            self._call_successors,
            self._notice_a_standstill,
            self._keep_the_budget,
            self._space_the_saves,
        ):
            if not self._works():
                break
            check()
        if self.mode in ("running", "closing") and self._now_s - self._usage_at_s >= USAGE_INTERVAL_S:
            self._emit_usage()

    def _try_again(self) -> None:
        """Invoke again whoever was put off, and give up when that lasts too long."""
        assert self.record is not None
        invocations = [invocation for slot in self.pool for invocation in slot.living()]
        put_off = [invocation for invocation in invocations if invocation.num_refused and invocation.began_at_s is None]
        if not put_off:
            self._throttled_since_s = None
            return
        since_s = self._throttled_since_s if self._throttled_since_s is not None else self._now_s
        if self._now_s - since_s > MAX_THROTTLED_S:
            running = len(invocations) - len(put_off)
            self._lose(
                f"the provider has put off functions for {MAX_THROTTLED_S:.0f} s (429): {running} of"
                f" {len(self.pool.slots)} run; raise the account's concurrency or choose fewer functions"
            )
            return
        for invocation in put_off:
            if invocation.retry_at_s is not None and invocation.retry_at_s <= self._now_s:
                self._orders.append(self.pool.invoke(invocation, self.record, self._now_s))

    def _find_unbegun(self) -> None:
        """Invocations that were accepted and never began are lost; one that begins later finds itself superseded."""
        limit_s = self.pace.start_limit_s()
        for slot in self.pool:
            for invocation in slot.living():
                is_late = self._now_s - invocation.invoked_at_s > limit_s
                if (
                    invocation.began_at_s is not None
                    or invocation.retry_at_s is not None
                    or invocation.is_adopted
                    or not is_late
                ):
                    continue
                self.pool.give_up(invocation, self._now_s)
                self.pool.num_lost += 1
                self._num_unbegun += 1
                if invocation is slot.successor:
                    # It may wait for the leaver yet, so nobody else may: the place is filled anew in a new attempt.
                    slot.successor, slot.abandoned_successor = None, invocation.incarnation
                elif self._num_unbegun > MAX_LOST:
                    self._lose(f"{self._num_unbegun} invocations in a row were accepted and never began")
                elif self.mode == "running" or self._works():
                    self._replace_missing(slot, invocation, "unbegun")

    def _find_silent(self) -> None:
        """After a roll call, those who have not joined the new attempt are gone; so are those who vanished."""
        for slot in self.pool:
            invocation = slot.invocation
            if (
                invocation is None
                or invocation.is_alive
                or invocation.end is not None
                or invocation.is_given_up
                or self.mode != "running"
            ):
                continue
            if invocation.is_uncertain and invocation.phase in OVER - {"left", "finished"}:
                # Nobody will tell of its end but its last report, which is here.
                self._replace_missing(slot, invocation, invocation.phase)
        if self._now_s < self._answer_by_s:
            return
        self._answer_by_s = math.inf
        for slot in self.pool:
            invocation = slot.invocation
            if (
                invocation is None
                or not invocation.is_alive
                or (invocation.began_at_s is None and not invocation.is_adopted)
            ):
                continue
            if invocation.report is None or invocation.report.attempt != self._attempt:
                self.pool.give_up(invocation, self._now_s)
                self._replace_missing(slot, invocation, "silent")

    def _replace_missing(self, slot: PlaceSlot, invocation: FunctionInvocation, how: str) -> None:
        """A function is gone, and only its absence says so."""
        if self.mode == "closing":
            self._stop_now(self.after)
        else:
            self._replace(slot, invocation, death_sentence(invocation, how, ""))

    def _call_successors(self) -> None:
        """Invoke who is to follow those whose lifetime is nearly over, early enough to be warm when they leave."""
        assert self.record is not None
        total = self.record.last_step or self.progress.total_steps
        for slot in self.pool:
            invocation = slot.invocation
            if invocation is None or not invocation.is_alive or invocation.warm_at_s is None:
                continue
            if slot.successor is not None or slot.abandoned_successor > invocation.incarnation:
                continue
            left_s = invocation.invoked_at_s + self.facts.service.lifetime_s - self._now_s
            if left_s > self.pace.calls_before_end_s():
                continue
            rest_s = math.inf if total is None else (total - slot.step) * self.pace.step_s
            if rest_s + self.pace.leaves_before_end_s() > left_s:
                self._orders.append(self.pool.launch(slot, self.record, self._now_s, is_successor=True))

    def _notice_a_standstill(self) -> None:
        """No step for a long time although everybody seems to be there: call the roll by a new attempt."""
        invocations = [slot.invocation for slot in self.pool if slot.invocation is not None]
        if self.mode != "running" or any(
            invocation.began_at_s is None and not invocation.is_adopted for invocation in invocations
        ):
            return
        if self._is_starved():
            # Samples are what is missing.
            return
        since_s = max([self._progress_at_s, *(invocation.warm_at_s or 0.0 for invocation in invocations)])
        limit_s = self.pace.silence_limit_s()
        if self._now_s - since_s <= limit_s:
            return
        self._num_probes += 1
        if self._num_probes > MAX_PROBES:
            self._lose(
                f"no step was completed after step {self.progress.furthest} in {MAX_PROBES} attempts of"
                f" {limit_s:.0f} s, although every function answers"
            )
            return
        self._is_probe = True
        self._look()

    def _keep_the_budget(self) -> None:
        """Let nobody begin a step that the budget does not hold, the saving and the end included."""
        assert self._plan is not None
        assert self.record is not None
        budget_usd = self.ledger.budget_usd
        if budget_usd is None:
            return
        spent_usd = self._spent_usd()
        if spent_usd + self.ledger.seconds_usd(self._plan, LAG_S) >= budget_usd:
            self._stop_now("budget")
            return
        if self.mode != "running":
            return
        total = self.progress.total_steps
        rest = math.inf if total is None else total - self.progress.furthest
        steps = self.ledger.affordable_steps(spent_usd, self._step_usd(self._plan), self._end_usd(self._plan))
        # Whatever is decided now is known to them this many steps later.
        lag = math.ceil(LAG_S / self.pace.step_s)
        if steps < rest and steps <= lag + 1 and self.progress.furthest > self.record.restore_step:
            self._close("budget", CLOSE_S + 2 * self.pace.step_s)

    def _space_the_saves(self) -> None:
        """Save less often where saving takes too much of a step; never more often within an attempt."""
        assert self._plan is not None
        assert self.record is not None
        is_known = self.progress.furthest >= self.record.restore_step + 3 and self.pace.measured_step_s is not None
        if self.mode == "running" and is_known:
            every = self._save_every(self._plan)
            if every > self.record.save_every:
                self._write(save_every=every)
