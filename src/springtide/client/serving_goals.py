"""The keywords of `st.serve`: checked when the file is read, turned into the API's options at the deployment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast

from springtide.client.goals import Params
from springtide.client.shares import MemoryAsked, ShareAsked, read_share, settled_share, share_option
from springtide.core.options.option import check_keywords, keyword_values, overridden, sent_options
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.quantities import parse_range


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


class ServeOptions:
    """What an inference class asks for, as it was written: the rows of SERVICE_OPTIONS that are keywords.

    Of `scale` the lower bound is guaranteed; more come with the load, one for every `in_flight` requests at once, or,
    where `capacity` says how many requests a second one replica answers within `slo`, as many as the load needs over
    time. `gpu` is the share of a device that each replica is sure of, with up to twice as much where it is free;
    `share` names both bounds, or is "auto" (as profiled), and `memory` is what it holds of the device's memory.
    """

    __slots__ = ("values",)

    def __init__(self, **given: Unpack[ServeKeywords]) -> None:
        """Raise InvalidRequest, with what would do, for what can never be."""
        self.values = cast(ServeKeywords, keyword_values(SERVICE_OPTIONS, given, "st.serve"))
        check_keywords(SERVICE_OPTIONS, self.values)
        parse_range(self.values["scale"], "scale", lowest=0)
        read_share(self.values["share"], self.values["memory"], self.values["gpu"])

    def override(self, changes: Mapping[str, Any]) -> ServeOptions:
        """A copy with some keywords changed; `params` are merged. Raises InvalidRequest for unknown keywords."""
        return ServeOptions(**cast(ServeKeywords, overridden(SERVICE_OPTIONS, self.values, changes, "deploy()")))

    def as_request(self) -> dict[str, Any]:
        """The `options` of PUT /v1/services/{name}."""
        minimum, maximum = parse_range(self.values["scale"], "scale", lowest=0)
        share = settled_share(self.values["share"], self.values["memory"], self.values["gpu"])
        bounds = {"min_replicas": minimum, "max_replicas": maximum}
        return sent_options(SERVICE_OPTIONS, self.values, datetime.now()) | bounds | share_option(share)
