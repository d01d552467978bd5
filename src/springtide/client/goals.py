"""What people pass to `st.train` and `st.serve`, checked once when the file is read and turned into the API's options
when it is submitted.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s, parse_money_usd, parse_range, validate_name
from springtide.core.shards import shards_for
from springtide.core.workload import (
    MAX_VIRTUAL_SHARDS,
    AdaptiveBatch,
    Entrypoint,
    LearningRateRule,
    LengthUnit,
    TrainingJob,
    WorkloadId,
)

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_OBJECTIVE = re.compile(r"(?:p99\s*<=?\s*)?(.+)", re.IGNORECASE)


class Auto(enum.Enum):
    """The type of `st.auto`."""

    AUTO = "auto"


auto: Final = Auto.AUTO
"""Let the platform choose: between one worker and as many as it has devices."""

Workers = int | str | tuple[int, int] | Auto
GlobalBatch = int | str | tuple[int, int]
Length = Literal["epochs", "progress"]
Params = Mapping[str, str | int | float | bool]


class TrainKeywords(TypedDict, total=False):
    """The keywords of `st.train`, of `st.Task` and of `.submit()`."""

    deadline: str | float | None
    budget: str | float | None
    global_batch: GlobalBatch
    max_local_batch: int | None
    learning_rate: LearningRateRule
    length: Length
    epochs: int
    workers: Workers
    seed: int
    name: str
    params: Params
    retries: int
    soft: bool
    wait: bool
    num_samples: int | None


class ServeKeywords(TypedDict, total=False):
    """The keywords of `st.serve` and of `.deploy()`."""

    slo: str | float | None
    scale: int | str | tuple[int, int]
    max_batch: int
    in_flight: int
    batch_wait: str | float
    idle: str | float
    gpu: float
    name: str
    params: Params


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


def workers_range(value: Workers | str, num_devices: int | None = None) -> tuple[int, int] | None:
    """The inclusive bounds; for `auto` 1 to `num_devices`, or None while the number of devices is not known."""
    if value is auto or (isinstance(value, str) and value.strip() == "auto"):
        return None if num_devices is None else (1, max(1, num_devices))
    assert not isinstance(value, Auto)
    return parse_range(value, "workers")


def batch_range(value: GlobalBatch) -> tuple[int, int]:
    """The bounds of the global batch size, equal where it is fixed: 64, (32, 512) or "32..512"."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int):
        check_count(value, "global_batch", 32)
        return value, value
    return parse_range(value, "global_batch")


