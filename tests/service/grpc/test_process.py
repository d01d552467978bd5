from __future__ import annotations

import importlib.util
import sys

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide.service.grpc import process as module
from springtide.service.grpc.process import GrpcProcess, check_libraries, grpc_beside


def test_missing_libraries_are_told_with_what_installs_them(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "grpc" else importlib.util.find_spec("os"))
    with pytest.raises(InvalidRequest, match=r"springtide\[grpc\]"):
        check_libraries()


def test_a_process_that_says_nothing_is_no_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(BackendError, match="log says why"):
        GrpcProcess(0, "http://127.0.0.1:1").start()


def test_what_was_not_started_can_be_stopped():
    process = GrpcProcess(0, "http://127.0.0.1:1")
    process.stop()
    assert process.pid is None


def test_without_a_port_there_is_no_process():
    process = grpc_beside(None, "http://127.0.0.1:1")
    assert (process.pid, process.address) == (None, "")
