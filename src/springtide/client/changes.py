"""What people want changed of a job that runs, turned into the body of PATCH /v1/jobs/{id}."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from springtide.client.goals import check_count, deadline_in_s
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_money_usd

# Written instead of a deadline or a budget, it takes the one that there is away.
NONE = "none"


def as_change(
    now: datetime,
    *,
    deadline: str | float | None = None,
    budget: str | float | None = None,
    soft: bool | None = None,
    wait: bool | None = None,
    retries: int | None = None,
) -> dict[str, Any]:
    """The body; what is None stays as it is, and "none" takes a deadline or budget away. A deadline counts from `now`.

    Raises InvalidRequest, also if nothing is to change.
    """
    body: dict[str, Any] = {}
    if deadline is not None:
        body["deadline_s"] = None if deadline == NONE else deadline_in_s(deadline, now)
    if budget is not None:
        body["budget_usd"] = None if budget == NONE else parse_money_usd(budget)
    if soft is not None:
        body["is_soft"] = soft
    if wait is not None:
        body["waits"] = wait
    if retries is not None:
        body["max_restarts"] = check_count(retries, "retries", 3, lowest=0)
    if not body:
        raise InvalidRequest("nothing is to change; name a deadline, a budget, soft, wait or retries")
    return body
