"""No promise is given up as long as weaker claims, on whole devices or on parts, keep a device that would save it."""

from __future__ import annotations

import pytest

from kits.scheduling.drawn_worlds import DrawnWorld
from kits.simulation.sweeps import part
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.answer import ALL_WEAK, HOLDS_IN_VAIN_S, HOLDS_S, Answer

NUM_DECISIONS = 14


# Worlds in which a promise was given up, before decision 79, beside a best-effort job with a share, a replica beyond a
# minimum, a guaranteed one that had other room, a sharer on its way out, a new promise, or workers to spare. The last
# five: replicas beyond minimums in the way of a group, one promise helped and not the other, a replica not the last.
@pytest.mark.parametrize(
    "seed", [10, 67, 248, 286, 377, 460, 513, 608, 753, 878, 1052, 1199, 1338, 13996, 16395, 18554, 15107, 16706]
)
def test_a_promise_that_was_given_up_beside_weaker_claims_is_kept(seed):
    DrawnWorld(seed).play(NUM_DECISIONS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_promise_is_given_up_beside_weaker_claims():
    """Many are lost to others as strong, and to jobs that are slower than they were profiled."""
    lost = [DrawnWorld(seed).play(NUM_DECISIONS) for seed in range(10_000, 10_000 + part(10_000, least=500))]
    assert sum(lost) > len(lost) / 20


@pytest.mark.parametrize(("claim", "lasts_s"), [(("first", WorkloadId("s")), HOLDS_S), (ALL_WEAK, HOLDS_IN_VAIN_S)])
def test_that_no_weaker_claim_opens_a_device_is_asked_anew_soon(claim, lasts_s):
    answer = Answer(100.0, barred=frozenset([claim]))
    assert answer.holds(100.0 + 0.9 * lasts_s, is_kept=True)
    assert not answer.holds(100.0 + lasts_s, is_kept=True)
    assert not answer.holds(100.0, is_kept=False)
