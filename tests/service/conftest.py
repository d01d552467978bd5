from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from kits.service.api_fixtures import HEADERS, TOKEN
from kits.service.function_fixtures import with_functions
from kits.service.platform_double import PlatformDouble
from springtide.service.api.application import build_api


@pytest.fixture
def platform(tmp_path):
    return PlatformDouble(tmp_path)


@pytest.fixture
def app(platform):
    return build_api(platform, token=TOKEN, registry=CollectorRegistry())


@pytest.fixture
def http(app):
    """A client with the token."""
    with TestClient(app, base_url="http://127.0.0.1:8787", headers=HEADERS, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def stranger(app):
    """A client without a token."""
    with TestClient(app, base_url="http://127.0.0.1:8787", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def connected(tmp_path):
    """A platform with machines and a function service."""
    return with_functions(tmp_path)


@pytest.fixture
def asking(connected):
    """A client of it, with the token."""
    app = build_api(connected, token=TOKEN, registry=CollectorRegistry())
    with TestClient(app, base_url="http://127.0.0.1:8787", headers=HEADERS, raise_server_exceptions=False) as client:
        yield client
