"""What a command is given: its words, its port, and requests as bytes. Whole commands: tests/service/gateway."""

from __future__ import annotations

import socket

import pytest

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.processes.command import words_of
from springtide.runtime.serving.processes.exchanges import written_request
from springtide.runtime.serving.processes.ports import LOOPBACK, held_port
from springtide.serving.frames import HttpHead


def test_a_command_is_a_text_or_words_of_a_function_that_may_take_the_port():
    assert words_of(lambda: "serve --port {port} 'a b'", 7) == ["serve", "--port", "7", "a b"]
    assert words_of(lambda port: ["serve", port, '{"x": 1}'], 7) == ["serve", "7", '{"x": 1}']
    assert words_of(lambda port, concurrency: ["serve", port, concurrency], 7, 4) == ["serve", "7", "4"]
    for given in ("", [], 7, "say 'x"):
        with pytest.raises(InvalidRequest):
            words_of(lambda given=given: given, 7)


def test_a_port_is_held_among_replicas_and_free_for_its_command(monkeypatch):
    with held_port() as first, socket.socket() as command:
        command.bind((LOOPBACK, first))
        numbers = iter([first, first, first + 1, first + 2, first + 3])
        monkeypatch.setattr("random.randrange", lambda *_: next(numbers))
        with held_port() as second:
            assert second != first


def test_a_request_has_the_length_of_its_body():
    head = HttpHead("POST", "http", "/f/x/a", b"", ())
    assert (
        written_request(head, b"/a", [(b"x", b"y")], b"abc")
        == b"POST /a HTTP/1.1\r\nx: y\r\ncontent-length: 3\r\n\r\nabc"
    )
    bare = HttpHead("GET", "http", "/f/x/a", b"", ())
    assert written_request(bare, b"/a?b", [], b"") == b"GET /a?b HTTP/1.1\r\n\r\n"
