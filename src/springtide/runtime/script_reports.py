"""`springtide.report`: how a plain script tells the platform how far it has come. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest

# A message to the control plane is bounded, and so is what it may hold of a script's own numbers.
MAX_METRICS = 64
MAX_NAME_CHARS = 64


class ScriptReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a script said last. `total` is the number of steps of the whole run; None if it has not said it."""

    step: int
    total: int | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = {}


class ReportChannel:
    """Where reports of this process's script go; `receive` is None where the platform does not run it."""

    def __init__(self) -> None:
        self.receive: Callable[[ScriptReport], None] | None = None


REPORTS = ReportChannel()


def report(step: int, total: int | None = None, loss: Any = None, **metrics: Any) -> None:
    """Report the number of finished optimizer steps of a plain script, of `total`, with its loss and other numbers.

    Call it after each step, on every rank; rank 0's is shown. Floats, ints and tensors with one element are taken. In a
    process that the platform does not run, under torchrun for example, it only checks its arguments. Raises
    InvalidRequest.
    """
    found = ScriptReport(
        step=_count("step", step),
        total=None if total is None else _count("total", total),
        loss=None if loss is None else _number("loss", loss),
        metrics={name: _number(name, value) for name, value in metrics.items()},
    )
    if found.total is not None and found.step > found.total:
        raise InvalidRequest(f"springtide.report() was told step {found.step} of {found.total}; total is the whole run")
    if len(metrics) > MAX_METRICS or any(len(name) > MAX_NAME_CHARS for name in metrics):
        raise InvalidRequest(
            f"springtide.report() takes up to {MAX_METRICS} numbers, with names of up to {MAX_NAME_CHARS} characters"
        )
    if REPORTS.receive is not None:
        REPORTS.receive(found)


def _count(name: str, value: Any) -> int:
    number = _number(name, value)
    if not 0 <= number < 2**53 or number != math.floor(number):
        raise InvalidRequest(f"springtide.report() needs a whole number of steps as {name}, got {value!r:.80}")
    return int(number)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        # A tensor with several elements raises RuntimeError.
        raise InvalidRequest(
            f"springtide.report() needs one number as {name}, got {type(value).__name__}; take a mean or an item of it"
        ) from None
