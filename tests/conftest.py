"""What holds for every test."""

from __future__ import annotations

import socket

import hypothesis
import pytest

from kits.simulation.sweeps import STRIDE, part

# Before any test module is imported: of the examples that hypothesis draws by itself CI plays a part, always the same.
hypothesis.settings.register_profile("drawn", max_examples=part(100, least=40), derandomize=STRIDE > 1)
hypothesis.settings.load_profile("drawn")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Spare each test a wait of up to 40 ms where failed tests are run again.

    pytest-rerunfailures writes twice to its socket per test and then waits for an answer: with Nagle's algorithm the
    second write waits for the other side's delayed acknowledgement.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
