"""What follows when a function ends: its successor continues, another function replaces it, or the job ends."""

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
    FindStart,
    ReplaceFunction,
    StopNow,
)
from springtide.core.wire.functions import ErrorCode

# Deaths in a row at one place, without progress of the job, after which the cause is taken to be permanent.
MAX_DEATHS = 5
# Errors after which another function is tried; "" comes from older functions, which do not say what failed.
MAY_PASS = frozenset({"store", ""})


def ended(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, end: InvocationEnded) -> Iterator[Effect]:
    """A function of the present plan that had begun has ended."""
    invocation.end, invocation.over_at_s = end, run.now_s
    result = end.result
    if result is None:
        yield from _died(run, slot, invocation, EndCause(end.outcome), end.error)
    elif result.outcome == "left":
        yield from left(run, slot, invocation)
    elif result.outcome == "failed":
        yield from failed(run, slot, invocation, result.error_code, result.error or end.error)
    else:
        yield from _returned(run, slot, invocation, result.outcome, result.step)


def ended_unneeded(run: Run, invocation: FunctionInvocation, end: InvocationEnded) -> Iterator[Effect]:
    """A function that is no longer needed has ended: only its charge is recorded."""
    if end.never_ran:
        run.pool.refuse(invocation, run.now_s, None)
        run.pool.give_up(invocation, run.now_s)
    elif end.outcome != "lost":
        invocation.end, invocation.over_at_s = end, run.now_s
    yield ConcludeIfStopped()


def left(run: Run, slot: PlaceSlot, invocation: FunctionInvocation) -> Iterator[Effect]:
    """It left before the end of its lifetime, its state saved: its successor continues within the same attempt."""
    if invocation is not slot.invocation:
        if invocation is slot.successor:
            slot.successor = None
        return
    invocation.over_at_s = run.now_s
    run.pool.num_handovers += 1
    slot.num_handovers += 1
    if run.mode is Mode.RUNNING and not _is_current(run, invocation):
        # It left within an earlier attempt, whose handover no successor reads.
        yield ReplaceFunction(slot, invocation, "it left while the others began anew")
        return
    successor, slot.successor = slot.successor, None
    if successor is not None and (successor.is_alive or successor.phase in WORKED or successor.has_finished):
        slot.invocation = successor
    elif slot.abandoned_successor > invocation.incarnation and run.mode is Mode.RUNNING:
        # A successor that was given up may still have started and taken over: only a new attempt excludes it.
        yield ReplaceFunction(slot, invocation, "it left, and its successor never began")
    elif run.is_stepping:
        assert run.record is not None
        yield run.pool.launch(slot, run.record, run.now_s, is_successor=True)
    else:
        yield ConcludeIfStopped()


def _returned(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, outcome: str, step: int) -> Iterator[Effect]:
    """It returned without an error: finished, stopped on request, or superseded."""
    if invocation is slot.successor and outcome == "finished" and slot.invocation is not None:
        # The successor took over and finished before its predecessor's departure was known.
        yield from left(run, slot, slot.invocation)
    if invocation is slot.successor:
        slot.successor = None
    elif invocation is slot.invocation and outcome == "finished":
        slot.step = max(slot.step, step)
        yield from look_if_finished(run)
        if run.mode is Mode.RUNNING and not _is_current(run, invocation):
            # It made the last step within an earlier attempt, and the others wait for it in a newer one.
            yield ReplaceFunction(slot, invocation, "it finished while the others began anew")
    elif invocation is slot.invocation and run.mode is Mode.RUNNING:
        # No stop was requested: it read an outdated record, or another function reported under its name.
        yield ReplaceFunction(slot, invocation, f"it ended as {outcome} although the job goes on")
    yield ConcludeIfStopped()


def look_if_finished(run: Run) -> Iterator[Effect]:
    """Find the last state once all functions have ended after the last step."""
    invocations = [slot.invocation for slot in run.pool if slot.invocation is not None]
    has_finished = any(invocation.has_finished for invocation in invocations)
    if run.mode is Mode.RUNNING and has_finished and not any(one.is_alive for one in invocations):
        yield FindStart()


def failed(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, code: ErrorCode, error: str) -> Iterator[Effect]:
    """It ended with an error: of a store (retried), of the data (the job pauses), or of the user's code (it fails)."""
    if code in MAY_PASS:
        yield from _died(run, slot, invocation, EndCause.STORE_TROUBLE, error)
        return
    is_ending = run.after in (After.STOP, After.FAILED, After.DATA)
    if run.mode in (Mode.OVER, Mode.ASSEMBLING) or is_ending:
        yield ConcludeIfStopped()
        return
    slot.error = error
    if code == "data":
        # Only the owner can bring the data back; a retry cannot.
        yield StopNow(After.DATA, error)
    else:
        yield FailJob(error)


def _died(run: Run, slot: PlaceSlot, invocation: FunctionInvocation, cause: EndCause, error: str) -> Iterator[Effect]:
    """It ended without a request. The job continues from the newest state, unless its functions keep failing."""
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
            # The others would wait for it at the boundary for ever.
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
    """Raise the memory of a stage whose function ran out of it, unless the plan has raised it already."""
    assert run.plan is not None
    stages, stage = list(run.plan.stages), invocation.place.stage
    if stages[stage].memory_mb <= invocation.memory_mb:
        stages[stage] = replace(stages[stage], memory_mb=memory_mb)
        run.plan = replace(run.plan, stages=tuple(stages))


def _is_current(run: Run, invocation: FunctionInvocation) -> bool:
    """Whether its last report belongs to the present attempt."""
    return invocation.report is not None and invocation.report.attempt == run.attempt
