"""Answers as the client reads them, however they come in pieces."""

from __future__ import annotations

import pytest

from springtide.client.calls import answers
from springtide.client.calls.answers import ItemReader, LineReader
from springtide.core.errors import BackendError

STREAM = b'data: "a\\u2028b"\n\n: comment\ndata: {"n": 1}\n\ndata: no json\ndata: two lines\n\n'
ITEMS = ["a\u2028b", {"n": 1}, "no json\ntwo lines"]


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_items_are_the_same_however_they_are_cut(size):
    reader = ItemReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [item for piece in pieces for item in reader.feed(piece)] == ITEMS


def test_an_error_at_the_end_is_raised_with_its_sentence():
    reader = ItemReader()
    broken = b'data: 1\n\nevent: error\ndata: {"error": {"code": "replica_lost", "message": "it was lost"}}\n\n'
    items = reader.feed(broken)
    assert next(items) == 1
    with pytest.raises(BackendError, match="it was lost"):
        next(items)


def test_a_line_without_an_end_is_bounded(monkeypatch):
    monkeypatch.setattr(answers, "MAX_LINE_BYTES", 8)
    reader = LineReader()
    assert reader.feed(b"one\ntwo") == [b"one"]
    assert reader.rest() == [b"two"]
    with pytest.raises(BackendError, match="too long"):
        reader.feed(b"x" * 9)
