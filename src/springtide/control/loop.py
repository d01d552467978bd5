"""The one loop that every executor is driven by, and how a control plane comes back after a crash."""

from __future__ import annotations

from collections.abc import Callable

from springtide.control.controller import Controller
from springtide.core.errors import JournalError, Superseded
from springtide.core.events import Event
from springtide.core.ports import Clock, Executor, Journal, Step

JOURNAL_RETRY_S = 1.0


def run(
    controller: Controller,
    executor: Executor,
    clock: Clock,
    journal: Journal,
    *,
    until: Callable[[], bool],
    on_step: Callable[[int, Step], None] | None = None,
    on_journal_error: Callable[[JournalError], None] | None = None,
) -> None:
    """Drive the platform until `until()` holds between two turns.

    The order is the safety argument: a step is durable before the executor or a caller is told of it (acknowledge), and
    before any of its effects begins (start). A crash anywhere leaves effects undone, never effects unrecorded.
    `on_step` is called with every journaled step, after it is durable. A journal that cannot be written (a full disk)
    halts decisions, not training: the step is tried again until it is durable, and what happens meanwhile is kept. A
    journal that another control plane has taken over ends the loop: raises Superseded, and nothing of the step has
    begun.
    """
    kept: list[Event] = []
    while not until():
        events = [*kept, *executor.wait(_at_once(clock) if kept else controller.wakeup_at_s)]
        kept = []
        # The clock is read once a turn: everything inside a turn happens at one instant.
        now_s = clock.now_s()
        memory = controller.state.memory
        step = controller.step(now_s, events)
        # A turn in which nothing happened and nothing was decided changes nothing that a replay would miss.
        has_new_memory = step.memory is not memory and step.memory != memory
        is_news = step.events or step.actions or step.reasons or has_new_memory
        while is_news:
            try:
                seq = journal.append(step)
            except Superseded:
                raise
            except JournalError as error:
                if until():
                    return
                if on_journal_error is not None:
                    on_journal_error(error)
                kept += executor.wait(clock.now_s() + JOURNAL_RETRY_S)
                continue
            if on_step is not None:
                on_step(seq, step)
            break
        executor.acknowledge(events)
        for action in step.actions:
            executor.start(action)


def _at_once(clock: Clock) -> float:
    return clock.now_s()


def recover(
    controller: Controller,
    executor: Executor,
    journal: Journal,
    *,
    on_step: Callable[[int, Step], None] | None = None,
) -> int:
    """Bring a fresh controller to where the journal ends and let the executor adopt or fence what still runs.

    `on_step` is told of every step on the way. Returns the number of the last step, 0 for an empty journal.
    """
    last_seq = 0
    for seq, step in journal.read():
        controller.restore(step)
        last_seq = seq
        if on_step is not None:
            on_step(seq, step)
    executor.recover(controller.standing())
    controller.wake()
    return last_seq


def verify(controller: Controller, journal: Journal) -> int:
    """Decide every step of a journal again with a fresh controller. Returns how many steps agree.

    Raises JournalError at the first step where the same events lead to other actions: another version or policy
    wrote the journal, or something in the core is not deterministic.
    """
    num_steps = 0
    for seq, recorded in journal.read():
        decided = controller.step(recorded.now_s, recorded.events)
        if decided.actions != recorded.actions or decided.reasons != recorded.reasons:
            raise JournalError(
                f"step {seq} at {recorded.now_s:.3f} s differs: recorded {recorded.actions}, decided {decided.actions}"
            )
        num_steps += 1
    return num_steps
