"""Optimus with the number of steps left as Pollux's published simulator counts it, to reproduce its figures."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import msgspec
import numpy as np

from springtide.core.decision import JobView, Plan, Snapshot
from springtide.scheduling.decisions.rounds import decide_in_rounds
from springtide_studies.adaptive.speeds import lengths
from springtide_studies.adaptive.truth import AppTruth
from springtide_studies.rivals.policies.tuned import share_by_gain


class PublishedOptimus(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`optimus-oracle` with the artifact's count of steps left: those of the trained epochs after the present one.

    The present epoch is not in it, so that a job in its last one counts as nearly done.
    """

    truths: Mapping[str, AppTruth]
    round_s: float = 60.0

    def decide(self, snapshot: Snapshot) -> Plan:
        """Return the plan for this snapshot."""
        return decide_in_rounds(
            "published optimus", self.round_s, snapshot, lambda now: share_by_gain(now, self._steps_left)
        )

    def _steps_left(self, view: JobView, num_held: int, now_s: float) -> float:
        """Optimizer steps of the validation runs at the job's batch from the end of the present epoch on."""
        truth = self.truths[view.job.family]
        size = view.job.global_batch_size
        ends, _ = lengths(truth, size)
        epoch = bisect.bisect_right(ends, view.equivalent_steps + 1e-6)
        if epoch >= len(ends) - 1:
            return 1.0
        runs = truth.app.runs
        done = [
            float(np.interp(size, list(runs), [float(run.steps[at]) for run in runs.values()]))
            for at in (epoch, len(ends) - 1)
        ]
        return done[1] - done[0]
