"""The platform's key and token in its cluster: made once, by whoever comes first, and refused where they are none."""

from __future__ import annotations

import asyncio
import base64

import pytest

from springtide.backends.kubernetes.client.errors import AlreadyExists
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import InvalidRequest
from springtide.service.assembly.cluster_secrets import api_token, master_key, master_key_secret, token_secret

SETTINGS = KubernetesSettings(name="tide", namespace="sys")


class Secrets:
    """The Secrets of one namespace. `rival` is made by somebody else between our look and our writing."""

    def __init__(self, rival=None):
        self.held = {}
        self.rival = rival

    async def find(self, kind, name, namespace=""):
        assert (kind.name, namespace) == ("Secret", "sys")
        return self.held.get(name)

    async def get(self, kind, name, namespace=""):
        return self.held[name]

    async def create(self, kind, obj, namespace=""):
        name = obj["metadata"]["name"]
        if self.rival is not None:
            self.held[name] = secret(**self.rival)
        if name in self.held:
            raise AlreadyExists(409, "AlreadyExists", f"{name} exists")
        self.held[name] = obj
        return obj


def secret(**values):
    return {"data": {name: base64.b64encode(value).decode() for name, value in values.items()}}


def test_both_are_made_once_and_found_again():
    cluster = Secrets()
    key = asyncio.run(master_key(cluster, SETTINGS))
    token = asyncio.run(api_token(cluster, SETTINGS))
    assert len(key) == 32
    assert len(token) >= 43
    assert (
        set(cluster.held) == {"tide-master-key", "tide-token"} == {master_key_secret(SETTINGS), token_secret(SETTINGS)}
    )
    assert asyncio.run(master_key(cluster, SETTINGS)) == key
    assert asyncio.run(api_token(cluster, SETTINGS)) == token
    # Nothing that lists the platform's objects overlooks them, and no two platforms have the same.
    assert cluster.held["tide-token"]["metadata"]["labels"]["springtide.dev/platform"] == "tide"
    assert asyncio.run(master_key(Secrets(), SETTINGS)) != key


def test_the_value_of_whoever_was_first_holds():
    assert asyncio.run(master_key(Secrets(rival={"key": b"k" * 32}), SETTINGS)) == b"k" * 32
    assert asyncio.run(api_token(Secrets(rival={"token": b"t" * 20 + b"\n"}), SETTINGS)) == "t" * 20


@pytest.mark.parametrize("found", [{"key": b"short"}, {"other": b"k" * 32}, {}])
def test_a_key_that_is_none_is_refused_with_the_mend(found):
    cluster = Secrets()
    cluster.held["tide-master-key"] = secret(**found)
    with pytest.raises(InvalidRequest, match="the Secret sys/tide-master-key must hold at least 32 random bytes"):
        asyncio.run(master_key(cluster, SETTINGS))


@pytest.mark.parametrize("found", [{"token": b"short"}, {"token": b"\xff" * 40}, {"token": b"a" * 20 + b"\0b"}, {}])
def test_a_token_that_is_none_is_refused_with_the_mend(found):
    cluster = Secrets()
    cluster.held["tide-token"] = secret(**found)
    with pytest.raises(InvalidRequest, match="the Secret sys/tide-token must hold at least 16 printable characters"):
        asyncio.run(api_token(cluster, SETTINGS))


def test_what_is_no_base64_is_no_secret():
    cluster = Secrets()
    cluster.held["tide-master-key"] = {"data": {"key": "not base64!"}}
    with pytest.raises(InvalidRequest, match="random bytes"):
        asyncio.run(master_key(cluster, SETTINGS))
