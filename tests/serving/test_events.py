"""What the items of a streamed answer look like on the wire."""

from __future__ import annotations

import msgspec
import pytest

import springtide as st
from springtide.core.errors import InvalidRequest
from springtide.serving.events import written_error, written_item


def test_a_value_is_an_event_or_a_line():
    assert written_item({"a": "x\ny"}, msgspec.json.encode, is_sse=True) == b'data: {"a":"x\\ny"}\n\n'
    assert written_item("x\ny", msgspec.json.encode, is_sse=False) == b'"x\\ny"\n'


def test_an_event_of_its_own_keeps_its_fields_and_every_line_of_its_text():
    event = st.sse("a\r\nb\rc\n", event="token", event_id="7", retry_ms=500)
    told = b"event: token\nid: 7\nretry: 500\ndata: a\ndata: b\ndata: c\ndata: \n\n"
    assert written_item(event, msgspec.json.encode, is_sse=True) == told
    assert written_item(st.sse({"n": 1}), msgspec.json.encode, is_sse=True) == b'data: {"n":1}\n\n'
    assert written_item(event, msgspec.json.encode, is_sse=False) == b'"a\\r\\nb\\rc\\n"\n'
    for field in ({"event": "a\nb"}, {"event_id": "a\rb"}):
        with pytest.raises(InvalidRequest, match="line break"):
            st.sse("x", **field)


def test_an_error_is_an_event_of_its_type_or_a_line():
    problem = {"code": "replica_lost", "message": "gone"}
    body = b'{"error":{"code":"replica_lost","message":"gone"}}'
    assert written_error(problem, is_sse=True) == b"event: error\ndata: " + body + b"\n\n"
    assert written_error(problem, is_sse=False) == body + b"\n"
