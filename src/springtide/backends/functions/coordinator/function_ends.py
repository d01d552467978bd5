"""What the end of a function means: a successor goes on, another function fills its place, or the job ends."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from springtide.backends.functions.coordinator.invocations import WORKED, FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.messages import InvocationEnded
from springtide.backends.functions.coordinator.reasons import (
    EndCause,
    end_sentence,
    out_of_memory_reason,
)
from springtide.backends.functions.coordinator.run import After, Mode, Run
from springtide.backends.functions.coordinator.verdicts import (
    ConcludeIfStopped,
    Effect,
    FailJob,
    LookForStart,
    ReplaceFunction,
    StopNow,
)
from springtide.core.wire.functions import ErrorCode

# How often the functions of one place may end without any progress of the job before that is no accident any more.
MAX_DEATHS = 5
# Another function is tried after these errors; one of an older version does not say what failed.
MAY_PASS = frozenset({"store", ""})


def ended(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, end: InvocationEnded) -> Iterator[Effect]:
    """A function of the present plan, which had begun, is over."""
    invocation.end, invocation.over_at_s = end, run.now_s
    result = end.result
    if result is None:
        yield from _died(run, slot, invocation, EndCause(end.outcome), end.error)
    elif result.outcome == "left":
        yield from left(run, slot, invocation)
    elif result.outcome == "failed":
        yield from failed(run, slot, invocation, result.error_code, result.error or end.error)
    else:
        yield from _ended_well(run, slot, invocation, result.outcome, result.step)


def ended_unneeded(run: Run, invocation: FunctionInvocation, end: InvocationEnded) -> Iterator[Effect]:
    """It is not needed any more: what counts is what it is charged for."""
    if end.never_ran:
        run.pool.refuse(invocation, run.now_s, None)
        run.pool.give_up(invocation, run.now_s)
    elif end.outcome != "lost":
        invocation.end, invocation.over_at_s = end, run.now_s
    yield ConcludeIfStopped()


def left(run: Run, slot: PlaceSlot, invocation: FunctionInvocation) -> Iterator[Effect]:
    """It left in time, its state saved: its successor goes on within the same attempt."""
    if invocation is not slot.invocation:
        if invocation is slot.successor:
            slot.successor = None
        return
    invocation.over_at_s = run.now_s
    run.pool.num_handovers += 1
    slot.num_handovers += 1
    if run.mode is Mode.RUNNING and not _is_of_now(run, invocation):
        # What it left behind in an attempt of the past is not read any more.
        yield ReplaceFunction(slot, invocation, "it left while the others began anew")
        return
    successor, slot.successor = slot.successor, None
    if successor is not None and (successor.is_alive or successor.phase in WORKED or successor.has_finished):
        slot.invocation = successor
    elif slot.abandoned_successor > invocation.incarnation and run.mode is Mode.RUNNING:
        # One that was given up may have seen that it left, and go on: only a new attempt shuts it out.
        yield ReplaceFunction(slot, invocation, "it left, and its successor never began")
    elif run.is_stepping:
        assert run.record is not None
        yield run.pool.launch(slot, run.record, run.now_s, is_successor=True)
    else:
        yield ConcludeIfStopped()


def _ended_well(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, outcome: str, step: int) -> Iterator[Effect]:
    """It finished, stopped as it was asked, or gave way."""
    if invocation is slot.successor and outcome == "finished" and slot.invocation is not None:
        # It took over and came to the end before it was known that the one before it had left.
        yield from left(run, slot, slot.invocation)
    if invocation is slot.successor:
        slot.successor = None
    elif invocation is slot.invocation and outcome == "finished":
        slot.step = max(slot.step, step)
        yield from look_if_finished(run)
        if run.mode is Mode.RUNNING and not _is_of_now(run, invocation):
            # It made the last step in an attempt of the past, and the others wait for it in a newer one.
            yield ReplaceFunction(slot, invocation, "it finished while the others began anew")
    elif invocation is slot.invocation and run.mode is Mode.RUNNING:
        # It was not asked to: it read a record of the past, or was taken for another.
        yield ReplaceFunction(slot, invocation, f"it ended as {outcome} although the job goes on")
    yield ConcludeIfStopped()


def look_if_finished(run: Run) -> Iterator[Effect]:
    """Look for the last state once all functions have ended after the last step."""
    invocations = [slot.invocation for slot in run.pool if slot.invocation is not None]
    has_finished = any(invocation.has_finished for invocation in invocations)
    if run.mode is Mode.RUNNING and has_finished and not any(one.is_alive for one in invocations):
        yield LookForStart()


def failed(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, code: ErrorCode, error: str) -> Iterator[Effect]:
    """It ended with an error: of a store, of the data, or of the user's code, which ends the job."""
    if code in MAY_PASS:
        yield from _died(run, slot, invocation, EndCause.STORE_TROUBLE, error)
        return
    is_ending = run.after in (After.STOP, After.FAILED, After.DATA)
    if run.mode in (Mode.OVER, Mode.ASSEMBLING) or is_ending:
        yield ConcludeIfStopped()
        return
    slot.error = error
    if code == "data":
        # Its owner has to bring the data back: trying again does not.
        yield StopNow(After.DATA, error)
    else:
        yield FailJob(error)


def _died(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, cause: EndCause, error: str) -> Iterator[Effect]:
    """It ended without being asked to. The job goes on from the newest state, unless its functions keep failing."""
    if invocation is slot.successor:
        slot.successor = None
        slot.num_deaths += 1
        return
    if invocation is not slot.invocation:
        return
    sentence = end_sentence(invocation, cause, error)
    if run.mode is Mode.CLOSING:
        slot.error = sentence
        if run.is_stepping:
            # The others would wait for it in vain.
            yield StopNow(run.after)
        yield ConcludeIfStopped()
        return
    if run.mode not in (Mode.RUNNING, Mode.LOOKING, Mode.OPENING):
        return
    slot.num_deaths += 1
    if cause is EndCause.OUT_OF_MEMORY:
        larger = run.facts.next_larger_mb(invocation.memory_mb)
        if larger is None:
            used_mb = invocation.end.max_memory_mb if invocation.end is not None else 0
            yield FailJob(out_of_memory_reason(invocation, used_mb))
            return
        _enlarge(run, invocation, larger)
    if run.mode is Mode.RUNNING and slot.num_deaths >= MAX_DEATHS:
        text = f"{sentence}, {slot.num_deaths} times in a row after step {run.progress.furthest}"
        is_outside = cause in (EndCause.STORE_TROUBLE, EndCause.REFUSED)
        yield StopNow(After.LOST, text) if is_outside else FailJob(text)
        return
    yield ReplaceFunction(slot, invocation, sentence)


def _enlarge(run: Run, invocation: FunctionInvocation, memory_mb: int) -> None:
    """Give the stage of a function that ran out of memory more of it, unless it has more already."""
    assert run.plan is not None
    stages, stage = list(run.plan.stages), invocation.place.stage
    if stages[stage].memory_mb <= invocation.memory_mb:
        stages[stage] = replace(stages[stage], memory_mb=memory_mb)
        run.plan = replace(run.plan, stages=tuple(stages))


def _is_of_now(run: Run, invocation: FunctionInvocation) -> bool:
    """Whether it reported last in the present attempt."""
    return invocation.report is not None and invocation.report.attempt == run.attempt
