"""Rules of an operator beyond room in the cluster: quotas, prices, and devices kept back for failures.

ElasticFlow §4.4: an extra rule before line 9 of Algorithm 1 decides whether a job that fits is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from springtide.core.decision import JobView, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology
from springtide.perf.curve import curve_of

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_HOUR = 3_600.0

Ledger = Mapping[str, Any]


class Hook(Protocol):
    """A rule that is applied to every job that could be promised its deadline, before the promise is given.

    `ledger` holds the plain values that the hook returned last time: its only memory, journaled with the policy's. A
    hook is pure, as policies are.
    """

    @property
    def name(self) -> str:
        """The name under which the hook's ledger is kept."""
        ...

    def review(self, view: JobView, snapshot: Snapshot, ledger: Ledger) -> tuple[str | None, Ledger]:
        """Return why the job is rejected (None: it is not) and the new ledger."""
        ...


class OwnerQuota(msgspec.Struct, frozen=True, kw_only=True):
    """At most so many jobs with promised deadlines for each owner: unfinished at a time, and admitted in one day."""

    max_unfinished: int | None = None
    max_per_day: int | None = None

    @property
    def name(self) -> str:
        """The hook's name."""
        return "quota"

    def review(self, view: JobView, snapshot: Snapshot, ledger: Ledger) -> tuple[str | None, Ledger]:
        """Count the owner's unfinished jobs, and those promised in the last 24 hours."""
        owner = view.job.owner
        who = f"'{owner}'" if owner else "all users without a name together"
        recent: dict[str, list[float]] = {
            name: kept
            for name, moments in ledger.items()
            if (kept := [at_s for at_s in moments if at_s > snapshot.now_s - SECONDS_PER_DAY])
        }
        mine = recent.get(owner, [])
        if self.max_unfinished is not None:
            live = {other.job.job_id for other in snapshot.jobs if other.promise.admitted_at_s is not None}
            unfinished = sum(other.job.owner == owner for other in snapshot.jobs if other.job.job_id in live)
            # Jobs admitted at this very moment are not in the snapshot as such yet.
            unfinished += sum(at_s == snapshot.now_s for at_s in mine)
            if unfinished >= self.max_unfinished:
                return (
                    f"{who} has {unfinished} jobs with promised deadlines, the quota is {self.max_unfinished}:"
                    " submit again when one has ended, or without a deadline",
                    recent,
                )
        if self.max_per_day is not None and len(mine) >= self.max_per_day:
            return (
                f"{who} was promised {len(mine)} deadlines in the last 24 hours, the quota is {self.max_per_day}:"
                " submit again tomorrow, or without a deadline",
                recent,
            )
        return None, {**recent, owner: [*mine, snapshot.now_s]}


class Pricing(Protocol):
    """What a promise costs."""

    def price_usd(self, view: JobView, now_s: float) -> float | None:
        """The price of running the job by its deadline, USD; None if it is not known."""
        ...


class UrgencyPricing(msgspec.Struct, frozen=True, kw_only=True):
    """Device hours at a price, times how much sooner than on its smallest size the job must be done.

    Both depend on the job's size and its deadline only (§4.4), never on other jobs. A job that has at least
    the time that its smallest size takes pays the plain price; one that has a third of it pays three times as much,
    at most `max_factor` times.
    """

    usd_per_device_hour: float
    max_factor: float = 8.0

    def price_usd(self, view: JobView, now_s: float) -> float | None:
        """Device hours on the smallest size that makes the deadline alone, at the price of its urgency."""
        curve, deadline_s = curve_of(view), view.job.goal.deadline_s
        if view.total_steps is None or curve.source == "guess" or not curve.sizes or deadline_s is None:
            return None
        steps, time_s = view.total_steps - view.progress.step, deadline_s - now_s
        longest_s = steps / curve.rate(curve.sizes[0])
        fitting = [size for size in curve.sizes if steps / curve.rate(size) <= time_s]
        if not fitting:
            return None
        device_hours = fitting[0] * steps / curve.rate(fitting[0]) / SECONDS_PER_HOUR
        factor = min(self.max_factor, max(1.0, longest_s / time_s))
        return device_hours * self.usd_per_device_hour * factor


class PriceGate(msgspec.Struct, frozen=True, kw_only=True):
    """Reject a job whose price is above its budget. A job without a budget pays any price."""

    pricing: Pricing

    @property
    def name(self) -> str:
        """The hook's name."""
        return "price"

    def review(self, view: JobView, snapshot: Snapshot, ledger: Ledger) -> tuple[str | None, Ledger]:
        """Compare price and budget; an unknown price is no reason to refuse."""
        budget_usd = view.job.goal.budget_usd
        price_usd = self.pricing.price_usd(view, snapshot.now_s)
        if budget_usd is None or price_usd is None or price_usd <= budget_usd:
            return None, ledger
        return (
            f"its deadline costs {price_usd:.2f} USD, its budget is {budget_usd:.2f} USD: a later deadline costs less",
            ledger,
        )


def review_all(
    hooks: Sequence[Hook], view: JobView, snapshot: Snapshot, ledgers: Mapping[str, Ledger]
) -> tuple[str | None, dict[str, Ledger]]:
    """Let every hook review the job, in turn. The first objection counts, and then no ledger changes."""
    after: dict[str, Ledger] = dict(ledgers)
    for hook in hooks:
        objection, after[hook.name] = hook.review(view, snapshot, after.get(hook.name, {}))
        if objection is not None:
            return objection, dict(ledgers)
    return None, after


def reserve_for_failures(
    topology: Topology, *, mtbf_hours: float, repair_hours: float, confidence: float = 0.99
) -> int:
    """How many devices to keep back so that promises survive node failures with probability `confidence` (§4.4).

    Nodes fail independently, each is down `repair_hours / (mtbf_hours + repair_hours)` of its time, so the number of
    nodes that are down at one moment is binomial. With the confidence asked for, no more than n nodes are down at once;
    the devices of the n largest nodes are kept back. Raises InvalidRequest if a figure makes no sense.
    """
    if not (mtbf_hours > 0 and repair_hours >= 0 and 0 < confidence < 1):
        raise InvalidRequest(
            "give a mean time between failures above 0 h, a repair time of 0 h or more and a confidence between 0 and 1"
        )
    down = repair_hours / (mtbf_hours + repair_hours) if math.isfinite(mtbf_hours) else 0.0
    sizes = sorted((len(node.devices) for node in topology.nodes), reverse=True)
    covered = 0.0
    for num_down in range(len(sizes) + 1):
        covered += math.comb(len(sizes), num_down) * down**num_down * (1 - down) ** (len(sizes) - num_down)
        if covered >= confidence:
            return sum(sizes[:num_down])
    return sum(sizes)


def reserve_fraction(topology: Topology, num_reserved: int) -> float:
    """The reserve as a fraction of all devices, the parameter of policies (0.0 without devices)."""
    total = len(topology.device_ids())
    return num_reserved / total if total else 0.0
