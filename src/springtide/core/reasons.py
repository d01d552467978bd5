"""Why a job's group changes, and why exact steps take several passes: as data, and as a sentence for people."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from springtide.core.functions import FunctionPlan

# Why the parts of an exact job's batch do not share a pass, by the code that its worker reports.
EXACT_OBSTACLES: Mapping[str, str] = MappingProxyType(
    {
        "batch_norm": "BatchNorm mixes samples",
        "mixed": "a function mixes samples",
        "noise": "gradient noise is measured from the parts of a batch",
        "device": "a pass for all parts was tried on CPUs only",
        "weight": "ctx.step gets a weight",
        "read": "values of a tensor are read before ctx.step",
        "chosen": "samples are chosen by their values",
        "random": "random numbers are drawn in a way for which there is no rule",
        "loss": "the loss is not made of torch's mean losses",
        "rule": "a function of the model cannot be computed for all parts at once",
        "buffers": "a pass changes buffers of the model",
        "shapes": "its inputs have too many shapes",
    }
)


def exact_sentence(obstacle: str, num_shards: int, cost: float | None) -> str:
    """`BatchNorm mixes samples: exact=4 runs 4 passes a step, at 1.3 of a plain step's processor time`.

    `obstacle` is a code of EXACT_OBSTACLES; of any other, and without one, only the cost is told, if it is known.
    """
    price = f"{cost:g} of a plain step's processor time" if cost else ""
    if obstacle not in EXACT_OBSTACLES:
        return f"exact={num_shards} costs {price}" if price else ""
    passes = f"{EXACT_OBSTACLES[obstacle]}: exact={num_shards} runs {num_shards} passes a step"
    return f"{passes}, at {price}" if price else passes


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
