"""The states that a job's functions have saved: which are complete, how often to save, which may be removed."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.backends.functions.coordinator import budget
from springtide.backends.functions.coordinator.messages import DeleteKeys, Emit, FindStates, Order, StatesFound
from springtide.backends.functions.coordinator.run import Mode, Run
from springtide.core.events import CheckpointCommitted
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import ControlRecord, Keys


class SavedStates:
    """The saved states of one job. `newest_step` is the newest step whose state is known to be complete."""

    def __init__(self, prefix: str) -> None:
        self.newest_step = 0
        self._keys = Keys(prefix)
        # Steps whose state is known to be complete and still needed, the newest last.
        self._known: list[int] = []
        self._removed_before = 0
        self._num_bytes = 0
        self._num_looks = 0
        # Prefixes of the messages of earlier attempts.
        self._left_over: list[str] = []

    @property
    def stored_bytes(self) -> float:
        """The bytes stored: about two states."""
        return 2.0 * self._num_bytes

    # --- finding ---------------------------------------------------------------------------------------------------

    def look(self, run: Run) -> FindStates:
        """The order to find the step to begin from: up to the newest with all losses known, unless that is the last."""
        total, told = run.progress.total_steps, run.progress.losses_known_step
        is_at_end = total is not None and told is not None and told >= total
        return self._look(run, None if is_at_end else told)

    def _look(self, run: Run, newest: int | None) -> FindStates:
        assert run.plan is not None
        self._num_looks += 1
        return FindStates(
            number=self._num_looks,
            num_layers=run.plan.stages[-1].end_layer,
            newest=newest,
            may_begin_anew=0 in self._known,
        )

    def observe(self, found: StatesFound) -> None:
        """Update the size of a state."""
        self._num_bytes = max(self._num_bytes, found.num_bytes)

    def is_newest_look(self, found: StatesFound) -> bool:
        """Whether it answers the newest FindStates."""
        return found.number == self._num_looks

    # --- an attempt's states ---------------------------------------------------------------------------------------

    def reached(self, step: int) -> None:
        """The state of that step is complete."""
        self.newest_step = max(self.newest_step, step)

    def begin(self, step: int, before: ControlRecord | None) -> None:
        """An attempt begins from that step; `before` is the record of the previous one."""
        self.reached(step)
        self._removed_before = max(self._removed_before, step - 1)
        # States of later steps were removed, or will be written again.
        self._known = [*(one for one in self._known if one < step), step]
        if before is not None:
            self._left_over.append(f"{self._keys.prefix}/wire/{before.generation}.{before.attempt}/")

    def remove_left_over(self) -> Iterator[Order]:
        """Every function has joined the newest attempt: remove the messages of earlier ones, which none reads."""
        if self._left_over:
            yield DeleteKeys(prefixes=tuple(self._left_over))
            self._left_over = []

    def commit(self, run: Run, step: int) -> Iterator[Order]:
        """Every stage has saved the state of that step: report it, and remove the states it replaces."""
        assert run.plan is not None
        known, self.newest_step = [*self._known, step], step
        path = f"{run.facts.store_url}/{self._keys.prefix}/state/{step:09d}"
        yield Emit(
            event=CheckpointCommitted(
                job_id=run.facts.job_id, generation=run.generation, step=step, path=path, num_bytes=self._num_bytes
            )
        )
        # While a search is under way, another one would make its answer stale, and a state that it may find must not be
        # removed.
        is_looking = run.mode not in (Mode.RUNNING, Mode.CLOSING)
        if not self._num_bytes and not is_looking:
            # Ask once for the size of a state, for the bill.
            yield self._look(run, None)
        # The newest two stay: a function may be reading the older one. States before the newest step with final losses
        # stay as well: where a place ends without reporting its losses, the steps are redone to learn them.
        final = 0 if is_looking else run.progress.final_step
        before = max((one for one in known[:-1] if one <= final), default=0)
        self._known = [one for one in known if one >= before]
        old = range(self._removed_before, before)
        self._removed_before = max(before, self._removed_before)
        keys = [key for k in old for stage in range(len(run.plan.stages)) for key in self._keys_of(k, stage)]
        if keys:
            yield DeleteKeys(keys=tuple(keys))

    def _keys_of(self, step: int, stage: int) -> tuple[str, str]:
        return self._keys.state_meta(step, stage), self._keys.state(step, stage)


def save_every(run: Run, plan: FunctionPlan) -> int:
    """The interval at which functions of a plan save, in steps."""
    if run.pace.measured_step_s is None:
        return run.record.save_every if run.record is not None else 1
    save_usd = 2 * len(plan.stages) * run.ledger.prices.usd_per_put
    return run.pace.save_every(budget.step_usd(run, plan), save_usd)


def check_interval(run: Run) -> Iterator[Order]:
    """Save less often where saving takes too long; never more often within an attempt."""
    assert run.plan is not None
    assert run.record is not None
    is_known = run.progress.furthest >= run.record.restore_step + 3 and run.pace.measured_step_s is not None
    if run.mode is Mode.RUNNING and is_known:
        every = save_every(run, run.plan)
        if every > run.record.save_every:
            yield run.amend(save_every=every)
