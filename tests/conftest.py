"""What holds for every test."""

from __future__ import annotations

import socket

import hypothesis
import pytest
import pytest_timeout

from kits.collecting import pytest_ignore_collect as pytest_ignore_collect
from kits.simulation.sweeps import DRAWS_AFRESH

# The profile of the command line (pyproject.toml), before it is loaded: runs draw the same examples, but `make full`.
CI = hypothesis.settings.get_profile("ci")
hypothesis.settings.register_profile("ci", CI, derandomize=not DRAWS_AFRESH)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Spare each test a wait of up to 40 ms where failed tests are run again.

    pytest-rerunfailures writes twice to its socket per test and then waits for an answer: with Nagle's algorithm the
    second write waits for the other side's delayed acknowledgement.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Limit the time of each run of a test.

    pytest-timeout sets its timer once for a test and all its reruns, and a timer that has fired is gone.
    """
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        item.ihook.pytest_timeout_cancel_timer(item=item)
        if settings.timeout:
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
