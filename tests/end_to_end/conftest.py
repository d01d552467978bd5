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
