"""What a quote says: whether a job would be accepted, when it would finish, for how much, and with which changes.

Scripts depend on these shapes. Times are seconds from the moment of asking, money is US dollars, and every figure
has its range: it lies between `p10` and `p90` in four of five cases.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.decision import PlannedRun, PromiseCondition
from springtide.core.functions import Bill, FunctionPlan
from springtide.core.shares import Share
from springtide.core.status.search import SearchQuote

Verdict = Literal["accepted", "refused"]
OptionName = Literal["cheapest", "chosen", "fastest"]


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its uncertainty; both None: not known."""

    p10: float | None = None
    p90: float | None = None


UNKNOWN = Range()


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A change with which the job would be accepted: `change` as it is typed, `options` as POST /v1/jobs takes it.

    `num_devices` is set where the platform would have to grow to so many devices. `finish_s` is not known where
    nothing is known of the job's speed.
    """

    change: str
    finish_s: Range = UNKNOWN
    cost_usd: Range = UNKNOWN
    options: dict[str, float | int | str | None] = {}
    num_devices: int | None = None


class QuoteOption(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run the job: on `workers` from now to its end, if it gets them.

    `communication_fraction` is the part of the devices' time that does not go into samples: 1 - speedup / workers.
    `batch_per_worker` is None for a script, whose batch is its own matter.
    """

    name: OptionName
    workers: int
    batch_per_worker: int | None
    finish_s: Range
    cost_usd: Range
    communication_fraction: float
    verdict: str


class FunctionQuoteOption(msgspec.Struct, frozen=True, kw_only=True):
    """A way to run the job on a function service. `bill` is that of the whole run as expected, item by item."""

    name: OptionName
    plan: FunctionPlan
    step_s: float
    finish_s: Range
    cost_usd: Range
    bill: Bill
    verdict: str


class PlaceQuote(msgspec.Struct, frozen=True, kw_only=True):
    """What the same job would meet elsewhere: on the platform's machines ("cluster"), or at the function service."""

    on: str
    verdict: Verdict
    reason: str
    finish_s: Range = UNKNOWN
    cost_usd: Range = UNKNOWN


class CountedOn(msgspec.Struct, frozen=True, kw_only=True):
    """What promises count on until `until_s` (None: for good): `num_devices`, of which `num_loaned` are on loan."""

    num_devices: int
    num_loaned: int
    until_s: float | None = None


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `quote`. Nothing was changed by asking.

    `verdict` is what a submission at this moment would get. `is_promised` says that the policy guarantees the
    deadline; otherwise `finish_s` is an expectation. `promised_if` is what a promise waits for where the speed is not
    known. `probability` is that of the deadline being kept, with failures
    and errors of the speed counted (None: there is none, or nothing tells how far off the speed may be), `confidence`
    the one that was asked for. `workers` is what it would train on for most of the time, `minimum_share`
    the fewest workers that make the deadline if it has them from now on. `schedule` is the planned
    number of workers over time. A refused job's `finish_s` and `cost_usd` are those of a run without the deadline.
    `speed_source` says what the figures rest on, `price_usd_per_device_hour` what a device costs. `counts_on` says
    what promises count on from now to the job's end or its deadline, stretch by stretch, where servers are loaned and
    taken back; empty: all there is. `on` names the function service that the quote is for ("": the platform's
    machines), `bill` is then that of the chosen option, and `elsewhere` what the job would meet at other places.
    `place_reason` says why it is for this place where that was left to the platform (`auto`).
    `search` is set where its workers and memory would be searched for while it runs. `share` is what each of its
    workers would hold of each of `devices_each` devices (None: the whole), `enforced` what would enforce that.
    """

    verdict: Verdict
    reason: str
    finish_s: Range = UNKNOWN
    cost_usd: Range = UNKNOWN
    workers: int | None = None
    minimum_share: int | None = None
    alternatives: tuple[Alternative, ...] = ()
    evidence: tuple[str, ...] = ()
    options: tuple[QuoteOption, ...] = ()
    schedule: tuple[PlannedRun, ...] = ()
    is_promised: bool = False
    promised_if: PromiseCondition | None = None
    probability: float | None = None
    confidence: float | None = None
    start_s: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    speed_source: str = "unknown"
    policy: str = ""
    price_usd_per_device_hour: float = 0.0
    counts_on: tuple[CountedOn, ...] = ()
    on: str = ""
    bill: Bill | None = None
    function_options: tuple[FunctionQuoteOption, ...] = ()
    elsewhere: tuple[PlaceQuote, ...] = ()
    place_reason: str = ""
    search: SearchQuote | None = None
    share: Share | None = None
    enforced: str = ""
    devices_each: int = 1
