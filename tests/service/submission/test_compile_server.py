"""The process that compiles what users send: every limit is set before the first byte of theirs is looked at."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest

from springtide.service.submission import compile_server

LIMITS = {
    resource.RLIMIT_AS: compile_server.MEMORY_BYTES,
    resource.RLIMIT_CPU: compile_server.CPU_S,
    resource.RLIMIT_NOFILE: 8,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_CORE: 0,
}


def test_every_limit_is_set_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, int] = {}
    seen: list[dict[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update({kind: pair[0]}))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def problem_of(name: str, text: str) -> str:
        seen.append(dict(limits))
        return ""

    monkeypatch.setattr(compile_server, "problem_of", problem_of)
    read_fd, write_fd = os.pipe()
    try:
        compile_server.compile_all({"train.py": "x = 1\n"}, "train.py", "", write_fd)
        assert json.loads(os.read(read_fd, 4096)) == {"problem": ""}
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert seen == [LIMITS]
