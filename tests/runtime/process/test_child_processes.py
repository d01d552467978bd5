"""Errands: what members report reaches the parent, failures become one sentence, nothing outlives the errand."""

from __future__ import annotations

import os

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide.runtime.process.child_processes import Errand, ErrandError, ErrandFiles


def test_reports_are_whole_files(tmp_path):
    files = ErrandFiles(tmp_path, "worker-0")
    files.tell("half way")
    files.finish({"answer": [1, 2]})
    files.fail(ErrandError(sentence="no", is_refused=True))
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
def errand(monkeypatch):
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    with Errand(deadline_s=60.0, tell=lambda text: None) as made:
        yield made


def put(errand: Errand, name: str, code: int | None, error: ErrandError | None = None, log: str = "") -> None:
    errand._processes[name] = Ended(code)  # type: ignore[assignment]
    errand.files(name).log.write_text(log)
    if error is not None:
        errand.files(name).fail(error)


def test_the_cause_is_told_not_its_consequence(errand):
    put(errand, "a", 1, ErrandError(sentence="connection closed by peer", is_cause=False))
    put(errand, "b", 1, ErrandError(sentence="ValueError: no such colour (train.py:7)"))
    with pytest.raises(BackendError, match=r"^ValueError: no such colour \(train\.py:7\)$"):
        errand.wait()


def test_a_refusal_stays_one(errand):
    put(errand, "a", None)
    put(errand, "b", 1, ErrandError(sentence="give --batch 2", is_refused=True))
    with pytest.raises(InvalidRequest, match="give --batch 2"):
        errand.wait()


def test_a_crash_shows_the_last_words(errand):
    put(errand, "a", 0)
    put(errand, "b", -11, log="a long story\nSegmentation fault")
    with pytest.raises(BackendError, match=r"was ended by signal 11; the end of what it wrote:\na long story\nSeg"):
        errand.wait()


@pytest.mark.slow
def test_a_member_that_cannot_start_is_an_error():
    with Errand(deadline_s=60.0, tell=lambda text: None) as errand:
        errand.start("a", ["no-such-entry-point"])
        directory = errand.directory
        with pytest.raises(BackendError, match="ended with exit code 2"):
            errand.wait()
    assert not directory.exists()
