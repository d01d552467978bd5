"""What people pass to `st.serve`, checked once when the file is read and turned into the API's options when it is
deployed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from springtide.client.goals import Params, check_count, check_params, unknown_keyword
from springtide.client.shares import MemoryAsked, ShareAsked, read_share, settled_share, share_option
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s, parse_range, validate_name

DEFAULT_MAX_BATCH = 8
_OBJECTIVE = re.compile(r"(?:p99\s*<=?\s*)?(.+)", re.IGNORECASE)


class ServeKeywords(TypedDict, total=False):
    """The keywords of `st.serve` and of `.deploy()`."""

    slo: str | float | None
    scale: int | str | tuple[int, int]
    max_batch: int
    in_flight: int
    batch_wait: str | float
    idle: str | float
    gpu: float | str
    share: ShareAsked
    memory: MemoryAsked
    capacity: float | None
    name: str
    params: Params


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


def check_capacity(value: object) -> float:
    """Return requests a second if that is what `value` is. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidRequest(f"capacity is how many requests a second one replica answers, got {value!r}; like 120.0")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What an inference class asks for, as it was written.

    Of `scale` the lower bound is guaranteed; more come with the load, one for every `in_flight` requests at once, or,
    where `capacity` says how many requests a second one replica answers within `slo`, as many as the load needs over
    time. `gpu` is the share of a device that each replica is sure of, with up to twice as much where it is free;
    `share` names both bounds, or is "auto" (as profiled), and `memory` is what it holds of the device's memory.
    """

    slo: str | float | None = None
    scale: int | str | tuple[int, int] = (0, 1)
    max_batch: int = DEFAULT_MAX_BATCH
    in_flight: int = 8
    batch_wait: str | float = "5ms"
    idle: str | float = "30s"
    gpu: float | str = 1.0
    share: ShareAsked = None
    memory: MemoryAsked = None
    capacity: float | None = None
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
        read_share(self.share, self.memory, self.gpu)
        if self.capacity is not None:
            check_capacity(self.capacity)
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
        options |= share_option(settled_share(self.share, self.memory, self.gpu))
        if self.capacity is not None:
            options["capacity_per_s"] = float(self.capacity)
        return options
