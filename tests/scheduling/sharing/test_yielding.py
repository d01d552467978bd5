"""No promise is given up as long as weaker claims, on whole devices or on parts, keep a device that would save it."""

from __future__ import annotations

import pytest

from kits.scheduling.drawn_worlds import DrawnWorld
from kits.simulation.sweeps import part

NUM_DECISIONS = 14


# Worlds in which a promise was given up, before decision 79, beside a best-effort job with a share, a replica beyond a
# minimum, a guaranteed one that had other room, a sharer on its way out, a new promise, or workers to spare.
@pytest.mark.parametrize("seed", [10, 67, 248, 286, 377, 460, 513, 608, 753, 878, 1052, 1199, 1338])
def test_a_promise_that_was_given_up_beside_weaker_claims_is_kept(seed):
    DrawnWorld(seed).play(NUM_DECISIONS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_promise_is_given_up_beside_weaker_claims():
    """Many are lost to others as strong, and to jobs that are slower than they were profiled."""
    lost = [DrawnWorld(seed).play(NUM_DECISIONS) for seed in range(10_000, 10_000 + part(10_000, least=500))]
    assert sum(lost) > len(lost) / 20
