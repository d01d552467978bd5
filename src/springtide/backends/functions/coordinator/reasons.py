"""Sentences for users about a job on functions: why a function was replaced, why the job stopped."""

from __future__ import annotations

from enum import StrEnum

from springtide.backends.functions.coordinator.invocations import FunctionInvocation


class EndCause(StrEnum):
    """Why a function that was still needed is gone."""

    FAILED = "failed"
    KILLED = "killed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    REFUSED = "refused"
    SILENT = "silent"
    UNBEGUN = "unbegun"
    STORE_TROUBLE = "store_trouble"
    # It returned without being told to.
    LEFT = "left"
    FINISHED = "finished"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"


_CAUSES = {
    EndCause.FAILED: "ended by itself",
    EndCause.KILLED: "was killed",
    EndCause.TIMED_OUT: "reached the end of its lifetime in the middle of a step",
    EndCause.OUT_OF_MEMORY: "ran out of memory",
    EndCause.REFUSED: "was refused by the provider",
    EndCause.SILENT: "has not answered for a while",
    EndCause.UNBEGUN: "never began",
    EndCause.STORE_TROUBLE: "could not go on",
    EndCause.LEFT: "ended as left",
    EndCause.FINISHED: "ended as finished",
    EndCause.STOPPED: "ended as stopped",
    EndCause.SUPERSEDED: "ended as superseded",
}


def end_sentence(invocation: FunctionInvocation, cause: EndCause, error: str = "") -> str:
    """How a function ended."""
    text = f"the function of stage {invocation.place.stage}, replica {invocation.place.replica} {_CAUSES[cause]}"
    return f"{text}: {error.rstrip('.')}" if error else text


def out_of_memory_reason(invocation: FunctionInvocation, used_mb: int) -> str:
    """Why a stage cannot run, and what would help."""
    used = f" (it had taken {used_mb} MB)" if used_mb else ""
    return (
        f"stage {invocation.place.stage} ran out of its {invocation.memory_mb} MB{used}, the most a function can have"
        " here: choose smaller micro-batches, or let the model be cut into more stages by profiling its layers anew"
    )


def budget_reason(job_id: str, budget_usd: float, spent_usd: float, step: int, needed_usd: float | None) -> str:
    """Why a job pauses before its budget is exceeded, and how to continue it."""
    suggestion = _round_up(max(needed_usd or 0.0, 1.5 * budget_usd))
    kept = f"a checkpoint of step {step} is kept" if step else "nothing was begun that would have to be kept"
    rest = f" (about ${needed_usd:.4g} in all)" if needed_usd else ""
    return (
        f"its budget of ${budget_usd:.4g} is nearly spent (${spent_usd:.4g} so far): {kept}; go on{rest} with"
        f" `springtide resume {job_id} --budget {suggestion}`"
    )


def _round_up(usd: float) -> str:
    """The amount rounded up to two significant digits."""
    text = f"{usd:.1e}"
    amount = float(text)
    if amount < usd:
        digits, exponent = text.split("e")
        amount = (float(digits) + 0.1) * 10 ** int(exponent)
    return f"{amount:.6f}".rstrip("0").rstrip(".")
