"""Text while it comes: characters of several tokens, stop strings over several pieces, calls of tools."""

from __future__ import annotations

import random

import pytest

from springtide.runtime.serving.llm.text import StopStrings, TextDecoder, ToolCalls


def as_bytes(tokens):
    return bytes(tokens).decode("utf-8", "replace")


def cut(text, seed):
    drawn = random.Random(seed)
    while text:
        size = drawn.randint(1, 5)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("seed", range(5))
def test_characters_come_whole(seed):
    text = "naïve 中文 🙂 end"
    decoder = TextDecoder(as_bytes)
    pieces = [decoder.feed(tokens) for tokens in cut(text.encode(), seed)]
    pieces.append(decoder.flush())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_do_not_stop_what_follows():
    decoder = TextDecoder(as_bytes)
    pieces = [decoder.feed([byte]) for byte in [0xFF] * 6 + [*b"ok"]]
    assert "".join(pieces).endswith("ok")
    assert decoder.feed([0xE4]) == ""
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_is_found_wherever_the_text_is_cut(seed):
    text = "one ##END# two #END three ##END## four"
    for stops, expected in ((["##END##"], "one ##END# two #END three "), (["four", "#END "], "one ##END# two ")):
        filtered = StopStrings(stops)
        shown = "".join(filtered.feed(piece) for piece in cut(text, seed))
        assert filtered.is_found
        assert (shown, filtered.flush()) == (expected, "")
    filtered = StopStrings(["four!"])
    shown = "".join(filtered.feed(piece) for piece in cut(text, seed))
    assert shown + filtered.flush() == text
    assert not filtered.is_found


@pytest.mark.parametrize("seed", range(10))
def test_calls_of_tools_are_taken_out(seed):
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "Bern"}}\n</tool_call>'
    text = f"So: {call}{call} <tool_call>no json</tool_call> 1 < 2"
    found = ToolCalls()
    told = [found.feed(piece) for piece in cut(text, seed)]
    assert [call for _, calls in told for call in calls] == [("get", '{"city":"Bern"}')] * 2
    shown = "".join(text for text, _ in told) + found.flush()
    assert shown == "So:  <tool_call>no json</tool_call> 1 < 2"


def test_a_call_that_does_not_end_stays_text():
    found = ToolCalls()
    assert found.feed('<tool_call>{"name": "a"') == ("", [])
    assert found.flush() == '<tool_call>{"name": "a"'
