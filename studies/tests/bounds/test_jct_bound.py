"""The bound on completion times: what it is in small cases, and that schedules never beat it."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.bounds.jct_bound import BoundJob, jct_bound, lower_hull

pytest.importorskip("scipy", reason="the solver is an extra")


def job(release_s: float, **time_s: float) -> BoundJob:
    return BoundJob(release_s=release_s, time_s={int(name.removeprefix("on")): time for name, time in time_s.items()})


def test_only_sizes_that_no_mix_beats_are_left() -> None:
    assert lower_hull({1: 100.0, 2: 60.0, 4: 40.0, 8: 40.0, 3: 55.0}) == [(1, 100.0), (2, 60.0), (4, 40.0)]
    # Two takes 260 device-seconds for 130 s; a mix of one and four takes as many for 125 s.
    assert lower_hull({1: 200.0, 2: 130.0, 4: 75.0}) == [(1, 200.0), (4, 75.0)]
    assert lower_hull({1: np.inf}) == []


def test_alone_a_job_takes_its_fastest_size() -> None:
    assert jct_bound([job(90.0, on1=4000.0, on4=1500.0)], 4) == [pytest.approx(1500.0)]
    assert jct_bound([job(90.0, on1=4000.0, on4=1500.0)], 2) == [pytest.approx(4000.0)], "four are not there"
    with pytest.raises(InvalidRequest, match="no number of devices"):
        jct_bound([job(0.0, on4=10.0)], 2)


def test_what_does_not_fit_beside_each_other_waits() -> None:
    three = [job(0.0, on1=6000.0)] * 3
    # In turns they end after 6, 12 and 18 thousand seconds; side by side, at the mean begin of their parts, after 9.
    assert sum(jct_bound(three, 1, slot_s=60.0)) == pytest.approx(27000.0, rel=0.01)
    assert sum(jct_bound(three, 1, slot_s=60.0, is_tight=True)) == pytest.approx(36000.0, rel=0.01), "exact"
    for is_tight in (False, True):
        assert sum(jct_bound(three, 3, slot_s=60.0, is_tight=is_tight)) == pytest.approx(18000.0)


def test_small_jobs_do_not_wait() -> None:
    ends_s = jct_bound([job(0.0, on1=6000.0), job(0.0, on1=5.0)], 1)
    assert ends_s == pytest.approx([6000.0, 5.0])


def test_no_order_of_jobs_beats_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        releases = np.sort(rng.uniform(0, 3000, 4))
        work = rng.uniform(800, 4000, 4)
        jobs = [job(release, on1=time, on2=0.6 * time) for release, time in zip(releases, work, strict=True)]
        bound, tight = (
            float(np.mean(jct_bound(jobs, 2, slot_s=120.0, is_tight=is_tight))) for is_tight in (False, True)
        )
        best = np.inf
        for order in permutations(range(4)):
            now_s, total_s = 0.0, 0.0
            for index in order:
                now_s = max(now_s, releases[index]) + 0.6 * work[index]
                total_s += now_s - releases[index]
            best = min(best, total_s / 4)
        assert 0.5 * best <= bound <= tight <= best + 1e-6
