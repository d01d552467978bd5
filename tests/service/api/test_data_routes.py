"""Datasets over the API: shards are checked as they come, a change counts only what is there, and names are names."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from kits.service.api_fixtures import job_body
from springtide.service.api import data_routes
from springtide.storage.datasets.cut import checked_arrays, cut
from springtide.storage.datasets.reading import DatasetReader
from springtide.storage.stores.open import open_store


def frames(count=20, first=0, per_shard=8):
    arrays = checked_arrays({"x": np.arange(first, first + count, dtype="float32"), "y": np.arange(count)})
    return list(cut(arrays, 12 * per_shard))


ARRAYS = [{"name": "x", "dtype": "F32", "shape": []}, {"name": "y", "dtype": "I64", "shape": []}]


def send(http, name, made):
    """Send shards; what a change says of them."""
    entries = []
    for frame, count in made:
        sha256 = hashlib.sha256(frame).hexdigest()
        answer = http.put(f"/v1/data/{name}/shards/{sha256}", content=frame)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"sha256": sha256, "num_bytes": len(frame)}
        entries.append([sha256, count, len(frame)])
    return entries


def change(http, name, verb, entries=(), part_id="p", arrays=ARRAYS):
    body = {"verb": verb, "part_id": part_id, "arrays": arrays, "shards": list(entries)}
    return post(http, name, msgspec.json.encode(body))


def post(http, name, body):
    return http.post(f"/v1/data/{name}", content=body, headers={"Content-Type": "application/json"})


def sentence(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_a_dataset_from_its_shards_to_its_end(http, platform):
    assert http.get("/v1/data").json() == []
    entries = send(http, "digits", frames())
    assert http.get("/v1/data").json() == []
    status = change(http, "digits", "put", entries).json()
    assert (status["kind"], status["num_samples"], status["num_shards"]) == ("whole", 20, 3)
    assert http.get("/v1/data/digits").json() == status
    assert http.get("/v1/data").json() == [status]
    assert http.get(f"/v1/data/digits/shards/{entries[0][0]}").json()["num_bytes"] == entries[0][2]
    # It lies where functions, and local runs of this user, look for it.
    store = open_store(f"file://{platform.state_dir}/functions/store")
    reader = DatasetReader(store, "digits")
    assert reader.read([19])["x"].tolist() == [19.0]
    reader.close()
    assert http.delete("/v1/data/digits").json() == {"removed": "digits"}
    assert "no dataset 'digits'" in sentence(http.get("/v1/data/digits"), 404)
    assert "no dataset 'digits'" in sentence(http.delete("/v1/data/digits"), 404)


def test_a_growing_dataset_and_an_append_whose_answer_was_lost(http):
    first = send(http, "clicks", frames(5))
    assert change(http, "clicks", "append", first, "a").json()["kind"] == "growing"
    second = send(http, "clicks", frames(3, 5))
    for _ in range(2):
        assert change(http, "clicks", "append", second, "b").json()["num_samples"] == 8
    assert change(http, "clicks", "close", (), "c", []).json()["kind"] == "closed"
    assert "closed at 8 samples" in sentence(change(http, "clicks", "append", second, "d"), 409)
    assert "no dataset 'nope'" in sentence(change(http, "nope", "close", (), "c", []), 404)


def test_a_change_counts_only_what_is_there(http):
    entries = send(http, "digits", frames())
    sha256, count, size = entries[1]
    for lie, status in (([sha256, count, size + 1], 409), (["0" * 64, count, size], 409), ([sha256, 0, size], 422)):
        told = sentence(change(http, "digits", "put", [entries[0], lie]), status)
        assert "shard 2 of 2" in told
    assert "at least one shard" in sentence(change(http, "digits", "put"), 422)
    assert "at least one shard" in sentence(change(http, "digits", "put", entries, arrays=[]), 422)
    assert http.get("/v1/data").json() == []
    # The shards of one dataset are not another's.
    assert "shard 1 of 3 was not sent" in sentence(change(http, "other", "put", entries), 409)


def test_what_is_no_shard_is_refused(http):
    frame, _ = frames()[0]
    other = hashlib.sha256(b"other").hexdigest()
    assert "do not have the digest" in sentence(http.put(f"/v1/data/d/shards/{other}", content=frame), 409)
    for data in (b"", b"hello", frame[:-1], frame + b"1"):
        path = f"/v1/data/d/shards/{hashlib.sha256(data).hexdigest()}"
        assert "no shard of a dataset" in sentence(http.put(path, content=data), 422)
        assert http.get(path).status_code == 404
    for name in ("sh", "0" * 63, "G" * 64):
        assert "is no digest" in sentence(http.put(f"/v1/data/d/shards/{name}", content=frame), 422)
        assert http.get(f"/v1/data/d/shards/{name}").status_code == 404
    assert http.get("/v1/data").json() == []


@pytest.mark.parametrize("name", ["Digits", "a%20b", "-x", "x" * 64, "%2e%2e"])
def test_names_are_names(http, name):
    frame, _ = frames()[0]
    for answer in (
        http.get(f"/v1/data/{name}"),
        http.delete(f"/v1/data/{name}"),
        change(http, name, "close", (), "c", []),
        http.put(f"/v1/data/{name}/shards/{hashlib.sha256(frame).hexdigest()}", content=frame),
    ):
        assert answer.status_code in (404, 405, 422), answer.text
        assert "error" in answer.json()
    assert http.get("/v1/data").json() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 422),
        (b'{"verb": "steal", "part_id": "a"}', 422),
        (b'{"verb": "put", "part_id": "../a"}', 422),
        (b'{"verb": "put", "part_id": "a", "extra": 1}', 422),
        (b'{"verb": "put", "part_id": "a", "shards": [["../x", 1, 1]]}', 422),
        (b'{"verb": "put", "part_id": "a", "shards": [["' + b"0" * 64 + b'", -1, 1]]}', 422),
        (b"[" * 200_000, 400),
    ],
)
def test_bodies_that_are_no_change(http, body, status):
    sentence(post(http, "digits", body), status)


def test_bodies_are_bounded(http, monkeypatch):
    frame, _ = frames()[0]
    monkeypatch.setattr(data_routes, "MAX_FRAME_BYTES", 100)
    path = f"/v1/data/d/shards/{hashlib.sha256(frame).hexdigest()}"
    assert "at most 100 bytes" in sentence(http.put(path, content=frame), 413)
    assert "larger than 2 MiB" in sentence(post(http, "d", b" " * (3 << 20)), 413)


def test_a_shard_may_be_larger_than_other_bodies_and_is_bounded_all_the_same(http):
    (made,) = cut(checked_arrays({"x": np.zeros(500_000), "y": np.zeros(500_000)}))
    assert len(made[0]) > 2 * 1024 * 1024
    send(http, "large", [made])
    told = http.put(f"/v1/data/d/shards/{'0' * 64}", content=b"", headers={"Content-Length": str(300 * 1024 * 1024)})
    assert "larger than 256 MiB" in sentence(told, 413)
    assert "larger than 2 MiB" in sentence(http.post("/v1/jobs", content=bytes(3 * 1024 * 1024)), 413)


def test_only_so_many_shards_come_at_once(http, monkeypatch):
    frame, _ = frames()[0]
    monkeypatch.setattr(data_routes, "MAX_UPLOADS", 0)
    answer = http.put(f"/v1/data/d/shards/{hashlib.sha256(frame).hexdigest()}", content=frame)
    assert "a moment later" in sentence(answer, 503)


def test_it_needs_the_token(stranger):
    for method, path in (
        ("GET", "/v1/data"),
        ("GET", "/v1/data/digits"),
        ("POST", "/v1/data/digits"),
        ("DELETE", "/v1/data/digits"),
        ("PUT", f"/v1/data/digits/shards/{'0' * 64}"),
    ):
        assert stranger.request(method, path).status_code == 401


def test_a_stream_that_a_job_trains_on_is_not_removed(http, platform):
    change(http, "clicks", "append", send(http, "clicks", frames(5)), "a")
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    record = platform.view().jobs[job_id]
    job = msgspec.structs.replace(record.job, stream="clicks")
    platform.view().jobs[job_id] = msgspec.structs.replace(record, job=job)
    assert f"springtide cancel {job_id}" in sentence(http.delete("/v1/data/clicks"), 409)
    assert http.get("/v1/data/clicks").status_code == 200
