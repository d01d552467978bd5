"""No text ends or holds up the process that asks: what Python's compiler cannot take is refused with a sentence."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from springtide.core.errors import CapacityError, InvalidRequest
from springtide.service.submission.compile_server import problem_of
from springtide.service.submission.source_check import MAX_WAITING, SourceCheck


@pytest.fixture(scope="module")
def sources() -> Iterator[SourceCheck]:
    made = SourceCheck()
    yield made
    made.close()


def nested_finally(depth: int) -> str:
    lines = [f"{' ' * i}try:\n{' ' * i} pass\n{' ' * i}finally:\n" for i in range(depth)]
    return "".join(lines) + " " * depth + "pass\n"


def nested_loops(depth: int) -> str:
    lines = [f"{' ' * (i + 1)}try: continue\n{' ' * (i + 1)}finally:\n" for i in range(depth)]
    return "while True:\n" + "".join(lines) + " " * (depth + 1) + "pass\n"


def test_python_passes(sources: SourceCheck) -> None:
    sources.check({})
    sources.check({"train.py": "def fit(ctx):\n    return ctx\n", "more.py": "x = 1\n"})
    with open(os.__file__, encoding="utf-8") as file:
        sources.check({"os.py": file.read()})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def fit(:\n", "train.py line 1 is not valid Python: invalid syntax"),
        ("x = 1\nreturn x\n", "train.py line 2 is not valid Python: 'return' outside function"),
        ("def f(a, a): pass\n", "duplicate argument 'a'"),
        ("x = 1\0", "null bytes"),
        ("x = '\ud800'", "surrogates not allowed"),
        ("(" * 5000 + ")" * 5000, "too many nested parentheses"),
        ("not " * 20000 + "x", "nested too deeply"),
    ],
)
def test_what_is_not_python_is_told_with_its_place(sources: SourceCheck, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=r"train\.py") as caught:
        sources.check({"ok.py": "x = 1\n", "train.py": text})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        pytest.param("[x " + "for x in y " * 60_000 + "]", "signal 11", id="a long comprehension"),
        pytest.param(nested_finally(19), "512 MB", id="nested finally"),
        pytest.param(nested_loops(12), "512 MB", id="nested continue"),
        # By the time that it takes, or by that of the clock where the machine is busy.
        pytest.param("def f(): pass\n" * 50_000, " s", marks=pytest.mark.slow, id="functions"),
        pytest.param("f'" + "{a}" * 200_000 + "'", " s", marks=pytest.mark.slow, id="a long f-string"),
    ],
)
def test_what_the_compiler_cannot_take_is_refused(sources: SourceCheck, text: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=r"bomb\.py could not be checked") as caught:
        sources.check({"bomb.py": text})
    assert limit in str(caught.value)
    sources.check({"train.py": "x = 1\n"})


def test_the_compiler_of_the_process_is_pythons() -> None:
    assert problem_of("a.py", "x = 1") == ""
    assert problem_of("a.py", "x = ") == "a.py line 1 is not valid Python: invalid syntax"


def test_a_process_that_is_gone_is_replaced() -> None:
    sources = SourceCheck()
    try:
        sources.check({"train.py": "x = 1\n"})
        assert sources._server is not None
        before = sources._server.pid
        os.kill(before, signal.SIGKILL)
        sources.check({"train.py": "x = 2\n"})
        assert sources._server.pid != before
    finally:
        sources.close()
    assert sources._server is None


def test_it_holds_nothing_of_the_process_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_TOKEN", "secret")
    sources = SourceCheck()
    try:
        sources.check({"train.py": "x = 1\n"})
        assert sources._server is not None
        with open(f"/proc/{sources._server.pid}/environ", "rb") as file:
            assert b"secret" not in file.read()
    finally:
        sources.close()


@pytest.mark.slow
def test_only_so_many_wait() -> None:
    sources = SourceCheck()
    sources._turn.acquire()
    results: list[str] = []

    def ask() -> None:
        try:
            sources.check({"train.py": "x = 1\n"})
            results.append("checked")
        except CapacityError:
            results.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(MAX_WAITING + 3)]
    for thread in threads:
        thread.start()
    while results.count("refused") < 3:
        time.sleep(0.01)
    sources._turn.release()
    for thread in threads:
        thread.join()
    sources.close()
    assert sorted(results) == ["checked"] * MAX_WAITING + ["refused"] * 3
