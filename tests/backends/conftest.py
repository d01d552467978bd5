"""Platforms on fake workers, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from local_platform import Platform, children
from springtide.core.ports import Standing


@pytest.fixture
def platform_of(tmp_path: Path) -> Iterator[Callable[..., Platform]]:
    """Builds platforms on one state directory; at the end everything they started must be gone."""
    before = children()
    platforms: list[Platform] = []

    def build(**options: Any) -> Platform:
        platform = Platform(tmp_path / "state", **options)
        platforms.append(platform)
        return platform

    yield build
    for platform in platforms:
        platform.executor.close(stop_workers=True, grace_s=2.0)
    assert children() == before, "processes were left behind"


@pytest.fixture
def platform(platform_of: Callable[..., Platform]) -> Platform:
    platform = platform_of()
    platform.executor.recover(Standing())
    return platform
