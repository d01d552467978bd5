"""Values of secrets do not reach a worker's log, wherever its output is cut and whatever writes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from springtide.runtime.process.redaction import Redactor

TOKEN = "hf_0123456789"
VALUES = {"TOKEN": TOKEN, "SHORT": "abc", "KEY": "first line\nsecond line\nx"}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_value_is_replaced_however_the_stream_is_cut(size: int) -> None:
    redactor = Redactor(VALUES)
    text = f"before {TOKEN}{TOKEN} hf_01234 abc\nsecond line, first line\nsecond line\nx, hf_".encode()
    out = b"".join(redactor.feed(text[at : at + size]) for at in range(0, len(text), size)) + redactor.flush()
    told = out.decode()
    assert told.startswith("before ***TOKEN******TOKEN*** hf_01234 abc\n***KEY***, ")
    assert told.endswith(", hf_")
    assert "first line" not in told
    assert "second line" not in told


def test_only_the_beginning_of_a_value_is_held_back() -> None:
    redactor = Redactor(VALUES)
    assert redactor.feed(b"epoch 1\n") == b"epoch 1\n"
    assert not redactor.is_holding
    assert redactor.feed(b"hf_0123") == b""
    assert redactor.is_holding
    assert redactor.flush() == b"hf_0123"


def test_without_values_nothing_is_done() -> None:
    assert not Redactor({})
    assert not Redactor({"SHORT": "1234567"})
    assert Redactor({}).feed(b"x") == b"x"
    assert Redactor({}).text("x") == "x"
    assert Redactor(VALUES).text(f"401 for {TOKEN}") == "401 for ***TOKEN***"


PROGRAM = f"""
import os, subprocess, sys
from springtide.runtime.process.redaction import Redactor, redact_output
redact_output(Redactor({{"TOKEN": {TOKEN!r}}}))
print("from python", {TOKEN!r})
sys.stderr.write("from stderr " + {TOKEN!r} + chr(10))
sys.stdout.flush()
os.write(1, b"from the system " + {TOKEN.encode()!r} + b"\\n")
subprocess.run(["sh", "-c", "echo from a program " + {TOKEN!r}])
try:
    os.wait()
except ChildProcessError:
    print("no child of its own is left")
print("at the end", {TOKEN!r}, flush=True)
os.abort()
"""


@pytest.mark.slow
def test_a_process_of_its_own_copies_all_that_a_worker_writes_until_it_dies() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert ran.returncode == -6
    told = ran.stdout.decode()
    assert TOKEN not in told
    for place in ("from python", "from stderr", "from the system", "from a program", "at the end"):
        assert f"{place} ***TOKEN***" in told
    assert "no child of its own is left" in told
