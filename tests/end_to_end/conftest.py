"""A real platform for the end-to-end tests: real processes, a real socket, a real journal on disk."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LivePlatform]:
    live = LivePlatform(tmp_path / "state")
    try:
        yield live
    finally:
        if live.http is not None:
            live.http.close()
        if live.is_alive:
            live.process.send_signal(signal.SIGTERM)
            try:
                live.process.wait(60.0)
            except subprocess.TimeoutExpired:
                live.kill()
        # What a failed test left behind is ended by its own records, never by name.
        for pid in live.worker_pids().values():
            os.kill(pid, signal.SIGKILL)
