"""EDF with one half of ElasticFlow each: with an admission test, or with its elastic allocation (ElasticFlow §6.4).

EDF itself gives each job, in the order of deadlines, as many devices as it can use without becoming slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
import numpy as np

from springtide.core.decision import Plan, Snapshot
from springtide.scheduling.decisions.fingerprint import Reads
from springtide_studies.rivals.policies.admission import Hook, review_all
from springtide_studies.rivals.policies.elastic_decisions import (
    DerivedShares,
    ElasticVerdict,
    own_memory,
    service_shares,
)
from springtide_studies.rivals.policies.elastic_jobs import READS, ElasticRow, LiveJobs
from springtide_studies.rivals.policies.elastic_plan import Rules
from springtide_studies.rivals.policies.elasticflow import decide_elastically, derived_shares
from springtide_studies.rivals.solvers.minimum_share import play_in_turn


class EdfElastic(msgspec.Struct, frozen=True, kw_only=True):
    """EDF with elastic scaling: ElasticFlow's shares and spare devices for all jobs, without admission.

    A job that can no longer meet its deadline keeps its turn and takes all it can use, as under EDF. Soft deadlines
    count like hard ones. The parameters are those of ElasticFlow.
    """

    levels: Literal["doubling", "all"] = "doubling"
    reserves_overhead: bool = False
    slot_s: float | None = None
    reserve_fraction: float = 0.0
    hooks: tuple[Hook, ...] = ()

    reads: ClassVar[Reads] = READS
    summary: ClassVar[str] = "ElasticFlow's allocation without its admission (its EDF + elastic scaling)."

    @property
    def rules(self) -> Rules:
        """Every deadline is claimed, none promised."""
        return Rules(admits=False, late_jobs_claim=True, reserves_overhead=self.reserves_overhead)

    def make_derived(self) -> DerivedShares:
        """An empty object to keep derived values in."""
        return derived_shares(self)

    def decide(self, snapshot: Snapshot, derived: DerivedShares | None = None) -> Plan:
        """Return the plan for this snapshot."""
        return decide_elastically(self, snapshot, derived)


class EdfAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """EDF that simulates itself before it promises a deadline, and rejects the job if any deadline would be missed.

    Arrivals are tested one by one; a job that is late already only counts against jobs with later deadlines. Sizes are
    powers of two. Soft deadlines and best effort come after all promised deadlines, the former first. `hooks` as for
    ElasticFlow.
    """

    summary: ClassVar[str] = "EDF that turns away deadlines it cannot make (ElasticFlow's variant)."

    hooks: tuple[Hook, ...] = ()

    reads: ClassVar[Reads] = READS

    def make_derived(self) -> DerivedShares:
        """An empty object to keep derived values in."""
        return DerivedShares(repr(self))

    def decide(self, snapshot: Snapshot, derived: DerivedShares | None = None) -> Plan:
        """Return the plan for this snapshot."""
        derived = derived or self.make_derived()
        rows = derived.curves.rows(snapshot)
        standing = derived.recall(snapshot, rows, None)
        return standing or derived.plan(snapshot, rows, self._decide(snapshot, rows, derived))

    def _decide(self, snapshot: Snapshot, rows: list[ElasticRow], derived: DerivedShares) -> ElasticVerdict:
        num_devices = service_shares(snapshot).left
        remembered = own_memory(snapshot, derived.rule)
        ledgers = dict(remembered["ledgers"]) if remembered is not None else {}
        live = LiveJobs(derived.curves, rows, snapshot)
        known = [index for index, row in enumerate(rows) if row.is_hard]
        promised = live.by_deadline([index for index in known if rows[index].view.promise.admitted_at_s is not None])
        ends_s = self._play(live, promised, num_devices)
        # Progress is reported in whole steps, so a job is late only if it is late by at least one step.
        spare_s = live.deadlines_s + 1.0 / live.rates[:, 0] if rows else live.deadlines_s
        admitted: dict[int, float] = {}
        refused: dict[int, str] = {}
        for index in known:
            view = rows[index].view
            if view.promise.admitted_at_s is not None:
                continue
            trial = live.by_deadline([*promised, index])
            after_s = self._play(live, trial, num_devices)
            broken = [
                other
                for other in trial
                if after_s[other] > live.deadlines_s[other]
                and (other == index or after_s[other] > max(ends_s[other], spare_s[other]))
            ]
            objection: str | None = _why_not(rows, broken, index) if broken else None
            if objection is None:
                objection, ledgers = review_all(self.hooks, view, snapshot, ledgers)
            if objection is None:
                promised, ends_s = trial, after_s
                admitted[index] = ends_s[index]
            elif view.started_at_s is None:
                refused[index] = objection
        counts = self._counts(live, promised, num_devices, refused)
        return ElasticVerdict(
            counts={row.job_id: count for row, count in zip(rows, counts, strict=True) if count},
            admitted={rows[index].job_id: finish_s for index, finish_s in admitted.items()},
            refused={rows[index].job_id: why for index, why in refused.items()},
            ledgers=ledgers,
        )

    def _play(self, live: LiveJobs, order: Sequence[int], num_devices: int) -> dict[int, float]:
        """When each of these jobs ends if EDF runs them and no other job arrives."""
        ends_s = play_in_turn(live.demands(order), live.now_s, num_devices) if order else np.empty(0)
        return dict(zip(order, ends_s.tolist(), strict=True))

    def _counts(self, live: LiveJobs, promised: Sequence[int], num_devices: int, refused: dict[int, str]) -> list[int]:
        """The devices of this moment: for each job the largest size that is left, promised deadlines first."""
        others = sorted(
            (index for index in range(len(live.rows)) if index not in set(promised) and index not in refused),
            key=lambda index: (live.deadlines_s[index], index),
        )
        counts = [0] * len(live.rows)
        for index in (*promised, *others):
            fitting = [size for size in live.rows[index].sizes if size <= num_devices]
            if fitting:
                counts[index] = fitting[-1]
                num_devices -= fitting[-1]
        return counts


def _why_not(rows: Sequence[ElasticRow], broken: Sequence[int], index: int) -> str:
    if index in broken:
        return "in the order of deadlines it would not end by its own"
    return f"in the order of deadlines '{rows[broken[0]].view.job.name}', which was promised its own, would miss it"
