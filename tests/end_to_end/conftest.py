"""A real platform for the end-to-end tests: real processes, a real socket, a real journal on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, ended_after


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path / "state")) as live:
        yield live


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    """A platform that runs already and goes on for the next test of the file; a test leaves nothing running on it.

    Tests that share it are of one xdist group, so that they run one after the other.
    """
    with ended_after(LivePlatform(tmp_path_factory.mktemp("standing") / "state")) as live:
        live.start()
        yield live
