"""Why a job's group changes, as data for programs and as a sentence for people."""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.functions import FunctionPlan


class ChosenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The functions that a policy chose for a job, and why."""

    plan: FunctionPlan
    why: str = ""


class GroupChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why the group of a job's workers is formed or changed.

    `before` and `after` count workers, or the samples of a step if only the batch changes. `why` is the policy's
    reason, `chosen` the plan of a job on functions that the reason is about.
    """

    code: Literal["start", "recover", "resize", "move", "batch", "plan"]
    before: int = 0
    after: int = 0
    why: str = ""
    chosen: ChosenPlan | None = None

    def text(self) -> str:
        """The sentence for people."""
        why = f" ({self.why})" if self.why else ""
        match self.code:
            case "start":
                return f"started on {workers_text(self.after)}" if self.chosen is None else f"started: {self.why}"
            case "recover":
                return f"re-formed with {workers_text(self.after)} after a loss"
            case "resize":
                return f"resized {self.before} -> {self.after}{why}"
            case "move":
                return f"moving {self.before} -> {self.after}{why}"
            case "batch":
                return f"batch {self.before} -> {self.after}{why}"
            case "plan":
                return f"new plan{why}"


def workers_text(count: int) -> str:
    """`1 worker`, `3 workers`."""
    return "1 worker" if count == 1 else f"{count} workers"
