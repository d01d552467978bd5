"""Records and views of jobs, changed by the names of fields wherever in their parts these are."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from springtide.control.records import JobRecord, StateReason
from springtide.core.decision import JobView

PARTS = frozenset(
    "bounds lifecycle group runs_as promise progress learnt saved restarts changes spent".split()  # noqa: SIM905
)
Value = TypeVar("Value", JobRecord, JobView)


def with_fields(value: Value, **fields: Any) -> Value:
    """The record or view with these fields changed, each in the part that has it."""
    inner: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, given in fields.items():
        if name in value.__struct_fields__:
            own[name] = given
            continue
        part = next(
            part for part in value.__struct_fields__ if part in PARTS and name in getattr(value, part).__struct_fields__
        )
        inner.setdefault(part, {})[name] = StateReason(given) if name == "reason" else given
    return replace(value, **own, **{part: replace(getattr(value, part), **given) for part, given in inner.items()})
