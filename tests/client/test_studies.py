"""A study's books: shares, the median rule, tenths of a training, and what is read back from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from springtide.client.studies import Study, Trial, locked_study, losses_by_part, read_study, write_study
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.status.platform import ProgressPoint


def trial_of(number: int, **fields: Any) -> Trial:
    return Trial(**{"number": number, "params": {}, "submit_key": "k", "cap_usd": 1.0, **fields})


def study_of(*trials: Trial, num_trials: int = 10, budget_usd: float = 10.0, **fields: Any) -> Study:
    return Study(name="s", num_trials=num_trials, budget_usd=budget_usd, trials=trials, **fields)


def test_money_of_trials_that_run_is_held_and_that_of_others_is_what_they_cost() -> None:
    study = study_of(
        trial_of(0, state="succeeded", spent_usd=0.25), trial_of(1, state="running", spent_usd=0.5), trial_of(2)
    )
    assert study.spent_usd == 0.75
    assert study.free_usd == 10.0 - 0.25 - 1.0 - 1.0
    assert study.share_usd() == pytest.approx(7.75 / 7)


def test_a_platform_that_exceeds_a_cap_makes_later_shares_smaller() -> None:
    study = study_of(trial_of(0, state="pruned", spent_usd=1.25))
    assert study.share_usd() == pytest.approx(8.75 / 9 / 1.25)
    assert study_of(trial_of(0, state="pruned", spent_usd=11.0)).share_usd() == 0.0
    assert study_of(trial_of(0), num_trials=1).share_usd() == 0.0


def test_the_best_by_either_direction() -> None:
    trials = tuple(trial_of(i, state="succeeded", value=value) for i, value in enumerate([2.0, -1.0, 3.0, -1.0]))
    trials += (trial_of(4, state="pruned", value=None),)
    assert study_of(*trials).best == trials[1]
    assert study_of(*trials, direction="maximize").best == trials[2]
    assert study_of().best is None


@pytest.mark.parametrize(
    ("losses", "is_worse"),
    [((9.0,), False), ((9.0, 2.6), True), ((9.0, 2.5), False), ((0.0, float("nan")), True), ((1.0,) * 10, False)],
)
def test_the_median_rule(losses: tuple[float, ...], is_worse: bool) -> None:
    others = [trial_of(i, state="succeeded", losses=(5.0, float(1 + i), *[0.0] * 8)) for i in range(4)]
    mine = trial_of(4, state="running", losses=losses)
    assert study_of(*others, mine).is_worse_than_median(mine) is is_worse
    few = trial_of(3, state="running", losses=losses)
    assert not study_of(*others[:3], few).is_worse_than_median(few)


def test_one_whose_losses_nobody_saw_is_no_measure_and_one_without_any_is_not_measured() -> None:
    silent = [trial_of(i, state="succeeded", losses=()) for i in range(5)]
    fresh = trial_of(5, state="running", losses=())
    assert not study_of(*silent, fresh).is_worse_than_median(fresh)
    told = trial_of(5, state="running", losses=(1.0, 9.0))
    assert not study_of(*silent, told).is_worse_than_median(told)


def points(*losses: float | None) -> list[ProgressPoint]:
    return [ProgressPoint(at_s=0.0, step=index + 1, loss=loss) for index, loss in enumerate(losses)]


def test_losses_are_means_of_tenths_that_are_over() -> None:
    series = points(*[float(step) for step in range(20)])
    assert losses_by_part(series, 20, is_over=True) == tuple(0.5 + 2 * part for part in range(10))
    assert losses_by_part(series[:6], 20, is_over=False) == (0.5, 2.5)
    assert losses_by_part(series[:7], 20, is_over=False) == (0.5, 2.5, 4.5)
    assert losses_by_part(points(None, 1.0), 20, is_over=True) == (1.0,)
    assert losses_by_part([*series[:2], *series[4:]], 20, is_over=True) == (0.5,)
    assert losses_by_part([], 20, is_over=True) == ()


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    assert read_study(path) is None
    study = study_of(trial_of(0, params={"a": "1"}, suggested={"a": 1, "b": "x", "c": None}, losses=(1.0, 0.5)))
    write_study(path, study)
    assert read_study(path) == study


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "else"}', b"\xff"])
def test_what_is_no_study_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="no study"):
        read_study(path)


def test_trials_that_are_missing_are_said(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_study(path, study_of(trial_of(1)))
    with pytest.raises(InvalidRequest, match="trials are missing"):
        read_study(path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "studies" / "s.json"
    with (
        locked_study(path),
        pytest.raises(BackendError, match="another process works on the study s"),
        locked_study(path),
    ):
        raise AssertionError
    with locked_study(path):
        pass
