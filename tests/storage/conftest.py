"""Real servers, started once for all tests of this room that ask for them."""

from __future__ import annotations

import os

import pytest

from kits.servers import missing_redis, running_redis, running_s3


@pytest.fixture(scope="session")
def redis_server():
    reason = missing_redis()
    if reason:
        pytest.skip(reason)
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server():
    with running_s3(buckets=("tests",)) as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch):
    """The environment holds these and no others of the machine's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
