from __future__ import annotations

import re
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.workloads.formats.pollux import STEPS_TO_END
from springtide.workloads.profiles import Profiles, find_profiles

PLACEMENTS = """local_bsz,placement,step_time,sync_time
4,1,0.5,0.01
12,1,1.0,0.01
4,2,0.6,0.1
12,2,1.4,0.2
4,11,9,1
4,24,1.2,0.5
12,24,2.0,0.5
12,44,2.5,1.0
12,222,8,1
"""
SCALABILITY = """num_nodes,num_replicas,local_bsz,step_time,sync_time
8,32,12,3.0,1.0
16,32,12,9.0,1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "placements.csv").write_text(PLACEMENTS)
    (tmp_path / "bert" / "scalability.csv").write_text(SCALABILITY)
    return tmp_path


def test_only_compact_placements_count(folder: Path) -> None:
    profiles = Profiles.read(folder)
    assert set(profiles.tables) == {"bert"}
    assert list(profiles.steps_per_s("bert", 384)) == [1, 2, 6, 8, 32]


def test_a_batch_is_cut_into_the_fewest_micro_steps(folder: Path) -> None:
    profiles = Profiles.read(folder)
    # One device takes 384 samples in 32 micro-steps of 12; the all-reduce comes once, after the last of them.
    assert profiles.steps_per_s("bert", 384)[1] == pytest.approx(1 / (1.0 + 31 * 0.99))
    assert profiles.steps_per_s("bert", 384)[2] == pytest.approx(1 / (1.4 + 15 * 1.2))
    assert profiles.steps_per_s("bert", 384)[8] == pytest.approx(1 / (2.5 + 3 * 1.5))
    assert profiles.steps_per_s("bert", 384)[32] == pytest.approx(1 / 3.0)


def test_times_between_measured_sizes_are_interpolated(folder: Path) -> None:
    # 12 samples on two devices are 6 each: a quarter of the way from 4 to 12.
    assert Profiles.read(folder).steps_per_s("bert", 12) == {1: pytest.approx(1.0), 2: pytest.approx(1 / 0.8)}


def test_the_folder_is_found_near_a_workload(folder: Path) -> None:
    place = folder.rename(folder.parent / "profiles")
    assert find_profiles(folder.parent / "workloads" / "w.csv", [("bert", 48)]) == place


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("4,x,1,0", "placements.csv line 11, column placement: 'x' is not a placement"),
        ("4,4,nan,0", "placements.csv line 11, column step_time: 'nan' must be"),
        ("4,4,1,2", "placements.csv line 11, column sync_time: 2 s of a step of 1 s"),
        ("0,4,1,0", "placements.csv line 11, column local_bsz: '0' must be"),
    ],
)
def test_bad_measurements_are_refused(folder: Path, row: str, sentence: str) -> None:
    (folder / "bert" / "placements.csv").write_text(PLACEMENTS + row + "\n")
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        Profiles.read(folder)


DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(not (DATA / "pollux").is_dir(), reason="the measurements of Pollux are not here")
def test_elasticflows_t4_tables_come_out_of_polluxs_measurements() -> None:
    derived = Profiles.read(DATA / "pollux" / "profiles")
    published = Profiles.read(DATA / "elasticflow" / "throughputs_T4")
    assert set(derived.tables) == set(STEPS_TO_END)
    for pair in published.pairs:
        ours = derived.steps_per_s(*pair)
        for count, rate in published.steps_per_s(*pair).items():
            assert ours[count] == pytest.approx(rate, rel=0.01), (pair, count)
