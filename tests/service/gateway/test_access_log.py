"""The access log: a line for each request to a service, in a bounded file, written without keeping requests waiting."""

from __future__ import annotations

import json
import logging
import stat

from kits.service.gateway_replicas import FakeReplica, run
from springtide.service.gateway import access_log
from springtide.service.gateway.access_log import AccessLog

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def note(log, **changes):
    log.note(**{"request_id": b"r", "method": "POST", "path": "/f/a", "status": 200, "seconds": 0.5, **changes})


def test_each_request_has_a_line_and_queries_are_left_out(tmp_path):
    path = tmp_path / "access.jsonl"

    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            traced = {"X-Request-Id": "abc", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
            assert (await harness.call([1], headers=traced)).status_code == 200
            made = (await harness.call(["x"])).headers["x-request-id"]
            await harness.client.get("/f/unknown?token=secret", headers={"traceparent": "wrong"})
            await harness.client.get("/v2/models/double")
            return made

    made = []

    async def noted(harness):
        made.append(await scenario(harness))

    run(noted, access_log=AccessLog(path, unix_s=lambda: 1_790_000_000.12345))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = [line.pop("seconds") for line in lines]
    assert all(0 <= each < 60 for each in seconds)
    assert {line.pop("unix_s") for line in lines} == {1_790_000_000.123}
    unknown = lines.pop(2)
    assert len(unknown.pop("request_id")) == 32
    assert unknown == {"method": "GET", "path": "/f/unknown", "status": 404}
    described = lines.pop()
    assert (described["path"], described["status"], described["service"]) == ("/v2/models/double", 200, "double")
    call = {"method": "POST", "path": "/f/double", "service": "double"}
    assert [{**line, "revision": 0} for line in lines] == [
        {"request_id": "abc", **call, "status": 200, "trace_id": TRACE, "revision": 0},
        {"request_id": made[0], **call, "status": 422, "revision": 0},
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "MAX_FILE_BYTES", 400)
    log = AccessLog(tmp_path / "access.jsonl")
    for index in range(40):
        note(log, path=f"/f/{index}", caller="shop")
        log.write(log.take())
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert {path.name for path in files} <= {"access.jsonl.1", "access.jsonl"}
    kept = [line for path in files for line in path.read_text().splitlines()]
    assert [json.loads(line)["path"] for line in kept] == [f"/f/{40 - len(kept) + index}" for index in range(len(kept))]
    assert 4 <= len(kept) <= 10


def test_what_comes_faster_than_it_is_written_is_dropped_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access_log, "_MAX_LINES", 3)
    log = AccessLog(tmp_path / "access.jsonl")
    for _ in range(5):
        note(log)
    with caplog.at_level(logging.WARNING):
        assert log.take().count(b"\n") == 3
    assert "2 lines of the access log were dropped" in caplog.text
    assert log.take() == b""


def test_a_full_disk_loses_lines_and_not_requests(tmp_path, caplog):
    log = AccessLog(tmp_path / "gone" / "access.jsonl")
    note(log)
    with caplog.at_level(logging.WARNING):
        log.write(log.take())
    assert "1 line(s) of the access log are lost: No such file or directory" in caplog.text


def test_without_a_file_lines_go_to_standard_output(capfdbinary):
    log = AccessLog(None)
    note(log, service="a", revision=3)
    log.write(log.take())
    line = json.loads(capfdbinary.readouterr().out)
    assert (line["service"], line["revision"], "caller" in line) == ("a", 3, False)
