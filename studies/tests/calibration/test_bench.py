"""What was said and what was kept: how they are counted, and that quotes keep what they say where jobs are played."""

from __future__ import annotations

import pytest

from springtide_studies.calibration.bench import row_of, rows_of
from springtide_studies.calibration.world import Promise, promises


def promise(index: int, said: float, *, is_kept: bool, num_earlier: int = 3, asked: float | None = None) -> Promise:
    return Promise(index=index, asked=asked, said=said, is_kept=is_kept, num_earlier=num_earlier, num_failures=0)


def test_what_is_kept_less_often_than_said_is_off() -> None:
    as_said = [promise(n, 0.9, is_kept=n % 10 > 0) for n in range(1000)]
    less = [promise(n, 0.9, is_kept=n % 10 > 1) for n in range(1000)]
    assert row_of("as said", as_said)["is_within"]
    assert not row_of("less", less)["is_within"]
    assert row_of("as said", as_said)["chance"] == pytest.approx(0.0095, abs=1e-4)


def test_first_runs_and_those_after_the_drift_are_counted_apart() -> None:
    found = [promise(n, n / 100, is_kept=n > 50, num_earlier=n % 2) for n in range(100)]
    by_case = {row["case"]: row["num"] for row in rows_of(found, 100)}
    assert by_case["all"] == 100
    assert by_case["all, said 0.9 to 1"] == 10
    assert by_case["first runs"] == 50
    assert by_case["after a drift of 15%, said 0.5 to 0.9"] == 10


@pytest.mark.slow
def test_jobs_that_are_played_keep_what_their_quotes_said() -> None:
    found = list(promises(400, seed=3, tell=lambda index: None))
    assert len(found) > 200
    assert row_of("all", found)["is_within"]
    assert len({one.is_kept for one in found}) == 2
