"""What a launch is counted as: guessed at first, measured by events now and then, on the stub driver's virtual clock.

Between the two events of a measurement lie at most two calls of one microsecond each on that clock, and what the
machine itself needs for a call is taken off: so times are exact to 3,000 ns.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kits.native.native_build import NATIVE, Native
from kits.native.work_scene import play

CALLS_NS = 3_000


def is_near(found: int, true_ns: int) -> bool:
    return abs(found - true_ns) <= CALLS_NS


def test_a_kernel_is_guessed_first_and_then_known(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "learn")
    assert 3_000 <= said["first_ns"] <= 4_000
    assert is_near(said["learned_ns"], 250_000)
    assert said["launches"] == 42


def test_the_first_measurement_settles_what_was_guessed(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "learn")
    # 41 launches before the last one; the first few were counted as 3 microseconds each when they began.
    assert abs(said["settled_ns"] - 41 * 250_000) <= 41 * CALLS_NS


def test_estimates_follow_lower_times_quickly_and_higher_ones_slowly(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "follow")
    assert is_near(said["before_ns"], 200_000)
    assert is_near(said["low_ns"], 50_000)
    assert said["num_down"] < 400
    assert said["num_down"] < said["num_up"] < 4_000


def test_every_shape_has_its_own_cost(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "shapes")
    assert said["one_ns"] <= 100 + CALLS_NS
    assert is_near(said["many_ns"], 1_000_000)
    assert is_near(said["some_ns"], 200_000)


def test_a_new_shape_of_a_known_function_is_guessed_by_its_blocks(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "shapes")
    assert 450_000 <= said["unseen_ns"] <= 550_000


def test_a_grid_of_two_to_the_32_blocks_is_not_taken_for_a_small_one(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "huge")
    assert said["one_block_ns"] <= 4_000
    # The most that a guess says: it never holds anybody for long.
    assert said["two_to_32_ns"] == 100_000_000
    assert said["largest_ns"] == 100_000_000


def test_few_launches_are_measured_and_nobody_waits_for_it(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "many")
    assert said["launches"] == 200_001
    assert 2 * 150 <= said["event_records"] <= 2 * 500
    assert said["event_waits"] == 0
    assert said["events"] <= 32
    assert is_near(said["last_ns"], 3_000)


def test_measurements_that_are_never_over_are_bounded(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "never_synchronised")
    assert said["launches"] == 20_000
    assert said["event_records"] == said["events"] == 32
    assert said["measured_ns"] == 0


def test_measured_and_estimated_are_counted_side_by_side(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "many")
    assert said["event_records"] > 2
    assert said["estimated_ns"] == pytest.approx(said["measured_ns"], rel=0.05)


def test_a_launch_that_fails_costs_nothing(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "failing", STUB_FAIL="cuLaunchKernel:1-9=701")
    assert said["num_failed"] == 9
    assert said["launches"] == 51
    assert abs(said["used_ns"] - 51 * 100_000) <= 51 * CALLS_NS


@pytest.mark.parametrize("broken", ["cuEventCreate", "cuEventRecord", "cuEventElapsedTime_v2"])
def test_a_driver_without_working_events_costs_only_the_measurements(
    native: Native, tmp_path: Path, broken: str
) -> None:
    said = play(native, tmp_path, "work_basic", "failing", STUB_FAIL=broken)
    assert said["num_failed"] == 0
    assert said["launches"] == 60
    assert said["measured_ns"] == 0
    assert 60 * 3_000 <= said["used_ns"] <= 60 * 4_000


def test_the_twins_for_default_streams_are_measured_by_their_twins(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "twins")
    assert said["twin_records"] > 0
    assert said["legacy_records"] == 0
    assert is_near(said["last_ns"], 100_000)


def test_events_of_dead_contexts_are_never_touched(native: Native, tmp_path: Path) -> None:
    """Under the sanitizers a use of one ends the program."""
    said = play(native, tmp_path, "work_basic", "contexts")
    assert said["most_events"] <= 2 * 32
    assert is_near(said["last_ns"], 30_000)


@pytest.mark.parametrize("scene", ["learn", "contexts"])
def test_a_driver_from_before_cuda_11_is_measured_as_well(native: Native, tmp_path: Path, scene: str) -> None:
    said = play(native, tmp_path, "work_basic", scene, stub=native.ancient_stub_dir)
    assert said["measured_ns"] > 0
    assert is_near(said["learned_ns"], 250_000) if scene == "learn" else is_near(said["last_ns"], 30_000)


def test_each_device_is_measured_with_events_of_its_own(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "devices", STUB_DEVICES=2)
    assert abs(said["first_used_ns"] - 100 * 40_000) <= 100 * CALLS_NS
    assert abs(said["second_used_ns"] - 100 * 90_000) <= 100 * CALLS_NS
    assert min(said["first_measured_ns"], said["second_measured_ns"]) > 0


def test_a_forked_child_measures_anew(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_basic", "forked", STUB_FORK="allow")
    assert is_near(said["last_ns"], 70_000)
    assert said["child_records"] > 0
    # The capture that was under way is the parent's.
    assert said["child_asked"] == 0


# --- the table by itself --------------------------------------------------------------------------------------------


def run_table(native: Native, scene: str) -> dict[str, int]:
    return run_alone(native, "work_table", scene)


def run_alone(native: Native, name: str, *arguments: str) -> dict[str, int]:
    """Run a program that has a part of the library inside, without a driver."""
    program = native.program(name, links=(), flags=(f"-I{native.native / 'src'}",))
    around = native.environment(preload=False)
    done = subprocess.run([program, *arguments], env=around, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_ever_new_shapes_drive_out_neither_what_is_in_use_nor_graphs(native: Native) -> None:
    assert run_table(native, "flood") == {"wrong": 0, "lost": 0, "graphs_lost": 0}


def test_threads_that_bring_the_same_shapes_make_one_entry_of_each(native: Native) -> None:
    assert run_table(native, "threads") == {"wrong": 0, "entries": 3_000, "launches": 800_000}


def test_settlement_goes_both_ways_within_bounds(native: Native) -> None:
    said = run_table(native, "settlement")
    assert said == {"up_ns": 500_000, "down_ns": 150_000, "floor_ns": 0, "most_ns": 500_000_000}


def test_a_thread_interrupted_while_it_counts_does_not_end_the_measuring(native: Native) -> None:
    assert run_table(native, "interrupted")["considered"] > 5


# --- measurements by themselves, where processor and device are modelled ----------------------------------------------


def test_what_the_processor_needs_for_a_launch_is_not_the_devices_time(native: Native) -> None:
    said = run_alone(native, "work_host")
    assert abs(said["idle_brief_ns"] - 6_000) <= 100
    assert abs(said["idle_lengthy_ns"] - 100_000) <= 100


def test_a_stream_that_is_busy_is_measured_as_it_is(native: Native) -> None:
    said = run_alone(native, "work_host")
    assert abs(said["busy_brief_ns"] - 6_000) <= 100
    # The queue was full, and the call returned long after it was made.
    assert abs(said["full_ns"] - 1_000_000) <= 100


def test_an_interrupted_thread_spoils_no_measurement(native: Native) -> None:
    assert abs(run_alone(native, "work_host")["interrupted_ns"] - 100_000) <= 1_000


def test_time_slices_of_others_are_hardly_counted(native: Native) -> None:
    assert 97_000 <= run_alone(native, "work_host")["sliced_ns"] <= 105_000


def test_a_kernel_that_never_ends_keeps_no_other_from_being_measured(native: Native) -> None:
    assert abs(run_alone(native, "work_host")["stuck_ns"] - 7_000) <= 100


# --- what is in the source ------------------------------------------------------------------------------------------


def test_nothing_is_measured_by_waiting() -> None:
    text = (NATIVE / "src" / "sample.c").read_text(encoding="utf-8") + (NATIVE / "src" / "work.c").read_text(
        encoding="utf-8"
    )
    assert not re.search(r"Synchronize|pthread_mutex|nanosleep|usleep", text)
