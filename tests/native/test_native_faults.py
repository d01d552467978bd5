"""The faults that were found in earlier interposition libraries: none of them is ours.

`fault_table.py` lists every one of them with the tests that guard it; those that have no better place are here. Each is
shown to be able to fail by a build that is broken on purpose (test_native_broken_builds.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kits.native.broken_builds import ALL_BROKEN
from kits.native.fault_table import TABLE
from kits.native.native_build import ROOT, Native

PATHS = [
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel_ptsz",
    "cuLaunchCooperativeKernelMultiDevice",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
    "cuLaunch",
    "cuLaunchGrid",
    "cuLaunchGridAsync",
]
# What fault_paths.c says of 100 launches of which each was counted and reached this very symbol of the driver.
ALL_COUNTED_AND_PASSED_ON = 100 * 1000 + 100
SUCCESS, NOT_FOUND, INVALID_VALUE = 0, 500, 1
FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT, UNTOUCHED = 0, 1, 2, 77


def said_by(
    native: Native, folder: Path, *what: str, stub: Path | None = None, **environment: object
) -> dict[str, Any]:
    around = {"SPRINGTIDE_GPU_SOCKET": folder / "socket", **environment}
    answer: dict[str, Any] = native.run("fault_paths", *what, env=around, stub=stub, timeout_s=30).json()
    return answer


def answer(result: int, status: int, is_there: bool) -> int:
    return result * 1000 + status * 10 + is_there


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fault)
def test_every_fault_has_tests_and_a_broken_build_that_they_find_out(row: Any) -> None:
    for test in row.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE), f"there is no {test}"
    broken = {each.test.partition("[")[0] for each in ALL_BROKEN}
    assert broken & set(row.tests), f"no broken build shows that a test of {row.fault!r} can fail"


# --- the way to the driver -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol", PATHS)
def test_every_launch_counts_and_goes_to_its_own_twin(native: Native, tmp_path: Path, symbol: str) -> None:
    """Launches by graphs, on several devices, by configuration, for per-thread streams were not counted or hooked."""
    said = said_by(native, tmp_path, "paths", STUB_CLOCK="off")
    assert said[f"{symbol} asked"] == ALL_COUNTED_AND_PASSED_ON
    assert said[f"{symbol} named"] == ALL_COUNTED_AND_PASSED_ON


@pytest.mark.parametrize("first", ["init", "version"])
def test_whatever_is_called_first(native: Native, tmp_path: Path, first: str) -> None:
    """cuInit before cuDriverGetVersion ended in a crash: the tables were not filled yet."""
    assert said_by(native, tmp_path, "begin", first)["kernels"] == 1


def test_what_the_driver_says_of_an_address_stands(native: Native, tmp_path: Path) -> None:
    said = said_by(native, tmp_path, "addresses")
    assert said["known"] == answer(SUCCESS, FOUND, True)
    assert said["unknown"] == answer(NOT_FOUND, SYMBOL_NOT_FOUND, False)
    assert said["too_old"] == answer(NOT_FOUND, VERSION_NOT_SUFFICIENT, False)
    assert said["wrong_flags"] == answer(INVALID_VALUE, UNTOUCHED, False)
    assert said["others_are_the_drivers"] == 1


def test_both_forms_of_cu_get_proc_address_are_ours(native: Native, tmp_path: Path) -> None:
    """The runtime asks for cuGetProcAddress itself, at 11030 with four arguments and at 12000 with five."""
    said = said_by(native, tmp_path, "addresses")
    assert (said["first_is_ours"], said["second_is_ours"], said["twins_differ"]) == (1, 1, 1)


@pytest.mark.parametrize("age", ["old", "ancient"])
def test_an_old_driver_is_held_by_its_names(native: Native, tmp_path: Path, age: str) -> None:
    """Without cuGetProcAddress_v2 the runtime asks dlsym for each name; what the driver lacks stays missing."""
    stub = native.old_stub_dir if age == "old" else native.ancient_stub_dir
    said = said_by(native, tmp_path, "names", stub=stub, STUB_CLOCK="off")
    assert (said["has_second"], said["has_first"], said["has_config"]) == (0, age == "old", 0)
    assert said["cuLaunchKernel named"] == ALL_COUNTED_AND_PASSED_ON
    assert said["cuLaunchKernel_ptsz named"] == ALL_COUNTED_AND_PASSED_ON


def test_a_kernel_of_a_library_counts(native: Native, tmp_path: Path) -> None:
    """A CUkernel of cuLibraryGetKernel is launched as it is, without a module or a function."""
    assert said_by(native, tmp_path, "library", STUB_CLOCK="off")["cuLaunchKernel named"] == ALL_COUNTED_AND_PASSED_ON


# --- what a launch costs ---------------------------------------------------------------------------------------------


def test_a_grid_of_two_to_the_32_blocks_is_the_largest_not_the_smallest(native: Native, tmp_path: Path) -> None:
    """The product of the grid had 32 bits: this one was free of charge."""
    said = said_by(native, tmp_path, "grids")
    assert said["blocks"] == 2**32 + 1
    assert said["all_blocks"] >= 1000 * said["one_block"] > 0


def test_time_is_charged_not_blocks(native: Native, tmp_path: Path) -> None:
    """A token was a block, whatever it did: two kernels of one shape cost the same, one ten times as long."""
    said = said_by(native, tmp_path, "learn")
    assert said["brief_ns"] == pytest.approx(100_000, rel=0.1)
    assert said["lengthy_ns"] == pytest.approx(1_000_000, rel=0.1)


# --- without a daemon ------------------------------------------------------------------------------------------------


def test_without_a_daemon_nobody_is_held(native: Native, tmp_path: Path) -> None:
    """Without the server every launch after the first one hung."""
    assert said_by(native, tmp_path, "alone", STUB_CLOCK="off")["kernels"] == 10_000


def test_the_environment_sets_no_quota(native: Native, tmp_path: Path) -> None:
    """A tenant set its own request, limit and priority by its environment; here that names an address only."""
    words = (ROOT / "native" / "src").glob("*.c")
    asked = {name for path in words for name in re.findall(r'getenv\(\s*("?\w+"?)', path.read_text(encoding="utf-8"))}
    assert asked == {"ST_SOCKET_VARIABLE"}
    claims = {"requests_rate": "1.0", "limits_rate": "1.0", "priority": "high", "is_llm": "1"}
    claimed, claimless = said_by(native, tmp_path, "grids", **claims), said_by(native, tmp_path, "grids")
    assert claimed["one_block"] == claimless["one_block"] > 0
    assert claimed["all_blocks"] == claimless["all_blocks"] > 0
