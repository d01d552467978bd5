"""The options of `st.serve`: checked when the decorator runs, converted to the API's options at deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast

from springtide.client.goals import Params, Variables
from springtide.client.secret_values import secret_values
from springtide.client.shares import MemoryAsked, ShareAsked, devices_asked, read_share, settled_share, share_option
from springtide.core.options.option import check_keywords, keyword_values, overridden, sent_options
from springtide.core.options.rules import SERVICE_RULES, check_rules
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.options.variables import Secrets
from springtide.core.options.words import SERVICE_WORDS
from springtide.core.quantities import parse_range


class ServeKeywords(TypedDict, total=False):
    """The options of `st.serve` and of `.deploy()`.

    `slo`: the latency to keep, "p99 < 200ms", "200ms" or seconds. `scale`: the number of replicas, such as (0, 4);
    the lower bound is guaranteed, and with 0 the service sleeps after `idle` ("30s" or seconds) without requests.
    `in_flight`: concurrent requests for which one more replica is started (8). `capacity`: requests per second that
    one replica answers within `slo`; the number of replicas then follows the load over time. `max_batch`: most items
    predicted together; `max_body`: MiB that the body of one call may have (1); `concurrency`: calls that a replica
    works on at a time (1, and 64 if `predict` is async); `calls`: the services that its code may call with
    `st.deployed`; `batch_wait`: how long a request waits for others.
    `start_timeout`: what a replica may take to load ("10m"). `gpu`: the fraction of a device that each replica is
    guaranteed, with up to twice as much if it is free; `share`: both bounds, such as (0.3, 0.6), or "auto" (from
    `springtide profile FILE --shares`); `memory`: its device memory, such as "4GB". With a share, `gpu` 2, 4 or 8 says
    of how many devices of one machine each replica holds it. `name`, `params` (strings in `self.params`), and `env`,
    `secrets`, `requirements` and `python` as in TrainKeywords.
    """

    slo: str | float | None
    scale: int | str | tuple[int, int]
    max_batch: int
    max_body: int
    concurrency: int | None
    calls: Sequence[str]
    in_flight: int
    batch_wait: str | float
    start_timeout: str | float | None
    idle: str | float
    gpu: float | str
    share: ShareAsked
    memory: MemoryAsked
    capacity: float | None
    name: str
    params: Params
    env: Variables
    secrets: Secrets
    requirements: str | Sequence[str]
    python: str


class ServeOptions:
    """The checked options of an inference class, as the user wrote them; ServeKeywords describes each.

    `values` holds all keywords of SERVICE_OPTIONS, with defaults for those that were not given.
    """

    __slots__ = ("values",)

    def __init__(self, **given: Unpack[ServeKeywords]) -> None:
        """Raise InvalidRequest for invalid options; its message says what would be valid."""
        self.values = cast(ServeKeywords, keyword_values(SERVICE_OPTIONS, given, "st.serve"))
        check_keywords(SERVICE_OPTIONS, self.values)
        parse_range(self.values["scale"], "scale", lowest=0)
        share = read_share(self.values["share"], self.values["memory"], self.values["gpu"])
        each = devices_asked(self.values["gpu"])
        check_rules(SERVICE_RULES, {**self.values, "share": share, "gpu": each}, SERVICE_WORDS["python"])

    def override(self, changes: Mapping[str, Any]) -> ServeOptions:
        """A copy with some keywords changed; `params`, `env` and `secrets` are merged. Raises InvalidRequest."""
        return ServeOptions(**cast(ServeKeywords, overridden(SERVICE_OPTIONS, self.values, changes, "deploy()")))

    def as_request(self) -> dict[str, Any]:
        """The `options` of PUT /v1/services/{name}."""
        minimum, maximum = parse_range(self.values["scale"], "scale", lowest=0)
        share = settled_share(self.values["share"], self.values["memory"], self.values["gpu"])
        sent = sent_options(SERVICE_OPTIONS, self.values, datetime.now())
        if self.values["secrets"]:
            sent["secrets"] = secret_values(self.values["secrets"])
        if (each := devices_asked(self.values["gpu"])) > 1:
            sent["devices_each"] = each
        return sent | {"min_replicas": minimum, "max_replicas": maximum} | share_option(share)
