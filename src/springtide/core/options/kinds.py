"""What the value of an option may be: how a keyword is checked and sent, and the bounds that each face repeats."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.core.options.packages import MAX_REQUIREMENTS, check_interpreter, check_requirements
from springtide.core.options.variables import MAX_VARIABLES, check_variables, secret_sources
from springtide.core.quantities import parse_duration_s, parse_money_usd, validate_name
from springtide.core.workload import DEVICES_EACH, MAX_CALLED_SERVICES

TEN_YEARS_S = 10 * 365 * 86400.0
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_PHASE = re.compile(r"(\d{1,6})\s*:\s*(\d{1,7})")
_OBJECTIVE = re.compile(r"(?:p99\s*<=?\s*)?(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OptionKind:
    """A kind of values. The base class takes any value: its kinds are parsed together with other options."""

    def sent(self, value: Any, name: str, now: datetime) -> Any:
        """The value of the keyword `name` as it is sent (JSON, SI units). Raises InvalidRequest."""
        return value

    def merged(self, before: Any, after: Any) -> Any:
        """The value where a later one is given beside an earlier one. The base class takes the later one."""
        return after


@dataclass(frozen=True, slots=True)
class Moment(OptionKind):
    """A time to keep, sent as seconds from now."""

    def sent(self, value: Any, name: str, now: datetime) -> float:
        """Raises InvalidRequest."""
        return deadline_in_s(value, now)


@dataclass(frozen=True, slots=True)
class Duration(OptionKind):
    """A time span, sent in seconds. `highest_s` is the most that is taken; `may_be_zero`: "none" or 0 is taken, too."""

    highest_s: float = TEN_YEARS_S
    may_be_zero: bool = False

    def sent(self, value: Any, name: str, now: datetime) -> float:
        """Raises InvalidRequest."""
        return self.seconds(value, name)

    def seconds(self, value: str | float, name: str) -> float:
        """The span in seconds. Raises InvalidRequest."""
        if self.may_be_zero and value in ("none", "0", 0) and not isinstance(value, bool):
            return 0.0
        return parse_duration_s(value, name)


@dataclass(frozen=True, slots=True)
class Objective(OptionKind):
    """A latency to keep: "p99 < 200ms", "200ms" or seconds; sent in seconds."""

    def sent(self, value: Any, name: str, now: datetime) -> float:
        """Raises InvalidRequest."""
        return objective_s(value)


@dataclass(frozen=True, slots=True)
class Money(OptionKind):
    """US dollars."""

    highest: float = 1e9

    def sent(self, value: Any, name: str, now: datetime) -> float:
        """Raises InvalidRequest."""
        return parse_money_usd(value, name)


@dataclass(frozen=True, slots=True)
class Count(OptionKind):
    """A whole number within bounds. A keyword is held to the lower one, a request to both."""

    lowest: int
    highest: int
    example: int

    def sent(self, value: Any, name: str, now: datetime) -> int:
        """Raises InvalidRequest."""
        return check_count(value, name, self.example, self.lowest)


@dataclass(frozen=True, slots=True)
class ShardCount(Count):
    """A number of virtual shards; the keyword may be True for the usual number, or False for none."""

    def sent(self, value: Any, name: str, now: datetime) -> Any:
        """Raises InvalidRequest."""
        if isinstance(value, bool):
            return self.example if value else None
        return check_count(value, name, self.example, self.lowest)


@dataclass(frozen=True, slots=True)
class DeviceCount(Count):
    """How many whole devices of one node each worker holds: 1, 2, 4 or 8. Rules hold a request to these."""

    def sent(self, value: Any, name: str, now: datetime) -> int:
        """Raises InvalidRequest."""
        if isinstance(value, bool) or value not in DEVICES_EACH:
            raise InvalidRequest(not_whole_devices(f"{name}={value!r}", "share=0.3 (--share 0.3)"))
        return int(value)


def not_whole_devices(given: str, share: str) -> str:
    """What is said of a number of devices that a worker cannot hold."""
    return f"{given}: a worker holds 1, 2, 4 or 8 whole devices of one node; a part of one device is {share}"


@dataclass(frozen=True, slots=True)
class Number(OptionKind):
    """A positive number. `meaning` and `example` are for the sentence that refuses another value."""

    meaning: str
    example: float
    highest: float = 1e9

    def sent(self, value: Any, name: str, now: datetime) -> float:
        """Raises InvalidRequest."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and 0 < value <= self.highest):
            raise InvalidRequest(f"{name} is {self.meaning}, got {value!r}; like {self.example}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Toggle(OptionKind):
    """True or False; with `may_be_open` also None: the platform decides."""

    may_be_open: bool = False

    def sent(self, value: Any, name: str, now: datetime) -> bool:
        """Raises InvalidRequest."""
        if not isinstance(value, bool):
            known = "True, False or None" if self.may_be_open else "True or False"
            raise InvalidRequest(f"{name} must be {known}, got {value!r:.80}")
        return value


@dataclass(frozen=True, slots=True)
class Choice(OptionKind):
    """One of a few fixed values."""

    values: tuple[str, ...]

    def sent(self, value: Any, name: str, now: datetime) -> str:
        """Raises InvalidRequest."""
        if value not in self.values:
            words = [repr(word) for word in self.values]
            known = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
            raise InvalidRequest(f"{name} must be {known}, got {value!r:.80}")
        return str(value)


@dataclass(frozen=True, slots=True)
class Name(OptionKind):
    """A name that is safe in paths, addresses and labels. `what` is what it names."""

    what: str
    max_chars: int = 64

    def sent(self, value: Any, name: str, now: datetime) -> str:
        """Raises InvalidRequest."""
        return validate_name(value, self.what) if value else ""


@dataclass(frozen=True, slots=True)
class Params(OptionKind):
    """Scalars by name for the user's code, sent as strings."""

    max_entries: int = 64

    def sent(self, value: Any, name: str, now: datetime) -> dict[str, str]:
        """Raises InvalidRequest."""
        return check_params(value)

    def merged(self, before: Any, after: Any) -> Any:
        """Both, of the same name the later."""
        return {**before, **after}


@dataclass(frozen=True, slots=True)
class Variables(OptionKind):
    """Environment variables by name."""

    max_entries: int = MAX_VARIABLES

    def sent(self, value: Any, name: str, now: datetime) -> dict[str, str]:
        """Raises InvalidRequest."""
        return check_variables(value, name)

    def merged(self, before: Any, after: Any) -> Any:
        """Both, of the same name the later."""
        return {**before, **after}


@dataclass(frozen=True, slots=True)
class SecretNames(OptionKind):
    """Environment variables whose values are kept apart. Names are sent here; the client adds the values."""

    max_entries: int = MAX_VARIABLES

    def sent(self, value: Any, name: str, now: datetime) -> dict[str, str]:
        """Raises InvalidRequest."""
        return dict.fromkeys(secret_sources(value, name), "")

    def merged(self, before: Any, after: Any) -> Any:
        """Both, of the same name the later."""
        return {**secret_sources(before, "secrets"), **secret_sources(after, "secrets")}


@dataclass(frozen=True, slots=True)
class Requirements(OptionKind):
    """Python packages: lines of a requirements file. A keyword may be the path of one, which the client reads."""

    max_entries: int = MAX_REQUIREMENTS

    def sent(self, value: Any, name: str, now: datetime) -> list[str]:
        """Raises InvalidRequest."""
        return [] if isinstance(value, str) else list(check_requirements(value, name))


@dataclass(frozen=True, slots=True)
class ServiceNames(OptionKind):
    """Names of services, each once."""

    max_entries: int = MAX_CALLED_SERVICES

    def sent(self, value: Any, name: str, now: datetime) -> list[str]:
        """Raises InvalidRequest."""
        return list(check_service_names(value, name))


@dataclass(frozen=True, slots=True)
class Interpreter(OptionKind):
    """The path of a Python interpreter on the platform's machine; empty for the platform's own."""

    max_chars: int = 1024

    def sent(self, value: Any, name: str, now: datetime) -> str:
        """Raises InvalidRequest."""
        return check_interpreter(value, name)


@dataclass(frozen=True, slots=True)
class Phases(OptionKind):
    """A batch schedule."""

    max_phases: int = 1000

    def sent(self, value: Any, name: str, now: datetime) -> list[dict[str, int]]:
        """Raises InvalidRequest."""
        found: list[dict[str, int]] = msgspec.to_builtins(batch_phases(value))
        return found


@dataclass(frozen=True, slots=True)
class CountRange(OptionKind):
    """A number or inclusive bounds: 4, "1..8". `may_be_auto`: also "auto", as many as there are."""

    lowest: int
    highest: int
    may_be_auto: bool = False


@dataclass(frozen=True, slots=True)
class Fractions(OptionKind):
    """Parts of a device: a request, and where it is named a limit."""


@dataclass(frozen=True, slots=True)
class Size(OptionKind):
    """Bytes: "24GB"."""


@dataclass(frozen=True, slots=True)
class Rates(OptionKind):
    """Optimizer steps a second by number of workers, at most `max_entries` of them."""

    max_entries: int


@dataclass(frozen=True, slots=True)
class Document(OptionKind):
    """An object with fields of its own, which the REST API checks."""


def check_service_names(names: object, what: str) -> tuple[str, ...]:
    """Names of services, each once. Raises InvalidRequest."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidRequest(f'{what} is a list of names of services, such as ["embed"], not {names!r:.80}')
    if len(names) > MAX_CALLED_SERVICES:
        raise InvalidRequest(f"{what} names {len(names)} services; at most {MAX_CALLED_SERVICES} are possible")
    return tuple(dict.fromkeys(validate_name(name, f"{what}: the name") for name in names))


def deadline_in_s(value: str | float, now: datetime) -> float:
    """Seconds from `now` until a deadline: a duration ("90m") or the next time the clock shows "18:00"."""
    match = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            return parse_duration_s(value, "deadline")
        except InvalidRequest:
            raise InvalidRequest(
                f"deadline {value!r} is not a time to keep; write it like '90m', '1h30m', '18:00' or 45 (seconds)"
            ) from None
    moment = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
    if moment <= now:
        moment += timedelta(days=1)
    return (moment - now).total_seconds()


def objective_s(value: str | float) -> float:
    """The latency objective in seconds: "p99 < 200ms", "200ms" or a number of seconds."""
    if not isinstance(value, str):
        return parse_duration_s(value, "slo")
    match = _OBJECTIVE.fullmatch(value.strip())
    try:
        return parse_duration_s(match[1] if match else value, "slo")
    except InvalidRequest:
        raise InvalidRequest(
            f"slo {value!r} is not an objective that can be kept; write it like 'p99 < 200ms' or '200ms'"
        ) from None


def batch_phases(value: str | Sequence[tuple[int, int]]) -> tuple[BatchPhase, ...]:
    """A batch schedule ("0:64,4:256" or pairs) as phases, epochs ascending. Raises InvalidRequest."""
    mend = "write it like batch_schedule=[(0, 64), (4, 256)], on the command line --batch-schedule 0:64,4:256"
    if isinstance(value, str):
        pairs: list[Any] = []
        for part in value.split(",") if value.strip() else ():
            match = _PHASE.fullmatch(part.strip())
            if match is None:
                raise InvalidRequest(f"{part.strip()!r} is no phase of a batch schedule (EPOCH:BATCH); {mend}")
            pairs.append((int(match[1]), int(match[2])))
    elif isinstance(value, Sequence):
        pairs = list(value)
    else:
        raise InvalidRequest(f"batch_schedule {value!r:.80} is no schedule; {mend}")
    phases: list[BatchPhase] = []
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(number, int) and not isinstance(number, bool) for number in pair):
            raise InvalidRequest(f"{pair!r:.80} is no phase of a batch schedule (an epoch and a batch); {mend}")
        epoch, size = pair
        if epoch < 0 or size < 1:
            raise InvalidRequest(f"a batch of {size} from epoch {epoch} on cannot be: epochs from 0, batches from 1")
        phases.append(BatchPhase(from_epoch=epoch, global_batch_size=size))
    check_ascending(phases, "batch_schedule")
    return tuple(phases)


class _Phase(Protocol):
    @property
    def from_epoch(self) -> int: ...


def check_ascending(phases: Sequence[_Phase], name: str) -> None:
    """Raise InvalidRequest unless the epochs of a batch schedule ascend. `name` is what it is called here."""
    for before, phase in itertools.pairwise(phases):
        if phase.from_epoch <= before.from_epoch:
            raise InvalidRequest(
                f"{name} names epoch {phase.from_epoch} after epoch {before.from_epoch}; epochs ascend, each once"
            )


def check_count(value: object, what: str, example: int, lowest: int = 1) -> int:
    """Return `value` if it is a whole number of at least `lowest`. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidRequest(
            f"{what} must be a whole number of at least {lowest}, got {value!r}; for example {example}"
        )
    return value


def check_params(params: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Parameters as the strings in which they are sent. Raises InvalidRequest."""
    if not isinstance(params, Mapping) or not all(isinstance(key, str) and key for key in params):
        raise InvalidRequest(f"params must map names to values, got {params!r:.80}; for example params={{'lr': 0.1}}")
    for key, value in params.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"param {key!r} must be a string or a number, not a {type(value).__name__}")
    return {key: str(value) for key, value in params.items()}
