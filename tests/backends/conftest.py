"""Platforms on fake workers, with nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_platform import Platform, children, living_workers, open_descriptors

from springtide.core.ports import Standing


@pytest.fixture
def platform_of(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Builds platforms on one state directory; at the end everything they started must be gone."""
    before = children(), open_descriptors(), threading.active_count()
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
    end_s = time.monotonic() + 5.0
    while living_workers(state_dir) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not living_workers(state_dir), "workers were left behind"
    assert (children(), open_descriptors(), threading.active_count()) == before, "something was left behind"


@pytest.fixture
def platform(platform_of: Callable[..., Platform]) -> Platform:
    platform = platform_of()
    platform.executor.recover(Standing())
    return platform
