"""What is asked of the server for the platform's own objects, with a server that is written down here."""

from __future__ import annotations

import asyncio

import pytest

from springtide.backends.kubernetes.client.errors import (
    AlreadyExists,
    Invalid,
    KubeForbidden,
    NoSuchObject,
    ServerFault,
    VersionConflict,
)
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.resources import client as module
from springtide.backends.kubernetes.resources.client import Objects
from springtide.core.errors import BackendError, InvalidRequest

KEY = Key("ml", "digits")
KIND = "TrainingFunction"


class Server:
    """Answers a call with what was put down for it, and remembers the calls."""

    def __init__(self):
        self.calls = []
        self.answers = []

    def __getattr__(self, verb):
        async def call(*args, **more):
            self.calls.append((verb, args, more))
            answer = self.answers.pop(0) if self.answers else {}
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Held:
    def __init__(self):
        self.found = []
        self.is_synced = True

    def objects(self):
        return self.found

    def get(self, name, namespace):
        return next((obj for obj in self.found if obj["metadata"]["name"] == name), None)


class Thread:
    """An API thread that runs what is asked of it at once, and writes only when told to."""

    def __init__(self):
        self.server = Server()
        self.writes = []
        self.caches = []

    def call(self, task, timeout_s):
        return asyncio.run(task(self.server))

    def write(self, key, effect, *, done=None, failed=None):
        self.writes.append((key, effect, done, failed))

    def cache(self, kind, **options):
        self.caches.append((kind, options))
        return Held()

    def drain(self):
        waiting, self.writes = self.writes, []
        for _, effect, done, failed in waiting:
            try:
                result = asyncio.run(effect(self.server))
            except BackendError as error:
                failed(error)
            else:
                if done is not None:
                    done(result)


@pytest.fixture
def thread():
    return Thread()


@pytest.fixture
def objects(thread):
    found = Objects(thread, ("ml", "web"), "mine")
    found.open(lambda kind, key: None)
    return found


def obj(name="digits", **metadata):
    return {"kind": KIND, "metadata": {"name": name, "namespace": "ml", "uid": "u1", **metadata}, "spec": {"epochs": 1}}


def error_of(kind, status=422):
    return kind(status, "Reason", "the server's own words")


def test_both_kinds_are_followed_in_the_namespaces_of_the_platform(objects, thread):
    assert [kind.name for kind, _ in thread.caches] == ["TrainingFunction", "InferenceFunction"]
    assert {options["namespaces"] for _, options in thread.caches} == {("ml", "web")}
    assert objects.watches("web")
    assert not objects.watches("elsewhere")
    assert Objects(thread).watches("anywhere")


def test_objects_that_name_another_platform_are_not_here(objects):
    labelled = {"labels": {"springtide.dev/platform": "another"}}
    mine = {"labels": {"springtide.dev/platform": "mine"}}
    objects._caches[KIND].found = [obj("a"), obj("b", **labelled), obj("c", **mine)]
    assert [found["metadata"]["name"] for found in objects.all(KIND)] == ["a", "c"]
    assert objects.get(KIND, Key("ml", "b")) is None
    assert objects.get(KIND, Key("ml", "a")) is not None


def test_an_object_that_is_there_already_is_not_an_error(objects, thread):
    thread.server.answers = [error_of(AlreadyExists, 409)]
    assert objects.create(KIND, obj()) is None


@pytest.mark.parametrize("kind", [Invalid, KubeForbidden, NoSuchObject])
def test_what_the_server_refuses_is_the_requests_fault_and_in_its_words(objects, thread, kind):
    thread.server.answers = [error_of(kind)]
    with pytest.raises(InvalidRequest, match="the server's own words"):
        objects.create(KIND, obj())


def test_a_server_in_trouble_is_nobodys_fault(objects, thread):
    thread.server.answers = [error_of(ServerFault, 500)]
    with pytest.raises(BackendError):
        objects.create(KIND, obj())


