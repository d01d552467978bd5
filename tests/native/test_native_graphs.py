"""Graphs weighed as a whole, and streams that capture: nothing on them is counted, held back or measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.native.native_build import Native
from kits.native.work_scene import play

BRIEF_NS = 100_000
LENGTHY_NS = 1_000_000
OK = 0
ILLEGAL_STATE, UNSUPPORTED, INVALIDATED, UNMATCHED = 401, 900, 901, 903


def weighs(found: int, num_brief: int, num_lengthy: int) -> bool:
    """Each kernel was measured to about 3 microseconds, the whole within 4 percent."""
    true_ns = num_brief * BRIEF_NS + num_lengthy * LENGTHY_NS
    return 0.96 * true_ns <= found <= 1.04 * true_ns


@pytest.mark.parametrize("variant", ["v1", "v2", "flags", "params", "params_ptsz", "twin"])
def test_a_graph_weighs_what_its_kernels_do_however_it_is_made(native: Native, tmp_path: Path, variant: str) -> None:
    assert weighs(play(native, tmp_path, "work_graphs", "variants")[variant], 3, 2)


def test_child_graphs_weigh_with_their_parents(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_graphs", "variants")
    assert weighs(said["nested"], 4, 2)
    assert said["empty"] == 500


def test_a_graph_of_unknown_kernels_is_measured_as_a_whole(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_graphs", "measured")
    assert said["guess"] < 50_000
    assert said["learned"] == pytest.approx(7_000_000, rel=0.001)
    # What the first launches were counted as is settled, too.
    assert said["used_ns"] == pytest.approx(said["busy_ns"], rel=0.001)


@pytest.mark.parametrize("scene", ["changes_unmeasured", "changes_measured"])
def test_a_changed_graph_weighs_otherwise(native: Native, tmp_path: Path, scene: str) -> None:
    said = play(native, tmp_path, "work_graphs", scene)
    kinds = {
        "four_brief": (4, 0),
        "one_lengthy": (3, 1),
        "two_lengthy": (2, 2),
        "three_lengthy": (1, 3),
        "one_off": (1, 2),
        "on_again": (1, 3),
        "updated_same": (1, 3),
        "updated_back": (4, 0),
        "refused": (4, 0),
    }
    wrong = {name: said[name] for name, (brief, lengthy) in kinds.items() if not weighs(said[name], brief, lengthy)}
    assert not wrong


def test_another_child_graph_changes_the_weight_of_the_whole(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_graphs", "children")
    assert weighs(said["before"], 5, 0)
    assert weighs(said["after"], 1, 4)
    assert weighs(said["again"], 1, 4)


def test_the_address_of_a_graph_that_is_gone_says_nothing(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_graphs", "handles")
    assert said["wrong"] == 0
    assert said["execs"] == 0
    assert native.sanitize or said["num_same"] > 0


def test_threads_make_launch_and_destroy_graphs_at_once(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_graphs", "threads")
    assert said["graphs_launched"] == 4 * 300 * 2
    assert said["execs"] == 0
    # 6 brief kernels a round; where one thread's graph is measured behind another's, it counts longer for once.
    assert 0.9 <= said["used_ns"] / (4 * 300 * 6 * BRIEF_NS) <= 1.3


# --- capture --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", ["global", "oldest", "to_graph"])
def test_a_capturing_stream_counts_nothing_and_is_never_measured(native: Native, tmp_path: Path, scene: str) -> None:
    said = play(native, tmp_path, "work_captures", scene)
    assert said["counted_ns"] == said["counted_launches"] == 0
    # Another stream beside it is counted as ever, but no event is recorded, asked or made anywhere meanwhile.
    assert said["beside_launches"] == 100
    assert said["event_calls"] == 0
    assert said["kernels"] == 101
    assert said["violations"] == 0
    assert said["normal"] == 1
    # What was captured runs later and is counted then: 100 kernels as one launch.
    assert said["graph_launches"] == 1
    assert said["graph_ns"] >= 100 * 30_000


def test_the_twins_capture_too(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "twins")
    assert said["counted_launches"] == said["counted_in_all"] == 0
    assert said["normal"] == 1


def test_a_stream_that_joined_a_capture_counts_nothing(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "joined")
    assert said["ended_by_other"] == UNMATCHED
    assert said["counted_launches"] == said["still_uncounted"] == 0
    assert said["normal"] == 1


def test_captures_that_go_wrong_leave_nothing_behind(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "failures")
    assert said["begun_twice"] == said["ended_twice"] == ILLEGAL_STATE
    assert said["invalid"] == INVALIDATED
    assert said["on_legacy"] == UNSUPPORTED
    assert said["normal"] == 1


def test_a_stream_destroyed_while_it_captures_leaves_nothing_behind(native: Native, tmp_path: Path) -> None:
    assert play(native, tmp_path, "work_captures", "destroyed")["normal"] == 1


def test_nobody_waits_for_tokens_on_a_capturing_stream(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "without_tokens")
    assert said["launches"] <= 2
    assert said["throttled_ns"] == said["num_open"] == 0


def test_a_graph_launched_into_a_capture_is_counted_with_the_outer_one(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "graph_in_capture")
    assert said["counted_launches"] == 0
    assert said["graph_launches"] == 1
    assert 20 * 3_000 <= said["graph_ns"] <= 20 * 4_000


def test_measurements_of_other_threads_break_no_capture(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_captures", "threads")
    assert said["violations"] == 0
    assert said["normal"] == 1
    assert said["event_records"] > 0
