"""The Secrets of workloads beside a server that keeps them, and somebody who takes them away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from springtide.backends.kubernetes.client.errors import AlreadyExists, NoSuchObject, VersionConflict
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.pods import secrets as secrets_module
from springtide.backends.kubernetes.pods.secrets import SECRET_AGE_S, PodSecrets
from springtide.core.workload import WorkloadId

DIGITS, SPEECH = WorkloadId("digits"), WorkloadId("speech")


class Server:
    """Has Secrets by name; `calls` are all that was asked of it."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.racers: list[Callable[[], None]] = []

    async def create(self, kind: object, secret: dict[str, Any]) -> None:
        self.calls.append(f"create {secret['metadata']['name']}")
        await asyncio.sleep(0)
        if self.racers:
            self.racers.pop(0)()
        if secret["metadata"]["name"] in self.held:
            raise AlreadyExists(409, "AlreadyExists", "there is one")
        self.held[secret["metadata"]["name"]] = secret

    async def patch(self, kind: object, name: str, changes: list[dict[str, Any]], namespace: str, *, how: str) -> None:
        self.calls.append(f"patch {name}")
        await asyncio.sleep(0)
        assert how == "json"
        if name not in self.held:
            raise NoSuchObject(404, "NotFound", "there is none")
        made: dict[str, Any] = {"metadata": {"name": name, "namespace": namespace}}
        for change in changes:
            assert change["op"] == "add"
            *path, last = change["path"].split("/")[1:]
            (made["metadata"] if path else made)[last] = change["value"]
        self.held[name] = made

    async def delete(self, kind: object, name: str, namespace: str) -> bool:
        self.calls.append(f"delete {name}")
        return self.held.pop(name, None) is not None


class Thread:
    """Runs writes at once."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def write(self, key: object, effect: Callable[[Any], Any], *, is_still_wanted: Callable[[], bool]) -> None:
        if is_still_wanted():
            asyncio.run(effect(self.server))


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(secrets_module.time, "monotonic", lambda: now_s[0])
    return now_s


def secret(name: str = "digits", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ml", "labels": {"a": "b"}, "annotations": {"c": "d"}}
    return {"metadata": metadata, "data": data or {"key": "k"}}


def ensure(secrets: PodSecrets, server: Server, *wanted: tuple[WorkloadId, dict[str, Any]]) -> None:
    async def together() -> None:
        await asyncio.gather(*(secrets.ensure(server, job, obj) for job, obj in wanted))  # type: ignore[arg-type]

    asyncio.run(together())


def secrets_of(server: Server) -> PodSecrets:
    return PodSecrets(Thread(server), lambda: True)  # type: ignore[arg-type]


def test_pods_that_start_together_write_one_secret(clock) -> None:
    server = Server()
    secrets = secrets_of(server)
    ensure(secrets, server, *[(DIGITS, secret())] * 4, (SPEECH, secret("speech")))
    assert sorted(server.calls) == ["create digits", "create speech"]


def test_one_of_an_earlier_life_is_written_over_whole(clock) -> None:
    server = Server()
    server.held["digits"] = secret(old="credentials", key="k") | {"type": "Opaque"}
    ensure(secrets_of(server), server, (DIGITS, secret(key="k2")))
    assert server.held["digits"]["data"] == {"key": "k2"}
    assert server.held["digits"]["metadata"]["labels"] == {"a": "b"}
    assert server.held["digits"]["metadata"]["ownerReferences"] == []


def test_one_that_somebody_took_away_is_there_again_after_a_while(clock) -> None:
    server = Server()
    secrets = secrets_of(server)
    ensure(secrets, server, (DIGITS, secret()))
    del server.held["digits"]
    clock[0] += SECRET_AGE_S / 2
    ensure(secrets, server, (DIGITS, secret()))
    assert not server.held
    clock[0] += SECRET_AGE_S
    ensure(secrets, server, (DIGITS, secret()), (DIGITS, secret()))
    assert server.held["digits"]["data"] == {"key": "k"}
    assert server.calls == ["create digits", "patch digits", "create digits"]


def test_one_that_came_and_went_is_a_conflict_to_be_tried_again(clock) -> None:
    server = Server()
    secrets = secrets_of(server)
    ensure(secrets, server, (DIGITS, secret()))
    del server.held["digits"]
    clock[0] += 2 * SECRET_AGE_S
    server.racers.append(lambda: server.held.update(digits=secret(key="another's")))
    with pytest.raises(VersionConflict):
        ensure(secrets, server, (DIGITS, secret()))
    ensure(secrets, server, (DIGITS, secret()))
    assert server.held["digits"]["data"] == {"key": "k"}


def test_one_that_failed_is_not_believed_to_be_there(clock) -> None:
    server = Server()
    secrets = secrets_of(server)

    def break_off() -> None:
        raise ConnectionError

    server.racers.append(break_off)
    with pytest.raises(ConnectionError):
        ensure(secrets, server, (DIGITS, secret()))
    ensure(secrets, server, (DIGITS, secret()))
    assert "digits" in server.held


def test_a_forgotten_one_is_removed_and_would_be_made_anew(clock) -> None:
    server = Server()
    secrets = secrets_of(server)
    ensure(secrets, server, (DIGITS, secret()))
    secrets.forget(DIGITS, Key("ml", "digits"))
    assert not server.held
    ensure(secrets, server, (DIGITS, secret()))
    assert server.calls == ["create digits", "delete digits", "create digits"]


def test_of_many_workloads_those_of_long_ago_are_forgotten(clock, monkeypatch) -> None:
    monkeypatch.setattr(secrets_module, "_MOST_REMEMBERED", 2)
    server = Server()
    secrets = secrets_of(server)
    ensure(secrets, server, (DIGITS, secret()))
    clock[0] += 2 * SECRET_AGE_S
    ensure(secrets, server, (SPEECH, secret("speech")))
    ensure(secrets, server, (WorkloadId("third"), secret("third")))
    ensure(secrets, server, (SPEECH, secret("speech")))
    ensure(secrets, server, (DIGITS, secret()))
    # It finds out that it has made it before.
    assert server.calls == ["create digits", "create speech", "create third", "create digits", "patch digits"]
