"""Errands of a coordinator beside its thread: streams that are looked at, parameter stores that come up or do not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.shell import io as io_module
from springtide.backends.functions.shell.io import CoordinatorIO, Wiring
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.wire.functions import Keys
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.storage.stores.open import open_store


class Host:
    """A parameter host that answers as it is told."""

    def __init__(self) -> None:
        self.is_up = True
        self.errors: list[Exception] = []
        self.asked: list[str] = []

    def acquire(self, job_id: str) -> str:
        self.asked.append("acquire")
        if self.errors:
            raise self.errors.pop(0)
        return "redis://one"

    def is_alive(self, job_id: str) -> bool:
        return self.is_up

    def renew(self, job_id: str) -> str:
        self.asked.append("renew")
        self.is_up = True
        return "redis://two"

    def release(self, job_id: str, *, lingers: bool = True) -> None:
        self.asked.append("release")

    def used_s(self, job_id: str) -> float:
        return 0.0

    def close(self, *, ends: bool) -> None:
        pass


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CoordinatorIO, Host, list[Any], JobObjects]:
    monkeypatch.setattr(io_module, "RETRY_S", 0.0)
    host, told = Host(), []
    job = TrainingJob(job_id=WorkloadId("j"), name="j", entrypoint=Entrypoint(source_path="x.py"), stream="clicks")
    objects = JobObjects(open_store(f"file://{tmp_path}/store"), Keys("jobs/j"))
    wiring = Wiring(
        provider=None,  # type: ignore[arg-type]
        store_url="",
        parameter_url="",
        parameter_host=host,
        work_dir=tmp_path,
        clock=None,  # type: ignore[arg-type]
        post=told.append,
    )
    return CoordinatorIO(job, wiring, objects, told.append, lambda line: None, threading.Event()), host, told, objects


def test_a_parameter_store_comes_up_and_goes(made: tuple[CoordinatorIO, Host, list[Any], JobObjects]) -> None:
    io, host, told, objects = made
    io.open_parameters()
    assert told == [messages.ParameterStoreUp(url="redis://one")]
    assert objects.parameter_url == "redis://one"
    io.check_parameters()
    assert len(told) == 1
    host.is_up = False
    io.check_parameters()
    assert told[-1] == messages.ParameterStoreLost()
    io.open_parameters()
    assert told[-1] == messages.ParameterStoreUp(url="redis://two")
    io.close_parameters()
    assert objects.parameter_url == ""
    assert host.asked == ["acquire", "acquire", "renew", "release"]


def test_one_that_is_slow_is_waited_for_and_one_that_cannot_be_is_not(
    made: tuple[CoordinatorIO, Host, list[Any], JobObjects],
) -> None:
    io, host, told, _ = made
    host.errors = [StorageError("not yet"), StorageError("not yet")]
    io.open_parameters()
    assert told == [messages.ParameterStoreUp(url="redis://one")]
    host.errors = [InvalidRequest("there is no redis-server; install it")]
    io.open_parameters()
    assert told[-1] == messages.StoreFailed(
        error="its parameter store does not come up: there is no redis-server; install it"
    )


def test_a_stream_that_is_not_there_is_named(made: tuple[CoordinatorIO, Host, list[Any], JobObjects]) -> None:
    io, _, told, _ = made
    io.check_stream()
    [seen] = told
    assert seen.stream is None
    assert "clicks" in seen.error
