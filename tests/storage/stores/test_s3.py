"""A real S3 API, and a scripted one for what a real one answers only on bad days."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.servers import ask_s3
from kits.storage.virtual_pace import VirtualTime
from springtide.core.errors import InvalidRequest, ObjectMissing, StorageError
from springtide.storage.stores import s3 as s3_store
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.open import open_store
from springtide.storage.stores.s3 import MAX_ATTEMPTS, S3Place, S3Store

pytestmark = pytest.mark.usefixtures("s3_credentials")
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def error(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>".encode()


@contextlib.contextmanager
def scripted(*answers, headers=None):
    """An endpoint that gives these (status, body) in turn, the last one for ever; and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path, body))
            if headers is not None:
                headers.append(dict(self.headers))
            status, answer = answers[min(len(asked), len(answers)) - 1]
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def store_at(endpoint, time=None, **more):
    place = S3Place(bucket="tests", prefix="run", endpoint=endpoint, region="us-east-1")
    return CheckedStore(S3Store(place, pace=(time or VirtualTime()).pace(), environment=KEYS, **more))


def test_prefixes_part_stores_in_one_bucket(s3_server):
    first, second = open_store(s3_server.s3_url("tests", "one")), open_store(s3_server.s3_url("tests", "two/deep"))
    first.put("a", b"1")
    assert second.keys("") == []
    second.put("a", b"2")
    assert open_store(s3_server.s3_url("tests")).keys("") == ["one/a", "two/deep/a"]
    for store in (first, second):
        store.delete(["a"])


@pytest.mark.slow
def test_more_keys_than_a_page_holds(s3_server):
    store = open_store(s3_server.s3_url("tests", "pages"))
    names = [f"k/{number:04d}" for number in range(1003)]
    for name in names:
        store.put(name, b"")
    assert store.keys("k/") == names
    assert store.requests().num_lists == 2
    store.delete(names)
    assert store.requests().num_deletes == 2
    assert store.keys("") == []


def test_a_bucket_that_vanishes_is_trouble_for_everything_that_is_asked(s3_server):
    ask_s3(s3_server, "PUT", "/vanishing")
    store = open_store(s3_server.s3_url("vanishing", "run"))
    store.put("a", b"1")
    store.delete(["a"])
    assert ask_s3(s3_server, "DELETE", "/vanishing") == 204
    for ask in (
        lambda: store.get("a"),
        lambda: store.wait("a", 60.0),
        lambda: store.put("a", b"1"),
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.keys(""),
    ):
        with pytest.raises(StorageError, match=r"the bucket vanishing does not exist at http.*: make it") as caught:
            ask()
        assert not isinstance(caught.value, ObjectMissing)
        assert "\n" not in str(caught.value)


def test_a_busy_server_is_asked_less_and_every_attempt_counts():
    time = VirtualTime()
    with scripted((503, error("SlowDown")), (503, error("SlowDown")), (200, b"hello")) as (endpoint, asked):
        store = store_at(endpoint, time)
        assert store.get("a") == b"hello"
    assert [verb for verb, _, _ in asked] == ["GET"] * 3
    assert asked[0][1] == "/tests/run/a"
    assert store.requests().num_gets == 3
    assert time.sleeps == [0.1, 0.2]


def test_a_server_that_stays_busy_is_given_up_with_pauses_that_are_bounded():
    time = VirtualTime()
    with scripted((503, error("SlowDown"))) as (endpoint, asked):
        store = store_at(endpoint, time)
        with pytest.raises(StorageError, match=rf"cannot write a: .* was too busy {MAX_ATTEMPTS} times in a row"):
            store.put("a", b"1")
    assert len(asked) == MAX_ATTEMPTS == store.requests().num_puts
    assert time.sleeps == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]


def test_a_refused_write_is_repeated_and_one_that_is_there_is_not_written():
    with scripted((503, error("SlowDown")), (200, b"")) as (endpoint, asked):
        assert store_at(endpoint).put_if_absent("a", b"1") is True
    assert [body for _, _, body in asked] == [b"1", b"1"]
    with scripted((412, error("PreconditionFailed"))) as (endpoint, asked):
        assert store_at(endpoint).put_if_absent("a", b"1") is False
    assert len(asked) == 1


