"""The law on the launch path, kept by every way to launch: no system call, no lock, no allocation, no environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.native.native_build import Native
from kits.native.work_scene import play

# The sanitizers allocate and ask the system by themselves.
SANITIZED = False


def test_launches_ask_nobody_for_anything(native: Native, tmp_path: Path) -> None:
    said = play(native, tmp_path, "work_law", STUB_CLOCK="off")
    assert said["counted"] == 8 * 22_000
    assert said["allocations"] == said["locks"] == said["looks"] == 0
    if not said["is_forbidden"]:
        pytest.skip("the kernel lets nobody forbid system calls here: allocations, locks and environment were seen")
