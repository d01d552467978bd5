"""The first decodings of a type, in several threads at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from springtide.core.decoding import convert, decode_json, decode_msgpack, decoder_of_made_type, json_decoder

# Threads change places after each instruction, and all begin with a type that nothing has decoded before.
FIRST_IN_FOUR_THREADS = """
import sys, threading
import msgspec
from springtide.core import decoding
sys.setswitchinterval(1e-6)
WAYS = [
    lambda kind: decoding.decode_json(b'{"of": {"a": 1}}', kind),
    lambda kind: decoding.decode_msgpack(b"\\x80", kind),
    lambda kind: decoding.convert({"of": {"a": 1}}, kind),
    lambda kind: decoding.decoder_of_made_type(kind).decode(b"{}"),
]
for number in range(150):
    inner = msgspec.defstruct(f"Inner{number}", [(name, "int | None", None) for name in "abcdefgh"])
    outer = msgspec.defstruct(f"Outer{number}", [("of", inner | None, None), ("other", list[inner], [])])
    gate = threading.Barrier(len(WAYS))
    threads = [threading.Thread(target=lambda way=way: (gate.wait(), way(outer))) for way in WAYS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


class Point(msgspec.Struct, frozen=True):
    at: int
    name: str = ""


@pytest.mark.slow
def test_threads_may_be_the_first_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_IN_FOUR_THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_what_is_decoded() -> None:
    assert decode_json(b'{"at": 1}', Point) == decode_msgpack(b"\x81\xa2at\x01", Point) == Point(1)
    assert decode_json('[{"at": 1}]', list[Point]) == [Point(1)]
    assert convert({"at": "1"}, Point, strict=False) == Point(1)
    assert decoder_of_made_type(Point | None).decode(b"null") is None
    assert json_decoder(Point) is json_decoder(Point)


def test_what_cannot_be_decoded() -> None:
    for wrong in (lambda: decode_json(b'{"at": "1"}', Point), lambda: convert({"at": "1"}, Point)):
        with pytest.raises(msgspec.ValidationError, match="Expected `int`, got `str` - at"):
            wrong()
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(b"", Point)