def check_count(value: object, what: str, example: int, lowest: int = 1) -> int:
    """Return `value` if it is a whole number of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidRequest(
            f"{what} must be a whole number of at least {lowest}, got {value!r}; for example {example}"
        )
    return value


def check_params(params: Params) -> dict[str, str]:
    """Parameters as the strings in which they travel."""
    if not isinstance(params, Mapping) or not all(isinstance(key, str) and key for key in params):
        raise InvalidRequest(f"params must map names to values, got {params!r:.80}; for example params={{'lr': 0.1}}")
    for key, value in params.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"param {key!r} must be a string or a number, not a {type(value).__name__}")
    return {key: str(value) for key, value in params.items()}


def unknown_keyword(names: set[str], allowed: set[str], where: str) -> None:
    """Refuse misspelt keywords, naming the ones that exist."""
    unknown = sorted(names - allowed)
    if unknown:
        raise InvalidRequest(f"{where} does not know {unknown[0]!r}; it knows {', '.join(sorted(allowed))}")


_UNITS: Final[Mapping[Length, LengthUnit]] = MappingProxyType({"epochs": "samples", "progress": "progress"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What a training function asks for, as it was written. A deadline counts from the submission.

    A `global_batch` with bounds may change while the job runs, from its lower bound on: then `max_local_batch` is what
    one worker holds at once, `learning_rate` how the rate follows, and `length` says whether the epochs are passes over
    the data or the progress that so many passes would make with the first batch.
    """

    deadline: str | float | None = None
    budget: str | float | None = None
    global_batch: GlobalBatch = 32
    max_local_batch: int | None = None
    learning_rate: LearningRateRule = "linear"
    length: Length = "epochs"
    epochs: int = 1
    workers: Workers = auto
    seed: int = 0
    name: str = ""
    params: Params = field(default_factory=dict)
    retries: int = 3
    soft: bool = False
    wait: bool = False
    num_samples: int | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the mend, for what can never be."""
        batch_range(self.global_batch)
        self._check_batch()
        check_count(self.epochs, "epochs", 10)
        check_count(self.retries, "retries", 3, lowest=0)
        check_count(self.seed, "seed", 0, lowest=0)
        if self.num_samples is not None:
            check_count(self.num_samples, "num_samples", 50_000)
        for keyword, value in (("soft", self.soft), ("wait", self.wait)):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{keyword} must be True or False, got {value!r:.80}")
        if self.deadline is not None:
            deadline_in_s(self.deadline, datetime(2000, 1, 1))
        if self.budget is not None:
            parse_money_usd(self.budget)
        bounds = workers_range(self.workers)
        if bounds is not None and bounds[1] > MAX_VIRTUAL_SHARDS:
            raise InvalidRequest(f"workers may be at most {MAX_VIRTUAL_SHARDS}, got {self.workers!r}")
        if self.name:
            validate_name(self.name)
        check_params(self.params)

    def _check_batch(self) -> None:
        """Raise InvalidRequest for what cannot be said of the batch, or not without bounds for it."""
        if self.max_local_batch is not None:
            check_count(self.max_local_batch, "max_local_batch", 64)
        for keyword, value, kind in (
            ("learning_rate", self.learning_rate, LearningRateRule),
            ("length", self.length, Length),
        ):
            if value not in get_args(kind):
                known = ", ".join(repr(name) for name in get_args(kind))
                raise InvalidRequest(f"{keyword} must be one of {known}, got {value!r:.80}")
        low, high = batch_range(self.global_batch)
        if low == high:
            for keyword, is_given in (
                ("max_local_batch", self.max_local_batch is not None),
                ("learning_rate", self.learning_rate != "linear"),
                ("length", self.length != "epochs"),
            ):
                if is_given:
                    raise InvalidRequest(
                        f"{keyword} needs a batch that may change; give it bounds like global_batch=({low}, {16 * low})"
                    )

    def batch_bounds(self) -> AdaptiveBatch | None:
        """Within what the platform may choose the batch; None where it is fixed."""
        low, high = batch_range(self.global_batch)
        if low == high:
            return None
        return AdaptiveBatch(
            min_size=low, max_size=high, max_local_size=self.max_local_batch, learning_rate=self.learning_rate
        )

    def override(self, changes: Mapping[str, Any], where: str = "submit()") -> TrainOptions:
        """A copy with some keywords changed; `params` are merged. Raises InvalidRequest for unknown keywords."""
        unknown_keyword(set(changes), {option.name for option in fields(self)}, where)
        given = dict(changes)
        if "params" in given:
            given["params"] = {**self.params, **given["params"]}
        return replace(self, **given)

    def as_local_job(self, name: str) -> TrainingJob:
        """The job that a run in this process trains: what the platform would make of it, without goal and source."""
        bounds = workers_range(self.workers)
        return TrainingJob(
            job_id=WorkloadId(name),
            name=name,
            entrypoint=Entrypoint(source_path=""),
            global_batch_size=batch_range(self.global_batch)[0],
            num_epochs=self.epochs,
            num_virtual_shards=shards_for(bounds[1] if bounds is not None else 1, self.batch_bounds()),
            seed=self.seed,
            params=check_params(self.params),
            batch=self.batch_bounds(),
            length_unit=_UNITS[self.length],
        )

    def as_request(self, num_devices: int, now: datetime) -> dict[str, Any]:
        """The `options` of POST /v1/jobs; `num_devices` is what `auto` may grow to."""
        bounds = workers_range(self.workers, num_devices)
        assert bounds is not None
        options: dict[str, Any] = {
            "global_batch_size": batch_range(self.global_batch)[0],
            "num_epochs": self.epochs,
            "min_workers": bounds[0],
            "max_workers": min(bounds[1], MAX_VIRTUAL_SHARDS),
            "seed": self.seed,
            "max_restarts": self.retries,
            "params": check_params(self.params),
        }
        if self.deadline is not None:
            options["deadline_s"] = deadline_in_s(self.deadline, now)
        if self.budget is not None:
            options["budget_usd"] = parse_money_usd(self.budget)
        if self.soft:
            options["is_soft"] = True
        if self.wait:
            options["waits"] = True
        if self.num_samples is not None:
            options["num_samples"] = self.num_samples
        batch = self.batch_bounds()
        if batch is not None:
            options["batch"] = msgspec.to_builtins(batch)
            options["length_unit"] = _UNITS[self.length]
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What an inference class asks for, as it was written.

    Of `scale` the lower bound is guaranteed; more come with the load, one for every `in_flight` requests at once.
    """

    slo: str | float | None = None
    scale: int | str | tuple[int, int] = (0, 1)
    max_batch: int = 8
    in_flight: int = 8
    batch_wait: str | float = "5ms"
    idle: str | float = "30s"
    gpu: float = 1.0
    name: str = ""
    params: Params = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the mend, for what can never be."""
        if self.slo is not None:
            objective_s(self.slo)
        parse_range(self.scale, "scale", lowest=0)
        check_count(self.max_batch, "max_batch", 8)
        check_count(self.in_flight, "in_flight", 8)
        parse_duration_s(self.batch_wait, "batch_wait")
        parse_duration_s(self.idle, "idle")
        if self.gpu != 1.0:
            raise InvalidRequest(
                f"gpu={self.gpu!r} is not possible: nothing on this platform enforces a share of a GPU, so a fraction "
                "would promise what it cannot keep; leave gpu out and each replica holds one whole device"
            )
        if self.name:
            validate_name(self.name)
        check_params(self.params)

    def override(self, changes: Mapping[str, Any]) -> ServeOptions:
        """A copy with some keywords changed; `params` are merged. Raises InvalidRequest for unknown keywords."""
        unknown_keyword(set(changes), {option.name for option in fields(self)}, "deploy()")
        given = dict(changes)
        if "params" in given:
            given["params"] = {**self.params, **given["params"]}
        return replace(self, **given)

    def as_request(self) -> dict[str, Any]:
        """The `options` of PUT /v1/services/{name}."""
        minimum, maximum = parse_range(self.scale, "scale", lowest=0)
        options: dict[str, Any] = {
            "min_replicas": minimum,
            "max_replicas": maximum,
            "max_batch_size": self.max_batch,
            "target_in_flight": self.in_flight,
            "batch_wait_s": parse_duration_s(self.batch_wait, "batch_wait"),
            "idle_s": parse_duration_s(self.idle, "idle"),
            "params": check_params(self.params),
        }
        if self.slo is not None:
            options["slo_s"] = objective_s(self.slo)
        return options
