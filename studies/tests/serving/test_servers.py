"""The servers of the bench: CPU between two counts, interpreters, and a peer that does not start."""

from __future__ import annotations

import sys

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide_studies.serving import servers
from springtide_studies.serving.servers import BARE, PEERS, cpu_between, interpreters, running_peer, version_of


def test_cpu_counts_processes_that_came_and_leaves_out_those_that_went():
    assert cpu_between({1: 2.0, 2: 5.0}, {1: 2.5, 3: 0.25}) == pytest.approx(0.75)


def test_a_given_interpreter_comes_before_the_installed_package():
    assert interpreters([])[BARE] == sys.executable
    assert interpreters([f"ray={sys.executable}"])["ray"] == sys.executable
    assert next(iter(interpreters([f"ray={sys.executable}"]))) == BARE


def test_an_interpreter_without_the_framework_is_refused(monkeypatch):
    absent = servers.ServingPeer(module="no", distribution="no-such-framework", path="/", command=PEERS[BARE].command)
    monkeypatch.setattr(servers, "PEERS", {"absent": absent})
    with pytest.raises(InvalidRequest, match="has no no-such-framework"):
        version_of("absent", sys.executable)


def test_a_peer_that_ends_at_once_is_told_with_its_output(tmp_path, monkeypatch):
    broken = servers.ServingPeer(
        module="no", distribution="no", path="/", command=lambda python, port, directory: (python, "-c", "1 / 0")
    )
    monkeypatch.setattr(servers, "PEERS", {"broken": broken})
    with (
        pytest.raises(BackendError, match="ZeroDivisionError"),
        running_peer("broken", sys.executable, "sums", tmp_path),
    ):
        pass
