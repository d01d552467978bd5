"""The load generator on a real server: what it counts, and what is an error."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from springtide_studies.serving.load import ServingLoad, ServingPhase, play


async def played(answers: list[bytes]) -> ServingLoad:
    """Two clients for 0.1 s, whose requests get these answers in turn."""
    given = [0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"POST /f/x HTTP/1.1\r\n")
                assert b"Authorization: Bearer t\r\n" in head
                assert await reader.readexactly(2) == b"{}"
                writer.write(answers[given[0] % len(answers)])
                given[0] += 1
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        phase = ServingPhase(
            port=server.sockets[0].getsockname()[1],
            path="/f/x",
            body="{}",
            headers={"Authorization": "Bearer t"},
            num_clients=2,
            seconds=0.1,
        )
        found = await play(phase)
        assert found.num_requests == given[0]
        return found


def reply(status: str, body: str, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n{body}".encode()


def test_good_answers_are_counted_with_their_times():
    found = uvloop.run(played([reply("200 OK", "1.0")]))
    assert found.num_requests > 2
    assert found.num_errors == 0
    assert 0 < found.p50_ms <= found.p99_ms
    assert found.per_s == pytest.approx(found.num_requests / found.seconds)


@pytest.mark.parametrize("other", [reply("429 Too Many Requests", "1.0"), reply("200 OK", "2.0")])
def test_another_status_or_another_answer_is_an_error(other):
    good = reply("200 OK", "1.0")
    found = uvloop.run(played([good, good, other]))
    assert 0 < found.num_errors < found.num_requests
    assert found.first_error


def test_a_server_that_closes_each_connection_is_asked_on_new_ones():
    found = uvloop.run(played([reply("200 OK", "1.0", "Connection: close\r\n")]))
    assert found.num_requests > 2
    assert found.num_errors == 0
