"""Checks a store before a job uses it: is it reachable and writable, and are its conditional writes atomic?"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from springtide.core.errors import StorageError
from springtide.storage.pacing import PollInterval, real_pace
from springtide.storage.stores.open import open_store

PROBE_PREFIX = "springtide-probe"


class ProbedStore(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe: the seconds of a put and of a get of a small object."""

    put_s: float
    get_s: float


def probe_store(
    url: str, pace: PollInterval | None = None, *, environment: Mapping[str, str] | None = None
) -> ProbedStore:
    """Put, get and delete a small object under a random name; `environment` is as in `open_store`.

    Raises InvalidRequest for an invalid URL, and StorageError with advice if the store is unreachable, refuses access,
    or accepts two conditional writes of the same object.
    """
    pace = pace or real_pace()
    store = open_store(url, environment)
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    try:
        began_s = pace.now_s()
        is_first = store.put_if_absent(key, b"first")
        put_s = pace.now_s() - began_s
        try:
            is_second = store.put_if_absent(key, b"second")
            began_s = pace.now_s()
            data = store.get(key)
            get_s = pace.now_s() - began_s
        finally:
            store.delete([key])
    finally:
        store.close()
    if not is_first or is_second or data != b"first":
        raise StorageError(
            "the store does not keep a first writer's object from a second one (a server that ignores If-None-Match?); "
            "use another server"
        )
    return ProbedStore(put_s=put_s, get_s=get_s)
