"""The command line against a platform made of values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from kits.cli.fake_client import FakeClient, command_line


@pytest.fixture
def springtide(tmp_path: Path) -> Callable[..., Result]:
    """Run the command line against the double."""
    return command_line(FakeClient(), tmp_path)
