"""`springtide bench interpose`: from turns to a verdict, and a million launches on every path counted exactly."""

from __future__ import annotations

import subprocess
from unittest.mock import MagicMock

import pytest

from springtide.backends.sharing.gpu.build import find_compiler, find_headers
from springtide.core.errors import BackendError
from springtide_studies.interposition.bench import (
    ARMS,
    BARE,
    HELD,
    HELD_OF_TWO,
    INERT,
    LAUNCHES_A_TURN,
    NUM_LAUNCHES,
    PATHS,
    WARMING_LAUNCHES,
    KernelLauncher,
    make_report,
    median_interval,
    run_interpose_bench,
)


def launchers(added_ns: float, *, num_turns: int = 100, num_lost: int = 0) -> dict[str, KernelLauncher]:
    """Arms of which the held ones took so much longer in every turn, while the machine itself wavered."""
    made = {}
    for arm in ARMS:
        added = added_ns if arm in (HELD, HELD_OF_TWO) else 0.0 if arm == BARE else 5.0
        ns = {path: [20.0 + turn % 7 + added for turn in range(num_turns)] for path in PATHS}
        made[arm] = KernelLauncher(
            MagicMock(spec=subprocess.Popen), num_asked=1000, num_arrived=1000, num_counted=1000 - num_lost, ns=ns
        )
    return made


def report(made: dict[str, KernelLauncher]) -> dict:
    return make_report(made, {"cpus": 1}, 1000)


def test_the_interval_is_around_the_median() -> None:
    low, middle, high = median_interval([float(k) for k in range(101)])
    assert (low, middle, high) == (40.0, 50.0, 60.0)
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)


def test_what_is_added_is_of_turns_that_followed_each_other() -> None:
    made = report(launchers(21.0))
    row = next(row for row in made["rows"] if row["arm"] == HELD and row["path"] == "graph")
    assert (row["added_ns"], row["added_ns_interval"], row["baseline"]) == (21.0, [21.0, 21.0], 23.0)
    assert (row["ours"], row["bound"], row["is_met"]) == (44.0, 53.0, True)
    assert made["passed"]
    inert = next(row for row in made["rows"] if row["arm"] == INERT)
    assert inert["added_ns"] == 5.0
    assert "is_met" not in inert


def test_every_path_has_a_bound_in_both_held_arms() -> None:
    bounded = {(row["arm"], row["path"]) for row in report(launchers(1.0))["rows"] if "bound" in row}
    assert bounded == {(arm, path) for arm in (HELD, HELD_OF_TWO) for path in PATHS}


def test_a_nanosecond_too_much_is_no_pass() -> None:
    assert report(launchers(30.0))["passed"]
    assert not report(launchers(31.0))["passed"]


def test_a_wide_interval_is_no_pass() -> None:
    made = launchers(29.0)
    made[HELD].ns["ex"] = [ns + (40.0 if turn % 2 else 0.0) for turn, ns in enumerate(made[HELD].ns["ex"])]
    assert not report(made)["passed"]


def test_a_lost_launch_is_no_pass() -> None:
    lost = report(launchers(1.0, num_lost=1))
    assert not lost["are_counts_exact"]
    assert not lost["passed"]
    assert "DO NOT AGREE" in lost["criterion"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_launches_on_every_path_are_counted_exactly() -> None:
    try:
        find_compiler()
        find_headers()
    except BackendError as error:
        pytest.skip(f"the native parts cannot be compiled here: {error}")
    made = run_interpose_bench(num_launches=NUM_LAUNCHES, seed=0, tell=lambda line: None)
    num_turns = NUM_LAUNCHES // LAUNCHES_A_TURN
    least = len(PATHS) * (NUM_LAUNCHES + num_turns * WARMING_LAUNCHES)
    assert made["are_counts_exact"], made["counts"]
    for arm, counts in made["counts"].items():
        assert set(counts.values()) == {counts["asked"]}
        assert least <= counts["asked"] <= least + 100, arm
    assert {row["num_turns"] for row in made["rows"]} == {num_turns}
