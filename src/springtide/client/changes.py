"""Changes to a running job as the body of PATCH /v1/jobs/{id}."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypedDict, Unpack

from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import CHANGEABLE_OPTIONS
from springtide.core.options.kinds import Moment, Money
from springtide.core.options.option import check_names

# Given as a deadline or budget, it removes the present one.
NONE = "none"


class ChangeKeywords(TypedDict, total=False):
    """The keywords of JobHandle.change, as in TrainKeywords; None leaves a value unchanged."""

    deadline: str | float | None
    budget: str | float | None
    soft: bool | None
    wait: bool | None
    retries: int | None


def as_change(now: datetime, **wish: Unpack[ChangeKeywords]) -> dict[str, Any]:
    """The request's body. None leaves a value unchanged, "none" removes a deadline or budget.

    A deadline counts from `now`. Raises InvalidRequest, also if nothing changes.
    """
    check_names(CHANGEABLE_OPTIONS, wish, "change()")
    body: dict[str, Any] = {}
    for option in CHANGEABLE_OPTIONS:
        value = wish.get(option.name)
        if value is not None and option.rest is not None:
            is_removed = value == NONE and isinstance(option.kind, Moment | Money)
            body[option.rest.path] = None if is_removed else option.kind.sent(value, option.name, now)
    if not body:
        names = ", ".join(option.name for option in CHANGEABLE_OPTIONS)
        raise InvalidRequest(f"nothing is to change; name one of {names}")
    return body
