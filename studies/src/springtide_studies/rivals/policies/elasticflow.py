"""ElasticFlow: a deadline is promised if a share for it is left, spare devices go where they bring most (ASPLOS'23).

The paper's design (§4), and beside it the published artifact's with its known faults, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from springtide.core.decision import Plan, Snapshot
from springtide.scheduling.decisions.fingerprint import Reads
from springtide_studies.rivals.policies.admission import Hook, review_all
from springtide_studies.rivals.policies.elastic_decisions import (
    DerivedShares,
    ElasticVerdict,
    own_memory,
    service_shares,
)
from springtide_studies.rivals.policies.elastic_jobs import READS, LiveJobs
from springtide_studies.rivals.policies.elastic_plan import ElasticFuture, ElasticOutcome, Rules, decide_elastic


class ElasticParameters(Protocol):
    """The parameters of the policies of this family; they differ in `rules`."""

    @property
    def levels(self) -> Literal["doubling", "all"]:
        """The sizes that jobs are given."""
        ...

    @property
    def reserves_overhead(self) -> bool:
        """Whether time for one change is kept free before every deadline."""
        ...

    @property
    def slot_s(self) -> float | None:
        """How long newcomers wait for the end of a slot."""
        ...

    @property
    def reserve_fraction(self) -> float:
        """The part of the devices that is not promised."""
        ...

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The operator's rules of admission."""
        ...

    @property
    def rules(self) -> Rules:
        """Where the policy differs from the paper."""
        ...


def derived_shares(policy: ElasticParameters) -> DerivedShares:
    """An empty object for a policy of this family to keep derived values in."""
    return DerivedShares(repr(policy), only_doublings=policy.levels == "doubling")


def decide_elastically(policy: ElasticParameters, snapshot: Snapshot, derived: DerivedShares | None) -> Plan:
    """The plan of a policy of this family."""
    derived = derived or derived_shares(policy)
    all_rows = derived.curves.rows(snapshot)
    standing = derived.recall(snapshot, all_rows, policy.slot_s)
    if standing is not None:
        return standing
    # A job that waits after a crash cannot use devices; one that is promised its end keeps its claim.
    pauses_s = [row.view.restarts.starts_at_s for row in all_rows if row.view.restarts.starts_at_s > snapshot.now_s]
    rows = all_rows
    if pauses_s and not policy.rules.admits:
        rows = [row for row in all_rows if row.view.restarts.starts_at_s <= snapshot.now_s]
    num_devices = service_shares(snapshot).left
    reserved = int(len(snapshot.cluster.device_ids()) * policy.reserve_fraction)
    remembered = own_memory(snapshot, derived.rule)
    ledgers = dict(remembered["ledgers"]) if remembered is not None else {}

    def review(index: int) -> str | None:
        objection, after = review_all(policy.hooks, rows[index].view, snapshot, ledgers)
        ledgers.update(after)
        return objection

    live = LiveJobs(derived.curves, rows, snapshot)
    reserves_s = [snapshot.overheads.cost_s(row.sizes[-1]) for row in rows] if policy.reserves_overhead else ()
    outcome = decide_elastic(live, num_devices, max(0, num_devices - reserved), policy.rules, reserves_s, review)
    verdict = _verdict_of(live, outcome, ledgers)
    if pauses_s and not policy.rules.admits:
        until_s = min(pauses_s) if verdict.until_s is None else min(verdict.until_s, *pauses_s)
        verdict = msgspec.structs.replace(verdict, until_s=until_s)
    return derived.plan(snapshot, all_rows, verdict, policy.slot_s)


def _verdict_of(live: LiveJobs, outcome: ElasticOutcome, ledgers: Mapping[str, Any]) -> ElasticVerdict:
    """The outcome by job id instead of by row."""
    rows = live.rows
    return ElasticVerdict(
        counts={row.job_id: count for row, count in zip(rows, outcome.counts, strict=True) if count},
        until_s=outcome.until_s,
        admitted={rows[index].job_id: finish_s for index, finish_s in outcome.admitted.items()},
        refused={rows[index].job_id: why for index, why in outcome.refused.items()},
        future=ElasticFuture(live, outcome),
        ledgers=ledgers,
    )


class ElasticFlow(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's policy: Algorithms 1 and 2 at every arrival, end and planned switch, one arrival after the other.

    A hard deadline is promised at once or its job is dropped: the paper has no waiting line (a goal that `waits` is
    refused like any other). Soft deadlines and best effort have no share and take part in Algorithm 2 (§4.4). Sizes
    are powers of two (§4.3) unless `levels` is "all". `reserves_overhead` keeps the price of one change free before
    every deadline; the paper's test knows no overhead. `slot_s`: newcomers wait for the end of a slot of that length.
    `reserve_fraction` of the devices are not promised, for failures (scheduling.admission). `hooks` are asked before
    line 9 of Algorithm 1.
    """

    levels: Literal["doubling", "all"] = "doubling"
    reserves_overhead: bool = False
    slot_s: float | None = None
    reserve_fraction: float = 0.0
    hooks: tuple[Hook, ...] = ()

    reads: ClassVar[Reads] = READS

    @property
    def rules(self) -> Rules:
        """The rules of the paper."""
        return Rules(reserves_overhead=self.reserves_overhead)

    def make_derived(self) -> DerivedShares:
        """An empty object to keep derived values in."""
        return derived_shares(self)

    def decide(self, snapshot: Snapshot, derived: DerivedShares | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_elastically(self, snapshot, derived)


class ElasticFlowArtifact(ElasticFlow, frozen=True, kw_only=True):
    """As the published artifact does where it differs from the paper (pkusys/ElasticFlow, `ef-accessctrl`).

    From the artifact: arrivals wait for the end of a slot (60 s, 240 s on the testbed) and are admitted together or
    not at all; a job that is late keeps its claim, and no job is admitted until it has ended; spare devices go to the
    job to which they bring least, jobs without any coming first. From the paper, as everywhere here: shares, levels,
    best effort. Not reproduced: whole seconds, and the price of a change charged to jobs that do not change.
    """

    summary: ClassVar[str] = "ElasticFlow as its published artifact decides, with its known faults."

    slot_s: float | None = 60.0

    @property
    def rules(self) -> Rules:
        """The rules of the artifact."""
        return Rules(in_batches=True, late_jobs_claim=True, is_reversed=True, reserves_overhead=self.reserves_overhead)
