"""The command line against a platform made of values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from kits.cli.fake_client import JOB, SERVICE, FakeClient, command_line
from springtide.core.status.platform import JobStatus, ServiceStatus


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of sent folders stays out of the home directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def make_job() -> Callable[..., JobStatus]:
    return lambda **changes: msgspec.structs.replace(JOB, **changes)


@pytest.fixture
def make_service() -> Callable[..., ServiceStatus]:
    return lambda **changes: msgspec.structs.replace(SERVICE, **changes)


@pytest.fixture
def springtide(client: FakeClient, tmp_path: Path) -> Callable[..., Result]:
    """Run the command line against the double."""
    return command_line(client, tmp_path)
