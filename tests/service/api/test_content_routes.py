"""Contents over the API: what is lacking, many in one body, one alone, and nothing that is not what it says."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from springtide.service.api import content_routes, limits

JSON = {"Content-Type": "application/json"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def missing(http, *digests):
    answer = http.post("/v1/missing-contents", content=msgspec.json.encode({"sha256": digests}), headers=JSON)
    assert answer.status_code == 200, answer.text
    return answer.json()["missing"]


def post(http, body, media_type="application/octet-stream"):
    return http.post("/v1/contents", content=body, headers={"Content-Type": media_type})


def sentence(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_contents_are_sent_once_many_together_and_one_alone(http):
    data = [b"a", b"b", b"large" * 1000]
    digests = [sha256(each) for each in data]
    assert missing(http, *digests) == digests
    packed = msgspec.msgpack.encode(dict(zip(digests[:2], data[:2], strict=True)))
    assert post(http, packed).json() == {"taken": 2}
    assert missing(http, *digests) == digests[2:]
    assert http.put(f"/v1/contents/{digests[2]}", content=data[2]).json() == {"taken": 1}
    assert missing(http, *digests) == []


def test_bytes_of_another_digest_are_refused(http):
    digest = sha256(b"a")
    assert "do not have the digest" in sentence(http.put(f"/v1/contents/{digest}", content=b"b"), 409)
    packed = msgspec.msgpack.encode({digest: b"b"})
    assert "do not have the digest" in sentence(post(http, packed), 409)
    assert missing(http, digest) == [digest]


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "A" * 64, "0" * 63])
def test_a_name_that_is_no_digest_is_refused(http, platform, name):
    assert http.put(f"/v1/contents/{name}", content=b"x").status_code in (404, 422)
    packed = msgspec.msgpack.encode({name: b"x"})
    assert "no digest" in sentence(post(http, packed), 422)
    assert not (platform.state_dir / "contents").exists()


@pytest.mark.parametrize("body", [b"", b"\xff", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"a": "text"})])
def test_a_body_that_is_no_map_of_contents_is_refused(http, body):
    assert "no msgpack map" in sentence(post(http, body), 400)


def test_what_is_asked_for_must_be_digests(http):
    answer = http.post("/v1/missing-contents", content=b'{"sha256": ["x"]}', headers=JSON)
    assert answer.status_code == 422
    assert http.post("/v1/missing-contents", content=b"{").status_code == 415
    assert "send it as application/octet-stream" in sentence(post(http, b"\x80", "application/json"), 415)


def test_bodies_are_bounded(http, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONTENTS_BODY_BYTES", 100)
    monkeypatch.setattr(content_routes, "MAX_FILE_BYTES", 100)
    data = b"x" * 101
    assert "larger than" in sentence(post(http, data), 413)
    assert "at most 100 bytes" in sentence(http.put(f"/v1/contents/{sha256(data)}", content=data), 413)
    assert missing(http, sha256(data)) == [sha256(data)]


def test_without_the_token_nothing_is_taken(stranger, platform):
    assert stranger.put(f"/v1/contents/{sha256(b'a')}", content=b"a").status_code == 401
    assert not (platform.state_dir / "contents").exists()
