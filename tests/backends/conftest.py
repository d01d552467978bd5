"""Platforms on fake workers, with nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kits.local.local_platform import Platform, children, living_workers, open_descriptors
from springtide.core.ports import Standing


@pytest.fixture
def platform_of(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Builds platforms on one state directory; at the end everything they started must be gone."""
    before = _things()
    state_dir = tmp_path / "state"
    platforms: list[Platform] = []

    def build(**options: object) -> Platform:
        platform = Platform(state_dir, **options)
        platforms.append(platform)
        return platform

    yield build
    for platform in platforms:
        platform.executor.close(stop_workers=True, grace_s=2.0)
        assert platform.executor.counts()["callback_errors"] == 0
    end_s = time.monotonic() + 30.0
    while (living_workers(state_dir) or _more(before)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not living_workers(state_dir), "workers were left behind"
    assert not _more(before), "something was left behind"


def _things() -> tuple[set[int], int, int]:
    """Child processes, and how many descriptors and threads this process has."""
    return children(), open_descriptors(), threading.active_count()


def _more(before: tuple[set[int], int, int]) -> list[object]:
    """What there is now beyond what there was; something of an earlier test may have gone meanwhile."""
    (processes, num_open, num_threads), (new_processes, now_open, now_threads) = before, _things()
    more = {"processes": new_processes - processes, "open": now_open - num_open, "threads": now_threads - num_threads}
    return [(what, found) for what, found in more.items() if (found if isinstance(found, set) else found > 0)]


@pytest.fixture
def platform(platform_of: Callable[..., Platform]) -> Platform:
    platform = platform_of()
    platform.executor.recover(Standing())
    return platform