def test_only_the_object_that_is_meant_is_changed(objects, thread):
    objects.patch(KIND, KEY, {"suspend": True, "replicas": None}, uid="u1")
    verb, args, _ = thread.server.calls[-1]
    assert verb == "patch"
    assert args[2] == {"metadata": {"uid": "u1"}, "spec": {"suspend": True, "replicas": None}}
    another = Invalid(422, "Invalid", "metadata.uid: field is immutable", fields=("metadata.uid",))
    thread.server.answers = [another, error_of(NoSuchObject, 404), error_of(Invalid)]
    assert objects.patch(KIND, KEY, {}, uid="u1") is None
    assert objects.patch(KIND, KEY, {}, uid="u1") is None
    with pytest.raises(InvalidRequest, match="the server's own words"):
        objects.patch(KIND, KEY, {}, uid="u1")


def test_only_the_object_that_is_meant_is_deleted(objects, thread):
    thread.server.answers = [error_of(VersionConflict, 409), error_of(ServerFault, 500)]
    objects.delete(KIND, KEY, uid="u1")
    assert thread.server.calls[-1][2] == {"uid": "u1"}
    with pytest.raises(BackendError):
        objects.delete(KIND, KEY, uid="u1")


def test_of_several_statuses_that_wait_only_the_newest_is_written(objects, thread):
    for number in range(3):
        objects.tell_status(obj(), {"step": number})
    assert len(thread.writes) == 1
    thread.drain()
    ((verb, args, more),) = thread.server.calls
    assert verb == "patch"
    assert more["subresource"] == "status"
    assert args[2] == [
        {"op": "test", "path": "/metadata/uid", "value": "u1"},
        {"op": "add", "path": "/status", "value": {"step": 2}},
    ]
    objects.tell_status(obj(), {"step": 3})
    assert len(thread.writes) == 1


def test_a_status_whose_writing_failed_for_a_moment_is_written_when_it_is_tried_again(objects, thread):
    objects.tell_status(obj(), {"step": 1})
    (_, effect, _, _) = thread.writes.pop()
    thread.server.answers = [error_of(ServerFault, 503)]
    with pytest.raises(ServerFault):
        asyncio.run(effect(thread.server))
    objects.tell_status(obj(), {"step": 2})
    asyncio.run(effect(thread.server))
    assert thread.server.calls[-1][1][2][1]["value"] == {"step": 2}
    # It was put in line anew by whoever tried again; nothing is written twice.
    num = len(thread.server.calls)
    thread.drain()
    assert len(thread.server.calls) == num


def test_a_status_is_not_written_into_another_object_of_that_name(objects, thread, caplog):
    objects.tell_status(obj(), {"step": 1})
    thread.server.answers = [error_of(Invalid), obj(uid="u2")]
    thread.drain()
    assert "could not be written" not in caplog.text
    objects.tell_status(obj(), {"step": "two"})
    thread.server.answers = [error_of(Invalid), obj()]
    thread.drain()
    assert "could not be written: the server's own words" in caplog.text


def test_an_event_that_was_posted_before_is_as_good(objects, thread):
    event = {"metadata": {"name": "e", "namespace": "ml"}, "involvedObject": {"uid": "u1"}}
    objects.tell_event(event)
    thread.server.answers = [error_of(AlreadyExists, 409)]
    thread.drain()
    assert objects.num_dropped_events == 0
    assert objects._num_events == 0


def test_events_that_nobody_takes_do_not_pile_up(objects, thread, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_EVENTS", 3)
    event = {"metadata": {"name": "e", "namespace": "ml"}, "involvedObject": {"uid": "u1"}}
    for _ in range(5):
        objects.tell_event(event)
    assert objects.num_dropped_events == 2
    thread.server.answers = [error_of(KubeForbidden, 403)]
    thread.drain()
    objects.tell_event(event)
    assert objects.num_dropped_events == 2


def test_the_texts_of_a_config_map(objects, thread):
    thread.server.answers = [{"data": {"a.py": "x"}}, {}, None]
    assert objects.config_map("ml", "code") == {"a.py": "x"}
    assert objects.config_map("ml", "empty") == {}
    assert objects.config_map("ml", "none") is None