@pytest.mark.parametrize(
    "broken", [b"", b"hello\r\n\r\n", b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\nETag: "1"\r\n\r\nabc']
)
def test_an_answer_that_breaks_off_is_asked_for_again(broken):
    whole = (
        b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\nabc'
    )
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer():
            for text in (broken, whole):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(text)

        answered = pool.submit(answer)
        store = store_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert store.get("a") == b"abc"
        answered.result(30.0)
    assert store.requests().num_gets == 2


def test_an_endpoint_that_is_not_there_is_said_after_some_attempts():
    time = VirtualTime()
    store = store_at("http://127.0.0.1:1", time, max_attempts=3)
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:1 does not answer after 3 attempts: is the endpoint"):
        store.get("a")
    assert len(time.sleeps) == 2
    with pytest.raises(StorageError, match="does not answer after 1 attempts"):
        store.put_if_absent("a", b"1")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "InvalidAccessKeyId", "does not know the access key: set AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY does not belong"),
        (403, "AccessDenied", "widen their policy"),
        (403, "", "widen their policy"),
        (401, "", "widen their policy"),
        (400, "ExpiredToken", "have expired: renew them"),
        (301, "PermanentRedirect", "in another region: give region="),
        (400, "AuthorizationHeaderMalformed", "in another region: give region="),
        (400, "SomethingElse", "answered: SomethingElse"),
        (404, "NoSuchBucket", "the bucket tests does not exist"),
    ],
)
def test_what_a_server_refuses_is_said_once_with_its_mend(status, code, words):
    with scripted((status, error(code) if code else b"")) as (endpoint, asked):
        store = store_at(endpoint)
        with pytest.raises(StorageError, match=words) as caught:
            store.get("a")
    assert len(asked) == 1
    assert "test/" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_wait_asks_for_the_key_at_growing_intervals_and_counts_every_miss():
    time = VirtualTime()
    with scripted((404, error("NoSuchKey"))) as (endpoint, asked):
        store = store_at(endpoint, time)
        with pytest.raises(ObjectMissing):
            store.wait("a", 1.0)
    assert {(verb, path) for verb, path, _ in asked} == {("GET", "/tests/run/a")}
    assert store.requests().num_gets == store.requests().num_misses == len(asked) == 18
    assert time.sleeps[0] == 0.025
    assert sum(time.sleeps) == pytest.approx(1.0)


def test_bytes_are_digested_only_where_nothing_else_guards_them(monkeypatch):
    headers = []
    with scripted((200, b""), headers=headers) as (endpoint, _):
        store_at(endpoint).put("a", b"1")
        monkeypatch.setattr(s3_store, "LOOPBACK", frozenset())
        place = S3Place(bucket="tests", endpoint=endpoint, is_plain_http_allowed=True)
        CheckedStore(S3Store(place, environment=KEYS)).put("a", b"1")
    assert headers[0]["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers[1]["x-amz-content-sha256"] == hashlib.sha256(b"1").hexdigest()


def test_an_endpoint_in_the_open_must_be_asked_for():
    with pytest.raises(InvalidRequest, match="allow_http=true"):
        S3Place(bucket="tests", endpoint="http://storage.example.com")
    assert S3Place(bucket="tests", endpoint="http://storage.example.com", is_plain_http_allowed=True).host
    assert S3Place(bucket="tests", endpoint="http://storage.example.com", is_plain_http_allowed=True).is_unencrypted
    assert not S3Place(bucket="tests").is_unencrypted
    assert S3Place(bucket="tests", endpoint="https://storage.example.com").host == "https://storage.example.com"
    assert S3Place(bucket="tests", region="eu-west-1").host == "AWS (eu-west-1)"


def test_an_endpoint_that_wants_the_bucket_in_its_name(monkeypatch):
    with scripted((200, b"hello")) as (endpoint, asked):
        place = S3Place(bucket="tests", endpoint=endpoint.replace("127.0.0.1", "localhost"), style="virtual")
        store = CheckedStore(S3Store(place, pace=VirtualTime().pace(), environment=KEYS, max_attempts=1))
        with contextlib.suppress(StorageError):
            store.get("a")
    # Where tests.localhost resolves, the bucket is no part of the path; where it does not, no request was sent.
    assert [path for _, path, _ in asked] in ([], ["/a"])


def test_no_credentials_at_all_is_said_before_anything_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises((InvalidRequest, StorageError), match="credentials"):
        open_store("s3://tests/run?endpoint=http://127.0.0.1:1").get("a")
