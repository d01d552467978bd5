"""One row of the tables of options: its name and kind, and how each face of the platform writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from springtide.core.errors import InvalidRequest
from springtide.core.options.kinds import (
    Choice,
    DeviceCount,
    Interpreter,
    Name,
    OptionKind,
    Phases,
    Requirements,
    SecretNames,
    ServiceNames,
    Toggle,
    Variables,
)

_LEFT_OUT_AT_DEFAULT = (
    Choice,
    DeviceCount,
    Interpreter,
    Name,
    Phases,
    Requirements,
    SecretNames,
    ServiceNames,
    Toggle,
    Variables,
)


@dataclass(frozen=True, slots=True)
class FlagText:
    """How a command's flag is written, like "--deadline TIME" or "--soft/--hard", and what its help says.

    `kind` is that of the option unless it is named. `choices` are values that only the command line knows.
    """

    text: str
    help: str
    kind: OptionKind | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag without the placeholder of its value."""
        return self.text.partition(" ")[0]

    @property
    def metavar(self) -> str | None:
        """The placeholder of its value; None: what the command line calls its kind."""
        return self.text.partition(" ")[2] or None


@dataclass(frozen=True, slots=True)
class RestField:
    """A field of `options` in the REST API: seconds, US dollars, counts. A dot leads into an object of its own.

    `kind` and `default` are those of the option unless they are named. `copied_to`: the workload (TrainingJob,
    InferenceService) or its goal has a field of this name, which takes the value as it is.
    """

    path: str
    help: str = ""
    kind: OptionKind | None = None
    default: Any = None
    copied_to: Literal["", "goal", "workload"] = ""
    examples: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectField:
    """A field of an object's spec in a cluster. A dot leads into an object of its own.

    `kind` is that of the option unless it is named. `shows_default`: the cluster fills the default in.
    """

    path: str
    help: str
    kind: OptionKind | None = None
    shows_default: bool = False

    @property
    def parent(self) -> str:
        """The object that it is in; empty for the spec itself."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name within its parent."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a job or a service. A face without an entry here does not have the option.

    `flags` are by command (`run` is also that of `quote`). `rest` is the one field that its value becomes: then every
    face converts it by its kind. `parts` are fields that a function fills from several options together.
    `is_changeable`: it may be changed while the job runs.
    """

    name: str
    kind: OptionKind
    default: Any = None
    is_keyword: bool = True
    is_changeable: bool = False
    flags: Mapping[str, FlagText] = field(default_factory=dict)
    rest: RestField | None = None
    parts: tuple[RestField, ...] = ()
    object: ObjectField | None = None


Table = tuple[Option, ...]


def rest_fields(table: Table) -> Iterator[tuple[RestField, OptionKind, Any]]:
    """The fields of the REST API's `options`, each with its kind and its default."""
    for option in table:
        if option.rest is not None:
            default = option.default if option.rest.default is None else option.rest.default
            yield option.rest, option.rest.kind or option.kind, default
        for part in option.parts:
            if "." not in part.path:
                yield part, part.kind or option.kind, part.default


def copied_fields(table: Table, target: Literal["goal", "workload"]) -> tuple[str, ...]:
    """The REST fields that a workload or its goal takes over under the same name."""
    return tuple(rest.path for rest, _, _ in rest_fields(table) if rest.copied_to == target)


def inner_fields(table: Table, outer: str) -> dict[str, str]:
    """The fields of the REST object `outer`, by the fields of a spec in a cluster that say the same."""
    return {
        option.object.name: part.path.partition(".")[2]
        for option in table
        for part in option.parts
        if option.object is not None and part.path.startswith(f"{outer}.")
    }


def check_names(table: Table, given: Mapping[str, Any], where: str) -> None:
    """Raise InvalidRequest for a keyword that no row has, naming those that there are."""
    known = {option.name for option in table if option.is_keyword}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidRequest(f"{where} does not know {unknown[0]!r}; it knows {', '.join(sorted(known))}")


def keyword_values(table: Table, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All keywords, those that were not given at their defaults. Raises InvalidRequest for a name that no row has."""
    check_names(table, given, where)
    return {option.name: option.default for option in table if option.is_keyword} | dict(given)


def overridden(table: Table, values: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keywords with some of them changed; `params`, `env` and `secrets` are merged. Raises InvalidRequest."""
    check_names(table, changes, where)
    kinds = {option.name: option.kind for option in table}
    return {**values, **{name: kinds[name].merged(values[name], value) for name, value in changes.items()}}


def check_keywords(table: Table, values: Mapping[str, Any]) -> None:
    """Raise InvalidRequest, with what would do, for a value that is not of its option's kind."""
    anytime = datetime(2000, 1, 1)
    for option in table:
        if option.is_keyword and (option.default is not None or values[option.name] is not None):
            option.kind.sent(values[option.name], option.name, anytime)


def sent_options(table: Table, values: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The REST fields of the keywords that become one field each.

    Words, toggles and what makes the environment are left out at their defaults. Quantities are always sent, so that a
    job keeps the defaults of the client that submitted it.
    """
    sent: dict[str, Any] = {}
    for option in table:
        if option.rest is None or not option.is_keyword or values[option.name] is None:
            continue
        is_word = isinstance(option.kind, _LEFT_OUT_AT_DEFAULT)
        if not is_word or values[option.name] != option.default:
            sent[option.rest.path] = option.kind.sent(values[option.name], option.name, now)
    return sent
