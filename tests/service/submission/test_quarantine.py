"""What was being taken in when a control plane died, beside a journal of either kind."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager

import httpx2
import msgspec
import pytest

from kits.end_to_end.live_platform import PATIENCE_S, LivePlatform, wait_for
from kits.servers import missing_postgres, running_postgres
from kits.service.api_fixtures import job_body, service_body
from kits.service.platform_double import Kept
from springtide.control.journal.postgres import PostgresJournal
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.errors import JournalError, StorageError
from springtide.service.submission.quarantine import (
    INTAKE_KEY,
    SET_ASIDE_S,
    Intake,
    Quarantine,
    SetAside,
    object_key,
    request_key,
)

KEY = request_key(b"a body")
NOW_S = 1_800_000_000.0


def die_during(store, key, now_s=NOW_S):
    """A control plane that dies while it takes `key` in: what it would write afterwards is not written."""
    with Quarantine(store, lambda: now_s).taking_in(key):
        left = store.meta(INTAKE_KEY)
    store.set_meta(INTAKE_KEY, left)


def taken_in(store, key, now_s=NOW_S):
    with Quarantine(store, lambda: now_s).taking_in(key):
        return True


@contextmanager
def sqlite_journal(tmp_path):
    journal = SqliteJournal(tmp_path / "journal.db")
    yield journal
    journal.close()


@contextmanager
def postgres_journal(tmp_path):
    if missing_postgres():
        pytest.skip(missing_postgres())
    with running_postgres() as server:
        journal = PostgresJournal(server.postgres_url())
        yield journal
        journal.close()


@pytest.mark.parametrize(
    "opened",
    [sqlite_journal, pytest.param(postgres_journal, marks=pytest.mark.slow)],
    ids=["sqlite", "postgres"],
)
def test_a_request_is_set_aside_after_the_second_death_for_a_day(opened, tmp_path):
    with opened(tmp_path) as journal:
        die_during(journal, KEY)
        die_during(journal, KEY)
        with pytest.raises(SetAside, match=r"died 2 times .* until 2027-01-16 08:00 UTC"):
            taken_in(journal, KEY, NOW_S + 60)
        assert taken_in(journal, request_key(b"another body"), NOW_S + 60)
        with pytest.raises(SetAside):
            taken_in(journal, KEY, NOW_S + SET_ASIDE_S - 1)
        assert taken_in(journal, KEY, NOW_S + SET_ASIDE_S)


def test_what_ends_or_is_refused_leaves_nothing():
    store = Kept()
    die_during(store, KEY)
    assert taken_in(store, KEY)
    assert store.meta(INTAKE_KEY) == "{}"
    for _ in range(3):
        with pytest.raises(ValueError), Quarantine(store).taking_in(KEY):
            raise ValueError("refused")
    assert store.meta(INTAKE_KEY) == "{}"
    die_during(store, KEY)
    assert taken_in(store, KEY), "the death before was of an intake that went well afterwards"


def test_an_object_is_set_aside_until_its_generation_changes():
    store = Kept()
    for _ in range(2):
        die_during(store, object_key("u-1", 3))
    with pytest.raises(SetAside, match="until its spec changes"):
        taken_in(store, object_key("u-1", 3), NOW_S + 100 * SET_ASIDE_S)
    assert taken_in(store, object_key("u-1", 4))
    assert taken_in(store, object_key("u-2", 3))


def test_an_end_in_order_is_no_death():
    store = Kept()
    for _ in range(3):
        quarantine = Quarantine(store)
        with quarantine.taking_in(KEY):
            quarantine.close()
            left = store.meta(INTAKE_KEY)
        store.set_meta(INTAKE_KEY, left)
    assert taken_in(store, KEY)


def test_those_that_were_in_the_middle_are_taken_in_one_at_a_time_the_second_time():
    store = Kept()
    left = Intake(attempts=1, at_unix_s=NOW_S)
    store.set_meta(INTAKE_KEY, msgspec.json.encode({"a": left, "b": left}).decode())
    quarantine = Quarantine(store, lambda: NOW_S)
    seen = []

    def second():
        with quarantine.taking_in("b"):
            seen.append("b")

    with quarantine.taking_in("a"):
        other = threading.Thread(target=second)
        other.start()
        with quarantine.taking_in("new"):
            seen.append("new")
        assert "b" not in seen
        assert '"b":{"attempts":1' in store.meta(INTAKE_KEY)
    other.join()
    assert seen == ["new", "b"]


def test_a_store_that_cannot_be_written_refuses_before_the_intake():
    class Full(Kept):
        def set_meta(self, key, value):
            raise JournalError("disk full")

    begun = []
    with pytest.raises(StorageError, match="disk full"), Quarantine(Full()).taking_in(KEY):
        begun.append(1)
    assert begun == []


def test_the_entry_stays_until_the_step_that_takes_the_source_in_is_durable(http, platform, monkeypatch):
    store, seen = Kept(), []
    platform.quarantine = Quarantine(store)
    submit = platform.submit

    def noting(event):
        seq = submit(event)
        seen.append(store.meta(INTAKE_KEY))
        return seq

    monkeypatch.setattr(platform, "submit", noting)
    for method, path, body in (("POST", "/v1/jobs", job_body()), ("PUT", "/v1/services/digits", service_body())):
        content = msgspec.json.encode(body)
        answer = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        assert answer.is_success
        assert request_key(content) in seen.pop()
        assert store.meta(INTAKE_KEY) == "{}"


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/jobs"), ("POST", "/v1/quote"), ("PUT", "/v1/services/x")])
def test_every_request_with_a_source_is_refused_once_it_is_set_aside(http, platform, method, path):
    content = msgspec.json.encode(service_body() if method == "PUT" else job_body())
    store = Kept()
    for _ in range(2):
        die_during(store, request_key(content))
    platform.quarantine = Quarantine(store, lambda: NOW_S)
    answer = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "set_aside")


def noted_in(path):
    """What is noted beside a journal that its platform holds open."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as journal:
        row = journal.execute("SELECT value FROM meta WHERE key = ?", (INTAKE_KEY,)).fetchone()
    return row[0] if row else ""


def post_in_vain(http, body):
    with pytest.raises(httpx2.HTTPError):
        http.post("/v1/jobs", json=body)


@pytest.mark.slow
def test_a_body_that_two_control_planes_died_of_is_refused_by_the_third(tmp_path):
    # What takes the checker of sources the most time that it has: during it the control plane is killed.
    slow = {"filename": "slow.py", "text": "x = f'" + "{a}" * 200_000 + "'\n", "object_name": "fit", "kind": "function"}
    body = {"name": "slow", "source": slow}
    platform = LivePlatform(tmp_path / "state", slots=1)
    try:
        for attempt in (1, 2):
            platform.start()
            asking = threading.Thread(target=post_in_vain, args=(platform.http, body))
            asking.start()
            wait_for(
                lambda n=attempt: f'"attempts":{n}' in noted_in(tmp_path / "state" / "journal.db"),
                PATIENCE_S,
                "the intake to begin",
            )
            platform.kill()
            asking.join()
        platform.start()
        for path in ("/v1/jobs", "/v1/quote"):
            refused = platform.http.post(path, json=body)
            assert refused.status_code == 422
            assert refused.json()["error"]["code"] == "set_aside"
            assert "the control plane died 2 times while it took this in" in refused.json()["error"]["message"]
        assert platform.submit("fine").startswith("fine-")
        assert "is set aside" in platform.log()
    finally:
        platform.stop()
