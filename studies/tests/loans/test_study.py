"""The study of loans: who plays, what is added up over sizes, ratios beside the paper's, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.loans import study as loaning
from springtide_studies.loans.play import LoanSetting
from springtide_studies.loans.study import parse_sizes, ratios_of, rows_of, study_loaning

PACE = {"dedicated": 4.0, "one-way": 2.0, "two-way": 1.5, "tide": 1.0}


def stand_in(setting: LoanSetting, *, timer: object, on_progress: Any) -> dict[str, Any]:
    """Figures that tell which run they are of."""
    if on_progress is not None:
        on_progress(3, 3)
    strategy = setting.policy.partition("/")[0].partition(":")[0]
    size = setting.n_r_max
    return {
        "jobs": 10,
        "queueing_mean_s": PACE[strategy] * size,
        "jct_mean_s": 10.0 * PACE[strategy] * size,
        "utilisation": 1.0 / PACE[strategy],
        "reclaim_p95_s": float(size),
        "decision_ms_p50": None,
        "minimums_broken": 0,
        "misses": {},
    }


def test_every_strategy_plays_every_size_and_figures_are_added_up() -> None:
    told: list[tuple[str, int, int]] = []
    answer = study_loaning(n_r_max=[2, 4], days=1, play=stand_in, on_progress=lambda *said: told.append(said))
    assert (answer["study"], answer["seed"], answer["cluster"]) == ("loaning", 0, "16x8@6+6+4")
    assert list(answer["policies"]) == ["dedicated", "one-way", "two-way", "tide", "springtide"]
    figures = answer["policies"]["two-way"]
    # What is counted is added up, what is bounded told at its worst, of the rest the mean.
    assert (figures["jobs"], figures["reclaim_p95_s"], figures["queueing_mean_s"]) == (20, 4.0, 4.5)
    assert figures["decision_ms_p50"] is None
    assert figures["n_r_max"]["4"]["queueing_mean_s"] == 6.0
    assert answer["rows"]["springtide"] == "tide/springtide"
    assert answer["rows"]["tide"] == "tide/fifo"
    assert ("springtide@4", 3, 3) in told


def test_ratios_are_ours_over_the_baseline_beside_the_papers() -> None:
    answer = study_loaning(n_r_max=[2, 4], days=1, play=stand_in)
    ratios = answer["ratios"]
    assert ratios["queueing"]["two-way"]["dedicated"] == {"2": 0.375, "4": 0.375}
    assert ratios["jct"]["springtide"]["one-way"] == {"2": 0.5, "4": 0.5}
    assert ratios["utilisation"]["tide"]["dedicated"]["2"] == 4.0
    assert ratios["paper"]["queueing"] == [pytest.approx(0.853), pytest.approx(0.304)]
    assert "dedicated" not in ratios["queueing"]


def test_a_baseline_of_nothing_has_no_ratio() -> None:
    figures = {"queueing_mean_s": 0.0, "jct_mean_s": 1.0, "utilisation": None}
    both = {"n_r_max": {"2": figures}}
    ratios = ratios_of({"dedicated": both, "two-way": both})
    assert ratios["queueing"]["two-way"]["dedicated"] == {"2": None}
    assert ratios["jct"]["two-way"]["dedicated"] == {"2": 1.0}
    assert ratios["utilisation"]["two-way"]["dedicated"] == {"2": None}


def test_rows_follow_the_training_policy() -> None:
    assert "tide" not in rows_of("springtide")
    assert rows_of("fapes:round_s=600")["two-way"].policy == "two-way/fapes:round_s=600"
    names = rows_of("fifo", ablations=True)
    assert names["springtide without forecast"].policy == "tide:ahead=no/springtide"
    assert names["tide, parts of servers"].isolates_devices
    only = study_loaning(n_r_max=[3], days=1, only=["one-way"], play=stand_in)
    assert list(only["policies"]) == ["one-way"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"n_r_max": []}, "--n-r-max 2,4,6,8"),
        ({"n_r_max": [16]}, "give 1 to 15"),
        ({"days": 0}, "give 1 to 60"),
        ({"only": ["best"]}, "choose among dedicated"),
        ({"training": "best"}, "there is no policy"),
        ({"cluster": "sixteen"}, "16x8"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        study_loaning(**asked, play=stand_in)


def test_sizes_as_people_write_them() -> None:
    assert parse_sizes("2, 4,8") == [2, 4, 8]
    for text in ("", "two", "2;4", "-1"):
        with pytest.raises(InvalidRequest, match="2,4,6,8"):
            parse_sizes(text)


def test_what_is_counted_and_what_is_bounded_are_told_apart() -> None:
    assert not loaning._COUNTED & loaning._WORST


@pytest.mark.slow
def test_processes_give_the_same_answer_as_one() -> None:
    asked: dict[str, Any] = {"n_r_max": [1, 2], "days": 1, "cluster": "4x8@2+2", "only": ["dedicated", "two-way"]}
    told: list[tuple[str, int, int]] = []
    alone = study_loaning(**asked)
    both = study_loaning(**asked, num_processes=2, on_progress=lambda *said: told.append(said))
    assert both == alone
    assert {name for name, _, _ in told} == {"dedicated@1", "dedicated@2", "two-way@1", "two-way@2"}
    assert alone["policies"]["two-way"]["minimums_broken"] == 0
