"""Errands: what members report reaches the parent, failures become one sentence, nothing outlives the processes."""

from __future__ import annotations

import os

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide.runtime.process.child_processes import MeasurementProcesses, MemberError, MemberFiles


def test_reports_are_whole_files(tmp_path):
    files = MemberFiles(tmp_path, "worker-0")
    files.report_progress("half way")
    files.finish({"answer": [1, 2]})
    files.fail(MemberError(sentence="no", is_refused=True))
    assert files.progress.read_text() == "half way"
    assert files.result.read_bytes() == b'{"answer":[1,2]}'
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "worker-0.error.json",
        "worker-0.progress",
        "worker-0.result.json",
    ]


class Ended:
    """A process that has ended; `wait` never looks at more."""

    pid = 0

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> None:
        pass


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    with MeasurementProcesses(deadline_s=60.0, on_progress=lambda text: None) as made:
        yield made


def put(
    processes: MeasurementProcesses, name: str, code: int | None, error: MemberError | None = None, log: str = ""
) -> None:
    processes._processes[name] = Ended(code)  # type: ignore[assignment]
    processes.files(name).log.write_text(log)
    if error is not None:
        processes.files(name).fail(error)


def test_the_cause_is_told_not_its_consequence(processes):
    put(processes, "a", 1, MemberError(sentence="connection closed by peer", is_cause=False))
    put(processes, "b", 1, MemberError(sentence="ValueError: no such colour (train.py:7)"))
    with pytest.raises(BackendError, match=r"^ValueError: no such colour \(train\.py:7\)$"):
        processes.wait()


def test_a_refusal_stays_one(processes):
    put(processes, "a", None)
    put(processes, "b", 1, MemberError(sentence="give --batch 2", is_refused=True))
    with pytest.raises(InvalidRequest, match="give --batch 2"):
        processes.wait()


def test_a_crash_shows_the_last_words(processes):
    put(processes, "a", 0)
    put(processes, "b", -11, log="a long story\nSegmentation fault")
    with pytest.raises(BackendError, match=r"was ended by signal 11; the end of what it wrote:\na long story\nSeg"):
        processes.wait()


@pytest.mark.slow
def test_a_member_that_cannot_start_is_an_error():
    with MeasurementProcesses(deadline_s=60.0, on_progress=lambda text: None) as processes:
        processes.start("a", ["no-such-entry-point"])
        directory = processes.directory
        with pytest.raises(BackendError, match="ended with exit code 2"):
            processes.wait()
    assert not directory.exists()
