"""The fields of a spec that are options: the schema of each by its kind, and its value to the REST API and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from springtide.backends.kubernetes.resources import schema
from springtide.backends.kubernetes.resources.schema import Schema
from springtide.core.decoding import convert
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.core.options.kinds import (
    Choice,
    Count,
    CountRange,
    Document,
    Duration,
    Fractions,
    Moment,
    Money,
    Name,
    Number,
    Objective,
    OptionKind,
    Params,
    Phases,
    Rates,
    Requirements,
    ServiceNames,
    Size,
    Toggle,
    Variables,
    check_ascending,
)
from springtide.core.options.option import ObjectField, Option, Table
from springtide.core.options.packages import MAX_REQUIREMENT_CHARS
from springtide.core.options.variables import check_variables
from springtide.core.quantities import MAX_NAME_CHARS, parse_duration_s, parse_money_usd, parse_range

Spec = Mapping[str, Any]
# Kinds whose schema needs only the description.
_DESCRIBED: Mapping[type[OptionKind], Callable[[str], Schema]] = MappingProxyType(
    {
        Moment: schema.moment,
        Objective: schema.latency,
        Money: schema.money,
        Toggle: schema.flag,
        Fractions: schema.share,
        Size: schema.size,
        Document: schema.free,
    }
)
# Larger integers are not exact in every reader of JSON.
_LARGEST_WHOLE = 2**53


def option_properties(table: Table, parent: str = "") -> dict[str, Schema]:
    """The properties of a spec, or of an object in it, by which a cluster checks what is said of these options."""
    found = [(option, option.object) for option in table if option.object is not None]
    return {field.name: _property(option, field) for option, field in found if field.parent == parent}


def read_options(table: Table, spec: Spec, deadline_s: Callable[[str | int], float] | None = None) -> dict[str, Any]:
    """The REST fields of the options in a spec that become one field each. Raises InvalidRequest.

    `deadline_s` counts the seconds from now until a deadline, where the table has any.
    """
    options: dict[str, Any] = {}
    for option in table:
        if option.rest is None or option.object is None:
            continue
        holder = spec.get(option.object.parent, {}) if option.object.parent else spec
        if option.object.name in holder:
            value, where = holder[option.object.name], f"spec.{option.object.path}"
            if isinstance(option.kind, Moment) and deadline_s is not None:
                options[option.rest.path] = deadline_s(value)
            else:
                options[option.rest.path] = _read(option.kind, value, where)
    return options


def checked_values(table: Table, spec: Spec) -> dict[str, Any]:
    """What a spec says of options, in the form that the rules over several options take. Raises InvalidRequest."""
    values: dict[str, Any] = {"on": "functions" if "functions" in spec else "cluster"}
    for option in table:
        if option.object is None:
            continue
        holder = spec.get(option.object.parent, {}) if option.object.parent else spec
        if option.object.name not in holder:
            continue
        value, where = holder[option.object.name], f"spec.{option.object.path}"
        match option.kind:
            case CountRange(may_be_auto=False):
                values[option.name] = parse_range(value, where, lowest=option.kind.lowest)
            case Phases():
                phases = convert(_read(option.kind, value, where), tuple[BatchPhase, ...])
                check_ascending(phases, where)
                values[option.name] = phases
            case _:
                values[option.name] = value
    profile = values.get("layer_profile")
    micro_batch = profile.get("micro_batch_size") if isinstance(profile, dict) else None
    return values | ({"micro_batch": micro_batch} if isinstance(micro_batch, int) else {})


def written_options(table: Table, options: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """The fields of a spec, or of an object in it, that say what these REST fields say: read_options undone."""
    spec: dict[str, Any] = {}
    for option in table:
        if option.rest is None or option.object is None or option.object.parent != parent:
            continue
        value = options.get(option.rest.path)
        is_default = value is False and option.default is False
        is_empty = value is None or (isinstance(value, str | dict | list | tuple) and not value)
        if not is_default and not is_empty:
            spec[option.object.name] = _write(option.kind, value)
    return spec


def plain(amount: float) -> str:
    """A number without exponent and trailing zeros."""
    return f"{amount:.9f}".rstrip("0").rstrip(".")


def bounds_text(low: int, high: int) -> int | str:
    """Inclusive bounds as they are written: 4, or "1..8"."""
    return low if low == high else f"{low}..{high}"


def _property(option: Option, field: ObjectField) -> Schema:
    kind, told = option.kind, field.help
    if type(kind) in _DESCRIBED:
        return _DESCRIBED[type(kind)](told)
    match kind:
        case Duration():
            return schema.duration(told, may_be_none=kind.may_be_zero)
        case Count(lowest, highest):
            default = option.default if field.shows_default else None
            return schema.whole(told, lowest, min(highest, _LARGEST_WHOLE), default)
        case Number():
            return schema.number(told, kind.highest)
        case Choice(values):
            return schema.choice(told, *values)
        case Name():
            return schema.text(told, max_chars=kind.max_chars)
        case CountRange(lowest, highest, may_be_auto):
            return schema.span(told, lowest=lowest, highest=highest, auto=may_be_auto)
        case Rates(max_entries):
            return schema.rates(told, max_entries)
        case Phases(max_phases):
            return schema.phases(max_phases)
        case Variables(max_entries):
            return schema.variables(told, max_entries)
        case Requirements(max_entries):
            return schema.lines(told, max_entries, MAX_REQUIREMENT_CHARS)
        case ServiceNames(max_entries):
            return schema.lines(told, max_entries, MAX_NAME_CHARS)
    assert isinstance(kind, Params), f"no schema for {kind}"
    return schema.parameters()


def _read(kind: OptionKind, value: Any, where: str) -> Any:
    match kind:
        case Duration():
            return kind.seconds(value, where)
        case Objective():
            return parse_duration_s(schema.LATENCY_PREFIX.sub("", value), where)
        case Money():
            return parse_money_usd(value, where)
        case CountRange():
            return list(parse_range(value, where))
        case Params():
            return _params(value, where)
        case Rates():
            return dict(value)
        case Variables():
            return check_variables({name: text or "" for name, text in value.items()}, where)
        case Phases():
            return [{"from_epoch": phase["fromEpoch"], "global_batch_size": phase["globalBatch"]} for phase in value]
    return value


def _write(kind: OptionKind, value: Any) -> Any:
    match kind:
        case Moment() | Duration() | Objective():
            return _time(float(value))
        case Money():
            return f"${plain(value)}"
        case CountRange():
            return bounds_text(*value)
        case Params() | Variables():
            return dict(value)
        case Requirements() | ServiceNames():
            return list(value)
        case Phases():
            return [{"fromEpoch": phase["from_epoch"], "globalBatch": phase["global_batch_size"]} for phase in value]
    return value


def _time(seconds: float) -> str:
    if seconds == 0:
        return "none"
    return f"{plain(seconds)}s" if seconds >= 1 else f"{plain(seconds * 1000)}ms"


def _params(params: Mapping[str, Any], where: str) -> dict[str, str]:
    for name, value in params.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"{where}.{name} must be a string, a number or a boolean, not {value!r:.60}")
    return {name: str(value) for name, value in params.items()}
