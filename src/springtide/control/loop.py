"""The loop that drives every executor, and how a control plane recovers after a crash."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from springtide.control.controller import Controller
from springtide.control.journal.archive import JournalSnapshot
from springtide.control.state_data import PlatformSnapshot, decode_snapshot, state_of
from springtide.core.errors import JournalDamaged, JournalError, Superseded
from springtide.core.events import DecisionsResumed, Event, ProgressReported
from springtide.core.ports import Clock, Executor, Journal, Step

LOG = logging.getLogger("springtide.journal")
JOURNAL_RETRY_S = 1.0


class Upkeep(Protocol):
    """What keeps the journal and the state from growing for ever. Neither method raises anything but Superseded."""

    def due_events(self, now_s: float) -> Sequence[Event]:
        """Events for the turn that begins."""
        ...

    def after_turn(self, now_s: float) -> None:
        """Called when the actions of a turn have been started."""
        ...


def run(
    controller: Controller,
    executor: Executor,
    clock: Clock,
    journal: Journal,
    *,
    until: Callable[[], bool],
    on_step: Callable[[int, Step], None] | None = None,
    on_journal_error: Callable[[JournalError], None] | None = None,
    gather_progress_s: float = 0.0,
    upkeep: Upkeep | None = None,
) -> None:
    """Drive the platform until `until()` holds between two turns.

    The order makes crashes safe: a step is durable before its events are acknowledged and before any of its actions
    starts. A crash at any point can leave actions undone, but never unrecorded. `on_step` is called with the sequence
    number and each step, after it is durable. While the journal cannot be written (a full disk), training goes on and
    decisions halt: the append is retried, and events that arrive meanwhile wait for the next turn. Raises Superseded
    when another control plane has taken over the journal; none of the step's actions has started then.

    Reports of progress that come within `gather_progress_s` seconds of the last turn wait until that time is over, so
    that the journal does not grow with the number of jobs; any other event ends the wait.
    """
    pending: list[Event] = []
    turn_s = clock.now_s()
    while not until():
        events = [*pending, *executor.wait(_at_once(clock) if pending else controller.wakeup_at_s)]
        pending = []
        wakeup_s = controller.wakeup_at_s
        until_s = min(turn_s + gather_progress_s, math.inf if wakeup_s is None else wakeup_s)
        while events and clock.now_s() < until_s and all(isinstance(event, ProgressReported) for event in events):
            events += executor.wait(until_s)
        # The clock is read once per turn, so that everything in a turn happens at one instant.
        now_s = turn_s = clock.now_s()
        memory = controller.state.memory
        own = [DecisionsResumed()] if controller.was_away(now_s) else []
        step = controller.step(now_s, [*own, *(upkeep.due_events(now_s) if upkeep is not None else ()), *events])
        # A turn without events and decisions is not recorded: a replay needs nothing of it.
        has_new_memory = step.memory is not memory and step.memory != memory
        must_record = step.events or step.actions or step.reasons or has_new_memory
        while must_record:
            try:
                seq = journal.append(step)
            except Superseded:
                raise
            except JournalError as error:
                if until():
                    return
                if on_journal_error is not None:
                    on_journal_error(error)
                pending += executor.wait(clock.now_s() + JOURNAL_RETRY_S)
                continue
            if on_step is not None:
                on_step(seq, step)
            break
        executor.acknowledge(events)
        for action in step.actions:
            executor.start(action)
        if upkeep is not None:
            upkeep.after_turn(now_s)


def _at_once(clock: Clock) -> float:
    return clock.now_s()


def recover(
    controller: Controller,
    executor: Executor,
    journal: Journal,
    *,
    on_step: Callable[[int, Step], None] | None = None,
    snapshots: Iterable[JournalSnapshot] = (),
    on_snapshot: Callable[[int, PlatformSnapshot], None] | None = None,
) -> int:
    """Replay the journal into a fresh controller and let the executor adopt or fence what still runs.

    The other arguments are those of `replay`. Returns the number of the last step, 0 for an empty journal. Raises
    JournalError.
    """
    last_seq = replay(controller, journal, on_step=on_step, snapshots=snapshots, on_snapshot=on_snapshot)
    executor.recover(controller.standing())
    controller.wake()
    return last_seq


def replay(
    controller: Controller,
    journal: Journal,
    *,
    on_step: Callable[[int, Step], None] | None = None,
    snapshots: Iterable[JournalSnapshot] = (),
    on_snapshot: Callable[[int, PlatformSnapshot], None] | None = None,
) -> int:
    """Bring a fresh controller to the state after the journal's last step, and return that one's number.

    It begins at the first of `snapshots` that can be read, for which `on_snapshot` is called, or else at the first
    step. `on_step` is called for every replayed step. Raises JournalError.
    """
    last_seq = begin(controller, snapshots, on_snapshot)
    for seq, step in journal.read(last_seq):
        if not last_seq and seq > 1:
            raise JournalDamaged(
                1, f"the journal begins at step {seq}, and no snapshot of the steps before can be read"
            )
        controller.restore(step)
        last_seq = seq
        if on_step is not None:
            on_step(seq, step)
    return last_seq


def begin(
    controller: Controller,
    snapshots: Iterable[JournalSnapshot],
    on_snapshot: Callable[[int, PlatformSnapshot], None] | None = None,
) -> int:
    """Give a fresh controller the state of the first snapshot that can be read; return its step, 0 if there is none.

    One whose parts for readers of the journal cannot be read, which `on_snapshot` is given, counts as unreadable, too.
    """
    for stored in snapshots:
        try:
            found = decode_snapshot(stored.blob)
            state = state_of(found.state)
            if on_snapshot is not None:
                on_snapshot(stored.seq, found)
        except (JournalError, ValueError, TypeError, LookupError) as error:
            LOG.warning("the snapshot of step %d cannot be used, an older one is looked for: %s", stored.seq, error)
            continue
        controller.begin_at(state)
        return stored.seq
    return 0


def verify(
    controller: Controller, journal: Journal, *, is_cold: bool = False, snapshots: Iterable[JournalSnapshot] = ()
) -> int:
    """Decide every step of a journal again with a fresh controller. Returns the number of steps.

    It begins after the first of `snapshots` that can be read, or else at the first step.

    With `is_cold` every step is decided without what was derived at earlier ones, and what the policy remembers and
    when it wants to be asked again are compared as well: a derived value that was used although an input of it had
    changed is found at that step. Raises JournalError at the first step where the same events lead to something else:
    another version or policy wrote the journal, or something in the core is not deterministic.
    """
    num_steps = 0
    after_seq = begin(controller, snapshots)
    for seq, recorded in journal.read(after_seq):
        if seq > 1 and not after_seq + num_steps:
            raise JournalError(f"the journal begins at step {seq}: it can be decided anew from a snapshot only")
        if is_cold:
            controller.forget_derived()
        decided = controller.step(recorded.now_s, recorded.events)
        if decided.actions != recorded.actions or decided.reasons != recorded.reasons:
            raise JournalError(
                f"step {seq} at {recorded.now_s:.3f} s differs: recorded {recorded.actions}, decided {decided.actions}"
            )
        if is_cold and _remembered(decided) != _remembered(recorded):
            raise JournalError(f"step {seq} at {recorded.now_s:.3f} s differs in what the policy remembers")
        num_steps += 1
    return num_steps


def _remembered(step: Step) -> bytes:
    """As bytes, since the memory in a journal that was read from a disk has lost its types."""
    return msgspec.json.encode((step.memory, step.revisit_at_s))
